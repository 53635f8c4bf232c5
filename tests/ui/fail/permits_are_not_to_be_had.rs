use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "upload", permits = 0, of = 0)]
async fn zero() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "upload", permits = 6, of = 5)]
async fn more_than_there_are() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "upload", permits = 1, of = 1_073_741_824)]
async fn more_than_can_be_counted() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "upload", permits = "one", of = 1.5)]
async fn no_numbers() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "upload", permits = some, of = 5)]
async fn another_type(some: usize) -> Result<(), Error> {
    Ok(())
}

fn main() {}
