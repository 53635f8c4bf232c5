//! The counters that a connection watches.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::{PushInfo, PushKind, Value};

use crate::backend::EventSink;
use crate::name::Name;

/// The watched counters, by their channels.
#[derive(Debug, Default)]
pub(super) struct Watched(Mutex<HashMap<String, Name>>);

impl Watched {
    /// If the message says that a watched counter has changed, tells the core. Returns whether the
    /// message was about a watched counter.
    pub(super) fn tell(&self, events: &EventSink, push: &PushInfo) -> bool {
        if push.kind != PushKind::Message {
            return false;
        }
        let Some(Value::BulkString(channel)) = push.data.first() else {
            return false;
        };
        let channel = std::str::from_utf8(channel).unwrap_or_default();
        let name = self.names().get(channel).cloned();
        let is_known = name.is_some();
        if let Some(name) = name {
            events.changed(name);
        }
        is_known
    }

    pub(super) fn names(&self) -> MutexGuard<'_, HashMap<String, Name>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
