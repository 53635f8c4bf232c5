use std::pin::Pin;

use lockcore::{Error, distributed_lock};

trait Stream {
    type Item;
}

struct Empty;

impl Stream for Empty {
    type Item = u64;
}

type BoxStream<'a, T> = Pin<Box<dyn Stream<Item = T> + Send + 'a>>;

#[distributed_lock(key = "order:{id}")]
async fn impl_stream(id: u64) -> Result<impl Stream<Item = u64>, Error> {
    Ok(Empty)
}

#[distributed_lock(key = "order:{id}")]
async fn alias(id: u64) -> Result<BoxStream<'static, u64>, Error> {
    Ok(Box::pin(Empty))
}

struct ReceiverStream;
struct Reply<T>(T);

#[distributed_lock(key = "order:{id}")]
async fn concrete(id: u64) -> Result<Reply<ReceiverStream>, Error> {
    Ok(Reply(ReceiverStream))
}

trait Service {
    type SubscribeStream;
    async fn subscribe(&self) -> Result<Reply<Self::SubscribeStream>, Error>;
}

impl Service for Empty {
    type SubscribeStream = Empty;

    #[distributed_lock(key = "order")]
    async fn subscribe(&self) -> Result<Reply<Self::SubscribeStream>, Error> {
        Ok(Reply(Empty))
    }
}

#[distributed_lock(key = "order:{id}")]
fn not_async(id: u64) -> Pin<Box<dyn Stream<Item = u64>>> {
    Box::pin(Empty)
}

fn main() {}
