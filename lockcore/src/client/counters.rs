//! Requests about counters and values: the only loop that asks a store until it answers. Waiting for a change is in `watches`.

use std::sync::Arc;
use std::time::Duration;

use super::calls::Where;
use super::gate::Replaced;
use super::shared::Shared;
use super::table::Phase;
use crate::backend::{Count, CountOp, Counted, Fault, MAX_COUNT, MAX_TEXT, Outcome, StoreError};
use crate::clock::Instant;
use crate::error::Error;
use crate::name::Name;
use crate::options::Wait;
use crate::pauses::Pauses;

/// A change that may have been carried out is repeated for at most this long. The store remembers it for twice as long
/// after it was carried out, so no repetition counts again.
const LONGEST: Duration = Duration::from_secs(30);

impl Shared {
    /// Carries out an operation on a counter or a value, exactly once.
    ///
    /// While nothing can have been carried out, it fails within one operation timeout, so that callers do not pile up in
    /// front of a store that is down. A change whose answer is missing is repeated, with its id, for as long as the
    /// caller waits.
    ///
    /// If this is dropped after its first poll, a change may have been carried out or not. Nothing else is left behind.
    pub(crate) async fn count(
        self: &Arc<Self>,
        name: &Name,
        op: CountOp,
        wait: Wait,
    ) -> Result<Counted, Error> {
        self.counted(name, op, wait)
            .await
            .map_err(|error| error.of_name(name.as_str()))
    }

    async fn counted(
        self: &Arc<Self>,
        name: &Name,
        op: CountOp,
        wait: Wait,
    ) -> Result<Counted, Error> {
        self.refuse_forked()?;
        if self.table().phase != Phase::Open {
            return Err(Error::shut_down());
        }
        if let CountOp::Write(written) = &op
            && written.text.len() > MAX_TEXT
        {
            let has = written.text.len();
            return Err(Error::config(format!(
                "the value has {has} bytes and at most {MAX_TEXT} are allowed; store it elsewhere, and write where it is"
            )));
        }
        let reads = op == CountOp::Read;
        let mut count = Count::new(name.clone(), self.new_id()?, op);
        if !reads {
            count.answered = self.answered.take(name);
        }
        let count = Arc::new(count);
        let began = self.clock.now();
        let settled_by = began.after(match wait {
            Wait::For(wait) => wait.max(self.op_timeout).min(LONGEST),
            Wait::Forever => LONGEST,
        });
        // It may have been carried out.
        let mut is_ambiguous = false;
        let mut pauses = Pauses::between(Duration::from_millis(5), Duration::from_millis(200));
        loop {
            let by = match is_ambiguous {
                true => settled_by,
                false => began.after(self.op_timeout),
            };
            let error = match self.ask_count(&count, by).await {
                Ok(answer) => {
                    // No attempt of it is still under way.
                    if !reads && !is_ambiguous {
                        self.answered.note(name, count.id);
                    }
                    return match answer.outcome {
                        Outcome::Overflow => Err(overflow(answer.value)),
                        Outcome::Applied | Outcome::Kept => Ok(answer),
                    };
                }
                Err(error) => error,
            };
            is_ambiguous |= !reads && (error.fault() == Fault::Unknown || error.is_halfway());
            let by = match is_ambiguous {
                true => settled_by,
                false => by,
            };
            let again = self.clock.now().after(pauses.draw());
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
            tracing::debug!(%error, "asking again for a counter or a value");
            self.alarm(again).await;
        }
    }

    /// Asks once.
    async fn ask_count(
        self: &Arc<Self>,
        count: &Arc<Count>,
        by: Instant,
    ) -> Result<Counted, StoreError> {
        let reached = self.connection(Where::Here, by).await?;
        let connected = &reached.connected;
        // The pass is kept until the answer is here.
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
        // The task may not have run for long, and the store may have forgotten that an earlier attempt was carried out.
        if sent.at >= by {
            return Err(StoreError::new(
                Fault::Retry,
                "it is too late to ask the store",
            ));
        }
        let by = by.min(sent.at.after(self.op_timeout));
        let answer = self.send(connected, by, sent, |verbs, _| {
            verbs.count(Arc::clone(count))
        });
        answer.await.map(|(_, answer)| answer)
    }
}

fn overflow(value: i64) -> Error {
    Error::config(format!(
        "the counter is at {value} and would pass {MAX_COUNT} or -{MAX_COUNT}; nothing was changed"
    ))
}
