use lockcore::{Error, distributed_lock};

#[distributed_lock(name = "order:{id}", lease = "10s", fallback = Ok(()), if = true)]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
