//! Wake-ups: what the server pushes on the connection, turned into the core's words.

use std::convert::Infallible;

use redis::{PushInfo, PushKind, Value};

use crate::backend::{Events, Wake};
use crate::request::Id;

/// Runs inside the connection's driver, so a wake-up reaches its waiter without a task in between.
///
/// The driver drops it when the connection breaks or its runtime ends, and with it `events`, which
/// is how the core learns that.
pub(super) fn sink(events: Events) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync {
    move |push| {
        if push.kind == PushKind::Message
            && let Some(Value::BulkString(message)) = push.data.get(1)
            && let Some(wake) = parse(message)
        {
            events.granted(wake);
        }
        Ok(())
    }
}

/// `<id> <ticket>`. Anything else is somebody else's message and is ignored.
fn parse(message: &[u8]) -> Option<Wake> {
    let (id, ticket) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    Some(Wake {
        id: Id::parse(id)?,
        ticket: ticket.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_id_and_a_number_are_a_wake_up() {
        let id = Id::draw().unwrap();
        let wake = parse(format!("{id} 17").as_bytes()).unwrap();
        assert_eq!((wake.id, wake.ticket), (id, 17));

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
        ] {
            assert_eq!(parse(forged), None, "{forged:?}");
        }
    }
}
