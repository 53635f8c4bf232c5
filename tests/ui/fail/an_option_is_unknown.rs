use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", wiat = "2s", timeout = "2s", onbusy = skip, colour = "red")]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
