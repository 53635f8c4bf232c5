//! Requests about counters and values. Waiting for a change is in `watches`.

use std::sync::Arc;

use super::asking::Sends;
use super::shared::Shared;
use crate::backend::{Count, CountOp, Counted, MAX_COUNT, MAX_TEXT, Outcome};
use crate::error::Error;
use crate::name::Name;
use crate::options::Wait;

impl Shared {
    /// Carries out an operation on a counter or a value, exactly once.
    ///
    /// While no attempt can have been carried out, this fails within one operation timeout. So
    /// callers do not pile up in front of a store that is down. A change whose answer is missing is
    /// repeated, with its id, for as long as the caller waits, but at most for 30 seconds.
    ///
    /// If this future is dropped after its first poll, a change may have been carried out or not.
    /// Nothing else is left behind.
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
        self.refuse_closed()?;
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
        let changes = !reads;
        let asked = self.until_answered(changes, wait, |verbs| verbs.count(Arc::clone(&count)));
        let (answer, sent) = asked.await?;
        // No attempt of this change is in flight any more, so the store may forget it.
        if changes && sent == Sends::Once {
            self.answered.note(name, count.id);
        }
        match answer.outcome {
            Outcome::Overflow => Err(overflow(answer.value)),
            Outcome::Applied | Outcome::Kept => Ok(answer),
        }
    }
}

fn overflow(value: i64) -> Error {
    Error::config(format!(
        "the counter is at {value} and would pass {MAX_COUNT} or -{MAX_COUNT}; nothing was changed"
    ))
}
