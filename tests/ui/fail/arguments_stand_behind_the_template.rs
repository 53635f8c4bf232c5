use lockcore::{Error, distributed_lock};

struct Order {
    id: u64,
}

#[distributed_lock(key = "order:{}:{}", order.id, id)]
async fn settle(order: Order, id: u64) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{:04}", *id, wait = "2s")]
async fn with_other_options(id: &u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
