//! When a request counts: `?durability=…`.
//!
//! A verb locks its name until its transaction is committed. If it waited for the disk meanwhile, a
//! name could change hands a few hundred times a second at most, and the server could not write the
//! log for several verbs at once, because a transaction that sends a notification holds a lock of
//! the whole server until it is committed. So all verbs are committed *asynchronously*: others see
//! them at once, and the disk has them a moment later.
//!
//! An enqueue, a renewal, an adoption or a resize *counts* only when the disk has it. For this the
//! client has a second connection, beside the one of the verbs. On it one transaction writes a
//! message to the log and waits until the disk has it, and the standbys too if the server waits for
//! them. The server writes the log in order. So then it has everything that was committed before
//! this transaction has begun. One such *flush* serves all verbs that were answered before it
//! began, and all that come meanwhile wait for the next.
//!
//! A release, a wake-up and a refusal wait for nothing. This is safe:
//!
//! - **A crash leaves a prefix of what was committed.** The prefix has everything that a flush has
//!   acknowledged. So it has all tickets that a client believes in. What can be missing are
//!   requests that nobody counts on, and releases of the last moments (up to three times
//!   `wal_writer_delay`), each with the grants that it has made.
//! - **A lost release brings back a ticket that nobody renews.** It stands in front of those that
//!   were granted by the release, because the line is in the order of the numbers. Let A be the
//!   ticket that is back, and B the one that was told that it holds. B goes on: its renewals answer
//!   that it waits, and such an answer keeps the lease of a holder. Nobody passes B, because nobody
//!   passes A, and B is the next behind A. When A has expired, B is granted once more.
//! - **A wake-up may be believed** for the same reason, whether A was released or has expired. If A
//!   has expired, no flush has acknowledged a renewal of A after that, because a renewal of A reads
//!   the table after the grant of B, and finds no ticket.
//! - **Numbers go on rising.** B's ticket was flushed, so its number is in the prefix. A later
//!   ticket stands behind it, or has a greater number by the clock of the server.
//!
//! With a standby that is promoted it is the same, if the flush has waited for this standby. The
//! price of a crash is that a name stays taken until the lease of a ticket like A ends.
//!
//! If a wake-up comes before the enqueue of its ticket counts, it is kept: see `waits`.
//!
//! Behind a pooler that gives connections of the server to others (`wakeups=look`), such a flush
//! proves nothing. If the server crashes between a verb and its flush, the pooler connects again
//! without a word, and the flush succeeds, although the crash has taken the verb back. So there each
//! verb that must count flushes in its own transaction. If its connection ends, it has no answer. Its
//! name stays locked until the disk has it. That makes many locks of one name slower, and keeps
//! everything above true: what can be missing after a crash is still only what nobody counts on. An
//! answer that shows what others have changed is flushed too, behind what it shows.
//!
//! A flush may hang, because a standby is cut off. The server does not notice then that the client
//! closes the connection, and keeps the process of this connection until the standby is back. So a
//! client ends the wait before it closes the connection. Otherwise each connection that the core
//! opens in place of one that does not answer would leave such a process, until the server takes no
//! connection any more. Nothing counts because of a wait that was ended.
//!
//! A client that is cut off or killed cannot end its wait, and behind a pooler it cannot do so once its
//! connection to the pooler has gone. So each client that connects ends the waits of its user that
//! have lasted for so long that no client can want them any more.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{mpsc, oneshot};
use tokio_postgres::AsyncMessage;
use tokio_postgres::error::Severity;

use super::calls;
use super::config::Server;
use super::dial::{self, Hears, Line, Patience};
use crate::backend::{Fault, StoreError};

/// The flushes of one connection.
#[derive(Clone, Debug)]
pub(super) struct Flushes(mpsc::UnboundedSender<Waiter>);

type Waiter = oneshot::Sender<Result<(), StoreError>>;

/// How many warnings the server has sent on a connection.
///
/// If the wait for a standby is ended, the server answers as if the flush had succeeded, and warns
/// that the standby may not have it. The warning comes before the answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Warnings(Arc<AtomicU64>);

impl Warnings {
    pub(super) fn hear(&self) -> Hears {
        let warnings = self.clone();
        Box::new(move |message| warnings.take(&message))
    }

    pub(super) fn take(&self, message: &AsyncMessage) {
        if let AsyncMessage::Notice(notice) = message
            && !matches!(
                notice.parsed_severity(),
                Some(Severity::Debug | Severity::Info | Severity::Log | Severity::Notice)
            )
        {
            self.0.fetch_add(1, Ordering::Release);
        }
    }

    /// Runs a request that flushes. Returns a failure beside the answer, if a warning has come
    /// meanwhile. It may be about another request on this connection.
    pub(super) async fn watch<T>(&self, asked: impl Future<Output = T>) -> (T, Option<StoreError>) {
        let before = self.0.load(Ordering::Acquire);
        let answer = asked.await;
        let warned = self.0.load(Ordering::Acquire) != before;
        let doubt = warned.then(|| {
            StoreError::new(
                Fault::Retry,
                "PostgreSQL: the wait for a standby was ended, and the standby may not have the \
                 request",
            )
        });
        (answer, doubt)
    }
}

impl Flushes {
    /// Begins to flush on this connection, which ends with the last copy of this value. `main` ends
    /// the connection of the verbs: neither is of use without the other.
    pub(super) fn begin(
        server: Arc<Server>,
        line: Line,
        warnings: Warnings,
        patience: Patience,
        main: tokio::task::AbortHandle,
    ) -> Self {
        let (flushes, waiters) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let ended = flush_for(&server, &line, &warnings, &patience, waiters).await;
            if ended {
                main.abort();
            }
        });
        Self(flushes)
    }

    /// Waits until everything counts that was answered on the connection of the verbs before this
    /// call. If the future is dropped, nobody misses its flush.
    pub(super) async fn flush(&self) -> Result<(), StoreError> {
        let (waiter, flushed) = oneshot::channel();
        let ended = || StoreError::broken("PostgreSQL: the connection of the flushes has ended");
        self.0.send(waiter).map_err(|_| ended())?;
        flushed.await.map_err(|_| ended())?
    }
}

/// Flushes for those that wait. Returns whether the connection has ended.
async fn flush_for(
    server: &Server,
    line: &Line,
    warnings: &Warnings,
    patience: &Patience,
    mut waiters: mpsc::UnboundedReceiver<Waiter>,
) -> bool {
    while let Some(first) = waiters.recv().await {
        let mut all = vec![first];
        while let Ok(next) = waiters.try_recv() {
            all.push(next);
        }
        let setting = server.durability.setting();
        let parameters: [calls::Parameter<'_>; 1] = [&setting];
        let asked = in_time(
            server,
            line,
            patience,
            line.calls.ask(&calls::FLUSH, &parameters),
        );
        let outcome = match warnings.watch(asked).await {
            (Err(error), _) if error.is_broken() => Err(error),
            (_, Some(doubt)) => Err(doubt),
            (flushed, None) => flushed.map(drop),
        };
        let ended = matches!(&outcome, Err(error) if error.is_broken());
        for waiter in all {
            // A caller that has gone needs no answer.
            let _ = waiter.send(outcome.clone());
        }
        if ended {
            return true;
        }
    }
    false
}

/// Waits for a request that flushes. If it takes too long, it is ended at the server. If there is no
/// answer to this either, the connection is of no use any more.
///
/// The request to end it has a connection of its own, and says which connection it means. If the
/// flush is answered at the same moment, it may end the next one. The callers of that one then try
/// again.
pub(super) async fn in_time<T>(
    server: &Server,
    line: &Line,
    patience: &Patience,
    asked: impl Future<Output = Result<T, StoreError>>,
) -> Result<T, StoreError> {
    let mut asked = pin!(asked);
    tokio::select! {
        biased;
        asked = &mut asked => return asked,
        // No caller waits any more that was there when the flush began.
        () = patience.end() => {}
    }
    let ended = async {
        dial::cancel(server, line).await;
        asked.await
    };
    tokio::select! {
        biased;
        ended = ended => ended,
        () = patience.end() => {
            Err(StoreError::broken("PostgreSQL: the server did not answer a flush in time"))
        }
    }
}
