use std::fmt::Display;
use std::pin::Pin;
use std::sync::Arc;

use lockcore::{Error, distributed_lock};

struct Order {
    id: u64,
    region: String,
}

#[distributed_lock(key = "order:{id}")]
async fn free(id: u64) -> Result<u64, Error> {
    Ok(id)
}

#[distributed_lock(key = "order:{value}")]
async fn generic<T, const N: usize>(value: T) -> Result<[T; N], Error>
where
    T: Display + Clone,
{
    Ok(std::array::from_fn(|_| value.clone()))
}

#[distributed_lock(key = "order:{value}")]
async fn argument_of_impl_trait(value: impl Display + Clone) -> Result<String, Error> {
    Ok(value.to_string())
}

#[distributed_lock(key = "order:{value}")]
async fn output_of_impl_trait(value: u8) -> Result<impl Display, Error> {
    Ok(value)
}

#[distributed_lock(key = "order:{order.id}")]
async fn named_lifetimes<'a>(order: &'a Order, _other: &str) -> Result<&'a str, Error> {
    Ok(&order.region)
}

#[distributed_lock(key = "order:{id}:{a}:{first}")]
async fn patterns(
    Order { id, region }: Order,
    (mut a, _): (u64, u64),
    [first, ..]: [u64; 3],
    _: u64,
) -> Result<String, Error> {
    a += id + first;
    Ok(format!("{region}{a}"))
}

/// Inner attributes and documentation are kept.
#[distributed_lock(key = "order")]
pub(crate) async unsafe fn attributes(#[allow(unused)] id: u64) -> Result<(), Error> {
    #![allow(unused_variables)]
    let unused = 1;
    Ok(())
}

/// Only one of these two functions is compiled.
#[cfg(not(any()))]
#[allow(improper_ctypes_definitions)]
#[distributed_lock(key = "order")]
async extern "C" fn there() -> Result<bool, Error> {
    Ok(true)
}

#[cfg(any())]
#[distributed_lock(key = "order")]
async fn there() -> Result<bool, Error> {
    Ok(false)
}

#[must_use = "it is a number"]
#[inline]
#[distributed_lock(key = "order:{mutable}:{other}", on_busy = Err(error), on_error = return Err(error))]
async fn mutable(mut mutable: u64, other: impl Into<u64> + Copy + Display) -> Result<u64, Error> {
    mutable += other.into();
    Ok(mutable)
}

mod inner {
    use lockcore::{Error, distributed_lock};

    #[distributed_lock(key = "order")]
    pub(in crate::every_shape_of_function_can_be_locked::inner) async fn hidden()
    -> Result<(), Error> {
        Ok(())
    }

    pub async fn open() -> Result<(), Error> {
        hidden().await
    }
}

#[distributed_lock(key = "depth:{depth}")]
async fn recursive(depth: u8) -> Result<u8, Error> {
    match depth {
        0 => Ok(0),
        _ => Ok(1 + Box::pin(recursive(depth - 1)).await?),
    }
}

struct Cart {
    user: u64,
    items: Vec<String>,
}

impl Cart {
    fn user_id(&self) -> u64 {
        self.user
    }

    #[distributed_lock(key = "cart:{self.user_id()}")]
    async fn by_reference(&self) -> Result<&[String], Error> {
        Ok(&self.items)
    }

    #[distributed_lock(key = "cart:{self.user}")]
    async fn by_mutable_reference(&mut self, item: &str) -> Result<&mut String, Error> {
        self.items.push(item.to_owned());
        Ok(self.items.last_mut().expect("just pushed"))
    }

    #[distributed_lock(key = "cart:{self.user}")]
    async fn by_value(self) -> Result<Vec<String>, Error> {
        Ok(self.items)
    }

    #[distributed_lock(key = "cart:{self.user}")]
    async fn by_arc(self: Arc<Self>) -> Result<usize, Error> {
        Ok(self.items.len())
    }

    #[distributed_lock(key = "cart:{self.user}")]
    async fn by_pin(mut self: Pin<&mut Self>) -> Result<u64, Error> {
        self.user += 1;
        Ok(self.user)
    }

    #[distributed_lock(key = "cart:{user}")]
    async fn without_self(user: u64) -> Result<Self, Error> {
        Ok(Self {
            user,
            items: Vec::new(),
        })
    }
}

trait Shop {
    fn name(&self) -> String;

    #[distributed_lock(key = "shop:{self.name()}")]
    #[allow(async_fn_in_trait)]
    async fn provided(&self) -> Result<String, Error> {
        Ok(self.name())
    }

    #[allow(async_fn_in_trait)]
    async fn required(&self) -> Result<u64, Error>;
}

impl Shop for Cart {
    fn name(&self) -> String {
        "shop".to_owned()
    }

    #[distributed_lock(key = "shop:{self.user}")]
    async fn required(&self) -> Result<u64, Error> {
        Ok(self.user)
    }
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let order = || Order {
        id: 7,
        region: "eu".to_owned(),
    };

    assert_eq!(free(7).await?, 7);
    assert_eq!(generic::<_, 2>("a").await?, ["a", "a"]);
    assert_eq!(argument_of_impl_trait('c').await?, "c");
    assert_eq!(output_of_impl_trait(8).await?.to_string(), "8");
    assert_eq!(named_lifetimes(&order(), "").await?, "eu");
    assert_eq!(patterns(order(), (1, 2), [3, 4, 5], 6).await?, "eu11");
    unsafe { attributes(1) }.await?;
    assert_eq!(recursive(3).await?, 3);
    assert!(there().await?);
    assert_eq!(mutable(1, 2u8).await?, 3);
    inner::open().await?;

    let mut cart = Cart::without_self(1).await?;
    cart.by_mutable_reference("tea").await?.push('s');
    assert_eq!(cart.by_reference().await?, ["teas"]);
    assert_eq!(cart.provided().await?, "shop");
    assert_eq!(cart.required().await?, 1);
    assert_eq!(Pin::new(&mut cart).by_pin().await?, 2);
    let cart = Arc::new(cart);
    assert_eq!(cart.clone().by_arc().await?, 1);
    assert_eq!(
        Arc::into_inner(cart)
            .expect("the only one")
            .by_value()
            .await?,
        ["teas"]
    );
    Ok(())
}
