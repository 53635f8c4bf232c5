use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", wait = forever, on_busy = "skip")]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
