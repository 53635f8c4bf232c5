//! Types with the names of refused types, and other code that looks like refused code.

use lockcore::{Error, ErrorKind, Locks, distributed_lock};

/// A type of this file, with the name of a type whose body is read later.
struct Response {
    id: u64,
}

#[distributed_lock(key = "order:{id}")]
async fn response_of_ours(id: u64) -> Result<self::Response, Error> {
    Ok(Response { id })
}

mod orders {
    pub mod model {
        pub struct Response(pub u64);
        pub struct Body(pub u64);
        pub struct Sse(pub u64);
    }
}

use orders::model;

/// The path begins with none of the crates whose types have a body that is read later.
#[distributed_lock(key = "order:{id}")]
async fn response_of_ours_by_its_path(id: u64) -> Result<orders::model::Response, Error> {
    Ok(model::Response(id))
}

#[distributed_lock(key = "order:{id}")]
async fn others_by_their_paths(id: u64) -> Result<(model::Body, model::Sse), Error> {
    Ok((model::Body(id), model::Sse(id)))
}

mod tonic {
    pub struct Response<T>(pub T);
}

/// The return type of a unary method of a gRPC service.
#[distributed_lock(key = "order:{id}")]
async fn response_with_its_message(id: u64) -> Result<tonic::Response<u64>, Error> {
    Ok(tonic::Response(id))
}

trait Shop {
    type Order;
    async fn order(&self) -> Result<Self::Order, Error>;
}

impl Shop for u64 {
    type Order = u64;

    #[distributed_lock(key = "order:{self}")]
    async fn order(&self) -> Result<Self::Order, Error> {
        Ok(*self)
    }
}

/// A type of this file, with the name of a type of another crate. This code can write an `impl`
/// only for its own type.
enum Status {
    Locked(Error),
    Odd,
}

impl From<Error> for Status {
    fn from(error: Error) -> Self {
        Self::Locked(error)
    }
}

#[distributed_lock(key = "order:{id}", try, locks = locks)]
async fn error_of_ours(locks: &Locks, id: u64) -> Result<(), Status> {
    match id % 2 {
        0 => Ok(()),
        _ => Err(Status::Odd),
    }
}

#[distributed_lock(key = "order:{id}", on_error = Err(error.to_string()))]
async fn error_of_another_crate(id: u64) -> Result<u64, String> {
    Ok(id)
}

struct Order {
    r#type: Option<&'static str>,
}

/// `type` needs no `r#` anywhere in a template. Text that looks like an option is accepted.
#[distributed_lock(key = "try, {order.type:?}:{type}:{order.type.is_some()}", held = lock)]
async fn keywords(order: &Order, r#type: u8) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

/// The two attributes acquire different locks.
#[distributed_lock(key = "order:{id}")]
#[distributed_lock(key = "shop:{id}", held = lock)]
async fn twice_with_two_keys(id: u64) -> Result<String, Error> {
    Ok(lock.name().to_owned())
}

/// In each call, exactly one of the two attributes acquires the lock.
#[distributed_lock(key = "order:{id}", when = id < 9, wait = "2s")]
#[distributed_lock(key = "order:{id}", when = id >= 9, wait = "1m", held = lock)]
async fn twice_with_two_conditions(id: u64) -> Result<bool, Error> {
    Ok(lock.is_some())
}

/// The longest ttl that every store for several machines accepts.
#[distributed_lock(key = "order", ttl = "12h", wait = "forever")]
async fn long_lease() -> Result<(), Error> {
    Ok(())
}

#[distributed_lock(key = "runtime")]
#[tokio::main(flavor = "current_thread")]
async fn runtime_below() -> Result<(), Error> {
    tokio::task::yield_now().await;
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn all() -> Result<(), Error> {
    assert_eq!(response_of_ours(7).await?.id, 7);
    assert_eq!(response_of_ours_by_its_path(7).await?.0, 7);
    let (body, sse) = others_by_their_paths(7).await?;
    assert_eq!((body.0, sse.0), (7, 7));
    assert_eq!(response_with_its_message(7).await?.0, 7);
    assert_eq!(7.order().await?, 7);

    let locks = lockcore::default_locks()?;
    let guard = locks.mutex("order:2").acquire().await?;
    let locked = error_of_ours(&locks, 2).await;
    assert!(matches!(locked, Err(Status::Locked(error)) if error.kind() == ErrorKind::Busy));
    guard.release().await?;
    assert!(error_of_ours(&locks, 2).await.is_ok());
    assert!(matches!(error_of_ours(&locks, 1).await, Err(Status::Odd)));

    assert_eq!(error_of_another_crate(7).await, Ok(7));
    let order = Order {
        r#type: Some("tea"),
    };
    assert_eq!(keywords(&order, 3).await?, "try, Some(\"tea\"):3:true");
    assert_eq!(twice_with_two_keys(7).await?, "shop:7");
    assert!(!twice_with_two_conditions(7).await?);
    assert!(twice_with_two_conditions(9).await?);
    long_lease().await
}

pub(crate) fn main() -> Result<(), Error> {
    all()?;
    runtime_below()
}
