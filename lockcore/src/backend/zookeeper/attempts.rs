//! Opening a session at whichever server answers first.
//!
//! The client library asks one server after another, and waits for a silent one as long as a
//! connection may be silent: longer than the core waits for a session. (A process that is stopped still
//! accepts connections, by its kernel, so only an answer tells.) So several attempts are begun, each at
//! another server. Each knows all servers, for the time when its own is gone; to find another for a
//! session that stands is the library's part.

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use tokio::task::JoinSet;
use zookeeper_client::{Client, Error as ZkError};

/// Of one attempt before the next: longer than a healthy server takes, even a distant one. A second
/// attempt that nobody needed costs the servers a session, which is closed at once.
const HEAD_START: Duration = Duration::from_millis(200);

/// So that the last is begun within a second, the default of an operation.
const MOST: usize = 5;

/// A session, by the first of several attempts that succeeds. An attempt asks each server once; with
/// which it begins is chosen here. Fails when all that were begun have failed.
///
/// Dropped, all attempts are given up, and the servers end what they may have begun.
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
        // Dropped when it is time for the next, it has lost no attempt that ended.
        if let Ok(ended) = tokio::time::timeout(HEAD_START, ended).await {
            return ended;
        }
    }
    Err(ZkError::NoHosts)
}

/// Of those that are under way. `failure` is that of the earlier ones.
async fn first_success(
    attempts: &mut JoinSet<Result<Client, ZkError>>,
    failure: &mut Option<ZkError>,
) -> Result<Client, ZkError> {
    while let Some(ended) = attempts.join_next().await {
        match ended {
            Ok(Ok(client)) => {
                // A server may have heard the others, and a session that is only left stays there
                // until its timeout. They go on until they end, and close what they get.
                attempts.detach_all();
                return Ok(client);
            }
            // It is the client's mistake only if all say so.
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
/// The library shuffles the servers when an attempt is first polled, by the thread's generator of
/// random numbers, which is seeded for this poll. Should the library do it in another way, the attempt
/// begins anywhere, as it would by itself.
async fn asking_first<T>(first: usize, servers: usize, attempt: impl Future<Output = T>) -> T {
    seeded_once(seed_that_begins_with(first, servers), attempt).await
}

/// The first poll is with this seed; then the generator goes on as if nothing had been.
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

    /// What the attempts rely on, and what another version of the library may do differently.
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
            // Nobody answers it, so it stays with the first for seconds.
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
