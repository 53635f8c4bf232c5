use lockcore::{Error, distributed_lock};

struct Order {
    id: u64,
}

#[distributed_lock(key = "order:{order.id}", held = order)]
async fn settle(order: Order) -> Result<u64, Error> {
    Ok(order.id)
}

fn main() {}
