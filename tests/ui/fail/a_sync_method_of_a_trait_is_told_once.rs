use lockcore::{Error, distributed_lock};

trait Shop {
    fn settle(&self, id: u64) -> Result<u64, Error>;
}

struct Corner;

impl Shop for Corner {
    #[distributed_lock(key = "order:{id}")]
    fn settle(&self, id: u64) -> Result<u64, Error> {
        Ok(id)
    }
}

impl Corner {
    // The message is only about the missing `async`, not about `.await`.
    #[distributed_lock(key = "order:{id}")]
    fn waits(&self, id: u64) -> Result<u64, Error> {
        tokio::task::yield_now().await;
        Ok(id)
    }

    #[distributed_lock(key = "order:{id}")]
    pub fn public(&self, id: u64) -> Result<u64, Error> {
        Ok(id)
    }

    async fn call(&self) -> Result<u64, Error> {
        Ok(self.waits(7).await? + self.public(7).await?)
    }
}

fn main() {}
