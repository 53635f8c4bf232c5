use lockcore::{Error, distributed_lock};
use tokio::task::JoinHandle;

#[distributed_lock(key = "order:{id}")]
async fn settle(id: u64) -> Result<JoinHandle<u64>, Error> {
    Ok(tokio::spawn(async move { id }))
}

#[distributed_lock(key = "order:{id}")]
async fn with_its_path(id: u64) -> Result<tokio::task::JoinSet<u64>, Error> {
    Ok(tokio::task::JoinSet::new())
}

use tokio::task;

#[distributed_lock(key = "order:{id}")]
async fn with_its_module(id: u64) -> Result<task::JoinHandle<u64>, Error> {
    Ok(tokio::spawn(async move { id }))
}

#[distributed_lock(key = "order:{id}")]
async fn thread(id: u64) -> Result<std::thread::JoinHandle<u64>, Error> {
    Ok(std::thread::spawn(move || id))
}

fn main() {}
