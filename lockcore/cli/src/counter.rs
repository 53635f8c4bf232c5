//! `lockcore counter`: a number that many processes change.

use lockcore::Locks;

use crate::args::Counter;
use crate::exit::Exit;
use crate::show;

pub(crate) async fn counter(locks: &Locks, command: Counter) -> Result<(), Exit> {
    let counted = match command {
        Counter::Get { name } => locks.counter(name).get().await?,
        Counter::Add { name, by } => locks.counter(name).add(by).await?,
        Counter::Set { name, count } => locks.counter(name).set(count).await?,
        Counter::Watch { name } => {
            let mut changes = locks.counter(name).changes();
            loop {
                show::line(&changes.next().await?.count.to_string())?;
            }
        }
    };
    Ok(show::line(&counted.count.to_string())?)
}
