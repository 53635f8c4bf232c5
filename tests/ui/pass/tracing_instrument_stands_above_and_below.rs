use lockcore::{Error, distributed_lock};
use tracing::instrument;

#[instrument(skip(id), err, ret)]
#[distributed_lock(key = "order:{id}", held = lock)]
async fn above(id: u64) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

#[distributed_lock(key = "order:{id}", held = lock)]
#[instrument(err)]
async fn below(id: u64) -> Result<String, Error> {
    let name = lock.name();
    Ok(name.to_owned())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    assert_eq!(above(1).await?, "order:1");
    assert_eq!(below(2).await?, "order:2");
    Ok(())
}
