use std::rc::Rc;
use std::time::Duration;

use lockcore::{Error, Locks, distributed_lock};

struct Shop {
    locks: Locks,
}

impl Shop {
    /// The `Rc` and the borrow of `locks` are dropped before the wait for the lock.
    #[distributed_lock(key = Rc::new("order").to_string(), ttl = *Rc::new(Duration::from_secs(5)), locks = self.locks)]
    async fn settle(&mut self, order: String) -> Result<usize, Error> {
        tokio::task::yield_now().await;
        Ok(order.len())
    }
}

#[distributed_lock(key = "local:{order}", locks = *locks)]
async fn local(locks: &Locks, order: Rc<str>) -> Result<usize, Error> {
    tokio::task::yield_now().await;
    Ok(order.len())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let mut shop = Shop {
        locks: Locks::connect("memory:")?,
    };

    assert_eq!(local(&shop.locks, Rc::from("four")).await?, 4);
    let settled = tokio::spawn(async move { shop.settle("three".to_owned()).await });
    assert_eq!(settled.await.expect("no panic")?, 5);
    Ok(())
}
