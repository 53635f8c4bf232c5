//! TLS to a member.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::tls::Connector;

/// An encrypted stream that notes a mistake that a person must correct.
///
/// A member refuses the certificate of a client after the handshake, when the client reads for the
/// first time. The library for HTTP/2 reads, and does not pass on why this has failed.
pub(super) struct Encrypted {
    stream: TlsStream<TcpStream>,
    tls: Arc<Connector>,
    mistake: Arc<OnceLock<String>>,
}

impl Encrypted {
    /// Makes the handshake.
    pub(super) async fn begin(tls: &Arc<Connector>, socket: TcpStream) -> io::Result<Self> {
        Ok(Self {
            stream: tls.connect(socket).await?,
            tls: Arc::clone(tls),
            mistake: Arc::default(),
        })
    }

    /// Where a mistake is noted.
    pub(super) fn mistake(&self) -> Arc<OnceLock<String>> {
        Arc::clone(&self.mistake)
    }

    fn note(&self, error: &io::Error) {
        if let Some(mistake) = self.tls.mistake(error) {
            self.mistake.get_or_init(|| mistake);
        }
    }

    /// Notes the reason when nothing more can be written. The member has closed the connection then,
    /// and its reason has arrived before: it is still to be read. Until it is, the write is pending.
    /// After that it is tried again, and fails again.
    fn noted_at_write<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(error)) = &written {
            self.note(error);
            let mut unread = [0; 1024];
            loop {
                let mut unread = ReadBuf::new(&mut unread);
                match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut unread)) {
                    Ok(()) if unread.filled().is_empty() => break,
                    Ok(()) => {}
                    Err(error) => {
                        self.note(&error);
                        break;
                    }
                }
            }
        }
        written
    }
}

impl AsyncRead for Encrypted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if let Poll::Ready(Err(error)) = &read {
            self.note(error);
        }
        read
    }
}

impl AsyncWrite for Encrypted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.noted_at_write(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.noted_at_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.noted_at_write(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
