use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", on_busy = 7)]
async fn on_busy(id: u64) -> Result<u64, Error> {
    Ok(id)
}

#[distributed_lock(key = "order:{id}", on_error = Err(error))]
async fn on_error(id: u64) -> Option<u64> {
    Some(id)
}

#[distributed_lock(key = "order:{id}", on_error = error.to_string())]
async fn nothing(id: u64) {}

fn main() {}
