use lockcore::{Error, ErrorKind, Locks, distributed_lock};

#[derive(Debug)]
enum SettleError {
    Lock(Error),
    AlreadySettled,
}

impl From<Error> for SettleError {
    fn from(error: Error) -> SettleError {
        SettleError::Lock(error)
    }
}

type Outcome<T> = Result<T, SettleError>;

#[distributed_lock(key = "order:{id}", try, locks = locks)]
async fn settle(locks: &Locks, id: u64) -> Outcome<()> {
    Err(SettleError::AlreadySettled)
}

#[distributed_lock(key = "order:{id}", try, locks = locks)]
async fn settle_generic<E: From<Error>>(locks: &Locks, id: u64) -> Result<(), E> {
    Ok(())
}

#[distributed_lock(key = "order:{id}", try, locks = locks)]
async fn settle_any(
    locks: &Locks,
    id: u64,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    Err("no money")?
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let locks = &Locks::connect("memory:")?;

    assert!(matches!(
        settle(locks, 1).await,
        Err(SettleError::AlreadySettled)
    ));
    assert_eq!(
        settle_any(locks, 1).await.unwrap_err().to_string(),
        "no money"
    );

    let guard = locks.mutex("order:1").acquire().await?;
    match settle(locks, 1).await {
        Err(SettleError::Lock(error)) => assert_eq!(error.kind(), ErrorKind::Busy),
        other => panic!("{other:?}"),
    }
    assert!(settle_any(locks, 1).await.unwrap_err().is::<Error>());
    assert!(settle_generic::<SettleError>(locks, 1).await.is_err());
    guard.release().await?;
    settle_generic::<Error>(locks, 1).await
}
