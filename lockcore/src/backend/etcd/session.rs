//! The lease that tickets live in. It outlives connections: when one ends, the core opens another,
//! and gets the same lease with its tickets, as long as the lease certainly lives.
//!
//! The keeper's runtime drives everything here, because the core opens this store's only connection
//! there.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tonic::Status;

use super::errors::{failed, is_without_lease, not_changed};
use super::layout::Layout;
use super::link::{Driver, Link};
use super::messages::{
    KeyValue, LeaseKeepAliveRequest, LeaseKeepAliveResponse, TxnRequest, TxnResponse, WatchRequest,
    WatchResponse, put, txn,
};
use super::proof::Proof;
use super::standing::{State, Told};
use crate::backend::{EventSink, Fault, StoreError};
use crate::clock::Clock;
use crate::name::Namespace;

/// How many beats there are in one ttl. A lease is valid for at least the ttl less the time between
/// two of them. Each costs the server a read and a keep-alive.
const BEATS: u32 = 6;

/// If a beat is not answered within this part of the ttl, the connection counts as broken. Two other
/// members may then be tried before the lease is over.
const PATIENCE: u32 = 3;

/// Neither takes longer than this, even if the lease is long. So a member that hangs is noticed
/// within half a minute, and requests that wait there become void: see `tickets`.
const LONGEST_BEAT: Duration = Duration::from_secs(10);
const LONGEST_PATIENCE: Duration = Duration::from_secs(20);

const ENDED: &str = "the servers have ended the lease of this client";

/// A lease at the servers.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) lease: i64,
    /// The ttl that was asked for, and the ttl that the server gave.
    pub(super) asked: Duration,
    pub(super) ttl: Duration,
    pub(super) layout: Layout,
    pub(super) namespace: Namespace,
    state: Mutex<State>,
}

/// The connection of the core: the use of a lease by one connection.
#[derive(Debug)]
pub(super) struct At {
    pub(super) session: Arc<Session>,
    pub(super) link: Arc<Link>,
    /// The number of this connection.
    number: u64,
    /// The revision at which this connection has written the key of the client. An enqueue compares
    /// it.
    pub(super) epoch: i64,
}

/// The epoch of a connection that takes no tickets: no key was written at this revision.
const NEVER: i64 = -1;

impl Drop for At {
    fn drop(&mut self) {
        // Ends the tasks too. They end anyway when the connection does.
        self.link.ended.abort();
        let attached = self.session.state().detach(self.number);
        drop(attached);
    }
}

impl Session {
    /// Asks for a lease of this many seconds.
    pub(super) async fn open(
        link: &Link,
        seconds: i64,
        layout: &Layout,
        namespace: &Namespace,
    ) -> Result<Self, StoreError> {
        let sent = Clock::BOOT.now();
        let (lease, ttl) = link.grant(seconds).await?;
        Ok(Self {
            lease,
            asked: Duration::from_secs(seconds.unsigned_abs()),
            ttl,
            layout: layout.clone(),
            namespace: namespace.clone(),
            state: Mutex::new(State::new(Proof::new(ttl, sent))),
        })
    }

    /// Uses the lease on this connection. Resolves when the servers have shown that it lives. If the
    /// future is dropped, the connection ends.
    pub(super) async fn attach(
        self: Arc<Self>,
        (link, driver): (Link, Driver),
        events: Arc<EventSink>,
    ) -> Result<Arc<At>, StoreError> {
        let epoch = self.begin_epoch(&link).await?;
        let (number, watches) = self.state().attach(events);
        let at = Arc::new(At {
            session: self,
            link: Arc::new(link),
            number,
            epoch,
        });
        let (lives, lived) = oneshot::channel();
        let (session, link) = (Arc::clone(&at.session), Arc::clone(&at.link));
        tokio::spawn(drive(session, link, number, (driver, watches, lives)));
        match lived.await {
            Ok(()) => Ok(at),
            Err(_) => Err(at.session.why_over().unwrap_or_else(|| {
                StoreError::new(Fault::Retry, "etcd: the connection has ended again")
            })),
        }
    }

    /// Writes the key of the client, so that no enqueue of an earlier connection takes a ticket any
    /// more. If the future is dropped, the key may be written later. Then a later connection takes no
    /// tickets, and is replaced.
    async fn begin_epoch(&self, link: &Link) -> Result<i64, StoreError> {
        let key = self.client_key();
        let write = vec![put(&key, String::new(), self.lease)];
        let written = link.txn(txn(Vec::new(), write, Vec::new())).await;
        let error = match written {
            Ok(answer) => return Ok(answer.revision()),
            Err(status) if is_without_lease(&status) => return Err(self.end(ENDED)),
            Err(status) => not_changed(status),
        };
        if error.fault() != Fault::Refused {
            return Err(error);
        }
        // The disk quota is used up. The connection keeps and releases what is held. When there is
        // room again, its first enqueue replaces it.
        link.delete(&key).await.map_err(not_changed)?;
        Ok(NEVER)
    }

    pub(super) fn client_key(&self) -> String {
        self.layout.client(&self.namespace, self.lease)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // No code that can panic runs under this mutex. Even after a panic, the maps would be
        // consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the lease can be used at this time.
    pub(super) fn is_usable(&self) -> bool {
        let state = self.state();
        let lives_for = state.proof.lives_for(Clock::BOOT.now());
        state.over.is_none() && !lives_for.is_zero()
    }

    fn why_over(&self) -> Option<StoreError> {
        self.state().over.clone()
    }

    /// For how long the lease certainly lives from now on. Zero if it is over.
    pub(super) fn lives_for(&self) -> Duration {
        let state = self.state();
        match state.over {
            None => state.proof.lives_for(Clock::BOOT.now()),
            Some(_) => Duration::ZERO,
        }
    }

    /// Ends the lease here. Its holders learn of it at their renewals, or when their deadlines come,
    /// which are not later. The core opens another connection, with another lease.
    pub(super) fn end(&self, why: &str) -> StoreError {
        let error = StoreError::replace(Fault::Retry, format!("etcd: {why}"));
        let mut state = self.state();
        state.over.get_or_insert_with(|| error.clone());
        let number = state.connections;
        let attached = state.detach(number);
        drop(state);
        drop(attached);
        error
    }

    /// Reports to the core, outside of the mutex.
    pub(super) fn tell(&self, told: Told) {
        let events = self
            .state()
            .attached
            .as_ref()
            .map(|at| Arc::clone(&at.events));
        let Some(events) = events else { return };
        for wake in told.granted {
            events.granted(wake);
        }
        for id in told.lost {
            events.recheck(id, Duration::ZERO);
        }
        if let Some(name) = told.changed {
            events.changed(name);
        }
    }

    /// Handles a message of a watch on the connection with this number.
    fn hear(&self, number: u64, answer: &WatchResponse) {
        let told = self.state().told(number, answer);
        match told {
            Some(told) => self.tell(told),
            None => {
                tracing::debug!(
                    reason = %answer.cancel_reason,
                    compacted = answer.compact_revision,
                    "a watch was ended by the server"
                );
                let events = self
                    .state()
                    .attached
                    .as_ref()
                    .map(|at| Arc::clone(&at.events));
                if let Some(events) = events {
                    events.gap();
                }
            }
        }
    }

    /// Proves that the lease lives: see `proof`. Fails if it may be over.
    async fn beat(&self, link: &Link, keep: &mut KeepAlive) -> Result<(), StoreError> {
        let read = Clock::BOOT.now();
        let of_read = link.term(&self.layout.all(&self.namespace)).await?;
        let (ttl, of_keep_alive) = keep.alive(link, self.lease).await.map_err(failed)?;
        if ttl <= 0 {
            return Err(self.end(ENDED));
        }
        let ttl = Duration::from_secs(ttl.unsigned_abs());
        let mut state = self.state();
        let now = Clock::BOOT.now();
        let lives = state.proof.beat(read, [of_read, of_keep_alive], ttl, now);
        state.sweep(now);
        drop(state);
        match lives {
            true => Ok(()),
            false => Err(self.end("the lease may have ended, no leader answered for it in time")),
        }
    }
}

impl At {
    /// Whether another connection has taken over, from the key of the client as it is now.
    pub(super) fn is_replaced(&self, client: Option<&KeyValue>) -> bool {
        client.is_none_or(|kv| kv.mod_revision != self.epoch)
    }

    /// Carries out a transaction. If the servers do not know the lease, it is over.
    pub(super) async fn txn(&self, txn: TxnRequest) -> Result<TxnResponse, StoreError> {
        let answer = self.link.txn(txn).await;
        answer.map_err(|status| match is_without_lease(&status) {
            true => self.session.end(ENDED),
            false => failed(status),
        })
    }

    /// The error, if somebody has revoked a lease of marks or of counters that was to be used. The next
    /// attempt looks for another one.
    pub(super) fn revoked(&self, status: &Status) -> Option<StoreError> {
        is_without_lease(status).then(|| {
            let mut state = self.session.state();
            state.marks = None;
            state.of_counters.clear();
            state.known.clear();
            StoreError::conflict("etcd: a lease was revoked at this moment")
        })
    }
}

/// Drives a connection: hears the watches, and proves that the lease lives. Ends with the
/// connection. Then the core is told, by dropping its events.
async fn drive(
    session: Arc<Session>,
    link: Arc<Link>,
    number: u64,
    (driver, watches, lives): (
        Driver,
        mpsc::UnboundedReceiver<WatchRequest>,
        oneshot::Sender<()>,
    ),
) {
    tokio::select! {
        ended = driver => {
            tracing::debug!(?ended, "the connection has ended");
        }
        ended = hear(&session, &link, number, watches) => {
            tracing::debug!(error = ?ended, "the stream of watches has ended");
        }
        error = beats(&session, &link, lives) => {
            tracing::debug!(%error, "the lease was not kept on this connection");
        }
    }
    link.ended.abort();
    let attached = session.state().detach(number);
    drop(attached);
}

/// Hears the watches until their stream ends, or the server refuses a new watch. The server knows the
/// stream by the login with which it was opened. When that login has ended, the other watches go on,
/// and all new ones are refused. Another connection makes another login.
async fn hear(
    session: &Session,
    link: &Link,
    number: u64,
    watches: mpsc::UnboundedReceiver<WatchRequest>,
) -> Result<(), Status> {
    let mut answers = link.stream("/etcdserverpb.Watch/Watch", watches).await?;
    while let Some(answer) = answers.message().await? {
        let answer: WatchResponse = answer;
        if answer.created && answer.canceled {
            return Err(Status::unauthenticated(answer.cancel_reason));
        }
        session.hear(number, &answer);
    }
    Ok(())
}

/// Beats until a beat fails. Tells of the first one.
async fn beats(session: &Session, link: &Link, lives: oneshot::Sender<()>) -> StoreError {
    let (mut keep, mut lives) = (KeepAlive::default(), Some(lives));
    loop {
        let ttl = session.state().proof.ttl();
        let patience = (ttl / PATIENCE).min(LONGEST_PATIENCE);
        match timeout(patience, session.beat(link, &mut keep)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error,
            Err(_) => {
                let text = format!("etcd: no answer within {patience:?}");
                return StoreError::new(Fault::Retry, text);
            }
        }
        if let Some(lives) = lives.take() {
            let _ = lives.send(()); // The caller may be gone, and then so is the connection.
        }
        let ttl = session.state().proof.ttl();
        tokio::time::sleep((ttl / BEATS).min(LONGEST_BEAT)).await;
    }
}

/// The stream of keep-alives. It is opened with the first one.
#[derive(Default)]
struct KeepAlive {
    stream: Option<(
        mpsc::UnboundedSender<LeaseKeepAliveRequest>,
        tonic::Streaming<LeaseKeepAliveResponse>,
    )>,
}

impl KeepAlive {
    /// Returns the ttl and the term of the answer.
    async fn alive(&mut self, link: &Link, lease: i64) -> Result<(i64, u64), Status> {
        let question = LeaseKeepAliveRequest { id: lease };
        let ended = || Status::unavailable("the stream of keep-alives has ended");
        let answers = match &mut self.stream {
            Some((questions, answers)) => {
                questions.send(question).map_err(|_| ended())?;
                answers
            }
            None => {
                let (questions, asked) = mpsc::unbounded_channel();
                questions.send(question).map_err(|_| ended())?;
                let path = "/etcdserverpb.Lease/LeaseKeepAlive";
                let answers = link.stream(path, asked).await?;
                &mut self.stream.insert((questions, answers)).1
            }
        };
        let answer = answers.message().await?.ok_or_else(ended)?;
        Ok((
            answer.ttl,
            answer.header.map_or(0, |header| header.raft_term),
        ))
    }
}
