use lockcore::distributed_lock;

#[distributed_lock(key = "order:{id}")]
async fn nothing(id: u64) {}

#[distributed_lock(key = "order:{id}")]
async fn unit(id: u64) -> () {}

#[distributed_lock(key = "order:{id}")]
async fn option(id: u64) -> Option<u64> {
    Some(id)
}

struct Receipt;

#[distributed_lock(key = "order:{id}")]
async fn other(id: u64) -> Receipt {
    Receipt
}

fn main() {}
