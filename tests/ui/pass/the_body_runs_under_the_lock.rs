use lockcore::{Error, ErrorKind, Locks, distributed_lock};

/// Another task tries to acquire the lock, and this returns its result. A spawned task does not
/// inherit the lock of this one.
async fn try_as_a_stranger(locks: &Locks, name: &'static str) -> Result<(), ErrorKind> {
    let locks = locks.clone();
    let asked = tokio::spawn(async move {
        let guard = locks.mutex(name).try_acquire().await?;
        guard.release().await?;
        Ok(())
    });
    asked
        .await
        .expect("no panic")
        .map_err(|error: Error| error.kind())
}

#[distributed_lock(key = "exclusive", locks = locks)]
async fn exclusive(locks: &Locks) -> Result<Result<(), ErrorKind>, Error> {
    Ok(try_as_a_stranger(locks, "exclusive").await)
}

#[distributed_lock(key = "failing", locks = locks)]
async fn failing(locks: &Locks, number: &str) -> Result<u8, Box<dyn std::error::Error>> {
    let number = number.parse()?;
    assert_eq!(
        try_as_a_stranger(locks, "failing").await,
        Err(ErrorKind::Busy)
    );
    Ok(number)
}

#[distributed_lock(key = "early", locks = locks)]
async fn returning_early(locks: &Locks, early: bool) -> Result<u8, Error> {
    if early {
        return Ok(1);
    }
    Ok(2)
}

#[distributed_lock(key = "shared", shared, locks = locks)]
async fn shared(locks: &Locks) -> Result<Result<(), ErrorKind>, Error> {
    let other = locks.clone();
    let reader = tokio::spawn(async move { reader(&other).await });
    reader.await.expect("no panic")?;
    Ok(try_as_a_stranger(locks, "shared").await)
}

#[distributed_lock(key = "shared", shared, try, locks = locks)]
async fn reader(locks: &Locks) -> Result<(), Error> {
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
pub(crate) async fn main() -> Result<(), Error> {
    let locks = &Locks::connect("memory:")?;

    assert_eq!(exclusive(locks).await?, Err(ErrorKind::Busy));
    assert_eq!(try_as_a_stranger(locks, "exclusive").await, Ok(()));

    assert_eq!(failing(locks, "3").await.unwrap(), 3);
    assert!(failing(locks, "three").await.is_err());
    assert_eq!(try_as_a_stranger(locks, "failing").await, Ok(()));

    assert_eq!(returning_early(locks, true).await?, 1);
    assert_eq!(returning_early(locks, false).await?, 2);
    assert_eq!(try_as_a_stranger(locks, "early").await, Ok(()));

    assert_eq!(shared(locks).await?, Err(ErrorKind::Busy));
    assert_eq!(try_as_a_stranger(locks, "shared").await, Ok(()));
    Ok(())
}
