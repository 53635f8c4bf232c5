use std::pin::Pin;

use lockcore::{Error, distributed_lock};

type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

#[distributed_lock(key = "order:{id}")]
fn impl_future(id: u64) -> impl Future<Output = Result<u64, Error>> {
    async move { Ok(id) }
}

#[distributed_lock(key = "order:{id}")]
fn alias(id: u64) -> BoxFuture<'static, Result<u64, Error>> {
    Box::pin(async move { Ok(id) })
}

#[distributed_lock(key = "order:{id}")]
fn boxed(id: u64) -> Pin<Box<dyn Future<Output = Result<u64, Error>>>> {
    Box::pin(async move { Ok(id) })
}

#[distributed_lock(key = "order:{id}")]
async fn out_of_an_async_fn(id: u64) -> Result<impl Future<Output = u64>, Error> {
    Ok(async move { id })
}

#[distributed_lock(key = "order:{id}")]
async fn several(id: u64) -> Result<Vec<BoxFuture<'static, u64>>, Error> {
    Ok(vec![Box::pin(async move { id })])
}

// This function returns no future. It returns a function that makes futures.
#[distributed_lock(key = "order:{id}")]
async fn a_function(id: u64) -> Result<impl Fn() -> BoxFuture<'static, u64>, Error> {
    Ok(move || -> BoxFuture<'static, u64> { Box::pin(async move { id }) })
}

fn main() {}
