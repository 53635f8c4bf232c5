use lockcore::distributed_lock;

struct Order;

#[distributed_lock(key = "order", on_error = Some(order))]
async fn settle(order: Order) -> Option<Order> {
    drop(order);
    None
}

fn main() {}
