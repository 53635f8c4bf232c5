use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", held = lock)]
async fn tail(id: u64) -> Result<u64, Error> {
    Ok("7")
}

#[distributed_lock(key = "order:{id}")]
async fn early(id: u64) -> Result<u64, Error> {
    if id == 0 {
        return "zero";
    }
    Ok(id)
}

#[distributed_lock(key = "order:{id}")]
async fn forgotten(id: u64) -> Result<u64, Error> {
    Ok(id);
}

fn main() {}
