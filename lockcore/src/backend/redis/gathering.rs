//! A stream that sends the commands of several tasks in one write, without making the server wait
//! for all of them.
//!
//! The driver of a connection writes as soon as it has a command. Tokio runs a task that was just
//! woken before all other tasks. Suppose that the answers of one read wake sixty tasks, and each
//! task sends its next command. Then the driver runs after each task, and writes each command
//! alone. So there is a system call for every command.
//!
//! Here the driver gets the answers in small parts. After each part the next read says once that
//! there is no more, and the driver yields: the tasks that were woken run first, and their next
//! commands go out in one write. (The driver reads once for each command that it takes from its
//! queue, so in one poll it may get several parts.) While the driver handles the next part, the
//! server works on these commands. If the driver waited for the
//! tasks of all answers instead, the server would be idle until these tasks have run. After that
//! the process would be idle until the server has answered all commands.
//!
//! If few requests are in flight, the driver does not yield, because the server would be idle
//! meanwhile.

use std::io;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

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

/// With fewer requests in flight, the driver gets all answers at once. Measured with 4 to 1,000
/// tasks on two processors. Up to 24 tasks, small parts make fewer pairs of acquire and release per
/// second. From 48 tasks on, they make more.
const MANY: usize = 32;

/// The bytes of a part: about ten answers. 100 to 400 make no clear difference.
const PART: usize = 200;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Gathering<S> {
    stream: S,
    in_flight: InFlight,
    /// The driver has got a part, and has not yielded since.
    has_part: bool,
}

impl<S> Gathering<S> {
    pub(super) fn new(stream: S, in_flight: InFlight) -> Self {
        Self {
            stream,
            in_flight,
            has_part: false,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathering<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.in_flight.0.load(Ordering::Relaxed) < MANY {
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        // The driver is scheduled again, behind the tasks that are ready. It does not yield to the
        // scheduler's list of tasks that yielded: another thread can take it from there if one of
        // the tasks blocks.
        if mem::take(&mut self.has_part) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let room = buf.remaining().min(PART);
        let mut part = ReadBuf::new(buf.initialize_unfilled_to(room));
        let outcome = Pin::new(&mut self.stream).poll_read(cx, &mut part);
        let read = part.filled().len();
        buf.advance(read);
        self.has_part = read > 0;
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathering<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
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

    /// Reads once. Returns how many bytes were read, if any, and whether the driver was woken to
    /// read again.
    fn read(stream: &mut Gathering<DuplexStream>) -> (Option<usize>, bool) {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut bytes = [0; 10 * PART];
        let mut buf = ReadBuf::new(&mut bytes);
        let outcome = Pin::new(stream).poll_read(&mut Context::from_waker(&waker), &mut buf);
        let read = outcome.is_ready().then(|| buf.filled().len());
        assert!(buf.filled().iter().all(|byte| *byte == b'x'));
        (read, woken.0.load(Ordering::Relaxed))
    }

    /// A stream with this many requests in flight, of which three parts of answers have arrived.
    async fn stream(requests: usize) -> (Gathering<DuplexStream>, Vec<UnderWay>, DuplexStream) {
        let in_flight = InFlight::default();
        let (near, mut far) = tokio::io::duplex(3 * PART);
        far.write_all(&[b'x'; 3 * PART]).await.unwrap();
        let requests = (0..requests).map(|_| in_flight.begin()).collect();
        (Gathering::new(near, in_flight), requests, far)
    }

    #[tokio::test]
    async fn answers_of_few_requests_are_handed_out_at_once() {
        let (mut stream, mut requests, _far) = stream(MANY).await;
        requests.pop();

        assert_eq!(read(&mut stream), (Some(3 * PART), false));
        assert_eq!(read(&mut stream), (None, false));
    }

    #[tokio::test]
    async fn the_driver_stands_back_once_after_each_part() {
        let (mut stream, _requests, far) = stream(MANY).await;

        for part in 0..3 {
            assert_eq!(read(&mut stream), (Some(PART), false), "{part}");
            assert_eq!(read(&mut stream), (None, true), "{part}");
        }
        // Nothing is there: it is woken when something is.
        assert_eq!(read(&mut stream), (None, false));
        drop(far);
        assert_eq!(read(&mut stream), (Some(0), false), "the end");
    }

    /// Works like a driver: it takes all commands and writes them, and then reads answers. Each
    /// answer wakes a task, and this task sends its next command. The worker of this runtime runs a
    /// task that was just woken before all other tasks.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn the_next_commands_of_the_tasks_of_a_part_are_in_one_write() {
        tokio::spawn(answers_wake_tasks()).await.unwrap();
    }

    async fn answers_wake_tasks() {
        let (mut stream, _requests, mut far) = stream(MANY).await;
        let (send, mut commands) = mpsc::unbounded_channel::<u8>();
        let answers = Arc::new(Semaphore::new(0));
        for _ in 0..MANY {
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
                let mut written = Vec::new();
                while let Poll::Ready(Some(command)) = commands.poll_recv(cx) {
                    written.push(command);
                }
                if !written.is_empty() {
                    let outcome = Pin::new(&mut stream).poll_write(cx, &written);
                    assert!(outcome.is_ready());
                }
                let mut bytes = [0; PART];
                let mut buf = ReadBuf::new(&mut bytes);
                while Pin::new(&mut stream).poll_read(cx, &mut buf).is_ready() {
                    // One answer is 20 bytes.
                    answers.add_permits(buf.filled().len() / 20);
                    buf.clear();
                }
                Poll::<()>::Pending
            })
            .await;
        });

        let mut first = [0; 1_000];
        let read = far.read(&mut first).await.unwrap();

        assert_eq!(read, PART / 20);
    }
}
