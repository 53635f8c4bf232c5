//! The value beside a lock, for its holder. Readers that do not hold the lock are in `value`.

use std::sync::Arc;

use super::lifecycle::Held;
use crate::backend::{CountOp, Outcome, Written};
use crate::error::{Error, LostReason};
use crate::options::Wait;

impl Held {
    /// Writes the value of the lock: a text of up to 1,024 bytes, for example how far the work is, or the address of this
    /// process. It replaces the value of before. The next holder finds it with [`value`](Self::value), and everybody
    /// else with [`Locks::value`](crate::Locks::value), which also tells of each change.
    ///
    /// The value is written with the [fencing token](Self::fencing_token), and the store refuses it if a later holder has
    /// written one. So a holder that was frozen cannot replace it. The value stays when the lock is released or lost, for
    /// at least a day after it was last written or read.
    ///
    /// The lock itself is not renewed by this. A lock whose value nobody writes or reads costs nothing more.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for a longer text, for a hold without a fencing token, and for a store without
    /// counters. [`Lost`](crate::ErrorKind::Lost) when the lock is lost, or the store refuses the value.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when nothing was written because the store is down or refuses.
    /// [`Unknown`](crate::ErrorKind::Unknown) when the value was sent and the answer never came: it may still arrive, also
    /// after a value that this holder writes later.
    ///
    /// # Cancel safety
    ///
    /// Not safe: if the future is dropped after it was polled, the value may be written or not, even after a value that
    /// this holder writes later.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let guard = locks.mutex("import").acquire().await?;
    /// guard.set_value("page 7 of 12").await?;
    /// guard.release().await?;
    ///
    /// let next = locks.mutex("import").acquire().await?;
    /// let left = next.value().await?.expect("it goes on where the other has stopped");
    /// assert_eq!(&*left.text, "page 7 of 12");
    /// # Ok(()) }
    /// ```
    pub async fn set_value(&self, text: impl Into<Arc<str>>) -> Result<(), Error> {
        if let Some(error) = self.loss() {
            return Err(error);
        }
        let name = self.0.lease.request.name.value();
        let written = Written::new(self.fencing_token()?, text);
        // A repetition is of use for as long as this is the holder.
        let wait = Wait::For(self.remaining());
        let counted = self.shared().count(&name, CountOp::Write(written), wait);
        match counted.await?.outcome == Outcome::Applied {
            true => Ok(()),
            false => {
                // The lease learns at once what the store knows.
                self.shared().recheck_now(self.0.lease.request.id);
                Err(self.lost_for(LostReason::Taken))
            }
        }
    }

    /// The value of the lock, which this holder or one before it has [written](Self::set_value). `None` if there is none.
    /// One request.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store is down; [`Config`](crate::ErrorKind::Config) for a
    /// store without counters.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn value(&self) -> Result<Option<Written>, Error> {
        let name = self.0.lease.request.name.value();
        let wait = Wait::Forever; // a read is never ambiguous, and does not wait longer for this
        let counted = self.shared().count(&name, CountOp::Read, wait).await?;
        Ok(counted.written)
    }
}
