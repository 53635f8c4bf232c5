use lockcore::{Error, distributed_lock};

#[distributed_lock(keys = ["account:{from}", "account:{too}"])]
async fn transfer(from: u64, to: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
