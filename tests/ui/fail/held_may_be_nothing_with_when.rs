use lockcore::{Error, FencingToken, distributed_lock};

#[distributed_lock(key = "order:{id}", when = id > 9, held = lock)]
async fn settle(id: u64) -> Result<FencingToken, Error> {
    Ok(lock.token())
}

fn main() {}
