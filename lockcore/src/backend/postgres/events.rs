//! Notifications: from the text of the server to the wake-ups and rechecks of the core, and which
//! channels a connection listens to.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use sha2::{Digest as _, Sha256};
use tokio_postgres::{AsyncMessage, Client, Notification};

use super::calls::VERSION;
use super::dial::Hears;
use super::durable::Warnings;
use super::waits::Waits;
use crate::backend::table;
use crate::backend::{EventSink, Wake};
use crate::name::Name;
use crate::request::Id;

/// The channel of the wake-ups for this receiver. The functions of the schema write it too.
pub(super) fn channel(receiver: u64) -> String {
    format!("lockcore1.{}", receiver.cast_signed())
}

/// The channel of a counter. The name of a channel has at most 63 bytes, so it is a hash.
pub(super) fn channel_of_counter(name: &Name) -> String {
    let digest = Sha256::digest(table::key(name, VERSION).as_bytes());
    let digits = digest[..16].iter().map(|byte| format!("{byte:02x}"));
    digits.fold("lockcore1.c.".to_owned(), |channel, byte| channel + &byte)
}

/// What a connection hears.
#[derive(Debug)]
pub(super) struct Ears {
    receiver: u64,
    waits: Arc<Waits>,
    listens: Mutex<bool>,
    /// The counters that are watched on this connection, by their channels.
    watched: Mutex<HashMap<String, Name>>,
    /// Whether the [greeting](GREETING) has come.
    greeted: AtomicBool,
}

/// A message by which a new connection finds out whether messages reach it at all.
pub(super) const GREETING: &str = "hello";

impl Ears {
    pub(super) fn new(receiver: u64, waits: Arc<Waits>) -> Self {
        Self {
            receiver,
            waits,
            listens: Mutex::new(false),
            watched: Mutex::default(),
            greeted: AtomicBool::new(false),
        }
    }

    /// Returns what the driver of the connection does with its messages. This runs inside the
    /// driver, so no other task has to run before a wake-up reaches its waiter. When the connection
    /// ends, the driver drops `events`, and the core learns of the end.
    pub(super) fn hear(self: &Arc<Self>, events: &Arc<EventSink>, warnings: &Warnings) -> Hears {
        let (ears, events) = (Arc::clone(self), Arc::clone(events));
        let warnings = warnings.clone();
        Box::new(move |message| match message {
            AsyncMessage::Notification(notification) => ears.tell(&events, &notification),
            message => warnings.take(&message),
        })
    }

    fn tell(&self, events: &EventSink, notification: &Notification) {
        let name = self.watched().get(notification.channel()).cloned();
        if let Some(name) = name {
            return events.changed(name);
        }
        if notification.payload() == GREETING {
            self.greeted.store(true, Ordering::Release);
        }
        for message in notification.payload().split(',') {
            match parse(message) {
                Some(Message::Granted(wake)) if self.waits.is_due(wake) => events.granted(wake),
                Some(Message::Again(id, after)) => events.recheck(id, after),
                Some(Message::Granted(_)) | None => {}
            }
        }
    }

    /// Runs `begin`, which begins to wait for something. Returns whether the connection listens. It
    /// does not stop to listen between the two.
    pub(super) fn listens_after(&self, begin: impl FnOnce()) -> bool {
        let listens = self.listens();
        begin();
        *listens
    }

    /// The connection listens from now on: a request has made it do so.
    pub(super) fn begun(&self) {
        *self.listens() = true;
    }

    /// Stops to listen if no ticket waits.
    ///
    /// The requests of a connection are carried out in the order in which they are sent, and this
    /// request is sent before `listens_after` can return again. So the next ticket that waits makes
    /// the connection listen again, and this cannot undo it. Nobody needs the answer.
    pub(super) fn stop(&self, client: &Client) {
        let mut listens = self.listens();
        if *listens && !self.waits.is_any_of(self.receiver) {
            *listens = false;
            let text = format!("UNLISTEN \"{}\"", channel(self.receiver));
            let _ = client.batch_execute(&text).now_or_never();
        }
    }

    pub(super) fn receiver(&self) -> u64 {
        self.receiver
    }

    pub(super) fn is_greeted(&self) -> bool {
        self.greeted.load(Ordering::Acquire)
    }

    pub(super) fn is_listening(&self) -> bool {
        *self.listens()
    }

    pub(super) fn watched(&self) -> MutexGuard<'_, HashMap<String, Name>> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listens(&self) -> MutexGuard<'_, bool> {
        self.listens.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Message {
    /// `<id> <ticket>`
    Granted(Wake),
    /// `<id> again <ms>`
    Again(Id, Duration),
}

/// A message of any other form does not come from the functions of the schema, and is ignored.
/// Every user of the database can send messages, but only the client and the server know an id.
fn parse(message: &str) -> Option<Message> {
    let (id, what) = message.split_once(' ')?;
    let id = Id::parse(id)?;
    Some(match what.strip_prefix("again ") {
        Some(millis) => Message::Again(id, Duration::from_millis(millis.parse().ok()?)),
        None => Message::Granted(Wake::new(id, what.parse().ok()?)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_that_no_function_sends_is_ignored() {
        let id = Id::draw().unwrap();
        let wake = parse(&format!("{id} 17"));
        assert_eq!(wake, Some(Message::Granted(Wake::new(id, 17))));
        let again = parse(&format!("{id} again 17"));
        assert_eq!(again, Some(Message::Again(id, Duration::from_millis(17))));

        let zeros = "0".repeat(32);
        for forged in [
            "",
            "17",
            " 17",
            "abc 17",
            zeros.as_str(),
            &format!("{zeros} "),
            &format!("{zeros} -1"),
            &format!("{zeros} again"),
            &format!("{zeros} again -1"),
            &format!("{zeros} again  1"),
        ] {
            assert_eq!(parse(forged), None, "{forged:?}");
        }
    }

    #[test]
    fn a_channel_of_a_counter_is_short_and_its_own() {
        let name = |text: &str| {
            Name::new(
                crate::name::Namespace::new("test").unwrap(),
                text.repeat(900),
            )
            .unwrap()
        };
        let channel = channel_of_counter(&name("a"));
        assert!(channel.len() < 64, "{channel}");
        assert_ne!(channel, channel_of_counter(&name("b")));
        assert_ne!(channel, channel_of_counter(&name("a").value()));
    }
}
