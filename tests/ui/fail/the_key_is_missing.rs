use lockcore::{Error, distributed_lock};

#[distributed_lock]
async fn bare(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(wait = "2s")]
async fn only_others(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock("order:{id}")]
async fn nameless(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key)]
async fn without_value(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
