//! What a client tells its listeners: trouble with the store, locks that were lost, and the grants
//! of each lock. See [`Locks::events`](crate::Locks::events).

pub use crate::client::events::{Event, EventListener, GrantEvent, GrantListener};
