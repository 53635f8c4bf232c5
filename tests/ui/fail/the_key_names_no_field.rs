use lockcore::{Error, distributed_lock};

struct Order {
    id: u64,
}

#[distributed_lock(key = "order:{order.ident}")]
async fn settle(order: &Order) -> Result<(), Error> {
    Ok(())
}

fn main() {}
