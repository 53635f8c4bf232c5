use lockcore::{Error, distributed_lock};

#[distributed_lock(key = 7)]
async fn literal(id: u64) -> Result<(), Error> {
    Ok(())
}

struct Order;

#[distributed_lock(key = "order:{order}")]
async fn not_displayed(order: &Order) -> Result<(), Error> {
    Ok(())
}

fn main() {}
