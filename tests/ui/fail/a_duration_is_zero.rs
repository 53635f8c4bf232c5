use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", wait = "0s", ttl = "0s")]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
