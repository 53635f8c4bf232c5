//! A file with SQLite: see [`guide::sqlite`](crate::guide::sqlite) for what it promises and needs.

mod config;
mod driver;
mod events;
mod file;
mod layout;
mod tickets;

use std::path::PathBuf;
use std::sync::Arc;

use url::Url;

use super::{
    Answer, Backend, Capability, Connection, Departure, Enqueued, Events, Place, Released, Renewed,
};
use crate::error::Error;
use crate::name::Name;
use crate::request::Request;
use crate::tls::Tls;
use driver::{Driver, Job};

/// Opens `sqlite:PATH`.
pub(crate) fn open(url: &Url, _: &Tls) -> Result<Arc<dyn Backend>, Error> {
    let path = config::file(url)?;
    Ok(Arc::new(Sqlite { path }))
}

/// A file of this machine.
#[derive(Debug)]
pub(crate) struct Sqlite {
    path: PathBuf,
}

/// A client's share of the one handle that this process has on the file.
#[derive(Debug)]
struct SqliteConnection {
    driver: Arc<Driver>,
    receiver: u64,
    joined: u64,
}

impl Backend for Sqlite {
    fn capability(&self) -> Capability {
        Capability::new()
            // Between processes a wake-up takes up to 50 ms; it comes all the same.
            .pushes(true)
            // One thread works them off one by one, some 100 µs each: enough that it is never idle, and so few that an
            // answer comes within milliseconds, on a busy machine too.
            .in_flight(16)
    }

    fn connect(&self, events: Events) -> Answer<Arc<dyn Connection>> {
        let path = self.path.clone();
        Box::pin(async move {
            let file = config::locate(&path)?;
            let driver = Driver::of(&file)?;
            let receiver = events.receiver();
            // Dropped here, the client has joined or will, and is told to leave by the reply that nobody takes.
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

/// Each verb is one job for the driver's thread, sent when the future is first polled. The only await is the one for
/// its answer: dropped there, the job is run to its end all the same, or, if its turn had not come, not at all. Neither
/// needs the runtime that polled the future. The core asks for a release again if it was dropped: see `Driver::ask`.
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

    fn inspect(&self, name: Name) -> Answer<Vec<Place>> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Inspect(name, reply)).await })
    }

    fn forget(&self, name: Name) -> Answer<()> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.ask(|reply| Job::Forget(name, reply)).await })
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
