use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "upload", permits = 1)]
async fn of_how_many() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "upload", of = 5)]
async fn how_many() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "upload", permits = 1, of = 5, shared)]
async fn of_a_read_lock() -> Result<(), Error> {
    Ok(())
}

fn main() {}
