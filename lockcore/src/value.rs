//! The value beside a lock: a text that its holder writes, and anybody can read.

// The holder's side is in `hold/value`.

use std::sync::Arc;

use crate::acquire::handle::Client;
use crate::backend::{CountOp, Counted};
use crate::counter::{Counter, Following};
use crate::error::Error;
use crate::name::Name;

pub use crate::backend::Written;

/// The value of a lock: a text that its holder has [written](crate::Held::set_value), with the
/// fencing token of that holder. Anybody can read it and follow its changes, whether or not the
/// lock is held.
///
/// The value stays when the lock is released. [`Locks::inspect`](crate::Locks::inspect) tells who
/// holds the lock now. If the [`TicketInfo::ticket`](crate::inspect::TicketInfo::ticket) of this
/// holder is the [ticket](crate::FencingToken::ticket) of the value's token, this holder has
/// written the value.
///
/// The value has nothing to do with the [`Counter`] of the same name.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let locks = lockcore::Locks::connect("memory:")?;
/// let progress = locks.value("import");
/// assert_eq!(progress.get().await?, None);
///
/// let guard = locks.mutex("import").acquire().await?;
/// guard.set_value("page 7 of 12").await?;
/// let written = progress.get().await?.expect("a value");
/// assert_eq!(&*written.text, "page 7 of 12");
/// assert_eq!(written.token, guard.fencing_token()?);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a value does nothing until it is read or followed"]
pub struct LockValue(Counter);

impl LockValue {
    pub(crate) fn new(client: &Arc<Client>, name: Result<Name, Error>) -> Self {
        Self(Counter::of(client, name.map(|name| name.value())))
    }

    /// Reads the value; `None` if there is none.
    ///
    /// # Errors
    ///
    /// As [`Counter::get`](crate::counter::Counter::get).
    ///
    /// # Cancel safety
    ///
    /// Safe: it only reads.
    pub async fn get(&self) -> Result<Option<Written>, Error> {
        Ok(self.read().await?.written)
    }

    /// The value with its version.
    pub(crate) async fn read(&self) -> Result<Counted, Error> {
        self.0.change(CountOp::Read).await
    }

    /// Follows the value: the present value, and later ones when it changes. Nothing happens at the
    /// store before the first call of [`next`](ValueChanges::next). It costs as much as
    /// [`Counter::changes`](crate::counter::Counter::changes).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// let locks = lockcore::Locks::connect("memory:")?;
    /// let mut changes = locks.value("import").changes();
    /// assert_eq!(changes.next().await?, None);
    ///
    /// let guard = locks.mutex("import").acquire().await?;
    /// guard.set_value("page 7 of 12").await?;
    /// let written = changes.next().await?.expect("a value");
    /// assert_eq!(&*written.text, "page 7 of 12");
    /// # Ok(()) }
    /// ```
    pub fn changes(&self) -> ValueChanges {
        ValueChanges(self.follow())
    }

    pub(crate) fn follow(&self) -> Following {
        self.0.follow()
    }
}

/// Follows the value of a lock: see [`LockValue::changes`].
#[derive(Debug)]
pub struct ValueChanges(Following);

impl ValueChanges {
    /// The value if it has been written since the last call, or else as soon as it is written. The
    /// first call returns the present value, or `None`.
    ///
    /// If several values follow each other fast, the call may return only the last of them. If the
    /// store is down, the call waits until the store is back.
    ///
    /// # Errors
    ///
    /// As [`CounterChanges::next`](crate::counter::CounterChanges::next).
    ///
    /// # Cancel safety
    ///
    /// Safe: if the future is dropped, the next call returns what this call would have returned.
    pub async fn next(&mut self) -> Result<Option<Written>, Error> {
        let counted = self.0.next().await?;
        Ok(counted.written)
    }
}
