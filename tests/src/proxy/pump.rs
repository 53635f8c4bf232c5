//! One connection of the proxy. In each direction, a reader gives each chunk a time at which it is
//! due. A writer passes the chunk on at this time, unless the proxy is frozen. `proxy` decides when
//! a connection is opened, cut and counted.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

use super::{Rules, Shared};

const CHUNK: usize = 16 * 1024;

/// How many chunks may be held in one direction. If there are more, the reader waits. The number is
/// large, so that a delay does not limit the throughput.
const ON_THE_WAY: usize = 1_024;

/// Why a connection has ended before both of its sides have shut down.
#[derive(Debug)]
pub(super) enum Broken {
    /// One side failed.
    Failed,
    /// The client is cut off, and the server is not told.
    ClientCut,
    /// The server has begun to answer a request whose reply must be lost.
    ReplyLost,
}

/// A chunk, and the time at which it is due.
type Chunk = (Instant, Vec<u8>);

/// Passes bytes both ways until both sides have shut down.
pub(super) async fn through(
    client: &mut TcpStream,
    server: &mut TcpStream,
    rules: &watch::Receiver<Rules>,
    shared: &Shared,
) -> Result<(), Broken> {
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let (queue_up, up) = mpsc::channel(ON_THE_WAY);
    let (queue_down, down) = mpsc::channel(ON_THE_WAY);
    let trapped = AtomicBool::new(false);

    let read_up = read(from_client, queue_up, |chunk| {
        shared.chunks_up.fetch_add(1, Ordering::Relaxed);
        let delay = shared.delay_of(chunk).unwrap_or(rules.borrow().delay_up);
        Ok((delay, chunk.to_vec()))
    });
    let mut begun = Vec::new();
    let read_down = read(from_server, queue_down, |chunk| {
        if trapped.load(Ordering::Relaxed) {
            return Err(Broken::ReplyLost);
        }
        let rules = rules.borrow();
        let mut chunk = match rules.events_lost {
            true => without_events(&mut begun, chunk),
            false => chunk.to_vec(),
        };
        if let Some((from, to)) = &*shared.renamed() {
            rename(&mut chunk, from, to);
        }
        Ok((rules.delay_down, chunk))
    });
    let mut recent = Vec::new();
    let write_up = write(to_server, up, rules.clone(), &shared.bytes_up, |chunk| {
        // This is set before the request is passed on, because the reply may be fast.
        if !trapped.load(Ordering::Relaxed) && shared.springs_the_trap(&mut recent, chunk) {
            trapped.store(true, Ordering::Relaxed);
        }
    });
    let write_down = write(to_client, down, rules.clone(), &shared.bytes_down, |_| {});
    tokio::try_join!(read_up, read_down, write_up, write_down).map(drop)
}

/// Lets the server read everything that was sent to it, and drops its answers. A reset could
/// overtake these bytes.
pub(super) async fn drain(mut server: TcpStream) {
    let _ = server.shutdown().await;
    let mut void = vec![0; CHUNK];
    while server.read(&mut void).await.is_ok_and(|read| read > 0) {}
}

/// Removes the events from the complete messages of ZooKeeper. `begun` keeps an incomplete message
/// for the next call. A message begins with its length. Then comes the number of the request that
/// it answers, or -1 for an event.
fn without_events(begun: &mut Vec<u8>, chunk: &[u8]) -> Vec<u8> {
    begun.extend_from_slice(chunk);
    let mut kept = Vec::new();
    while let Some((length, rest)) = begun.split_first_chunk() {
        let length = u32::from_be_bytes(*length) as usize;
        if rest.len() < length {
            break;
        }
        let message: Vec<u8> = begun.drain(..4 + length).collect();
        if message[4..8] != [0xff; 4] {
            kept.extend(message);
        }
    }
    kept
}

fn rename(chunk: &mut [u8], from: &[u8], to: &[u8]) {
    for at in 0..chunk.len().saturating_sub(from.len() - 1) {
        if chunk[at..].starts_with(from) {
            chunk[at..at + to.len()].copy_from_slice(to);
        }
    }
}

/// Reads chunks and queues them. `on_chunk` returns the delay of a chunk, and the part of it that
/// is passed on.
async fn read(
    mut from: ReadHalf<'_>,
    queue: mpsc::Sender<Chunk>,
    mut on_chunk: impl FnMut(&[u8]) -> Result<(Duration, Vec<u8>), Broken>,
) -> Result<(), Broken> {
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(()); // the writer handles the end of the queue
        }
        let (delay, chunk) = on_chunk(&buffer[..read])?;
        if queue.send((Instant::now() + delay, chunk)).await.is_err() {
            return Ok(()); // the writer has failed, and reports that
        }
    }
}

async fn write(
    mut to: WriteHalf<'_>,
    mut queue: mpsc::Receiver<Chunk>,
    mut rules: watch::Receiver<Rules>,
    passed: &AtomicU64,
    mut before: impl FnMut(&[u8]),
) -> Result<(), Broken> {
    while let Some((due, chunk)) = queue.recv().await {
        sleep_until(due).await;
        before(&chunk);
        pass(&to, &chunk, &mut rules, passed).await?;
    }
    thawed(&mut rules).await?;
    Ok(to.shutdown().await?)
}

async fn pass(
    to: &WriteHalf<'_>,
    mut chunk: &[u8],
    rules: &mut watch::Receiver<Rules>,
    passed: &AtomicU64,
) -> io::Result<()> {
    while !chunk.is_empty() {
        thawed(rules).await?;
        to.writable().await?;
        // The rules stay borrowed until the bytes are written and counted. So no write follows when
        // a `freeze` has returned, and a reader of the traffic gets no old count.
        let rules = rules.borrow();
        if rules.frozen {
            continue;
        }
        match to.try_write(chunk) {
            Ok(written) => {
                passed.fetch_add(written as u64, Ordering::Relaxed);
                chunk = &chunk[written..];
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

async fn thawed(rules: &mut watch::Receiver<Rules>) -> io::Result<()> {
    let thawed = rules.wait_for(|rules| !rules.frozen).await;
    thawed
        .map(drop)
        .map_err(|_| io::ErrorKind::ConnectionAborted.into()) // the proxy was dropped
}

impl Shared {
    /// The delay of a chunk that contains the marker of the delayed requests.
    fn delay_of(&self, chunk: &[u8]) -> Option<Duration> {
        let delayed = self.delayed_requests();
        let (marker, delay) = delayed.as_ref()?;
        if !chunk.windows(marker.len()).any(|window| window == marker) {
            return None;
        }
        self.delayed.fetch_add(1, Ordering::Relaxed);
        Some(*delay)
    }

    /// Whether the chunk completes a request whose reply must be lost. `recent` is the end of the
    /// earlier data, where a marker may have begun.
    fn springs_the_trap(&self, recent: &mut Vec<u8>, chunk: &[u8]) -> bool {
        let mut trap = self.trap();
        let Some(trap) = trap.as_mut().filter(|trap| trap.remaining > 0) else {
            recent.clear();
            return false;
        };
        recent.extend_from_slice(chunk);
        if recent
            .windows(trap.marker.len())
            .any(|window| window == trap.marker)
        {
            trap.remaining -= 1;
            self.recognised.fetch_add(1, Ordering::Relaxed);
            return true;
        }
        recent.drain(..recent.len().saturating_sub(trap.marker.len() - 1));
        false
    }
}

impl From<io::Error> for Broken {
    fn from(_: io::Error) -> Self {
        Self::Failed
    }
}
