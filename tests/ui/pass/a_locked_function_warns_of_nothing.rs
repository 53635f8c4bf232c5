//! A locked function causes no warnings that a plain `async fn` would not cause. Many bodies here
//! are on one line. rustfmt would change these lines, but only there the compiler can warn about
//! unnecessary braces.

#![deny(clippy::significant_drop_tightening)]
#![allow(dead_code, reason = "most are only compiled")]

use std::fmt::Display;
use std::time::Duration;

use lockcore::{Error, Locks, Wait, distributed_lock};
use tokio::task::yield_now;

type Outcome<T> = Result<T, Error>;

#[rustfmt::skip]
mod bodies_on_one_line {
    use super::{Display, Error, Outcome, distributed_lock, yield_now};

    #[distributed_lock(key = "a")] pub async fn call() -> Result<(), Error> { Ok(()) }
    #[distributed_lock(key = "a:{id}")] async fn value(id: u64) -> Result<u64, Error> { Ok(id) }
    #[distributed_lock(key = "ticket#id={id}")] async fn sign(id: u64) -> Result<u64, Error> { Ok(id) }
    #[distributed_lock(key = "a:{id}")] async fn sum(id: u64) -> Result<u64, Error> { Ok(id + 1) }
    #[distributed_lock(key = "a")] async fn awaits() -> Outcome<()> { call().await }
    #[distributed_lock(key = "a")] async fn tries() -> Outcome<()> { call().await?; Ok(()) }
    #[distributed_lock(key = "a")] async fn wraps() -> Outcome<u8> { Ok({ yield_now().await; 7 }) }
    #[distributed_lock(key = "a")] async fn macro_call() -> Outcome<String> { Ok(format!("{}", 7)) }
    #[distributed_lock(key = "a")] async fn block() -> Outcome<u8> { { let seven = 7; Ok(seven) } }
    #[distributed_lock(key = "a")] async fn tuple() -> Outcome<(u8, u8)> { Ok((1, 2)) }
    #[distributed_lock(key = "a")] async fn matches(a: bool) -> Outcome<u8> { if a { Ok(1) } else { Ok(2) } }
    #[distributed_lock(key = "a")] async fn panics() -> Outcome<u8> { panic!("always") }
    #[distributed_lock(key = "a")] async fn unreachable() -> Outcome<u8> { unreachable!() }
    #[distributed_lock(key = "a")] async fn fails(a: Error) -> Outcome<u8> { Err(a) }
    #[distributed_lock(key = "a")] async fn path(a: Outcome<u8>) -> Outcome<u8> { a }
    #[distributed_lock(key = "a")] async fn loops() -> Outcome<u8> { loop { yield_now().await; } }
    #[distributed_lock(key = "a", held = lock)] async fn held() -> Outcome<String> { Ok(lock.name().to_owned()) }
    #[distributed_lock(key = "a", on_busy = skip, on_error = ())] async fn nothing() {}
    #[distributed_lock(key = "a", on_busy = skip, on_error = ())] async fn unit() { yield_now().await }
    #[distributed_lock(key = "a", on_busy = skip, on_error = ())] async fn statement() { yield_now().await; }
    #[distributed_lock(key = "a", on_error = 0)] async fn number() -> u64 { 7 }
    #[distributed_lock(key = "a", on_error = panic!("{error}"))] async fn never() -> u64 { 7 }
    #[distributed_lock(key = "a", wait = "forever", on_error = panic!("{error}"))] async fn for_ever() -> ! { loop { yield_now().await; } }
    #[distributed_lock(key = "a", on_busy = panic!(), on_error = std::process::exit(1))] async fn exits() -> ! { std::process::exit(0) }
    #[distributed_lock(key = "a", on_busy = None, on_error = None)] async fn option() -> Option<u64> { Some(7) }
    #[distributed_lock(key = "a", on_busy = skip, on_error = ())] async fn output_is_unit(a: &u64) { assert!(*a > 1) }
    #[distributed_lock(key = "a")] async fn output_is_a_trait(a: u64) -> Outcome<impl Display> { Ok(a) }
    #[distributed_lock(key = "a")] async fn closure() -> Outcome<impl Fn() -> u8> { Ok(|| 7) }
    #[distributed_lock(key = "a")] async fn reference(a: &str) -> Outcome<&str> { Ok(a) }
    #[distributed_lock(key = "a")] async fn generic<T: Default>() -> Outcome<T> { Ok(T::default()) }
    #[distributed_lock(key = "a")] async fn array() -> Outcome<[u8; 2]> { Ok([1, 2]) }
}

#[rustfmt::skip]
mod methods_on_one_line {
    use super::{Outcome, distributed_lock, yield_now};

    #[async_trait::async_trait]
    trait Shop: Sync {
        fn id(&self) -> u64;
        #[distributed_lock(key = "a:{self.id()}")] async fn provided(&self) -> Outcome<u64> { Ok(self.id()) }
        async fn required(&mut self, id: u64) -> Outcome<u64>;
        async fn awaits(&self) -> Outcome<u64>;
        async fn nothing(&self);
    }

    struct Corner(u64);

    #[async_trait::async_trait]
    impl Shop for Corner {
        fn id(&self) -> u64 { self.0 }
        #[distributed_lock(key = "a:{id}")] async fn required(&mut self, id: u64) -> Outcome<u64> { Ok(self.0 + id) }
        #[distributed_lock(key = "a")] async fn awaits(&self) -> Outcome<u64> { self.provided().await }
        #[distributed_lock(key = "a", on_busy = skip, on_error = ())] async fn nothing(&self) { yield_now().await }
    }

    trait Native {
        #[distributed_lock(key = "a")] #[allow(async_fn_in_trait)] async fn of_the_trait(&self) -> Outcome<u8> { Ok(7) }
        #[allow(async_fn_in_trait)] async fn required(&self, _id: u64) -> Outcome<u64>;
    }

    impl Native for Corner {
        #[distributed_lock(key = "a")] async fn required(&self, _id: u64) -> Outcome<u64> { Ok(self.0) }
    }

    impl Corner {
        #[distributed_lock(key = "a")] async fn by_value(self) -> Outcome<Self> { Ok(self) }
        #[distributed_lock(key = "a")] async fn mutable(mut self) -> Outcome<Self> { self.0 += 1; Ok(self) }
        #[distributed_lock(key = "a")] async fn part(&mut self) -> Outcome<&mut u64> { Ok(&mut self.0) }
        #[distributed_lock(key = "a")] async fn none() -> Outcome<Option<Self>> { Ok(None) }
    }
}

#[rustfmt::skip]
mod options_of_any_kind {
    use super::{Duration, Locks, Outcome, Wait, distributed_lock, yield_now};

    pub struct Shop { pub locks: Locks, pub name: String, pub wait: Wait, pub names: Vec<String> }

    impl Shop {
        #[distributed_lock(key = self.name, locks = self.locks, wait = self.wait)]
        pub async fn fields(&self) -> Outcome<()> { Ok(()) }

        #[distributed_lock(key = self.name, locks = self.locks, wait = Duration::MAX, ttl = Duration::MAX)]
        async fn lends(&mut self) -> Outcome<&mut str> { Ok(&mut self.name) }

        #[distributed_lock(keys = self.names, locks = &self.locks, held = locks)]
        async fn several(&self) -> Outcome<bool> { Ok(locks.is_valid()) }

        #[distributed_lock(key = "{self.name}", when = !self.name.is_empty(), reentrant = !self.name.is_empty())]
        async fn negations(&self) -> Outcome<()> { Ok(()) }
    }

    #[distributed_lock(key = name, locks = locks)]
    async fn references(name: &str, locks: &Locks) -> Outcome<usize> { Ok(name.len()) }

    #[distributed_lock(key = name.clone(), locks = locks.clone())]
    async fn clones(name: String, locks: Locks) -> Outcome<(String, Locks)> { Ok((name, locks)) }

    #[distributed_lock(key = format!("a:{id}"), permits = 1, of = id, min_hold = "1s", max_hold = "1h")]
    async fn numbers(id: u32) -> Outcome<u32> { Ok(id) }

    #[distributed_lock(key = "a", on_busy = { return Ok(1) }, on_error = { Err(error)? })]
    async fn returns_early() -> Outcome<u32> { Ok(1) }

    #[distributed_lock(key = "a", on_busy = { drop(error); Ok(1) }, on_error = Err(error))]
    async fn blocks() -> Outcome<u32> { Ok(1) }

    #[distributed_lock(key = "a", on_busy = eprintln!("{error}"), on_error = { eprintln!("{error}"); })]
    async fn prints() { yield_now().await }

    #[distributed_lock(key = "a", on_busy = { yield_now().await }, on_error = drop(error))]
    async fn nothing() {}
}

mod bodies_of_several_lines {
    use super::{Outcome, distributed_lock, yield_now};

    #[distributed_lock(key = "a")]
    async fn early(id: Option<u64>) -> Outcome<u64> {
        let Some(id) = id else {
            return Ok(0);
        };
        if id == 1 {
            return Ok(id);
        }
        yield_now().await;
        Ok(id * 2)
    }

    #[distributed_lock(key = "a")]
    async fn mutable(mut ids: Vec<u64>, mut sum: u64) -> Outcome<(Vec<u64>, u64)> {
        sum += ids.pop().unwrap_or_default();
        Ok((ids, sum))
    }

    #[distributed_lock(key = "a:{id}", held = lock, on_busy = skip)]
    async fn unit_tail(id: u64) -> Outcome<()> {
        let token = lock.grant_id();
        tokio::spawn(async move { token.as_u64() });
        match id {
            0 => Ok(()),
            _ => early(Some(id)).await.map(drop),
        }
    }

    #[distributed_lock(key = "a")]
    async fn items_come_first(id: u64) -> Outcome<u64> {
        use std::cmp::max;
        const ONE: u64 = 1;
        fn twice(id: u64) -> u64 {
            id * 2
        }
        Ok(max(twice(id), ONE))
    }

    /// The future is larger than clippy allows for awaited futures. A locked function contains
    /// several futures.
    #[distributed_lock(key = "a")]
    async fn large() -> Outcome<u8> {
        let large = ([0_u8; 15_000], [0_u8; 15_000]);
        yield_now().await;
        Ok(large.0[0] + large.1[0])
    }

    /// This function has the largest number of lines that clippy allows.
    #[distributed_lock(key = "a")]
    async fn long(mut sum: u64) -> Outcome<u64> {
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        sum += 1;
        Ok(sum)
    }

    struct Shop(u64);

    impl Shop {
        /// # Errors
        ///
        /// The errors of the lock.
        #[distributed_lock(key = "a:{self.0}")]
        pub async fn documented(&mut self, other: &Self) -> Outcome<Self> {
            self.0 += other.0;
            yield_now().await;
            Ok(Self(self.0))
        }

        #[must_use = "it is the shop"]
        #[distributed_lock(key = "a:{self.0}", on_error = panic!("{error}"))]
        pub async fn by_value(self) -> Self {
            self
        }
    }
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    bodies_on_one_line::call().await?;
    let shop = options_of_any_kind::Shop {
        locks: Locks::connect("memory:")?,
        name: "a".to_owned(),
        wait: Wait::Forever,
        names: Vec::new(),
    };
    shop.fields().await
}
