use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", try, wait = "2s")]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", try = true)]
async fn with_value(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
