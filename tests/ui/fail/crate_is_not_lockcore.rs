use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", crate = std)]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
