//! One connection to one member. All requests and both streams of a client use it.
//!
//! HTTP/2 gives each request a stream of its own, and the server works on all of them at the same
//! time. So requests that are sent one after the other may be carried out in any order. Whoever
//! needs an order waits for the answer of the first, or puts both into one transaction.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::PathAndQuery;
use http::{HeaderValue, Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::task::{AbortHandle, JoinHandle};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

use super::config::{Member, Settings};
#[cfg(feature = "etcd-tls")]
use super::encrypted::Encrypted;
use super::errors::{failed, is_login_forgotten, not_changed, not_connected};
use super::messages::{
    AuthenticateRequest, AuthenticateResponse, DeleteRequest, DeleteResponse, LeaseGrantRequest,
    LeaseGrantResponse, LeaseRevokeRequest, LeaseRevokeResponse, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse, RangeRequest, RangeResponse, StatusRequest, StatusResponse,
    TxnRequest, TxnResponse, one,
};
use crate::backend::{Fault, StoreError};

/// The longest answer that is read. The list of the longest line has some two megabytes.
const LONGEST_ANSWER: usize = 64 << 20;

/// How much the server may send before it is read. The defaults of HTTP/2 are 64 KiB, which a long
/// list fills.
const WINDOW: u32 = 4 << 20;

/// What a client with TLS cannot know when a server is silent or ends the connection.
pub(super) const NOT_ENCRYPTED: &str = "; if this port does not speak TLS, write etcd://";
const NOT_PLAIN: &str = "; if this port speaks TLS, write etcd+tls://";

/// An open connection. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct Link {
    service: Service,
    pub(super) ended: AbortHandle,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.ended.abort();
    }
}

/// The task that moves the bytes of a connection. It ends with the connection.
pub(super) type Driver = JoinHandle<Result<(), hyper::Error>>;

/// Connects to one of the members: they are tried in random order, each for a part of the time that
/// there is. A member is usable if it answers a read of the key `probe`, which shows that it has a
/// leader that leads.
///
/// If the future is dropped, what it has opened is dropped with it.
pub(super) async fn dial(
    settings: &Settings,
    probe: &str,
    time: Duration,
) -> Result<(Link, Driver), StoreError> {
    let mut members: Vec<&Member> = settings.members.iter().collect();
    fastrand::shuffle(&mut members);
    let share = time / u32::try_from(members.len()).unwrap_or(u32::MAX);
    let mut failure: Option<StoreError> = None;
    while let Some(member) = members.pop() {
        let tried = to_member(settings, member, probe);
        // The core limits the time of all together, and so that of the last one.
        let tried = match members.is_empty() {
            true => tried.await,
            false => tokio::time::timeout(share, tried)
                .await
                .unwrap_or_else(|_| {
                    let text = format!("no answer within {share:?}");
                    Err(StoreError::new(Fault::Retry, text))
                }),
        };
        match tried {
            Ok(linked) => return Ok(linked),
            // A mistake that a person must correct is told, if no member can be used.
            Err(_) if failure.as_ref().is_some_and(|f| f.fault() == Fault::Config) => {}
            Err(error) => {
                let place = format!("{}:{}", member.host, member.port);
                failure = Some(not_connected(&place, &error));
            }
        }
    }
    // A URL names at least one host.
    Err(failure.unwrap_or_else(|| StoreError::new(Fault::Config, "the URL names no host")))
}

async fn to_member(
    settings: &Settings,
    member: &Member,
    probe: &str,
) -> Result<(Link, Driver), StoreError> {
    let out_of_reach = |error: io::Error| StoreError::new(Fault::Retry, format!("etcd: {error}"));
    // In a URL an IPv6 address is in brackets, and this takes it with them.
    let place = format!("{}:{}", member.host, member.port);
    let stream = TcpStream::connect(&place).await.map_err(out_of_reach)?;
    stream.set_nodelay(true).map_err(out_of_reach)?;
    #[cfg(feature = "etcd-tls")]
    if let Some(tls) = &member.tls {
        let mistake = |mistake: &str| StoreError::new(Fault::Config, format!("etcd: {mistake}"));
        let encrypted = Encrypted::begin(tls, stream).await;
        let encrypted = encrypted.map_err(|error| match tls.mistake(&error) {
            Some(what) => mistake(&what),
            None => StoreError::new(Fault::Retry, format!("etcd: {error}{NOT_ENCRYPTED}")),
        })?;
        let noted = encrypted.mistake();
        let begun = begin(settings, encrypted, ("https", &place), probe).await;
        return begun.map_err(|(error, _)| match noted.get() {
            Some(what) => mistake(what),
            None => error,
        });
    }
    let begun = begin(settings, stream, ("http", &place), probe).await;
    begun.map_err(|(error, is_closed)| match is_closed {
        true => StoreError::new(Fault::Retry, format!("{error}{NOT_PLAIN}")),
        false => error,
    })
}

/// Begins to speak with a member. An error comes with whether the connection was closed.
async fn begin(
    settings: &Settings,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    (scheme, place): (&'static str, &str),
    probe: &str,
) -> Result<(Link, Driver), (StoreError, bool)> {
    let shaken = http2::Builder::new(TokioExecutor::new())
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .handshake(TokioIo::new(stream));
    let (requests, connection) = shaken.await.map_err(|error| {
        let text = format!("etcd: {error}");
        (StoreError::new(Fault::Retry, text), true)
    })?;
    let driver = tokio::spawn(connection);
    let mut link = Link {
        service: Service {
            requests,
            scheme,
            place: place.into(),
            login: None,
        },
        ended: driver.abort_handle(),
    };
    let usable = async {
        if let Some((name, password)) = &settings.login {
            let token = link.log_in(name, password).await.map_err(failed)?;
            link.service.login = Some(Arc::new(Login {
                name: name.clone(),
                password: password.clone(),
                token: Mutex::new(token),
                again: tokio::sync::Mutex::default(),
            }));
        }
        link.term(probe).await
    };
    match usable.await {
        Ok(_) => Ok((link, driver)),
        Err(error) => Err((error, link.service.requests.is_closed())),
    }
}

impl Link {
    /// Returns the token of a new login.
    async fn log_in(&self, name: &str, password: &str) -> Result<HeaderValue, Status> {
        let login = AuthenticateRequest {
            name: name.to_owned(),
            password: password.to_owned(),
        };
        // The server refuses a login that comes with a token that has ended.
        let service = Service {
            login: None,
            ..self.service.clone()
        };
        let answer: AuthenticateResponse =
            send(service, "/etcdserverpb.Auth/Authenticate", login).await?;
        let mut token = HeaderValue::from_str(&answer.token)
            .map_err(|_| Status::unauthenticated("the token of the login is no text"))?;
        token.set_sensitive(true);
        Ok(token)
    }

    /// Logs in again, if no other request has done so since this token was used.
    ///
    /// A login takes the server a tenth of a second, so of many requests only one makes it. If the
    /// future is dropped, the next request goes on.
    async fn log_in_again(&self, login: &Login, used: &HeaderValue) -> Result<(), Status> {
        let _turn = login.again.lock().await;
        if login.token() == *used {
            let token = self.log_in(&login.name, &login.password).await?;
            *login.token.lock().unwrap_or_else(PoisonError::into_inner) = token;
        }
        Ok(())
    }

    pub(super) async fn txn(&self, txn: TxnRequest) -> Result<TxnResponse, Status> {
        self.call("/etcdserverpb.KV/Txn", txn).await
    }

    /// Deletes a key. Returns whether it was there.
    ///
    /// Servers whose disk quota is used up take this.
    pub(super) async fn delete(&self, key: &str) -> Result<bool, Status> {
        let question = DeleteRequest { key: key.into() };
        let answer = self.call("/etcdserverpb.KV/DeleteRange", question).await;
        answer.map(|DeleteResponse { deleted }| deleted > 0)
    }

    /// Reads keys. The answer is at least as new as this call.
    pub(super) async fn range(&self, range: RangeRequest) -> Result<RangeResponse, StoreError> {
        let answer = self.call("/etcdserverpb.KV/Range", range).await;
        answer.map_err(not_changed)
    }

    /// Reads a key that does not exist. The answer shows that a majority follows a leader. It has
    /// the term of the member.
    pub(super) async fn term(&self, key: &str) -> Result<u64, StoreError> {
        let answer = self.range(one(key)).await?;
        Ok(answer.header.map_or(0, |header| header.raft_term))
    }

    /// Grants a lease for this many seconds. Returns its id, and the ttl that the server gives.
    ///
    /// With rights at the server, everybody who knows the id of a lease may keep or revoke it. So
    /// the id is drawn at random. If the answer is lost, the lease ends by itself.
    pub(super) async fn grant(&self, seconds: i64) -> Result<(i64, Duration), StoreError> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|error| {
            StoreError::new(Fault::Retry, format!("etcd: no random numbers: {error}"))
        })?;
        let id = (i64::from_ne_bytes(bytes) & i64::MAX).max(1);
        let grant = LeaseGrantRequest { ttl: seconds, id };
        let granted: Result<LeaseGrantResponse, _> =
            self.call("/etcdserverpb.Lease/LeaseGrant", grant).await;
        let granted = granted.map_err(not_changed)?;
        match granted.error.as_str() {
            "" => Ok((id, Duration::from_secs(granted.ttl.max(0).unsigned_abs()))),
            error => Err(StoreError::new(Fault::Retry, format!("etcd: {error}"))),
        }
    }

    pub(super) async fn revoke(&self, lease: i64) -> Result<(), Status> {
        let revoke = LeaseRevokeRequest { id: lease };
        let revoked = self.call("/etcdserverpb.Lease/LeaseRevoke", revoke).await;
        revoked.map(|LeaseRevokeResponse {}| ())
    }

    /// For how long a lease lives if nobody keeps it. Zero if there is no such lease.
    pub(super) async fn time_to_live(&self, lease: i64) -> Result<Duration, StoreError> {
        let question = LeaseTimeToLiveRequest { id: lease };
        let answer: Result<LeaseTimeToLiveResponse, _> = self
            .call("/etcdserverpb.Lease/LeaseTimeToLive", question)
            .await;
        Ok(answer.map_err(not_changed)?.certain())
    }

    pub(super) async fn status(&self) -> Result<StatusResponse, StoreError> {
        let answer = self
            .call("/etcdserverpb.Maintenance/Status", StatusRequest {})
            .await;
        answer.map_err(not_changed)
    }

    /// Sends a request when this is first polled. If the server has forgotten the login, it refuses
    /// the request before it begins. Then this logs in once, and sends the request again.
    async fn call<Q, A>(&self, path: &'static str, question: Q) -> Result<A, Status>
    where
        Q: Message + Clone + 'static,
        A: Message + Default + 'static,
    {
        let Some(login) = &self.service.login else {
            return send(self.service.clone(), path, question).await;
        };
        let used = login.token();
        match send(self.service.clone(), path, question.clone()).await {
            Err(status) if is_login_forgotten(&status) => {
                self.log_in_again(login, &used).await?;
                send(self.service.clone(), path, question).await
            }
            outcome => outcome,
        }
    }

    /// Opens a stream in both directions. Resolves when the server has sent something on it.
    pub(super) async fn stream<Q, A>(
        &self,
        path: &'static str,
        questions: UnboundedReceiver<Q>,
    ) -> Result<Streaming<A>, Status>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = ready(self.service.clone()).await?;
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(path);
        let questions = tonic::Request::new(UnboundedReceiverStream::new(questions));
        Ok(grpc.streaming(questions, path, codec).await?.into_inner())
    }
}

async fn send<Q, A>(service: Service, path: &'static str, question: Q) -> Result<A, Status>
where
    Q: Message + 'static,
    A: Message + Default + 'static,
{
    let mut grpc = ready(service).await?;
    let codec = ProstCodec::<Q, A>::default();
    let path = PathAndQuery::from_static(path);
    let answer = grpc
        .unary(tonic::Request::new(question), path, codec)
        .await?;
    Ok(answer.into_inner())
}

async fn ready(service: Service) -> Result<Grpc<Service>, Status> {
    let mut grpc = Grpc::new(service).max_decoding_message_size(LONGEST_ANSWER);
    let ready = grpc.ready().await;
    ready.map_err(|error| Status::from_error(Box::new(error)))?;
    Ok(grpc)
}

/// The connection as the library for gRPC uses it. It does not connect again.
#[derive(Clone, Debug)]
struct Service {
    requests: SendRequest<Body>,
    scheme: &'static str,
    place: Arc<str>,
    login: Option<Arc<Login>>,
}

/// The login of a connection. A server forgets it when nobody has used it for some minutes.
struct Login {
    name: String,
    password: String,
    /// What requests are sent with.
    token: Mutex<HeaderValue>,
    /// Held by a request that logs in again.
    again: tokio::sync::Mutex<()>,
}

impl Login {
    fn token(&self) -> HeaderValue {
        let token = self.token.lock().unwrap_or_else(PoisonError::into_inner);
        token.clone()
    }
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}

impl GrpcService<Body> for Service {
    type ResponseBody = Incoming;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, hyper::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.requests.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let path = request.uri().path_and_query().cloned();
        let uri = Uri::builder().scheme(self.scheme).authority(&*self.place);
        let uri = uri.path_and_query(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
        if let Ok(uri) = uri.build() {
            *request.uri_mut() = uri;
        }
        let headers = request.headers_mut();
        // A member without a leader refuses the request at once, and ends the streams.
        headers.insert("hasleader", HeaderValue::from_static("true"));
        if let Some(login) = &self.login {
            headers.insert("token", login.token());
        }
        Box::pin(self.requests.send_request(request))
    }
}
