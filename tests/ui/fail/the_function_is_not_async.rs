use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order:{id}")]
fn settle(id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}")]
fn returns_a_future(id: u64) -> impl Future<Output = Result<(), Error>> {
    async { Ok(()) }
}

fn main() {}
