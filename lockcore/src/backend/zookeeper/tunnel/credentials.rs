//! User and password. The tunnel itself sends them to each server, because other processes can read
//! the bytes that the library sends over the loopback device.
//!
//! In both directions, a message is a length, followed by that number of bytes. The library's first
//! message opens or resumes the session. The tunnel sends the credentials directly after this
//! message, where the library would send its own credentials. A server handles requests in their
//! order, so it knows the user before it handles any other request of the connection.

use std::fmt;
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// The number of a request with credentials, and of the reply to it.
const XID: i32 = -4;
/// The type of a request with credentials.
const AUTH: i32 = 100;
/// The reply begins with its length, the number of its request, the number of a transaction, and an
/// error.
const REPLY_XID: std::ops::Range<usize> = 4..8;
const REPLY_ERROR: std::ops::Range<usize> = 16..20;
/// Servers refuse longer messages (`jute.maxbuffer`). The few messages that this module reads are
/// far shorter.
const LONGEST: usize = 1 << 20;

/// The request with the credentials. The tunnel sends it on each connection.
#[derive(Clone)]
pub(super) struct Credentials {
    request: Vec<u8>,
}

impl Credentials {
    /// For `user:password`.
    pub(super) fn digest(identity: &str) -> Self {
        let mut body = Vec::new();
        for number in [XID, AUTH, 0] {
            body.extend(number.to_be_bytes());
        }
        for text in ["digest", identity] {
            body.extend((text.len() as u32).to_be_bytes());
            body.extend(text.as_bytes());
        }
        let mut request = (body.len() as u32).to_be_bytes().to_vec();
        request.extend(body);
        Self { request }
    }

    /// Forwards the library's first message to the server, followed by the credentials.
    pub(super) async fn show(
        &self,
        from_library: &mut (impl AsyncRead + Unpin),
        to_server: &mut (impl AsyncWrite + Unpin),
    ) -> io::Result<()> {
        let Some(mut both) = message(from_library).await? else {
            return Ok(());
        };
        both.extend_from_slice(&self.request);
        to_server.write_all(&both).await?;
        to_server.flush().await
    }
}

/// Forwards the server's messages to the library until the server has answered the credentials. If
/// the server has accepted them, the answer is not forwarded, because the library has not sent the
/// request. A refusal is forwarded: the library ends the session when it gets a refusal, whatever
/// request the refusal belongs to.
pub(super) async fn pass_until_answered(
    from_server: &mut (impl AsyncRead + Unpin),
    to_library: &mut (impl AsyncWrite + Unpin),
) -> io::Result<()> {
    // The first message is about the session. Its form is not the form of a reply.
    let mut is_reply = false;
    while let Some(message) = message(from_server).await? {
        let is = |place, number: i32| message.get(place) == Some(&number.to_be_bytes()[..]);
        let answered = is_reply && is(REPLY_XID, XID);
        if answered && is(REPLY_ERROR, 0) {
            return Ok(());
        }
        to_library.write_all(&message).await?;
        if answered {
            return Ok(());
        }
        is_reply = true;
    }
    Ok(())
}

/// The next message, including its length. `None` at the end of the stream.
async fn message(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length).await {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let rest = u32::from_be_bytes(length) as usize;
    if rest > LONGEST {
        return Err(io::Error::other(
            "the server at this port does not speak ZooKeeper's protocol; name the client port of a ZooKeeper server",
        ));
    }
    let mut message = length.to_vec();
    message.resize(length.len() + rest, 0);
    from.read_exact(&mut message[length.len()..]).await?;
    Ok(Some(message))
}

/// Does not show the password: secrets are never printed.
impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REFUSED: i32 = -115;

    fn framed(body: &[u8]) -> Vec<u8> {
        [&(body.len() as u32).to_be_bytes()[..], body].concat()
    }

    fn reply(xid: i32, error: i32) -> Vec<u8> {
        let transaction = 0_i64;
        framed(
            &[
                &xid.to_be_bytes()[..],
                &transaction.to_be_bytes(),
                &error.to_be_bytes(),
            ]
            .concat(),
        )
    }

    /// The bytes that the library receives when the server sends these messages.
    async fn passed_on(said: &[Vec<u8>]) -> Vec<u8> {
        let (said, mut heard) = (said.concat(), Vec::new());
        pass_until_answered(&mut &said[..], &mut heard)
            .await
            .unwrap();
        heard
    }

    #[test]
    fn they_are_written_as_the_protocol_has_it_and_not_shown() {
        let credentials = Credentials::digest("ann:secret");

        let expected: &[u8] = b"\0\0\0\x24\xff\xff\xff\xfc\0\0\0\x64\0\0\0\0\
            \0\0\0\x06digest\0\0\0\x0aann:secret";
        assert_eq!(credentials.request, expected);
        assert!(!format!("{credentials:?}").contains("secret"));
    }

    #[tokio::test]
    async fn they_go_behind_the_first_message_and_before_all_others() {
        let (first, second) = (framed(b"opens a session"), framed(b"asks for something"));
        let credentials = Credentials::digest("ann:secret");

        let from = [first.clone(), second.clone()].concat();
        let (mut from, mut to) = (&from[..], Vec::new());
        credentials.show(&mut from, &mut to).await.unwrap();

        assert_eq!(to, [first, credentials.request].concat());
        assert_eq!(from, second, "left for later");
    }

    #[tokio::test]
    async fn only_a_refusal_is_for_the_library() {
        // The first message is about the session. At the place of the request number, it has the
        // number of a request with credentials.
        let session = reply(XID, 0);
        let other = reply(7, 0);
        let accepted = [session.clone(), other.clone(), reply(XID, 0)];
        assert_eq!(passed_on(&accepted).await, accepted[..2].concat());

        let refused = [session, reply(XID, REFUSED)];
        assert_eq!(passed_on(&refused).await, refused.concat());
    }

    #[tokio::test]
    async fn a_connection_may_end_before_an_answer() {
        assert_eq!(passed_on(&[]).await, b"");
        let session = [framed(b"your session has ended")];
        assert_eq!(passed_on(&session).await, session.concat());
    }

    #[tokio::test]
    async fn something_else_is_not_read_for_ever() {
        let said = b"HTTP/1.1 400 Bad Request\r\n\r\n";
        let error = pass_until_answered(&mut &said[..], &mut Vec::new()).await;
        assert!(error.unwrap_err().to_string().contains("ZooKeeper"));
    }
}
