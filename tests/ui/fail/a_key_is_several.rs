use lockcore::{Error, distributed_lock};

#[distributed_lock(key = ["account:{from}", "account:{to}"])]
async fn list(from: u64, to: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = vec![from.to_string(), to.to_string()])]
async fn vector(from: u64, to: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
