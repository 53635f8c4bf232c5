use async_trait::async_trait;
use lockcore::{Error, distributed_lock};

struct SettleError;

struct Shop {
    id: u64,
}

#[async_trait]
trait Settle {
    #[distributed_lock(key = "order")]
    async fn without_body(&self) -> Result<(), Error>;

    async fn options(&mut self) -> Result<u64, Error>;
    async fn errors(&mut self) -> Result<u64, SettleError>;
    async fn types(&mut self) -> Result<u64, Error>;
    async fn nothing(&mut self);
}

#[async_trait]
impl Settle for Shop {
    async fn without_body(&self) -> Result<(), Error> {
        Ok(())
    }

    #[distributed_lock(kye = "order:{self.id}", wait = "soon", held = lock)]
    async fn options(&mut self) -> Result<u64, Error> {
        self.id += 1;
        Ok(lock.grant_id().as_u64())
    }

    #[distributed_lock(key = "order:{self.ident}")]
    async fn errors(&mut self) -> Result<u64, SettleError> {
        Ok(self.id)
    }

    #[distributed_lock(key = "order:{self.id}")]
    async fn types(&mut self) -> Result<u64, Error> {
        Ok("7")
    }

    #[distributed_lock(key = "order:{self.id}")]
    async fn nothing(&mut self) {}
}

fn main() {}
