//! A watch over the sentinels, for one connection to the master. It tells this connection when the
//! master changes.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::watch;

use super::dial::{Driver, Server};
use super::sentinels::Sentinels;
use super::task::Tasks;
use super::views::{Address, View, Views};
use crate::backend::{Fault, StoreError};
use crate::clock::{Clock, Instant};

/// The shortest time between two tries to reach the sentinels that have failed, while nothing says
/// that the master has changed. There are tries only while there are requests. A try costs one
/// connection for each failed sentinel. Once a second costs little, and is often enough to find a
/// sentinel that was started again.
const AGAIN: Duration = Duration::from_secs(1);

/// Listens to the sentinels until this value is dropped. It belongs to one connection to the master
/// that they have named.
#[derive(Debug)]
pub(super) struct Watch {
    listening: Arc<Listening>,
    master: Address,
    /// The address of the master as text.
    address: Arc<str>,
}

/// The present answers of the sentinels, and the tasks that listen to them.
#[derive(Debug)]
struct Listening {
    sentinels: Arc<Sentinels>,
    views: watch::Sender<Views>,
    /// A task for each sentinel that the client listens to, and the tasks that [`Watch::spawn`] has
    /// started.
    tasks: Tasks,
    /// From when sentinels that have failed may be asked again.
    again: Mutex<Instant>,
}

impl Watch {
    /// Asks all sentinels at once. Returns the master, and the watch over it. It must be called in
    /// the runtime of the connection that will be made.
    pub(super) async fn begin(
        sentinels: &Arc<Sentinels>,
    ) -> Result<(Arc<Server>, Self), StoreError> {
        let listening = Listening::begin(sentinels);
        let master = listening.agreed().await?;
        let server = sentinels.server_at(&master)?;
        sentinels.note_master(&master);
        listening.ask_again_when_another_has_moved(master.clone());
        let address = master.to_string().into();
        let watch = Self {
            listening,
            master,
            address,
        };
        Ok((server, watch))
    }

    /// The sentinels, and what the connections to their masters share.
    pub(super) fn sentinels(&self) -> &Arc<Sentinels> {
        &self.listening.sentinels
    }

    /// The address of the master as text.
    pub(super) fn address(&self) -> &Arc<str> {
        &self.address
    }

    /// Resolves when a majority names another server than the one of this connection. Returns that
    /// server.
    fn moved(&self) -> impl Future<Output = Address> + Send + 'static {
        let (mut views, here) = (self.listening.views.subscribe(), self.master.clone());
        async move {
            let elsewhere = |views: &Views| views.master().is_some_and(|master| *master != here);
            let elsewhere = match views.wait_for(elsewhere).await {
                Ok(views) => views.master().cloned(),
                Err(_) => None, // this watch is over
            };
            match elsewhere {
                Some(master) => master,
                None => std::future::pending().await,
            }
        }
    }

    /// Resolves with the connection, or with an error if a majority names another master first.
    /// Without this check, the client could wait for an old master that is silent.
    pub(super) async fn meanwhile<T>(
        &self,
        connecting: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        tokio::select! {
            connected = connecting => connected,
            _ = self.moved() => Err(StoreError::new(
                Fault::Retry,
                format!(
                    "cannot connect to the master {}: the sentinels name another one by now, which is tried next",
                    self.master
                ),
            )),
        }
    }

    /// Ends the connection when a majority names another master. Then the other connections of this
    /// client ask the sentinels too.
    pub(super) fn leave_when_moved(&self, driver: &Driver) {
        let (moved, end) = (self.moved(), driver.end());
        let sentinels = Arc::clone(&self.listening.sentinels);
        self.spawn(async move {
            let master = moved.await;
            end.abort();
            sentinels.note_master(&master);
        });
    }

    /// Runs a task that ends with this watch. The watch ends with the connection.
    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.listening.tasks.spawn(task);
    }

    /// Called for each request. Asks the sentinels again that have failed. The request does not
    /// wait for them.
    pub(super) fn listen_again(&self) {
        if !self.listening.views.borrow().0.iter().any(is_deaf) {
            return;
        }
        let again = *self.listening.again();
        if again <= Clock::BOOT.now() {
            self.listening.ask_again();
        }
    }

    /// Warnings about the sentinels for an operator.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let all = self.listening.sentinels.servers.len();
        if all < 3 {
            warnings.push(format!(
                "the URL names {all} of the sentinels, and a majority of them has to answer; name all of them, and at least \
                 three"
            ));
        }
        for (view, server) in self
            .listening
            .views
            .borrow()
            .0
            .iter()
            .zip(&self.listening.sentinels.servers)
        {
            match view {
                View::Failed(error) => warnings.push(format!("one sentinel is missing: {error}")),
                View::Names(master) if *master != self.master => warnings.push(format!(
                    "the sentinels disagree: {} names {master}, and most name {}",
                    server.info.addr(),
                    self.master
                )),
                View::Asked | View::Names(_) => {}
            }
        }
        warnings
    }
}

impl Listening {
    /// Asks all sentinels at once, and listens to them.
    fn begin(sentinels: &Arc<Sentinels>) -> Arc<Self> {
        let all = sentinels.count();
        let listening = Arc::new(Self {
            views: watch::Sender::new(Views(vec![View::Asked; all])),
            sentinels: Arc::clone(sentinels),
            tasks: Tasks::in_runtime(Handle::current()),
            again: Mutex::new(Clock::BOOT.now()),
        });
        listening.ask(0..all);
        listening
    }

    fn ask(&self, sentinels: impl IntoIterator<Item = usize>) {
        *self.again() = Clock::BOOT.now().after(AGAIN);
        for at in sentinels {
            let (sentinels, views) = (Arc::clone(&self.sentinels), self.views.clone());
            self.tasks.spawn(async move {
                let failed = sentinels.hear(at, &views).await;
                views.send_modify(|views| views.0[at] = View::Failed(failed));
            });
        }
    }

    /// Asks the sentinels again that have failed.
    fn ask_again(&self) {
        let mut deaf = Vec::new();
        self.views.send_if_modified(|views| {
            for (at, view) in views.0.iter_mut().enumerate() {
                if is_deaf(view) {
                    *view = View::Asked;
                    deaf.push(at);
                }
            }
            false // no task waits for this change
        });
        self.ask(deaf);
    }

    /// Asks the sentinels again when another connection of this client has found another master.
    ///
    /// A connection that is not used does not ask by itself. If its sentinels were started again in
    /// the meantime, it would stay at the old master. It does not believe the other connection: the
    /// sentinels decide. If this connection has already found the other master itself, it does not
    /// ask.
    fn ask_again_when_another_has_moved(self: &Arc<Self>, here: Address) {
        let (mut masters, this) = (self.sentinels.masters(), Arc::downgrade(self));
        self.tasks.spawn(async move {
            loop {
                let elsewhere = |latest: &Option<Address>| latest.as_ref() != Some(&here);
                let found = masters
                    .wait_for(elsewhere)
                    .await
                    .map(|latest| latest.clone());
                let (Ok(found), Some(listening)) = (found, this.upgrade()) else {
                    return;
                };
                if listening.views.borrow().master() != found.as_ref() {
                    listening.ask_again();
                }
                drop(listening);
                if masters.changed().await.is_err() {
                    return;
                }
            }
        });
    }

    /// Returns the master that a majority names. Does not wait for sentinels whose answers cannot
    /// change the result.
    async fn agreed(&self) -> Result<Address, StoreError> {
        let mut views = self.views.subscribe();
        let settled = |views: &Views| views.master().is_some() || views.cannot_agree();
        // The sender lives in `self`, so this cannot fail.
        let _ = views.wait_for(settled).await;
        let views = views.borrow();
        let master = views.master().cloned();
        master.ok_or_else(|| self.sentinels.no_majority(&views))
    }

    fn again(&self) -> MutexGuard<'_, Instant> {
        self.again.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the sentinel could not be asked, or its connection has ended.
fn is_deaf(view: &View) -> bool {
    matches!(view, View::Failed(_))
}
