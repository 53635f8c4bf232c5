use lockcore::{Error, distributed_lock};

struct Order {
    id: u64,
}

#[distributed_lock(key = "#order.id")]
async fn with_a_sign(order: Order) -> Result<u64, Error> {
    Ok(order.id)
}

#[distributed_lock(keys = ["all", "order:{{order.id}}"])]
async fn with_two_braces(order: Order) -> Result<u64, Error> {
    Ok(order.id)
}

impl Order {
    #[distributed_lock(key = "order:{{self.id}}")]
    async fn of_self(&self) -> Result<u64, Error> {
        Ok(self.id)
    }
}

fn main() {}
