use lockcore::{Error, distributed_lock};
use tokio::task::JoinHandle;

#[distributed_lock(key = "order:{id}")]
async fn settle(id: u64) -> Result<JoinHandle<u64>, Error> {
    Ok(tokio::spawn(async move { id }))
}

fn main() {}
