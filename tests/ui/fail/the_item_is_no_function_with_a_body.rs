use lockcore::{Error, distributed_lock};

#[distributed_lock(key = "order")]
struct Order;

#[distributed_lock(key = "order")]
impl Order {
    async fn settle(&self) -> Result<(), Error> {
        Ok(())
    }
}

trait Shop {
    #[distributed_lock(key = "order:{id}")]
    async fn settle(&self, id: u64) -> Result<(), Error>;
}

fn main() {}
