use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", wait = "2 parsecs", ttl = 5)]
async fn literals(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", wait = "2", ttl = "soon")]
async fn more_literals(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", wait = id, ttl = id)]
async fn expressions(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
