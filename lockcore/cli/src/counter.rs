//! `lockcore counter`: a number that many processes change.

use lockcore::Locks;

use crate::args::Counter;
use crate::exit::Exit;
use crate::show;

pub(crate) async fn counter(locks: &Locks, command: Counter) -> Result<(), Exit> {
    let counted = match command {
        Counter::Get { name } => locks.counter(name).get().await?,
        Counter::Add { name, by } => locks.counter(name).add(by).await?,
        Counter::Set { name, value } => locks.counter(name).set(value).await?,
        Counter::Watch { name } => {
            let mut changes = locks.counter(name).changes();
            loop {
                show::line(&changes.next().await?.value.to_string())?;
            }
        }
    };
    Ok(show::line(&counted.value.to_string())?)
}
