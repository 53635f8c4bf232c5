//! A stream that sends the commands of several tasks in one write, without making the server wait
//! for all of them.
//!
//! The driver of a connection writes as soon as it has a command. Tokio runs a task that was just
//! woken before all other tasks. Suppose that the answers of one read wake sixty tasks, and each
//! task sends its next command. Then the driver runs after each task, and writes each command
//! alone. So there is a system call for every command.
//!
//! Here the driver gets the answers in parts, usually one part each time that it runs. Then the
//! tasks of these answers run, and their next commands go out in one write. While the driver
//! handles the next part, the server works on these commands. If the driver waited for the tasks of
//! all answers instead, the server would be idle until these tasks have run. After that the process
//! would be idle until the server has answered all commands.
//!
//! With some dozens of requests in flight, a part is about a fifth of the answers. So a few parts
//! are on their way at any time, and both sides have work.
//!
//! If few requests are in flight, the driver gets all answers at once. Parts would be too small
//! then, and the server would be idle while the driver yields.

use std::fmt;
use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The number of requests that are in flight on a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlight(Arc<AtomicUsize>);

/// Counts a request as in flight until this value is dropped.
#[derive(Debug)]
pub(super) struct UnderWay(InFlight);

impl InFlight {
    pub(super) fn begin(&self) -> UnderWay {
        self.0.fetch_add(1, Ordering::Relaxed);
        UnderWay(self.clone())
    }

    /// Whether exactly one request is in flight.
    pub(super) fn is_one(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 1
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// With fewer requests in flight, the driver gets all answers at once. This number and those of
/// [`lines`] were measured with 2 to 1,000 tasks on two processors, in pairs of acquire and release
/// per second.
const MANY: usize = 6;

/// How many bytes are read from the socket at once: a few hundred answers.
const READ: usize = 4096;

/// How many parts the bytes of one read make at most. Long answers, such as those to renewals, have
/// many lines, and wake only one task each.
const MOST_PARTS: usize = 16;

/// How many lines a part has, if its answers are short. The answer to a granted enqueue has two
/// lines, and the answer to a release has one. With larger parts, the server is idle for longer,
/// and tokio wakes a second thread for the many tasks that are ready. Smaller parts need more
/// writes.
fn lines(in_flight: usize) -> usize {
    (in_flight / 5).clamp(2, 24)
}

/// Bytes that `Debug` does not show.
struct Bytes(Box<[u8]>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("…")
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Gathering<S> {
    stream: S,
    in_flight: InFlight,
    /// The bytes that were read last. The driver has not got those in `rest`.
    bytes: Bytes,
    rest: Range<usize>,
    /// The driver has got a part since it has begun to run.
    has_part: bool,
}

impl<S> Gathering<S> {
    pub(super) fn new(stream: S, in_flight: InFlight) -> Self {
        Self {
            stream,
            in_flight,
            bytes: Bytes(vec![0; READ].into()),
            rest: 0..0,
            has_part: false,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathering<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let in_flight = this.in_flight.0.load(Ordering::Relaxed);
        let is_many = in_flight >= MANY;
        if this.has_part {
            // The driver is scheduled again, behind the tasks that are ready on its thread. It does
            // not yield to the scheduler's list of tasks that yielded: another thread can take it
            // from there if one of the tasks blocks.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if this.rest.is_empty() {
            if !is_many {
                return Pin::new(&mut this.stream).poll_read(cx, buf);
            }
            let mut read = ReadBuf::new(&mut this.bytes.0);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            this.rest = 0..read.filled().len();
        }
        let rest = &this.bytes.0[this.rest.clone()];
        let mut part = rest.len();
        if is_many {
            let mut line_ends = (1..).zip(rest).filter(|(_, byte)| **byte == b'\n');
            let end = line_ends.nth(lines(in_flight) - 1);
            let least = this.rest.end / MOST_PARTS;
            part = end.map_or(part, |(length, _)| part.min(length.max(least)));
        }
        let given = part.min(buf.remaining());
        buf.put_slice(&rest[..given]);
        this.rest.start += given;
        // If the driver had too little room, it may read the rest of the part.
        this.has_part = is_many && given > 0 && given == part;
        Poll::Ready(Ok(()))
    }
}

/// The driver reads once for each command that it takes from its queue. After that it writes and
/// flushes, before it yields. So a write or a flush is the end of its run. If more than 8 KiB of
/// commands are queued, the driver writes several times in one run, and gets a part for each.
///
/// If a write fails, the driver ends, and the answers in `rest` are dropped like those that are
/// still in the socket. Their outcome is unknown, as after every break.
impl<S: AsyncWrite + Unpin> AsyncWrite for Gathering<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.has_part = false;
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.has_part = false;
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.has_part = false;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::task::{Wake, Waker};

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::sync::{Semaphore, mpsc};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Answers of one line.
    const ANSWER: &[u8] = b":1\r\n";

    /// Reads once. Returns how many answers were read, if any, and whether the driver was woken to
    /// run again.
    fn read(stream: &mut Gathering<DuplexStream>) -> (Option<usize>, bool) {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut bytes = [0; READ];
        let mut buf = ReadBuf::new(&mut bytes);
        let outcome = Pin::new(stream).poll_read(&mut Context::from_waker(&waker), &mut buf);
        let (answers, rest) = buf.filled().as_chunks();
        assert!(answers.iter().all(|answer: &[u8; 4]| answer == ANSWER) && rest.is_empty());
        (
            outcome.is_ready().then_some(answers.len()),
            woken.0.load(Ordering::Relaxed),
        )
    }

    /// The end of a run of the driver.
    async fn flush(stream: &mut Gathering<DuplexStream>) {
        stream.flush().await.unwrap();
    }

    /// A stream with this many requests in flight, of which all have been answered.
    async fn stream(requests: usize) -> (Gathering<DuplexStream>, Vec<UnderWay>, DuplexStream) {
        with_lines(requests, requests).await
    }

    /// A stream with this many requests in flight, and with lines of answers that have arrived.
    async fn with_lines(
        requests: usize,
        lines: usize,
    ) -> (Gathering<DuplexStream>, Vec<UnderWay>, DuplexStream) {
        let in_flight = InFlight::default();
        let (near, mut far) = tokio::io::duplex(READ);
        far.write_all(&ANSWER.repeat(lines)).await.unwrap();
        let requests = (0..requests).map(|_| in_flight.begin()).collect();
        (Gathering::new(near, in_flight), requests, far)
    }

    #[tokio::test]
    async fn answers_of_few_requests_are_handed_out_at_once() {
        let (mut stream, _requests, _far) = stream(MANY - 1).await;

        assert_eq!(read(&mut stream), (Some(MANY - 1), false));
        assert_eq!(read(&mut stream), (None, false));
    }

    #[tokio::test]
    async fn the_driver_gets_one_part_each_time_that_it_runs() {
        let (mut stream, _requests, far) = stream(50).await;

        for run in 0..5 {
            assert_eq!(read(&mut stream), (Some(10), false), "{run}");
            // It reads once for each of its commands.
            assert_eq!(read(&mut stream), (None, true), "{run}");
            assert_eq!(read(&mut stream), (None, true), "{run}");
            flush(&mut stream).await;
        }
        // Nothing is there: it is woken when something is.
        assert_eq!(read(&mut stream), (None, false));
        drop(far);
        assert_eq!(read(&mut stream), (Some(0), false), "the end");
    }

    #[tokio::test]
    async fn the_rest_is_handed_out_at_once_when_few_requests_are_left() {
        let (mut stream, mut requests, _far) = stream(50).await;
        assert_eq!(read(&mut stream), (Some(10), false));
        flush(&mut stream).await;

        requests.truncate(MANY - 1);

        assert_eq!(read(&mut stream), (Some(40), false));
        assert_eq!(read(&mut stream), (None, false));
    }

    #[tokio::test]
    async fn the_answers_of_one_read_come_in_sixteen_parts_at_most() {
        let all = READ / ANSWER.len();
        let (mut stream, _requests, _far) = with_lines(MANY, all).await;

        for _ in 0..MOST_PARTS {
            assert_eq!(read(&mut stream), (Some(all / MOST_PARTS), false));
            flush(&mut stream).await;
        }
        assert_eq!(read(&mut stream), (None, false));
    }

    /// A driver that cannot write all its commands ends its run before it flushes.
    #[tokio::test]
    async fn a_write_is_the_end_of_a_run_too() {
        let (mut stream, _requests, _far) = stream(50).await;
        assert_eq!(read(&mut stream), (Some(10), false));

        stream.write_all(b"command").await.unwrap();

        assert_eq!(read(&mut stream), (Some(10), false));
    }

    /// Works like a driver: for each command it reads answers, and each answer wakes a task. After
    /// that it writes the commands. Each task sends its next command. The worker of this runtime
    /// runs a task that was just woken before all other tasks.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn the_next_commands_of_the_tasks_of_a_part_are_in_one_write() {
        tokio::spawn(answers_wake_tasks()).await.unwrap();
    }

    async fn answers_wake_tasks() {
        let (mut stream, _requests, mut far) = stream(50).await;
        let (send, mut commands) = mpsc::unbounded_channel::<u8>();
        let answers = Arc::new(Semaphore::new(0));
        for _ in 0..50 {
            let (send, answers) = (send.clone(), Arc::clone(&answers));
            tokio::spawn(async move {
                answers.acquire().await.unwrap().forget();
                send.send(b'c').unwrap();
            });
        }
        // They wait for their answers.
        tokio::task::yield_now().await;
        tokio::spawn(async move {
            std::future::poll_fn(|cx| {
                let read = |stream: &mut Gathering<_>, cx: &mut Context<'_>| {
                    let mut bytes = [0; READ];
                    let mut buf = ReadBuf::new(&mut bytes);
                    while Pin::new(&mut *stream).poll_read(cx, &mut buf).is_ready() {
                        answers.add_permits(buf.filled().len() / ANSWER.len());
                        buf.clear();
                    }
                };
                let mut written = Vec::new();
                while let Poll::Ready(Some(command)) = commands.poll_recv(cx) {
                    read(&mut stream, cx);
                    written.push(command);
                }
                read(&mut stream, cx);
                if !written.is_empty() {
                    let outcome = Pin::new(&mut stream).poll_write(cx, &written);
                    assert!(outcome.is_ready());
                }
                let outcome = Pin::new(&mut stream).poll_flush(cx);
                assert!(outcome.is_ready());
                Poll::<()>::Pending
            })
            .await;
        });

        for _ in 0..5 {
            let mut commands = [0; 1_000];
            assert_eq!(far.read(&mut commands).await.unwrap(), 10);
        }
    }
}
