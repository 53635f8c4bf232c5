use lockcore::distributed_lock;

#[derive(Debug)]
struct SettleError;

#[distributed_lock(key = "order:{id}")]
async fn settle(id: u64) -> Result<(), SettleError> {
    Ok(())
}

mod app {
    pub type Result<T> = std::result::Result<T, super::SettleError>;
}

#[distributed_lock(key = "order:{id}")]
async fn alias(id: u64) -> app::Result<()> {
    Ok(())
}

fn main() {}
