//! A file with SQLite: see [`guide::sqlite`](crate::guide::sqlite) for what it promises and needs.

mod adopt;
mod config;
mod counters;
mod driver;
mod events;
mod file;
mod layout;
mod statements;
mod tickets;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use url::Url;

use super::{
    Adoption, Answer, Backend, Capability, Connection, Count, Counted, Departure, Enqueued,
    EventSink, Fault, Listing, Page, Released, Renewed, Resize, Resized, StoreError, TicketInfo,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::{Id, Request};
use crate::tls::Tls;
use driver::{Driver, Job, Reply};

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
    route: Arc<Route>,
    receiver: u64,
    joined: u64,
}

/// The way from the path of the URL to the thread that has the file open.
#[derive(Debug)]
struct Route {
    path: PathBuf,
    /// The file that the path led to when the connection was opened.
    file: PathBuf,
    driver: Arc<Driver>,
}

impl Route {
    async fn ask<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Result<T, StoreError> {
        self.leads_to_the_file()?;
        self.driver.ask(job).await
    }

    /// Fails if a symbolic link in the path leads to another file by now. Processes that start from
    /// now on use that other file, and do not see the locks in this one. The thread checks only the
    /// file itself. A path without symbolic links needs no check here.
    fn leads_to_the_file(&self) -> Result<(), StoreError> {
        if self.path == self.file || config::locate(&self.path).is_ok_and(|file| file == self.file)
        {
            return Ok(());
        }
        let text = format!(
            "{} does not lead to {} any more; the locks in that file are lost",
            self.path.display(),
            self.file.display()
        );
        Err(StoreError::replace(Fault::Retry, text))
    }
}

impl Backend for Sqlite {
    fn capability(&self) -> Capability {
        Capability::new()
            // Between processes a wake-up takes up to 50 ms, but no wake-up is left out.
            .pushes(true)
            // One thread does the jobs one by one, some 100 µs each. 16 jobs keep the thread busy.
            // They are few enough for an answer within milliseconds, even on a busy machine.
            .in_flight(16)
            // More would only wait for the thread.
            .renewals_in_flight(800)
            // A commit is in the file even if its process is killed. A crash of the machine may undo
            // commits, but it ends all processes that use the file too.
            .names_ahead(true)
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
            let route = Arc::new(Route { path, file, driver });
            let connection: Arc<dyn Connection> = Arc::new(SqliteConnection {
                route,
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
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        let (route, receiver) = (Arc::clone(&self.route), self.receiver);
        Box::pin(async move {
            route
                .ask(|reply| Job::Enqueue(request, receiver, reply))
                .await
        })
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(|reply| Job::Renew(tickets, reply)).await })
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        let route = Arc::clone(&self.route);
        Box::pin(async move {
            if route.leads_to_the_file().is_err() {
                // The tickets are not in the file of the path. A holder learns from this answer
                // that its lock was lost.
                return Ok(vec![Released::NotFound; tickets.len()]);
            }
            route.ask(|reply| Job::Release(tickets, reply)).await
        })
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(|reply| Job::Inspect(name, reply)).await })
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(|reply| Job::List(listing, reply)).await })
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(|reply| Job::AskBack(name, id, ask, reply)).await })
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        let (route, receiver) = (Arc::clone(&self.route), self.receiver);
        Box::pin(async move {
            route
                .ask(|reply| Job::Adopt(adoption, receiver, reply))
                .await
        })
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(|reply| Job::Resize(resize, reply)).await })
    }

    fn forget(&self, name: Name) -> Answer<()> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(|reply| Job::Forget(name, reply)).await })
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(|reply| Job::Count(count, reply)).await })
    }

    fn check(&self) -> Answer<Vec<String>> {
        let route = Arc::clone(&self.route);
        Box::pin(async move { route.ask(Job::Check).await })
    }
}

impl Drop for SqliteConnection {
    fn drop(&mut self) {
        self.route
            .driver
            .send(Job::Leave(self.receiver, self.joined));
    }
}
