//! Requests about counters and values. Waiting for a change is in `watches`.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tracing::Level;

use super::asking::Sends;
use super::calls::OWN;
use super::shared::Shared;
use super::table::AtEnd;
use crate::backend::{Answer, Connection, Count, CountOp, Counted, MAX_COUNT, MAX_TEXT, Outcome};
use crate::error::Error;
use crate::name::Name;
use crate::options::Wait;

impl Shared {
    /// Carries out an operation on a counter or a value, exactly once. `keep` is for
    /// [how long](Count::keep) the store keeps it.
    ///
    /// How long a change is repeated: see [`until_answered`](Self::until_answered). Each repetition
    /// has the same id.
    ///
    /// If this future is dropped after its first poll, a change may have been carried out or not.
    /// Nothing else is left behind.
    pub(crate) async fn count(
        self: &Arc<Self>,
        name: &Name,
        op: CountOp,
        keep: Option<Duration>,
        wait: Wait,
    ) -> Result<Counted, Error> {
        let open = self.refuse_closed();
        let open = open.map_err(|error| error.of_name(name.as_str()));
        open?;
        self.counted(name, op, keep, wait).await
    }

    /// [`count`](Self::count) of a value for the holder of a lock, who may finish its work while the
    /// client is being shut down.
    pub(crate) async fn count_for_holder(
        self: &Arc<Self>,
        name: &Name,
        op: CountOp,
        wait: Wait,
    ) -> Result<Counted, Error> {
        self.counted(name, op, None, wait).await
    }

    /// Makes a change because a ticket has ended, on the connection of the caller's runtime. If it
    /// fails, those who watch the counter learn later that the ticket has ended.
    pub(super) async fn tell_end_of_ticket(self: &Arc<Self>, change: AtEnd) {
        let AtEnd { counter, op } = change;
        let changed = self.count_for_holder(&counter, op, Wait::For(Duration::ZERO));
        if let Err(error) = changed.await {
            self.not_told(error);
        }
    }

    /// As [`tell_end_of_ticket`](Self::tell_end_of_ticket), for several changes on the keeper. If the
    /// keeper has no connection, they are sent once on a connection that is lent. All are sent at
    /// once, so that a store that does not answer takes one operation timeout.
    pub(super) async fn tell_ends_of_tickets(self: &Arc<Self>, changes: Vec<AtEnd>) {
        if changes.is_empty() {
            return;
        }
        let Some(lent) = self.lent(OWN).await else {
            join_all(
                changes
                    .into_iter()
                    .map(|change| self.tell_end_of_ticket(change)),
            )
            .await;
            return;
        };
        let tell = async |AtEnd { counter, op }| {
            let count = Arc::new(Count::new(counter, self.new_id()?, op));
            let by = self.clock.now().after(self.op_timeout);
            let verb = |verbs: &dyn Connection, _| verbs.count(count);
            let told = self.send_lent(&lent, by, verb).await;
            told.map(drop).map_err(Error::from)
        };
        for outcome in join_all(changes.into_iter().map(tell)).await {
            if let Err(error) = outcome {
                self.not_told(error);
            }
        }
    }

    fn not_told(&self, error: Error) {
        self.log(Level::DEBUG, move || {
            tracing::debug!(%error, "could not tell others that a ticket has ended");
        });
    }

    async fn counted(
        self: &Arc<Self>,
        name: &Name,
        op: CountOp,
        keep: Option<Duration>,
        wait: Wait,
    ) -> Result<Counted, Error> {
        let counted = self.carried_out(name, op, keep, wait).await;
        counted.map_err(|error| error.of_name(name.as_str()))
    }

    async fn carried_out(
        self: &Arc<Self>,
        name: &Name,
        op: CountOp,
        keep: Option<Duration>,
        wait: Wait,
    ) -> Result<Counted, Error> {
        self.refuse_forked()?;
        if let CountOp::Write(written) = &op {
            check_value(&written.text)?;
        }
        let changes = op != CountOp::Read;
        let count = Count::new(name.clone(), self.new_id()?, op);
        let count = Arc::new(Count { keep, ..count });
        let asked = self.until_answered(changes, wait, |verbs| match changes {
            true => self.send_change(verbs, &count),
            false => verbs.count(Arc::clone(&count)),
        });
        let (answer, sent) = asked.await?;
        // No attempt of this change is in flight any more, so the store may forget it.
        if changes && sent == Sends::Once {
            self.answered().note(name, &[count.id]);
        }
        match answer.outcome {
            Outcome::Overflow => Err(overflow(answer.count)),
            Outcome::Applied | Outcome::Kept => Ok(answer),
        }
    }

    /// Sends a change, and with it the ids of the changes that the store may forget. They are read
    /// now, after the request has passed the gate: during a burst of changes, all changes are made
    /// before the first answer comes. If this attempt fails, the next change tells the ids again.
    fn send_change(
        self: &Arc<Self>,
        verbs: &dyn Connection,
        count: &Arc<Count>,
    ) -> Answer<Counted> {
        let ids = self.answered().take(&count.name);
        if ids.is_empty() {
            return verbs.count(Arc::clone(count));
        }
        let telling = Arc::new(Count {
            answered: ids,
            ..Count::clone(count)
        });
        let answer = verbs.count(Arc::clone(&telling));
        let told = Told {
            shared: Arc::clone(self),
            telling,
            is_answered: Cell::new(false),
        };
        Box::pin(async move {
            let answer = answer.await?;
            told.is_answered.set(true);
            Ok(answer)
        })
    }
}

/// A request that tells the store ids. If this is dropped before the store has answered, the ids
/// are noted again.
struct Told {
    shared: Arc<Shared>,
    telling: Arc<Count>,
    is_answered: Cell<bool>,
}

impl Drop for Told {
    fn drop(&mut self) {
        if !self.is_answered.get() && !self.shared.is_forked() {
            let Count { name, answered, .. } = &*self.telling;
            self.shared.answered().note(name, answered);
        }
    }
}

/// Checks the length of a value that is to be written.
pub(crate) fn check_value(text: &str) -> Result<(), Error> {
    let has = text.len();
    if has <= MAX_TEXT {
        return Ok(());
    }
    Err(Error::config(format!(
        "the value has {has} bytes and at most {MAX_TEXT} are allowed; store it elsewhere, and write where it is"
    )))
}

fn overflow(count: i64) -> Error {
    Error::config(format!(
        "the counter is at {count} and would pass {MAX_COUNT} or -{MAX_COUNT}; nothing was changed"
    ))
}
