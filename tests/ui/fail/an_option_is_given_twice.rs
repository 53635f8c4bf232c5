use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", try, key = "id", try)]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
