//! A file with SQLite: see [`guide::sqlite`](crate::guide::sqlite) for what it promises and needs.

mod adopt;
mod config;
mod counters;
mod driver;
mod events;
mod file;
mod layout;
mod tickets;

use std::path::PathBuf;
use std::sync::Arc;

use url::Url;

use super::{
    Adoption, Answer, Backend, Capability, Connection, Count, Counted, Departure, Enqueued,
    EventSink, Listing, Page, Released, Renewed, Resize, Resized, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::{Id, Request};
use crate::tls::Tls;
use driver::{Driver, Job};

/// Opens `sqlite:PATH`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    let path = config::file(url)?;
    Ok(Arc::new(Sqlite { path }))
}

/// A store in a file on this machine.
#[derive(Debug)]
pub(crate) struct Sqlite {
    path: PathBuf,
}

/// A client's connection. All clients of this process share one handle of the file.
#[derive(Debug)]
struct SqliteConnection {
    driver: Arc<Driver>,
    receiver: u64,
    joined: u64,
}

impl Backend for Sqlite {
    fn capability(&self) -> Capability {
        Capability::new()
            // Between processes a wake-up takes up to 50 ms, but no wake-up is left out.
            .pushes(true)
            // One thread does the jobs one by one, some 100 µs each. 16 jobs keep the thread busy.
            // They are few enough for an answer within milliseconds, even on a busy machine.
            .in_flight(16)
            .asks_back(true)
            .lists(true)
            .adopts(true)
            .resizes(true)
            // Changes are not pushed: SQLite tells nobody of a change, and a read of a counter
            // costs less than finding out which counters have changed.
            .counters(true)
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let path = self.path.clone();
        Box::pin(async move {
            let file = config::locate(&path)?;
            let driver = Driver::of(&file)?;
            let receiver = events.receiver();
            // If the future is dropped here, the thread may do the join later. It then removes the
            // client again, because nobody takes the reply. If the join was answered already, the
            // client stays listed. That does no harm: the next join of the same client replaces it.
            let joined = driver.ask(|reply| Job::Join(events, reply)).await?;
            let connection: Arc<dyn Connection> = Arc::new(SqliteConnection {
                driver,
                receiver,
                joined,
            });
            Ok(connection)
        })
    }
}

/// Each operation is one job for the driver's thread. The first poll of the future sends the job,
/// and the only await is for the answer. If the future is dropped there, the thread finishes the
/// job if it has begun it, and otherwise does not do it. The thread does not need the runtime that
/// polled the future. If the future of a release is dropped, the core sends the release again: see
/// `Driver::ask`.
impl Connection for SqliteConnection {
    fn enqueue(&self, request: Arc<Request>) -> Answer<Enqueued> {
        let (driver, receiver) = (Arc::clone(&self.driver), self.receiver);
        Box::pin(async move {
            driver
                .ask(|reply| Job::Enqueue(request, receiver, reply))
                .await
        })
    }

    fn renew(&self, tickets: Vec<Arc<Request>>) -> Answer<Vec<Renewed>> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Renew(tickets, reply)).await })
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Release(tickets, reply)).await })
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Inspect(name, reply)).await })
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::List(listing, reply)).await })
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::AskBack(name, id, ask, reply)).await })
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        let (driver, receiver) = (Arc::clone(&self.driver), self.receiver);
        Box::pin(async move {
            driver
                .ask(|reply| Job::Adopt(adoption, receiver, reply))
                .await
        })
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Resize(resize, reply)).await })
    }

    fn forget(&self, name: Name) -> Answer<()> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Forget(name, reply)).await })
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Count(count, reply)).await })
    }

    fn check(&self) -> Answer<Vec<String>> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(Job::Check).await })
    }
}

impl Drop for SqliteConnection {
    fn drop(&mut self) {
        self.driver.send(Job::Leave(self.receiver, self.joined));
    }
}
