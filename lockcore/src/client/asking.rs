//! The only loop that repeats a request until the store answers. It is for requests that are not
//! about tickets: about counters, values and stored capacities. A store carries out each of them
//! once, however often it is sent.

use std::sync::Arc;
use std::time::Duration;

use super::calls::Where;
use super::gate::Replaced;
use super::shared::Shared;
use super::table::Phase;
use crate::backend::{Answer, Connection, Fault, StoreError};
use crate::clock::Instant;
use crate::error::Error;
use crate::options::Wait;
use crate::pauses::Pauses;

/// A change that may have been carried out is repeated for at most this long. A store remembers a
/// change of a counter for twice as long, counted from when it was carried out. So no repetition
/// counts again.
const LONGEST: Duration = Duration::from_secs(30);

/// How often a change may have reached the store before it was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sends {
    /// The change was sent once, or it is certain that no earlier attempt was carried out.
    Once,
    /// An earlier attempt may have been carried out, or may be carried out later.
    Several,
}

impl Shared {
    /// # Errors
    ///
    /// `Config` in a [forked child](Self::is_forked); `Lost` once the client is shut down.
    pub(super) fn refuse_closed(&self) -> Result<(), Error> {
        self.refuse_forked()?;
        match self.table().phase {
            Phase::Open => Ok(()),
            _ => Err(Error::shut_down()),
        }
    }

    /// Sends a request until the store answers it.
    ///
    /// While no attempt can have been carried out, this fails when the store has not answered for
    /// one operation timeout. So callers do not pile up in front of a store that is down. If the
    /// store answers that another client was in the way, the request is sent again for as long as
    /// the caller waits. A change whose answer is missing is repeated for as long as the caller
    /// waits, but at most for 30 seconds.
    ///
    /// If this future is dropped after its first poll, the change may have been carried out or not.
    /// Nothing else is left behind.
    pub(super) async fn until_answered<T>(
        self: &Arc<Self>,
        changes: bool,
        wait: Wait,
        verb: impl Fn(&dyn Connection) -> Answer<T>,
    ) -> Result<(T, Sends), Error> {
        let began = self.clock.now();
        let settled_by = began.after(match wait {
            Wait::For(wait) => wait.max(self.op_timeout).min(LONGEST),
            Wait::Forever => LONGEST,
        });
        let given_up_by = match wait {
            Wait::For(wait) => began.after(wait.max(self.op_timeout)),
            Wait::Forever => Instant::FAR_FUTURE,
        };
        // The operation timeout of the next attempt counts from this time. An answer of the store
        // moves it.
        let mut since = began;
        // Whether an attempt may have been carried out.
        let mut is_ambiguous = false;
        let mut pauses = Pauses::between(Duration::from_millis(5), Duration::from_millis(200));
        loop {
            let by = match is_ambiguous {
                true => settled_by,
                false => since.after(self.op_timeout).min(given_up_by),
            };
            let error = match self.ask_once(by, &verb).await {
                Ok(answer) if is_ambiguous => return Ok((answer, Sends::Several)),
                Ok(answer) => return Ok((answer, Sends::Once)),
                Err(error) => error,
            };
            is_ambiguous |= changes && (error.fault() == Fault::Unknown || error.is_halfway());
            let again = self.clock.now().after(pauses.draw());
            if error.is_conflict() {
                since = again;
            }
            let by = match is_ambiguous {
                true => settled_by,
                false => since.after(self.op_timeout).min(given_up_by),
            };
            let is_final = match error.fault() {
                Fault::Config | Fault::Refused => !error.is_halfway(),
                Fault::Retry | Fault::Unknown => false,
            };
            if is_final || again >= by {
                return Err(match is_ambiguous {
                    true => {
                        Error::unknown(format!("whether the change was made is unknown: {error}"))
                    }
                    false => error.unavailable_unless_config(),
                });
            }
            tracing::debug!(%error, "asking again for a counter, a value or a capacity");
            self.alarm(again).await;
        }
    }

    async fn ask_once<T>(
        self: &Arc<Self>,
        by: Instant,
        verb: impl Fn(&dyn Connection) -> Answer<T>,
    ) -> Result<T, StoreError> {
        let reached = self.connection(Where::Here, by).await?;
        let connected = &reached.connected;
        // The pass is kept until the answer has come.
        let _pass = match self.admit(connected.enqueues(), 1, by).await {
            Some(Ok(pass)) => pass,
            Some(Err(Replaced)) => {
                return Err(StoreError::new(Fault::Retry, "the connection was replaced"));
            }
            None => {
                let text = "too many requests of this process are in front of this one";
                return Err(StoreError::new(Fault::Retry, text));
            }
        };
        let sent = self.sent_now();
        // The task may not have run for a long time. Then the store may have forgotten an earlier
        // attempt that it has carried out.
        if sent.at >= by {
            return Err(StoreError::new(
                Fault::Retry,
                "it is too late to ask the store",
            ));
        }
        let by = by.min(sent.at.after(self.op_timeout));
        let answer = self.send(connected, by, sent, |verbs, _| verb(verbs));
        let outcome = answer.await;
        self.learn(connected.enqueues(), sent, outcome.as_ref().err());
        outcome.map(|(_, answer)| answer)
    }
}
