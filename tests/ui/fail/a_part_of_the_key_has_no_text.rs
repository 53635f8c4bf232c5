use lockcore::{Error, distributed_lock};

struct Order {
    id: Option<u64>,
}

#[distributed_lock(key = "order:{id}")]
async fn option(id: Option<u64>) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{order.id:>8}:{order}")]
async fn field(order: &Order) -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "order:{id}")]
async fn generic<T: Send>(id: T) -> Result<(), Error> {
    Ok(())
}

struct Shelf<T>(T);

impl<T: Sync> Shelf<T> {
    #[distributed_lock(key = "shelf:{self.0}")]
    async fn of_the_impl(&self) -> Result<(), Error> {
        Ok(())
    }
}

fn main() {}
