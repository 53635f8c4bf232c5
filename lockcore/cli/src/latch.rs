//! `lockcore latch`: a count that others wait for.

use lockcore::Locks;
use lockcore::inspect::visible;

use crate::args::{Latch, LatchStep};
use crate::exit::{BUSY, Exit};
use crate::show;

pub(crate) async fn latch(locks: &Locks, latch: Latch) -> Result<(), Exit> {
    // The count after the step, and whether it is printed as text too.
    let (name, count, is_asked) = match latch.step {
        LatchStep::Set { name, count } => match locks.latch(&name).try_set(count).await? {
            true => (name, count, false),
            false => {
                let name = visible(&name);
                let text = format!("{name}: the latch is not at zero; reset it first");
                return Err(Exit::new(BUSY, text));
            }
        },
        LatchStep::Down { name, by } => {
            let count = locks.latch(&name).count_down_by(by).await?;
            (name, count, true)
        }
        LatchStep::Wait { name, wait } => {
            let latch = locks.latch(&name);
            let latch = match wait {
                Some(wait) => latch.wait(wait),
                None => latch,
            };
            latch.wait_for_zero().await?;
            (name, 0, false)
        }
        LatchStep::Count { name } => {
            let count = locks.latch(&name).count().await?;
            (name, count, true)
        }
        LatchStep::Reset { name } => {
            locks.latch(&name).reset().await?;
            (name, 0, false)
        }
    };
    match (latch.json, is_asked) {
        (false, false) => Ok(()),
        (json, _) => Ok(show::count(json, &name, count)?),
    }
}
