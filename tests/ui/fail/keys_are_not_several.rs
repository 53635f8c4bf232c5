use lockcore::{Error, distributed_lock};

#[distributed_lock(keys = [])]
async fn none(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = "order:{id}")]
async fn one(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys)]
async fn without_value(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
