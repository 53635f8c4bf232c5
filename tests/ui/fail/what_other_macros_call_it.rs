use lockcore::{Error, distributed_lock};

#[distributed_lock(name = "order:{id}", lease = "10s", fallback = Ok(()), if = true)]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", read, lease_time = 10, waitTime = 2, no_wait, limit = 5)]
async fn options_of_ours(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", write, url = "redis://127.0.0.1/", lock_at_most_for = "1m", retry = 3)]
async fn none_or_several(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
