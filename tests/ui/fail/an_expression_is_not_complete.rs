use lockcore::{Error, distributed_lock};

#[distributed_lock(key = order., wait = Duration::, ttl = 2 *)]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
