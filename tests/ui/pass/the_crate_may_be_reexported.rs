mod app {
    pub mod deps {
        pub use lockcore as locking;
    }
}

use app::deps::locking::{Error, distributed_lock};

#[distributed_lock(key = "a", wait = "forever", ttl = "5s", crate = app::deps::locking, held = lock)]
async fn path() -> Result<bool, Error> {
    Ok(lock.is_valid())
}

#[distributed_lock(key = "b", crate = crate::the_crate_may_be_reexported::app::deps::locking)]
async fn absolute_path() -> Result<(), Error> {
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    assert!(path().await?);
    absolute_path().await
}
