//! The responses to requests that the layer itself answers. `refusal` has the reasons and the
//! texts.

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response};

use crate::body::LockBody;
use crate::protocol::Protocol;
use crate::refusal::{Answers, Problem, Refusal};

impl Problem {
    pub(crate) fn into_response<B>(
        self,
        answers: &Answers,
        protocol: Protocol,
    ) -> Response<LockBody<B>> {
        let problem = self.with_key_if(answers.name_key);
        let mut response = match (protocol, &answers.own) {
            (Protocol::Grpc(content_type), _) => problem.in_grpc(content_type),
            (Protocol::Http, None) => problem.in_http(answers),
            (Protocol::Http, Some(own)) => {
                let problem = &problem;
                own(Refusal::of(problem, answers)).map(LockBody::full)
            }
        };
        if problem.may_be_repeated() {
            let header = response.headers_mut().entry(RETRY_AFTER);
            header.or_insert_with(|| problem.retry_after(answers).into());
        }
        response
    }

    fn in_http<B>(&self, answers: &Answers) -> Response<LockBody<B>> {
        let status = self.status(answers);
        let mut response = Response::new(LockBody::full(self.json(status).into()));
        *response.status_mut() = status;
        response.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        response
    }

    /// A response with trailers only. The trailers are sent as the headers of the response.
    fn in_grpc<B>(&self, content_type: HeaderValue) -> Response<LockBody<B>> {
        let mut response = Response::new(LockBody::empty());
        *response.headers_mut() = self.grpc_status();
        response.headers_mut().insert(CONTENT_TYPE, content_type);
        response
    }
}
