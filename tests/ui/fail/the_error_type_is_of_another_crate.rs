use std::io;

use lockcore::distributed_lock;

mod http {
    pub struct StatusCode;
}

mod tonic {
    pub struct Status;
    pub type Result<T> = std::result::Result<T, Status>;
}

use http::StatusCode;

#[distributed_lock(key = "order:{id}")]
async fn text(id: u64) -> Result<u64, String> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn static_text(id: u64) -> Result<u64, &'static str> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn cow(id: u64) -> Result<u64, std::borrow::Cow<'static, str>> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn unit(id: u64) -> Result<u64, ()> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn status_code(id: u64) -> Result<u64, StatusCode> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn status_and_text(id: u64) -> Result<u64, (StatusCode, String)> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn io_error(id: u64) -> Result<u64, std::io::Error> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn io_alias(id: u64) -> io::Result<u64> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn grpc(id: u64) -> Result<u64, tonic::Status> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn grpc_alias(id: u64) -> tonic::Result<u64> {
    Ok(id)
}

fn main() {}
