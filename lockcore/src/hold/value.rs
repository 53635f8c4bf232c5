//! The value beside a lock, for its holder. Reading it without holding the lock is in `value`.

use std::sync::Arc;
use std::time::Duration;

use super::lifecycle::Held;
use crate::backend::{CountOp, Outcome, Written};
use crate::error::{Error, LostReason};
use crate::options::Wait;
use crate::token::FencingToken;

impl Held {
    /// Writes the value of the lock: a text of up to 1,024 bytes. Examples are how far the work has
    /// come, or the address of this process. The text replaces the previous value. The next holder
    /// reads it with [`value`](Self::value). Everybody else reads it with
    /// [`Locks::value`](crate::Locks::value), which also reports each change.
    ///
    /// The value is written with the [fencing token](Self::fencing_token), and the store refuses it
    /// if a later holder has written a value. So a holder that was frozen cannot replace the value
    /// of a later holder. The value stays after the lock is released or lost, for at least 30
    /// days after it was last written or read.
    ///
    /// The write does not renew the lock. A lock whose value nobody writes or reads costs nothing
    /// more.
    ///
    /// # Errors
    ///
    /// [`Config`](crate::ErrorKind::Config) for a longer text, for a hold without a fencing token,
    /// and for a store without counters. [`Lost`](crate::ErrorKind::Lost) when the lock is lost, or
    /// the store refuses the value. [`Unavailable`](crate::ErrorKind::Unavailable) when nothing was
    /// written because the store is down or refuses. [`Unknown`](crate::ErrorKind::Unknown) when
    /// the value was sent and no answer came. The value may then arrive later, and may even replace
    /// a newer value of this holder.
    ///
    /// # Cancel safety
    ///
    /// Not safe: if the future is dropped after it was polled, the value may be written or not. It
    /// may be written late, and then even replace a newer value of this holder.
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
        // Repeating the write makes sense for as long as the lock is held.
        let token = self.fencing_token()?;
        let outcome = self.write_value(token, text.into(), self.remaining());
        outcome.await.map_err(|error| self.failed(error))
    }

    /// [`set_value`](Self::set_value) with this token. Its errors do not say that work under the lock
    /// may have begun. A write whose answer is missing is repeated for as long as `wait`, or for an
    /// operation timeout if that is longer.
    pub(crate) async fn write_value(
        &self,
        token: FencingToken,
        text: Arc<str>,
        wait: Duration,
    ) -> Result<(), Error> {
        if let Some(error) = self.loss() {
            return Err(error);
        }
        let name = self.0.lease.request.name.value();
        let write = CountOp::Write(Written::new(token, text));
        let counted = self
            .shared()
            .count_for_holder(&name, write, Wait::For(wait));
        match counted.await?.outcome == Outcome::Applied {
            true => Ok(()),
            false => {
                // The keeper renews the lease at once, so that the lease learns that it is lost.
                self.shared().recheck_now(self.0.lease.request.id);
                Err(self.lost_for(LostReason::Taken))
            }
        }
    }

    /// The value of the lock, which this holder or an earlier holder has
    /// [written](Self::set_value). `None` if there is none. Costs one request.
    ///
    /// # Errors
    ///
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store is down;
    /// [`Config`](crate::ErrorKind::Config) for a store without counters.
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn value(&self) -> Result<Option<Written>, Error> {
        let name = self.0.lease.request.name.value();
        let wait = Wait::Forever; // a read ends within one operation timeout all the same
        let shared = self.shared();
        let counted = match self.is_valid() {
            true => shared.count_for_holder(&name, CountOp::Read, wait).await,
            false => shared.count(&name, CountOp::Read, None, wait).await,
        };
        let counted = counted.map_err(|error| self.failed(error))?;
        Ok(counted.written)
    }
}
