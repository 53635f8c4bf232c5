use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "")]
async fn one() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(keys = ["a", ""])]
async fn of_several() -> Result<(), Error> {
    Ok(())
}

fn main() {}
