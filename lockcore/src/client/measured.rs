//! A connection whose requests are measured.

use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    Adoption, Answer, Connection, Count, Counted, Departure, Enqueued, Fault, Id, Listing, Name,
    Page, Released, Renewed, Request, Resize, Resized, TicketInfo,
};
use crate::meter::{Asked, Requests, Verb};

/// Measures how long each request takes, from when it is sent until its answer is read.
#[derive(Debug)]
pub(crate) struct Measured {
    inner: Arc<dyn Connection>,
    requests: Requests,
}

impl Measured {
    pub(crate) fn around(inner: Arc<dyn Connection>, requests: Requests) -> Self {
        Self { inner, requests }
    }

    /// The same answer, measured. A store may send its request when a verb is called, before the
    /// future is polled. So the time begins when `send` is called. If the future is dropped, the
    /// request counts as not answered.
    fn measured<T: 'static>(
        &self,
        verb: Verb,
        send: impl FnOnce(&dyn Connection) -> Answer<T>,
    ) -> Answer<T> {
        let asked = self.requests.begin(verb);
        let answer = send(&*self.inner);
        Box::pin(async move {
            let outcome = answer.await;
            asked.ended(match &outcome {
                Ok(_) => Asked::OK,
                Err(error) => match error.fault() {
                    Fault::Retry => "retry",
                    Fault::Refused => "refused",
                    Fault::Unknown => "unknown",
                    Fault::Config => "config",
                },
            });
            outcome
        })
    }
}

impl Connection for Measured {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.inner)
    }

    fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
        self.measured(Verb::Enqueue, |inner| inner.enqueue(request, patience))
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        self.measured(Verb::Renew, |inner| inner.renew(tickets, patience))
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        self.measured(Verb::Release, |inner| inner.release(tickets))
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        self.measured(Verb::Inspect, |inner| inner.inspect(name))
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        self.measured(Verb::List, |inner| inner.list(listing))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        self.measured(Verb::AskBack, |inner| inner.ask_back(name, id, ask))
    }

    fn detach(&self, ticket: Arc<Request>) -> Answer<()> {
        self.measured(Verb::Detach, |inner| inner.detach(ticket))
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        self.measured(Verb::Adopt, |inner| inner.adopt(adoption))
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        self.measured(Verb::Resize, |inner| inner.resize(resize))
    }

    fn forget(&self, name: Name) -> Answer<()> {
        self.measured(Verb::Forget, |inner| inner.forget(name))
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        self.measured(Verb::Count, |inner| inner.count(count))
    }

    fn watch(&self, name: Name) -> Answer<()> {
        self.measured(Verb::Watch, |inner| inner.watch(name))
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        self.measured(Verb::Unwatch, |inner| inner.unwatch(name))
    }

    fn check(&self) -> Answer<Vec<String>> {
        self.measured(Verb::Check, |inner| inner.check())
    }
}
