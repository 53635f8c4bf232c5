use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use lockcore::{Error, Locks, distributed_lock};
use tracing::instrument;

struct Order {
    id: u64,
}

#[async_trait]
trait Shop: Sync {
    fn id(&self) -> u64;

    #[distributed_lock(key = "shop:{self.id()}", held = lock)]
    async fn provided(&self, other: u64) -> Result<String, Error> {
        if other == 0 {
            return Ok(String::new());
        }
        tokio::task::yield_now().await;
        Ok(format!("{}+{}", lock.name(), self.id() + other))
    }

    async fn patterns(
        &mut self,
        order: Order,
        pair: (u64, u64),
        text: &str,
    ) -> Result<String, Error>;
    async fn by_arc(self: Arc<Self>, number: u64) -> Result<u64, Error>;
    async fn instrument_above(&mut self) -> Result<String, Error>;
    async fn instrument_below(&mut self) -> Result<String, Error>;
    async fn nothing(&self);
    async fn without_self<T: Display + Send>(value: T) -> Result<String, Error>
    where
        Self: Sized;
}

struct Corner {
    id: u64,
    locks: Locks,
}

fn wait() -> Duration {
    Duration::from_secs(1)
}

#[async_trait]
impl Shop for Corner {
    fn id(&self) -> u64 {
        self.id
    }

    // `self::` is a path. `self` is the shop.
    #[distributed_lock(
        key = "order:{order.id}:{a}:{self.id}:{text}",
        locks = self.locks,
        wait = self::wait(),
        held = lock,
    )]
    async fn patterns(
        &mut self,
        order: Order,
        (a, _b): (u64, u64),
        text: &str,
    ) -> Result<String, Error> {
        self.id += 1;
        let Order { id: 1 } = order else {
            return Ok(String::new());
        };
        Ok(lock.name().to_owned())
    }

    #[distributed_lock(key = "order:{number}:{self.id}", when = self.id > 0, held = lock)]
    async fn by_arc(self: Arc<Self>, mut number: u64) -> Result<u64, Error> {
        assert_eq!(lock.expect("held").name(), "order:1:9");
        number += self.id;
        Ok(number)
    }

    #[instrument(skip_all)]
    #[distributed_lock(key = "order:{self.id}", held = lock)]
    async fn instrument_above(&mut self) -> Result<String, Error> {
        self.id += 1;
        Ok(lock.name().to_owned())
    }

    #[distributed_lock(key = "order:{self.id}", held = lock)]
    #[instrument(skip_all)]
    async fn instrument_below(&mut self) -> Result<String, Error> {
        Ok(lock.name().to_owned())
    }

    #[distributed_lock(key = "order:{self.id}", try, on_busy = skip, on_error = panic!("{error} {}", self.id))]
    async fn nothing(&self) {
        tokio::task::yield_now().await;
    }

    #[distributed_lock(key = "order:{value}", held = lock)]
    async fn without_self<T: Display + Send>(value: T) -> Result<String, Error> {
        Ok(lock.name().to_owned())
    }
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let locks = lockcore::default_locks()?;
    let mut shop = Corner {
        id: 7,
        locks: locks.clone(),
    };
    let order = Order { id: 1 };

    assert_eq!(shop.provided(1).await?, "shop:7+8");
    assert_eq!(shop.provided(0).await?, "");
    assert_eq!(shop.patterns(order, (2, 3), "x").await?, "order:1:2:7:x");
    assert_eq!(shop.instrument_above().await?, "order:8");
    assert_eq!(shop.instrument_below().await?, "order:9");
    assert_eq!(Corner::without_self('a').await?, "order:a");
    let guard = locks.mutex("order:9").acquire().await?;
    shop.nothing().await;
    guard.release().await?;
    assert_eq!(Arc::new(shop).by_arc(1).await?, 10);
    Ok(())
}
