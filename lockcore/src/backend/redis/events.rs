//! Turns the messages that the server pushes on the connection into the wake-ups and rechecks of
//! the core.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use redis::{PushInfo, PushKind, Value};

use super::watched::Watched;
use crate::backend::{EventSink, Wake};
use crate::request::Id;

/// Returns the sink for the messages of a connection. It runs inside the connection's driver. So no
/// other task has to run before a wake-up reaches its waiter.
///
/// The driver drops this sink when the connection breaks or its runtime ends. The sink owns
/// `events`, and the core learns of the end when `events` is dropped.
pub(super) fn sink(
    events: Arc<EventSink>,
    watched: Arc<Watched>,
) -> impl Fn(PushInfo) -> Result<(), Infallible> + Send + Sync {
    move |push| {
        if !watched.tell(&events, &push) {
            tell(&events, &push, true);
        }
        Ok(())
    }
}

/// Passes a message to the core. Ignores all other pushes.
///
/// If the message may come from the wrong server, it is not `certain`. If it then says that a ticket is
/// granted, the ticket rechecks at once and is not yet held.
pub(super) fn tell(events: &EventSink, push: &PushInfo, certain: bool) {
    match message(push) {
        Some(Message::Granted(wake)) if certain => events.granted(wake),
        Some(Message::Granted(wake)) => events.recheck(wake.id, Duration::ZERO),
        Some(Message::Again(id, after)) => events.recheck(id, after),
        Some(Message::Wanted(id)) => events.wanted(id),
        None => {}
    }
}

fn message(push: &PushInfo) -> Option<Message> {
    // The second kind is for a channel in a slot of a cluster.
    let is_message = matches!(push.kind, PushKind::Message | PushKind::SMessage);
    match push.data.get(1) {
        Some(Value::BulkString(message)) if is_message => parse(message),
        _ => None,
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Message {
    /// `<id> <ticket>`
    Granted(Wake),
    /// `<id> again <ms>`
    Again(Id, Duration),
    /// `<id> wanted`
    Wanted(Id),
}

/// A message of any other form does not come from the scripts of this library, and is ignored.
fn parse(message: &[u8]) -> Option<Message> {
    let (id, what) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    let id = Id::parse(id)?;
    if what == "wanted" {
        return Some(Message::Wanted(id));
    }
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
    use crate::backend::News;

    #[test]
    fn a_message_that_no_script_sends_is_ignored() {
        let id = Id::draw().unwrap();
        let wake = parse(format!("{id} 17").as_bytes());
        assert_eq!(wake, Some(Message::Granted(Wake { id, ticket: 17 })));
        let again = parse(format!("{id} again 17").as_bytes());
        assert_eq!(again, Some(Message::Again(id, Duration::from_millis(17))));
        let wanted = parse(format!("{id} wanted").as_bytes());
        assert_eq!(wanted, Some(Message::Wanted(id)));

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
            b"00000000000000000000000000000000 wanted ",
            b"00000000000000000000000000000000 again  1",
        ] {
            assert_eq!(parse(forged), None, "{forged:?}");
        }
    }

    #[test]
    fn a_message_that_is_not_certain_makes_a_ticket_ask_and_grants_nothing() {
        let (send, told) = std::sync::mpsc::channel();
        let namespace = crate::name::Namespace::new("test").unwrap();
        let events = EventSink::new(1, namespace, move |news| send.send(news).unwrap());
        let id = Id::draw().unwrap();
        let push = |text: String| PushInfo {
            kind: PushKind::SMessage,
            data: vec![Value::Nil, Value::BulkString(text.into_bytes())],
        };

        tell(&events, &push(format!("{id} 17")), false);
        tell(&events, &push(format!("{id} again 17")), false);
        tell(&events, &push("17".into()), false);

        drop(events);
        let after = [Duration::ZERO, Duration::from_millis(17)];
        let expected = after.map(|after| News::Recheck(id, after));
        assert_eq!(told.iter().collect::<Vec<_>>(), expected);
    }
}
