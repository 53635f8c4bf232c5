//! Wake-ups: what the server pushes on the connection, turned into the core's words.

use std::convert::Infallible;
use std::time::Duration;

use redis::{PushInfo, PushKind, Value};

use crate::backend::{EventSink, Wake};
use crate::request::Id;

/// Runs inside the connection's driver, so a wake-up reaches its waiter without a task in between.
///
/// The driver drops it when the connection breaks or its runtime ends, and with it `events`, which
/// is how the core learns that.
pub(super) fn sink(events: EventSink) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync {
    move |push| {
        if push.kind == PushKind::Message
            && let Some(Value::BulkString(message)) = push.data.get(1)
        {
            match parse(message) {
                Some(Message::Granted(wake)) => events.granted(wake),
                Some(Message::Again(id, after)) => events.recheck(id, after),
                None => {}
            }
        }
        Ok(())
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Message {
    /// `<id> <ticket>`
    Granted(Wake),
    /// `<id> again <ms>`
    Again(Id, Duration),
}

/// Anything else is somebody else's message and is ignored.
fn parse(message: &[u8]) -> Option<Message> {
    let (id, what) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    let id = Id::parse(id)?;
    Some(match what.strip_prefix("again ") {
        Some(millis) => Message::Again(id, Duration::from_millis(millis.parse().ok()?)),
        None => Message::Granted(Wake {
            id,
            ticket: what.parse().ok()?,
        }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_script_sends_is_a_message() {
        let id = Id::draw().unwrap();
        let wake = parse(format!("{id} 17").as_bytes());
        assert_eq!(wake, Some(Message::Granted(Wake { id, ticket: 17 })));
        let again = parse(format!("{id} again 17").as_bytes());
        assert_eq!(again, Some(Message::Again(id, Duration::from_millis(17))));

        for forged in [
            &b""[..],
            b"17",
            b" 17",
            b"abc 17",
            b"\xff\xfe 17",
            b"00000000000000000000000000000000",
            b"00000000000000000000000000000000 ",
            b"00000000000000000000000000000000 -1",
            b"00000000000000000000000000000000 17 ",
            b"+0000000000000000000000000000000 17",
            b"00000000000000000000000000000000 again",
            b"00000000000000000000000000000000 again -1",
            b"00000000000000000000000000000000 again  1",
        ] {
            assert_eq!(parse(forged), None, "{forged:?}");
        }
    }
}
