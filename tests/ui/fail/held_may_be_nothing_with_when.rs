use lockcore::{Error, GrantId, distributed_lock};

#[distributed_lock(key = "order:{id}", when = id > 9, held = lock)]
async fn settle(id: u64) -> Result<GrantId, Error> {
    Ok(lock.grant_id())
}

fn main() {}
