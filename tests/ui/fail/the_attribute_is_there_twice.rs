use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}")]
#[distributed_lock(key = "order:{id}", wait = "2s")]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", when = id < 9)]
#[distributed_lock(key = "order:{id}", when = id < 9)]
async fn with_a_condition(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
