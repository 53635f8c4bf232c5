//! `lockcore counter`: a number that many processes change.

use lockcore::Locks;

use crate::args::{Counter, CounterStep};
use crate::exit::Exit;
use crate::show;

pub(crate) async fn counter(locks: &Locks, counter: Counter) -> Result<(), Exit> {
    let json = counter.json;
    let (name, counted) = match counter.step {
        CounterStep::Get { name } => (name.clone(), locks.counter(name).get().await?),
        CounterStep::Add { name, by } => (name.clone(), locks.counter(name).add(by).await?),
        CounterStep::Set { name, count } => (name.clone(), locks.counter(name).set(count).await?),
        CounterStep::Watch { name } => {
            let mut changes = locks.counter(&name).changes();
            loop {
                show::count(json, &name, changes.next().await?.count)?;
            }
        }
    };
    Ok(show::count(json, &name, counted.count)?)
}
