use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", on-busy = skip)]
async fn busy(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(max-hold = "1m", key = "order:{id}", lock-at-least-for = "1s")]
async fn hold(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
