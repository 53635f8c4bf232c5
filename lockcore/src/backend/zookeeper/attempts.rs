//! Opens a session at the server that answers first.
//!
//! The client library asks one server after another. It waits for a silent server as long as a
//! connection may be silent, which is longer than the core waits for a session. (The kernel accepts
//! connections even for a process that is stopped, so only an answer proves that a server works.)
//! Therefore this module begins several attempts, each at another server. Each attempt also knows
//! the other servers, and asks them if its first server fails. Once a session is open, the library
//! itself finds another server for the session.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::task::JoinSet;
use zookeeper_client::{Client, Error as ZkError};

/// The time before the next attempt begins. It is longer than a healthy server takes to answer,
/// even a distant server. A second attempt that was not necessary costs the servers a session,
/// which is closed at once.
const HEAD_START: Duration = Duration::from_millis(200);

/// The greatest number of attempts. With 5, the last attempt begins within a second, which is the
/// default timeout of an operation.
const MOST: usize = 5;

/// Opens a session by several attempts, and returns the session of the first attempt that succeeds.
/// An attempt asks each server once. This function chooses the server that the attempt asks first.
/// It fails when all attempts have failed.
///
/// If the future is dropped, all attempts are given up, and the servers end the sessions that they
/// may have begun.
pub(super) async fn first_to_answer<A>(
    servers: usize,
    attempt: impl Fn() -> A,
) -> Result<Client, ZkError>
where
    A: Future<Output = Result<Client, ZkError>> + Send + 'static,
{
    let mut order: Vec<usize> = (0..servers).collect();
    fastrand::shuffle(&mut order);
    order.truncate(MOST);
    let mut attempts = JoinSet::new();
    let mut failure = None;
    for (begun, &first) in (1..).zip(&order) {
        attempts.spawn(asking_first(first, servers, attempt()));
        let ended = first_success(&mut attempts, &mut failure);
        if begun == order.len() {
            return ended.await;
        }
        // When the next attempt is due, `ended` is dropped. This loses no attempt that has ended.
        if let Ok(ended) = tokio::time::timeout(HEAD_START, ended).await {
            return ended;
        }
    }
    Err(ZkError::NoHosts)
}

/// The first success of the attempts that are in progress. `failure` is the failure of earlier
/// attempts.
async fn first_success(
    attempts: &mut JoinSet<Result<Client, ZkError>>,
    failure: &mut Option<ZkError>,
) -> Result<Client, ZkError> {
    while let Some(ended) = attempts.join_next().await {
        match ended {
            Ok(Ok(client)) => {
                // The other attempts may have begun a session. A session that is not closed stays
                // at the servers until its timeout. So these attempts run to their end, and close
                // the sessions that they get.
                attempts.detach_all();
                return Ok(client);
            }
            // `AuthFailed` is returned only if every attempt fails with it, because only then the
            // mistake is certainly the client's.
            Ok(Err(error)) => match failure {
                None | Some(ZkError::AuthFailed) => *failure = Some(error),
                Some(_) => {}
            },
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => {}
        }
    }
    Err(failure.take().unwrap_or(ZkError::NoHosts))
}

/// Makes an attempt ask this server first.
///
/// The library shuffles the servers when an attempt is first polled. For this, it uses the thread's
/// random number generator. So this function sets the seed of the generator for that poll. If a
/// later version of the library does this differently, the attempt begins at any server, as it
/// would without this function.
async fn asking_first<T>(first: usize, servers: usize, attempt: impl Future<Output = T>) -> T {
    seeded_once(seed_that_begins_with(first, servers), attempt).await
}

/// Runs the first poll of `work` with this seed. Afterwards the generator continues as if nothing
/// had happened.
async fn seeded_once<T>(seed: u64, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    let begun = poll_fn(|context| {
        let before = fastrand::get_seed();
        fastrand::seed(seed);
        let begun = work.as_mut().poll(context);
        fastrand::seed(before);
        Poll::Ready(begun)
    });
    match begun.await {
        Poll::Ready(ended) => ended,
        Poll::Pending => work.await,
    }
}

fn seed_that_begins_with(first: usize, servers: usize) -> u64 {
    loop {
        let seed = fastrand::u64(..);
        let mut order: Vec<usize> = (0..servers).collect();
        fastrand::Rng::with_seed(seed).shuffle(&mut order);
        if order.first().is_none_or(|begins| *begins == first) {
            return seed;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// The attempts rely on this order, and another version of the library may behave differently.
    #[tokio::test]
    async fn the_library_asks_the_server_first_that_it_is_made_to() {
        const SERVERS: usize = 5;
        let servers: Vec<TcpListener> = (0..SERVERS)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let address = |server: &TcpListener| server.local_addr().unwrap().to_string();
        let hosts = servers.iter().map(address).collect::<Vec<_>>().join(",");

        for first in (0..SERVERS).cycle().take(4 * SERVERS) {
            let hosts = hosts.clone();
            let connecting = async move { Client::connector().connect(&hosts).await.map(drop) };
            let connecting = tokio::spawn(asking_first(first, SERVERS, connecting));
            // No server answers, so the attempt waits for the first server for seconds.
            let asked = loop {
                tokio::task::yield_now().await;
                let accepted = servers.iter().position(|server| {
                    server.set_nonblocking(true).unwrap();
                    server.accept().is_ok()
                });
                if let Some(asked) = accepted {
                    break asked;
                }
            };
            connecting.abort();
            assert_eq!(asked, first);
        }
    }

    #[tokio::test]
    async fn the_generator_of_the_thread_is_left_as_it_was() {
        fastrand::seed(7);
        let expected: Vec<u64> = (0..3).map(|_| fastrand::u64(..)).collect();

        fastrand::seed(7);
        let (seed, seeded) = (11, async { fastrand::u64(..) });
        let drawn = seeded_once(seed, seeded).await;

        assert_eq!(drawn, fastrand::Rng::with_seed(seed).u64(..));
        let left: Vec<u64> = (0..3).map(|_| fastrand::u64(..)).collect();
        assert_eq!(left, expected);
    }
}
