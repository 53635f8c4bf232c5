//! Requests about the stored capacity of a name. Each change names the last change that its read
//! has found. The store carries it out only if there was no other change since. So a repetition
//! after a lost answer does not count again.

use std::num::NonZeroU32;
use std::sync::Arc;

use super::asking::Sends;
use super::shared::Shared;
use crate::backend::{Resize, ResizeOp, ResizeOutcome, Resized};
use crate::error::Error;
use crate::name::Name;
use crate::options::Wait;
use crate::request::mismatch;

/// How often a change starts again from a new read because somebody else was faster.
const TURNS: u32 = 100;

/// Whether it does harm if a change is made twice. This can happen unnoticed if an answer is lost
/// and somebody else changes the capacity in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Twice {
    /// The change sets the capacity to a fixed number.
    Harmless,
    /// The change adds to the capacity, or takes away from it.
    Wrong,
}

impl Shared {
    /// The capacity that is stored for a name.
    pub(crate) async fn stored_capacity(
        self: &Arc<Self>,
        name: &Name,
    ) -> Result<Option<u32>, Error> {
        if !self.capability.resizes {
            return Ok(None);
        }
        let read = self.read_capacity(name, self.defaults.wait).await;
        let read = read.map_err(|error| error.of_name(name.as_str()))?;
        Ok(read.capacity)
    }

    /// Changes the stored capacity of a name to what `next` computes from it. `stated` is the
    /// capacity that the caller states, which counts while none is stored. Returns the capacity
    /// that is stored after the change.
    ///
    /// If this future is dropped after its first poll, the change may have been made or not.
    /// Nothing else is left behind.
    pub(crate) async fn resize(
        self: &Arc<Self>,
        name: &Name,
        stated: NonZeroU32,
        twice: Twice,
        next: impl Fn(Option<u32>) -> Result<Option<u32>, Error>,
    ) -> Result<Option<u32>, Error> {
        let resized = self.resized(name, stated, twice, next).await;
        resized.map_err(|error| error.of_name(name.as_str()))
    }

    async fn resized(
        self: &Arc<Self>,
        name: &Name,
        stated: NonZeroU32,
        twice: Twice,
        next: impl Fn(Option<u32>) -> Result<Option<u32>, Error>,
    ) -> Result<Option<u32>, Error> {
        self.refuse_closed()?;
        if !self.capability.resizes {
            return Err(Error::config(
                "this store cannot store the capacity of a semaphore, so that it cannot be resized while it is in use: let \
                 all callers state the new capacity, at a time when nobody holds permits, or use another store: a quorum \
                 of Redis servers is the only one of ours that cannot",
            ));
        }
        let wait = self.defaults.wait;
        for _ in 0..TURNS {
            let read = self.read_capacity(name, wait).await?;
            let capacity = next(read.capacity)?;
            if capacity == read.capacity {
                return Ok(capacity);
            }
            let op = ResizeOp::Set {
                capacity,
                after: read.change,
                stated,
            };
            let resize = Arc::new(Resize::new(name.clone(), self.new_id()?, op));
            let asked = self.until_answered(true, wait, |verbs| verbs.resize(Arc::clone(&resize)));
            let (answer, sends) = asked.await?;
            match answer.outcome {
                ResizeOutcome::Applied => return Ok(capacity),
                ResizeOutcome::Mismatch { in_use } => return Err(mismatch(stated, in_use)),
                // An earlier attempt may have been carried out, and another client may have changed
                // the capacity after that.
                ResizeOutcome::Kept if sends == Sends::Several && twice == Twice::Wrong => {
                    return Err(Error::unknown(
                        "whether the capacity was changed is unknown: the answer was lost, and somebody else has changed \
                         it since",
                    ));
                }
                ResizeOutcome::Kept => {}
            }
        }
        Err(Error::unavailable(
            "others have changed the capacity each time before this change; nothing was changed",
        ))
    }

    async fn read_capacity(self: &Arc<Self>, name: &Name, wait: Wait) -> Result<Resized, Error> {
        self.refuse_closed()?;
        let read = Resize::new(name.clone(), self.new_id()?, ResizeOp::Read);
        let read = Arc::new(read);
        let asked = self.until_answered(false, wait, |verbs| verbs.resize(Arc::clone(&read)));
        asked.await.map(|(answer, _)| answer)
    }
}
