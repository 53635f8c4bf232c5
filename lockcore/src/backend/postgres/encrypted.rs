//! TLS: the client asks the server for it before anything else, and says nothing in plain text.
//! <https://www.postgresql.org/docs/current/protocol-flow.html#PROTOCOL-FLOW-SSL>

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use crate::backend::Fault;
use crate::tls::Connector;

/// `SSLRequest`: its length, and the number that stands for it.
const REQUEST: [u8; 8] = *b"\0\0\0\x08\x04\xd2\x16\x2f";

/// Encrypts a connection on which nothing was said yet. An error has the text for the user.
///
/// Only one byte is read in plain text. What an attacker puts behind it would be a part of the
/// handshake, which then fails.
pub(super) async fn begin(
    tls: &Connector,
    mut socket: TcpStream,
) -> Result<TlsStream<TcpStream>, (Fault, String)> {
    let out_of_reach = |error: io::Error| (Fault::Retry, error.to_string());
    socket.write_all(&REQUEST).await.map_err(out_of_reach)?;
    match socket.read_u8().await.map_err(out_of_reach)? {
        b'S' => {}
        b'N' => {
            return Err((
                Fault::Config,
                "the server does not use TLS; set ssl on there, or write postgres:// for a \
                 connection that is not encrypted"
                    .to_owned(),
            ));
        }
        // A server that cannot serve another client answers with an error in plain text.
        b'E' => {
            let text = "the server refuses the connection before TLS: it may be overloaded";
            return Err((Fault::Retry, text.to_owned()));
        }
        _ => {
            return Err((
                Fault::Config,
                "the server at this port is not PostgreSQL, or does not speak TLS; use the port \
                 that does, or the scheme without TLS"
                    .to_owned(),
            ));
        }
    }
    (tls.connect(socket).await).map_err(|error| match tls.mistake(&error) {
        Some(mistake) => (Fault::Config, mistake),
        None => out_of_reach(error),
    })
}
