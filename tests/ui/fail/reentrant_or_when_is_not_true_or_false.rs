use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", reentrant = id)]
async fn reentrant(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", when = Some(id))]
async fn when(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", reentrant, when)]
async fn without_value(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
