use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id")]
async fn unclosed(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:id}")]
async fn unopened(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
