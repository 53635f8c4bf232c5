use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", ttl = "100d")]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
