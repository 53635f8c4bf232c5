//! The socket to a server, for the stores whose drivers take a stream of ours.

use std::io;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

/// What a driver reads and writes. The encryption is ours, so the driver knows nothing of it.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

pub(super) async fn socket(host: &str, port: u16) -> io::Result<TcpStream> {
    // In a URL an IPv6 address is in brackets.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let socket = TcpStream::connect((host, port)).await?;
    // A request is one small write that must not wait for more data.
    socket.set_nodelay(true)?;
    // The peer may go without notice: a cable is pulled, or a NAT entry is dropped. The kernel then
    // finds out within about ten seconds.
    sockopt::set_socket_keepalive(&socket, true)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        sockopt::set_tcp_keepidle(&socket, Duration::from_secs(5))?;
        sockopt::set_tcp_keepintvl(&socket, Duration::from_secs(2))?;
        sockopt::set_tcp_keepcnt(&socket, 3)?;
    }
    Ok(socket)
}
