use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "cart:{id}", linger = "0s")]
async fn none(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "cart:{id}", linger = "2s")]
async fn long(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
