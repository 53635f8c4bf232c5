//! The protocol of MySQL, as far as the store needs it: the login, and a text that is answered with
//! rows. <https://dev.mysql.com/doc/dev/mysql-server/latest/PAGE_PROTOCOL.html>
//!
//! It is written here because no driver takes a stream of ours, and so none leaves the TLS to us.
//! The store sends calls of procedures only, one at a time on a connection, so little of the
//! protocol is needed.

use std::fmt;
use std::io;
use std::sync::Arc;

use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;

use super::login::{Login, prove};
use crate::backend::socket::Stream;

/// What the client and the server agree on.
mod flag {
    pub(super) const LONG_PASSWORD: u32 = 1;
    pub(super) const WITH_DATABASE: u32 = 1 << 3;
    pub(super) const PROTOCOL_41: u32 = 1 << 9;
    pub(super) const TLS: u32 = 1 << 11;
    pub(super) const TRANSACTIONS: u32 = 1 << 13;
    pub(super) const SECURE: u32 = 1 << 15;
    pub(super) const SEVERAL_ANSWERS: u32 = 1 << 17;
    pub(super) const PLUGINS: u32 = 1 << 19;
    pub(super) const ATTRIBUTES: u32 = 1 << 20;
    pub(super) const NO_EOF: u32 = 1 << 24;
}

/// The server has another answer to the same request.
const MORE_FOLLOWS: u16 = 1 << 3;

/// The longest message in one packet.
const LONGEST: usize = 0x00ff_ffff;

const LONGEST_GREETING: usize = 4_096;

const OTHER_SERVER: Failure = Failure::Odd(
    "the server at this port is not MySQL, or does not speak TLS; use the port that does, or the \
     scheme without TLS",
);

/// utf8mb4. Texts are compared as bytes everywhere, so this is only about messages.
const CHARSET: u8 = 45;

const QUERY: u8 = 3;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The connection has ended.
    Ended(io::Error),
    /// The server has answered with an error.
    Refused { code: u16, text: String },
    /// The answer is none of this protocol.
    Odd(&'static str),
    /// Somebody must correct this before the login can succeed.
    Mistake(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Ended(error)
    }
}

/// A row of an answer, in text form.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) columns: Arc<[String]>,
    pub(super) values: Vec<Option<Vec<u8>>>,
}

/// What the server says first.
#[derive(Debug)]
pub(super) struct Greeting {
    flags: u32,
    plugin: String,
    nonce: Vec<u8>,
}

/// A connection that is logged in.
pub(super) struct Wire {
    stream: BufReader<Box<dyn Stream>>,
    /// The number of the next packet of this exchange.
    next: u8,
    flags: u32,
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").finish_non_exhaustive()
    }
}

/// Reads the greeting. Not a byte behind it is read, because TLS may begin there.
pub(super) async fn greeted(socket: &mut TcpStream) -> Result<Greeting, Failure> {
    let mut head = [0; 4];
    socket.read_exact(&mut head).await?;
    // The first packet has the number zero, and is short. A server that says something else may wait
    // for an answer.
    if head[3] != 0 || length(head) > LONGEST_GREETING {
        return Err(OTHER_SERVER);
    }
    let mut message = vec![0; length(head)];
    socket.read_exact(&mut message).await?;
    if let [0xff, ..] = *message {
        return Err(refusal(&message));
    }
    greeting(&message).ok_or(OTHER_SERVER)
}

fn greeting(message: &[u8]) -> Option<Greeting> {
    let mut rest = Rest(message);
    if rest.number(1)? != 10 {
        return None;
    }
    rest.text()?;
    rest.take(4)?;
    let mut nonce = rest.take(8)?.to_vec();
    rest.take(1)?;
    let low = rest.number(2)?;
    rest.take(3)?;
    let high = rest.number(2)?;
    let many = rest.number(1)?;
    rest.take(10)?;
    let many = usize::try_from(many).ok()?.saturating_sub(8).max(13);
    nonce.extend_from_slice(rest.take(many)?);
    nonce.truncate(20);
    let plugin = rest.text().unwrap_or_default();
    Some(Greeting {
        flags: u32::try_from(low | high << 16).ok()?,
        plugin: String::from_utf8_lossy(plugin).into_owned(),
        nonce,
    })
}

impl Greeting {
    /// The request to go on with TLS. `None` if the server does not have it.
    #[cfg(feature = "mysql-tls")]
    pub(super) fn encrypt(&self) -> Option<Vec<u8>> {
        let begin = self.answer(flag::TLS);
        (self.flags & flag::TLS != 0).then(|| packet(1, &begin))
    }

    fn agreed(&self) -> u32 {
        let wanted = flag::LONG_PASSWORD
            | flag::WITH_DATABASE
            | flag::PROTOCOL_41
            | flag::TRANSACTIONS
            | flag::SECURE
            | flag::SEVERAL_ANSWERS
            | flag::PLUGINS
            | flag::ATTRIBUTES
            | flag::NO_EOF;
        wanted & self.flags
    }

    /// The beginning of every answer.
    fn answer(&self, more: u32) -> Vec<u8> {
        let mut begin = (self.agreed() | more).to_le_bytes().to_vec();
        begin.extend((LONGEST as u32).to_le_bytes());
        begin.push(CHARSET);
        begin.extend([0; 23]);
        begin
    }
}

impl Wire {
    /// Logs in, over a stream on which the greeting was read.
    pub(super) async fn log_in(
        stream: Box<dyn Stream>,
        greeting: Greeting,
        login: &Login,
        is_encrypted: bool,
    ) -> Result<Self, Failure> {
        let mut wire = Self {
            stream: BufReader::new(stream),
            next: if is_encrypted { 2 } else { 1 },
            flags: greeting.agreed(),
        };
        let more = if is_encrypted { flag::TLS } else { 0 };
        let mut answer = greeting.answer(more);
        let proof = prove(&greeting.plugin, login, &greeting.nonce, is_encrypted);
        // If the server wants another proof from this user, it says so.
        let proof = proof.unwrap_or_default();
        put_text(&mut answer, login.user.as_bytes());
        answer.push(u8::try_from(proof.len()).unwrap_or_default());
        answer.extend(&proof);
        put_text(&mut answer, login.database.as_bytes());
        put_text(&mut answer, greeting.plugin.as_bytes());
        if wire.flags & flag::ATTRIBUTES != 0 {
            // For the operator who lists the connections.
            let attributes = b"\x0cprogram_name\x08lockcore";
            answer.push(attributes.len() as u8);
            answer.extend(attributes);
        }
        wire.send(&answer).await?;
        wire.be_let_in(login, is_encrypted).await?;
        Ok(wire)
    }

    async fn be_let_in(&mut self, login: &Login, is_encrypted: bool) -> Result<(), Failure> {
        loop {
            let message = self.receive().await?;
            match *message {
                [0x00, ..] => return Ok(()),
                [0xff, ..] => return Err(refusal(&message)),
                [0xfe, ref rest @ ..] => {
                    let mut rest = Rest(rest);
                    let plugin = String::from_utf8_lossy(rest.text().unwrap_or_default());
                    let nonce = rest.0.strip_suffix(b"\0").unwrap_or(rest.0);
                    let proof = prove(&plugin, login, nonce, is_encrypted);
                    let proof = proof.map_err(Failure::Mistake)?;
                    self.send(&proof).await?;
                }
                // The server knows the password, and goes on.
                [0x01, 3, ..] => {}
                // The server asks for the password itself.
                [0x01, 4, ..] if is_encrypted => {
                    let mut password = Vec::new();
                    put_text(&mut password, login.password.as_bytes());
                    self.send(&password).await?;
                }
                [0x01, 4, ..] => {
                    return Err(Failure::Mistake(
                        "the server asks for the password itself (caching_sha2_password), which \
                         this connection would send in plain text; write mysql+tls://"
                            .to_owned(),
                    ));
                }
                _ => return Err(Failure::Odd("an unknown message in a login")),
            }
        }
    }

    /// Sends a text, and returns all rows of all its answers. The text was carried out if this
    /// succeeds.
    ///
    /// If the future is dropped, the connection is of no use any more.
    pub(super) async fn ask(&mut self, text: &[u8]) -> Result<Vec<Row>, Failure> {
        self.next = 0;
        let mut message = Vec::with_capacity(text.len() + 1);
        message.push(QUERY);
        message.extend_from_slice(text);
        self.send(&message).await?;
        let mut rows = Vec::new();
        loop {
            let message = self.receive().await?;
            let status = match *message {
                [0x00, ..] => status_of_ok(&message),
                [0xff, ..] => return Err(refusal(&message)),
                _ => self.rows(&message, &mut rows).await?,
            };
            let status = status.ok_or(Failure::Odd("an answer without an end"))?;
            if status & MORE_FOLLOWS == 0 {
                return Ok(rows);
            }
        }
    }

    /// Reads an answer with rows, which begins with the number of its columns.
    async fn rows(&mut self, begin: &[u8], rows: &mut Vec<Row>) -> Result<Option<u16>, Failure> {
        let odd = || Failure::Odd("an unreadable answer");
        let many = Rest(begin).long().flatten().ok_or_else(odd)?;
        let mut columns = Vec::new();
        for _ in 0..many {
            let message = self.receive().await?;
            let mut rest = Rest(&message);
            let name = (0..5).map(|_| rest.value()).last().flatten().flatten();
            columns.push(String::from_utf8_lossy(name.ok_or_else(odd)?).into_owned());
        }
        let columns: Arc<[String]> = columns.into();
        let has_eof = self.flags & flag::NO_EOF == 0;
        if has_eof {
            self.receive().await?;
        }
        loop {
            let message = self.receive().await?;
            match *message {
                [0xff, ..] => return Err(refusal(&message)),
                [0xfe, ..] if has_eof => return Ok(Rest(&message[1..]).skipped(2)),
                [0xfe, ..] => return Ok(status_of_ok(&message)),
                _ => {}
            }
            let mut rest = Rest(&message);
            let values = (0..columns.len()).map(|_| Some(rest.value()?.map(<[u8]>::to_vec)));
            let values: Option<Vec<_>> = values.collect();
            rows.push(Row {
                columns: Arc::clone(&columns),
                values: values.ok_or_else(odd)?,
            });
        }
    }

    /// Resolves when the server ends the connection, while nothing is asked. May be dropped.
    pub(super) async fn ended(&mut self) {
        // A byte that answers nothing would be the reason of the end.
        let _ = self.stream.fill_buf().await;
    }

    async fn send(&mut self, message: &[u8]) -> Result<(), Failure> {
        if message.len() >= LONGEST {
            return Err(Failure::Odd("a request is too long"));
        }
        self.stream.write_all(&packet(self.next, message)).await?;
        Ok(self.stream.flush().await?)
    }

    async fn receive(&mut self) -> Result<Vec<u8>, Failure> {
        let mut head = [0; 4];
        self.stream.read_exact(&mut head).await?;
        let length = length(head);
        if length >= LONGEST {
            return Err(Failure::Odd("an answer is too long"));
        }
        self.next = head[3].wrapping_add(1);
        let mut message = vec![0; length];
        self.stream.read_exact(&mut message).await?;
        Ok(message)
    }
}

fn length([low, middle, high, _]: [u8; 4]) -> usize {
    u32::from_le_bytes([low, middle, high, 0]) as usize
}

fn packet(number: u8, message: &[u8]) -> Vec<u8> {
    let mut packet = (message.len() as u32).to_le_bytes()[..3].to_vec();
    packet.push(number);
    packet.extend_from_slice(message);
    packet
}

/// A text that ends with a zero.
fn put_text(message: &mut Vec<u8>, text: &[u8]) {
    message.extend_from_slice(text);
    message.push(0);
}

/// The flags behind the two counts of an OK.
fn status_of_ok(message: &[u8]) -> Option<u16> {
    let mut rest = Rest(message.get(1..)?);
    rest.long()?;
    rest.long()?;
    rest.skipped(0)
}

fn refusal(message: &[u8]) -> Failure {
    let mut rest = Rest(message);
    let code = rest.skipped(1).unwrap_or_default();
    // The SQLSTATE is left out: it says less than the code.
    let text = match *rest.0 {
        [b'#', _, _, _, _, _, ref text @ ..] => text,
        ref text => text,
    };
    let text = String::from_utf8_lossy(text).into_owned();
    Failure::Refused { code, text }
}

/// What is left to read of a message.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, many: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(many)?;
        self.0 = rest;
        Some(taken)
    }

    /// A number of so many bytes, the lowest first.
    fn number(&mut self, bytes: usize) -> Option<u64> {
        let bytes = self.take(bytes)?;
        let number = |number, byte: &u8| number << 8 | u64::from(*byte);
        Some(bytes.iter().rev().fold(0, number))
    }

    /// A number of two bytes, behind so many others.
    fn skipped(&mut self, bytes: usize) -> Option<u16> {
        self.take(bytes)?;
        u16::try_from(self.number(2)?).ok()
    }

    /// A number whose first byte says how long it is. `Some(None)` is null.
    #[allow(clippy::option_option, reason = "null is a value of the protocol")]
    fn long(&mut self) -> Option<Option<u64>> {
        Some(Some(match self.number(1)? {
            0xfb => return Some(None),
            0xfc => self.number(2)?,
            0xfd => self.number(3)?,
            0xfe => self.number(8)?,
            small => small,
        }))
    }

    /// A value with its length in front. `Some(None)` is null.
    #[allow(clippy::option_option, reason = "null is a value of the protocol")]
    fn value(&mut self) -> Option<Option<&'a [u8]>> {
        match self.long()? {
            None => Some(None),
            Some(length) => Some(Some(self.take(usize::try_from(length).ok()?)?)),
        }
    }

    /// A text that ends with a zero.
    fn text(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|byte| *byte == 0)?;
        let text = self.take(end)?;
        self.take(1)?;
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_of_mariadb_is_read() {
        let mut message = b"\x0a5.5.5-10.11.6-MariaDB\0\x07\0\0\0abcdefgh\0".to_vec();
        message.extend(b"\xfe\xf7\x2d\x02\0\xff\x81\x15\0\0\0\0\0\0\x1d\0\0\0ijklmnopqrst\0");
        message.extend(b"mysql_native_password\0");
        let read = greeting(&message).unwrap();

        assert_eq!(read.nonce, b"abcdefghijklmnopqrst");
        assert_eq!(read.plugin, "mysql_native_password");
        assert_eq!(read.flags, 0x81ff_f7fe);
        for end in 0..message.len() - 23 {
            assert!(greeting(&message[..end]).is_none(), "{end}");
        }
    }

    #[test]
    fn numbers_have_one_to_nine_bytes_and_may_be_null() {
        for (bytes, number) in [
            (&b"\x07"[..], Some(7)),
            (b"\xfb", None),
            (b"\xfc\x01\x02", Some(0x0201)),
            (b"\xfd\x01\x02\x03", Some(0x03_0201)),
            (b"\xfe\x01\0\0\0\0\0\0\x02", Some(0x0200_0000_0000_0001)),
        ] {
            assert_eq!(Rest(bytes).long(), Some(number));
            assert_eq!(Rest(&bytes[..bytes.len() - 1]).long(), None);
        }
    }

    #[test]
    fn an_error_has_its_code_and_its_text() {
        let Failure::Refused { code, text } = refusal(b"\xff\x15\x04#28000Access denied") else {
            panic!("another failure");
        };
        assert_eq!((code, &*text), (1045, "Access denied"));
        let Failure::Refused { code, text } = refusal(b"\xff\x10\x04Too many connections") else {
            panic!("another failure");
        };
        assert_eq!((code, &*text), (1040, "Too many connections"));
    }
}
