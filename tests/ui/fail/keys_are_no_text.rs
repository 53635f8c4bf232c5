use lockcore::{Error, distributed_lock};

#[distributed_lock(keys = ["a:{id", 7])]
async fn literals(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = ["a:{id}", id])]
async fn element(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = id)]
async fn no_iterator(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = ids)]
async fn iterator_of_numbers(ids: Vec<u64>) -> Result<(), Error> {
    Ok(())
}

fn main() {}
