use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}")]
fn settle(id: u64) -> Result<u64, Error> {
    tokio::task::yield_now().await;
    Ok(id)
}

async fn settle_all() -> Result<u64, Error> {
    Ok(settle(7).await? + settle(8).await?)
}

fn main() {}
