//! The answers of the sentinels, and the master that follows from them.

use std::fmt;

use redis::{PushInfo, PushKind, Value};

use crate::backend::StoreError;

/// The channel on which a sentinel says that a master has changed: `<service> <old host> <old port>
/// <new host> <new port>`.
pub(super) const SWITCH: &str = "+switch-master";

/// A server as sentinels, or the nodes of a cluster, name it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// The answer of one sentinel.
#[derive(Clone, Debug)]
pub(super) enum View {
    /// The sentinel has not answered yet.
    Asked,
    /// The sentinel names this master, and will send a message if the master changes.
    Names(Address),
    /// The sentinel could not be asked, or its connection has ended.
    Failed(StoreError),
}

/// The answer of each sentinel, in the order of the URL.
#[derive(Clone, Debug)]
pub(super) struct Views(pub(super) Vec<View>);

impl Views {
    /// The server that most sentinels name, and how many of them name it.
    fn best(&self) -> Option<(&Address, usize)> {
        let named = self.0.iter().filter_map(|view| match view {
            View::Names(master) => Some(master),
            View::Asked | View::Failed(_) => None,
        });
        let count = |master: &Address| named.clone().filter(|other| *other == master).count();
        let counted = named.clone().map(|master| (master, count(master)));
        counted.max_by_key(|(_, count)| *count)
    }

    /// The server that a majority names.
    pub(super) fn master(&self) -> Option<&Address> {
        let (master, count) = self.best()?;
        is_majority(count, self.0.len()).then_some(master)
    }

    /// Whether a majority is impossible, whatever the missing answers are.
    pub(super) fn cannot_agree(&self) -> bool {
        let asked = self.0.iter().filter(|view| matches!(view, View::Asked));
        let best = self.best().map_or(0, |(_, count)| count);
        !is_majority(best + asked.count(), self.0.len())
    }
}

pub(super) fn is_majority(some: usize, all: usize) -> bool {
    2 * some > all
}

/// The new master of the service, if the message is about this service.
pub(super) fn switched_to(push: &PushInfo, service: &str) -> Option<Address> {
    let [Value::BulkString(channel), Value::BulkString(message)] = &push.data[..] else {
        return None;
    };
    if push.kind != PushKind::Message || channel != SWITCH.as_bytes() {
        return None;
    }
    let words: Vec<_> = std::str::from_utf8(message).ok()?.split(' ').collect();
    match words[..] {
        [of, _, _, host, port] if of == service => Some(Address {
            host: host.to_owned(),
            port: port.parse().ok()?,
        }),
        _ => None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::backend::Fault;

    pub(in crate::backend::redis) fn names(server: &str) -> View {
        View::Names(Address {
            host: server.into(),
            port: 1,
        })
    }

    pub(in crate::backend::redis) fn failed(fault: Fault) -> View {
        View::Failed(StoreError::new(fault, "said why"))
    }

    #[test]
    fn the_master_is_the_server_that_a_majority_of_all_sentinels_names() {
        let (retry, config) = (failed(Fault::Retry), failed(Fault::Config));
        for (views, master, cannot_agree) in [
            (vec![names("a"), View::Asked, View::Asked], None, false),
            (vec![names("a"), names("b"), View::Asked], None, false),
            (vec![names("a"), names("b"), names("b")], Some("b"), false),
            (vec![names("a"), names("b"), names("c")], None, true),
            (vec![names("a"), retry.clone(), View::Asked], None, false),
            (vec![names("a"), retry.clone(), config.clone()], None, true),
            (vec![names("a"), names("b")], None, true),
            (
                vec![names("a"), names("a"), names("b"), names("b")],
                None,
                true,
            ),
            (vec![names("a")], Some("a"), false),
        ] {
            let views = Views(views);
            let found = views.master().map(|master| master.host.as_str());
            assert_eq!(found, master, "{views:?}");
            let is_hopeless = master.is_none() && views.cannot_agree();
            assert_eq!(is_hopeless, cannot_agree, "{views:?}");
        }
    }

    #[test]
    fn only_a_message_about_the_service_names_another_master() {
        let push = |kind: PushKind, channel: &str, message: &str| PushInfo {
            kind,
            data: [channel, message]
                .map(|text| Value::BulkString(text.as_bytes().to_vec()))
                .to_vec(),
        };
        let about = |message| switched_to(&push(PushKind::Message, SWITCH, message), "s");

        let to = about("s 10.0.0.1 6379 10.0.0.2 6380").unwrap();
        assert_eq!(to.to_string(), "10.0.0.2:6380");
        for other in [
            "t 10.0.0.1 6379 10.0.0.2 6380",
            "s 10.0.0.1 6379 10.0.0.2",
            "s 10.0.0.1 6379 10.0.0.2 port",
            "s",
            "",
        ] {
            assert_eq!(about(other), None, "{other}");
        }
        let elsewhere = push(PushKind::Message, "+sdown", "s a 1 b 2");
        assert_eq!(switched_to(&elsewhere, "s"), None);
        let answer = push(PushKind::Subscribe, SWITCH, "s a 1 b 2");
        assert_eq!(switched_to(&answer, "s"), None);
    }
}
