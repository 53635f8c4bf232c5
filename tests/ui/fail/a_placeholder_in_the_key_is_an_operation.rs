use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id + 1}")]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
