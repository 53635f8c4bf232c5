use lockcore::{Error, distributed_lock};

struct Shop;

impl Shop {
    // The signature looks as if `#[async_trait]` had made it, but the body does not.
    #[distributed_lock(key = "order")]
    fn settle<'life0, 'async_trait>(
        &'life0 self,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<(), Error>> + Send + 'async_trait>>
    where
        'life0: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move { Ok(()) })
    }
}

fn main() {}
