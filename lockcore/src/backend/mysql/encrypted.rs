//! TLS: it begins behind the greeting of the server, and in front of the user and the proof.
//! <https://dev.mysql.com/doc/dev/mysql-server/latest/page_protocol_connection_phase.html>

use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

use super::wire::{Failure, Greeting};
use crate::tls::Connector;

/// Encrypts a connection on which the greeting was read, and nothing was said yet. An attacker may
/// have changed the greeting: the worst is then a login that fails.
pub(super) async fn begin(
    tls: &Connector,
    mut socket: TcpStream,
    greeting: &Greeting,
) -> Result<TlsStream<TcpStream>, Failure> {
    let Some(request) = greeting.encrypt() else {
        return Err(Failure::Mistake(
            "the server does not use TLS; give it a certificate, or write mysql:// for a \
             connection that is not encrypted"
                .to_owned(),
        ));
    };
    socket.write_all(&request).await?;
    let stream = tls.connect(socket).await;
    stream.map_err(|error| ended(tls, Failure::Ended(error)))
}

/// The failure, as a mistake if a person must correct something about TLS.
pub(super) fn ended(tls: &Connector, failure: Failure) -> Failure {
    match failure {
        Failure::Ended(error) => match tls.mistake(&error) {
            Some(mistake) => Failure::Mistake(mistake),
            None => Failure::Ended(error),
        },
        failure => failure,
    }
}
