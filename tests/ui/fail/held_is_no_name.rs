use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", held = "lock")]
async fn text(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", held = lock.grant_id())]
async fn expression(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", held)]
async fn nothing(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
