use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}", keys = ["a:{id}", "b:{id}"])]
async fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
