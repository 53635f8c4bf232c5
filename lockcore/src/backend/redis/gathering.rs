//! A stream that lets the commands of several tasks go out in one write.
//!
//! The driver of a connection writes as soon as it has a command. Tokio runs a task that was just woken before all
//! others. So when an answer of the server wakes sixty tasks, and each sends its next command, the driver would run
//! after each of them, and write each command by itself: a system call and a packet for every one.
//!
//! Here the driver stands back once before it writes, if other requests are under way. The tasks that are ready run
//! first, and their commands are in the same write. A request that is alone is written at once.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The number of requests that are under way on a connection.
#[derive(Clone, Debug, Default)]
pub(super) struct InFlight(Arc<AtomicUsize>);

/// Counts a request as under way until it is dropped.
#[derive(Debug)]
pub(super) struct UnderWay(InFlight);

impl InFlight {
    pub(super) fn begin(&self) -> UnderWay {
        self.0.fetch_add(1, Ordering::Relaxed);
        UnderWay(self.clone())
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Gathering<S> {
    stream: S,
    in_flight: InFlight,
    /// Whether it has stood back since the last write.
    has_stood_back: bool,
}

impl<S> Gathering<S> {
    pub(super) fn new(stream: S, in_flight: InFlight) -> Self {
        Self {
            stream,
            in_flight,
            has_stood_back: false,
        }
    }

    /// Whether the driver must let the tasks that are ready run first. If so, it is scheduled again, behind them.
    ///
    /// It stands back once for each write. So it waits for the tasks that are ready now, and for no others. It does not
    /// yield to the scheduler's list of tasks that yielded: another thread can take it from there if one of those tasks
    /// blocks.
    fn stands_back(&mut self, cx: &Context<'_>) -> bool {
        let stands_back = !self.has_stood_back && self.in_flight.0.load(Ordering::Relaxed) > 1;
        if stands_back {
            cx.waker().wake_by_ref();
        }
        self.has_stood_back = stands_back;
        stands_back
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Gathering<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathering<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.stands_back(cx) {
            true => Poll::Pending,
            false => Pin::new(&mut self.stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.stands_back(cx) {
            true => Poll::Pending,
            false => Pin::new(&mut self.stream).poll_write_vectored(cx, bufs),
        }
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
    use tokio::sync::mpsc;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Tries to write once. Returns whether the write was done, and whether the driver was woken to try again.
    fn write(stream: &mut Gathering<DuplexStream>) -> (bool, bool) {
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let written = Pin::new(stream).poll_write(&mut Context::from_waker(&waker), b"command");
        (written.is_ready(), woken.0.load(Ordering::Relaxed))
    }

    fn stream() -> (Gathering<DuplexStream>, InFlight, DuplexStream) {
        let in_flight = InFlight::default();
        let (near, far) = tokio::io::duplex(1_000);
        let stream = Gathering::new(near, in_flight.clone());
        (stream, in_flight, far)
    }

    #[test]
    fn a_request_that_is_alone_is_written_at_once() {
        let (mut stream, in_flight, _far) = stream();
        let _alone = in_flight.begin();
        drop(in_flight.begin());

        for _ in 0..3 {
            assert_eq!(write(&mut stream), (true, false));
        }
    }

    #[test]
    fn each_write_waits_once_for_the_tasks_that_are_ready() {
        let (mut stream, in_flight, _far) = stream();
        let _both = [in_flight.begin(), in_flight.begin()];

        for _ in 0..3 {
            assert_eq!(write(&mut stream), (false, true), "not delayed");
            assert_eq!(write(&mut stream), (true, false), "delayed twice");
        }
    }

    /// Each task sends a command, as after an answer that has woken all of them. The worker of this runtime runs a task
    /// that was just woken before all others.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn the_commands_of_tasks_that_are_ready_are_in_one_write() {
        tokio::spawn(many_tasks_send()).await.unwrap();
    }

    async fn many_tasks_send() {
        const TASKS: usize = 50;
        let (mut stream, in_flight, mut far) = stream();
        let (send, mut commands) = mpsc::unbounded_channel::<[u8; 4]>();
        // Works as the driver of a connection: it takes all commands that there are, and writes them.
        tokio::spawn(async move {
            let mut buffer = Vec::new();
            while let Some(command) = commands.recv().await {
                buffer.extend(command);
                std::future::poll_fn(|cx| {
                    while let Poll::Ready(Some(command)) = commands.poll_recv(cx) {
                        buffer.extend(command);
                    }
                    let written = Pin::new(&mut stream).poll_write(cx, &buffer);
                    written.map(|written| buffer.drain(..written.unwrap()).count())
                })
                .await;
            }
            stream.flush().await.unwrap();
        });
        let ready: Vec<_> = (0..TASKS)
            .map(|_| {
                let (send, under_way) = (send.clone(), in_flight.begin());
                tokio::spawn(async move {
                    send.send(*b"PING").unwrap();
                    under_way
                })
            })
            .collect();

        let mut first = [0; 1_000];
        let read = far.read(&mut first).await.unwrap();

        assert_eq!(read, 4 * TASKS);
        drop(ready);
    }
}
