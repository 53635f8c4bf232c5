use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order")]
struct Order;

trait Shop {
    #[distributed_lock(key = "order:{id}")]
    async fn settle(&self, id: u64) -> Result<(), Error>;
}

fn main() {}
