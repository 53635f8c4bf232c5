use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", crate = "lockcore")]
async fn text(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
