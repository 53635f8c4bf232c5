use lockcore::{Error, distributed_lock};

struct Order {
    id: u64,
}

#[distributed_lock(key = order:{order.id}, wait = "2s")]
async fn colon(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = order-{order.id})]
async fn minus(order: Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = order_{id})]
async fn name(id: u64) -> Result<(), Error> {
    Ok(())
}

fn main() {}
