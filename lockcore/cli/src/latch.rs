//! `lockcore latch`: a count that others wait for.

use lockcore::Locks;
use lockcore::inspect::visible;

use crate::args::Latch;
use crate::exit::{BUSY, Exit};
use crate::show;

pub(crate) async fn latch(locks: &Locks, command: Latch) -> Result<(), Exit> {
    match command {
        Latch::Set { name, count } => match locks.latch(&name).try_set(count).await? {
            true => Ok(()),
            false => {
                let name = visible(&name);
                let text = format!("{name}: the latch is not at zero; reset it first");
                Err(Exit::new(BUSY, text))
            }
        },
        Latch::Down { name, by } => {
            let count = locks.latch(name).count_down_by(by).await?;
            Ok(show::line(&count.to_string())?)
        }
        Latch::Wait { name, wait } => {
            let latch = locks.latch(name);
            let latch = match wait {
                Some(wait) => latch.wait(wait),
                None => latch,
            };
            Ok(latch.wait_for_zero().await?)
        }
        Latch::Count { name } => {
            let count = locks.latch(name).count().await?;
            Ok(show::line(&count.to_string())?)
        }
        Latch::Reset { name } => Ok(locks.latch(name).reset().await?),
    }
}
