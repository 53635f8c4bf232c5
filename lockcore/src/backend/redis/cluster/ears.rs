//! The connection on which a node sends wake-ups to waiters and ask-backs to holders.
//!
//! It is used for subscriptions only. When a slot leaves a node, the server ends the subscriptions
//! in it with a message that no request has asked for. The driver takes this message for the answer
//! to the oldest request that is in flight. From then on, every answer would go to the wrong
//! request. If a connection has only subscriptions, this costs nothing but another connection.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures_util::future::join_all;
use redis::aio::MultiplexedConnection;
use redis::{PushInfo, PushKind, Value};
use tokio::sync::{mpsc, watch};

use super::context::Context;
use super::slots;
use crate::backend::redis::dial::{Server, settings};
use crate::backend::redis::errors::failed;
use crate::backend::redis::task::Task;
use crate::backend::redis::views::Address;
use crate::backend::redis::{events, layout};
use crate::backend::{Fault, StoreError};

/// The slots in which this client listens at one node.
#[derive(Debug)]
pub(super) struct Ears {
    shared: Arc<Shared>,
    wishes: mpsc::UnboundedSender<u16>,
    _task: Task,
}

#[derive(Debug)]
struct Shared {
    node: Address,
    context: Context,
    heard: watch::Sender<Heard>,
    /// The slots whose subscriptions this client is ending.
    leaving: Mutex<HashSet<u16>>,
}

#[derive(Debug, Default)]
struct Heard {
    /// The slots whose subscriptions the server has confirmed.
    slots: BTreeSet<u16>,
    /// The slots whose subscriptions the server has refused.
    refused: HashMap<u16, StoreError>,
    /// Why the connection is broken, if it is.
    ended: Option<StoreError>,
}

const LOST: &str = "the connection for wake-ups is lost";

impl Ears {
    pub(super) fn open(context: &Context, node: Address, server: Arc<Server>) -> Self {
        let shared = Arc::new(Shared {
            node,
            context: context.clone(),
            heard: watch::Sender::default(),
            leaving: Mutex::default(),
        });
        let (wishes, mut wished) = mpsc::unbounded_channel();
        let listens = Arc::clone(&shared);
        let task = Task::spawn(&context.runtime, async move {
            let reason = listens.listen(&server, &mut wished).await;
            let heard_any = listens.heard.send_replace(Heard {
                ended: Some(reason),
                ..Heard::default()
            });
            drop(wished); // not before the reason is known
            if !heard_any.slots.is_empty() {
                listens.missed();
            }
        });
        Self {
            shared,
            wishes,
            _task: task,
        }
    }

    pub(super) fn hears(&self, slot: u16) -> bool {
        self.shared.heard.borrow().slots.contains(&slot)
    }

    pub(super) fn have_ended(&self) -> bool {
        self.shared.heard.borrow().ended.is_some() || self.wishes.is_closed()
    }

    /// Begins to listen in a slot.
    pub(super) fn wish(&self, slot: u16) {
        self.shared.heard.send_if_modified(|heard| {
            heard.refused.remove(&slot);
            false
        });
        let _ = self.wishes.send(slot); // if the task has ended, `heard` says so
    }

    /// Resolves when this client listens in the slot.
    pub(super) async fn until_heard(&self, slot: u16) -> Result<(), StoreError> {
        let mut heard = self.shared.heard.subscribe();
        let is_settled = |heard: &Heard| {
            let is_refused = heard.refused.contains_key(&slot);
            heard.slots.contains(&slot) || is_refused || heard.ended.is_some()
        };
        let settled = tokio::select! {
            biased;
            settled = heard.wait_for(is_settled) => settled.ok(),
            // The task has ended with its runtime.
            () = self.wishes.closed() => None,
        };
        let error = match settled.as_deref() {
            Some(heard) if heard.slots.contains(&slot) => return Ok(()),
            Some(heard) => heard.refused.get(&slot).or(heard.ended.as_ref()).cloned(),
            None => None,
        };
        Err(error.unwrap_or_else(|| StoreError::new(Fault::Retry, LOST)))
    }
}

impl Shared {
    /// Runs until the connection ends. Returns the reason.
    async fn listen(
        self: &Arc<Self>,
        server: &Arc<Server>,
        wished: &mut mpsc::UnboundedReceiver<u16>,
    ) -> StoreError {
        let sink = Arc::clone(self);
        let config = settings().set_push_sender(move |push: PushInfo| {
            sink.pushed(&push);
            Ok::<_, Infallible>(())
        });
        let events = Weak::clone(&self.context.events);
        let opened = server.open(config, events, async |_| Ok(())).await;
        let (connection, driver, ()) = match opened {
            Ok(opened) => opened,
            Err(error) => return error,
        };
        let serve = async {
            let mut looked = Looked::default();
            while let Some(slot) = wished.recv().await {
                let mut batch = HashSet::from([slot]);
                while let Ok(slot) = wished.try_recv() {
                    batch.insert(slot);
                }
                if !self.subscribe(&connection, batch, &mut looked).await {
                    return;
                }
            }
        };
        tokio::select! {
            () = driver.ended() => {}
            () = serve => {}
        }
        server.because(Fault::Retry, LOST)
    }

    /// Subscribes in these slots, and ends a few of the subscriptions that no ticket needs any more.
    /// Returns whether the connection can be used further.
    async fn subscribe(
        &self,
        connection: &MultiplexedConnection,
        slots: HashSet<u16>,
        looked: &mut Looked,
    ) -> bool {
        let unneeded = self.unneeded(looked, slots.len());
        let requests = slots.iter().map(|slot| (PushKind::SSubscribe, *slot));
        let leaves = unneeded.iter().map(|slot| (PushKind::SUnsubscribe, *slot));
        let Context {
            namespace,
            receiver,
            ..
        } = &self.context;
        let requests = requests.chain(leaves).map(|(kind, slot)| {
            let verb = match kind {
                PushKind::SSubscribe => "SSUBSCRIBE",
                _ => "SUNSUBSCRIBE",
            };
            let channel = layout::wake_channel(namespace, &slots::channel(*receiver, slot));
            let request = redis::cmd(verb).arg(&channel).take();
            let mut connection = connection.clone();
            async move {
                let answer = request.query_async::<Value>(&mut connection).await;
                (
                    slot,
                    answer.map(|answer| is_answer(&answer, &kind, &channel)),
                )
            }
        });
        // All requests are sent together.
        let answers = join_all(requests).await;
        let mut elsewhere = false;
        for (slot, answer) in answers {
            let error = match answer {
                // `pushed` has handled this message.
                Ok(true) => continue,
                // This message is the answer to another request, or to none. From now on all
                // answers are mixed up.
                Ok(false) => return false,
                // The node has answered with a redirect, because it does not serve the slot. The
                // slot has moved to another node, or its move to this node is not complete. This
                // client then reads the map of slots again. Until it listens at the right node, the
                // waiter rechecks at short intervals.
                Err(error) if error.redirect_node().is_some() => {
                    elsewhere = true;
                    StoreError::new(Fault::Retry, "the slot is at another node by now")
                }
                Err(error) => failed(error),
            };
            if error.is_broken() {
                return false;
            }
            self.leaving().remove(&slot);
            self.heard.send_modify(|heard| {
                heard.refused.insert(slot, error);
            });
        }
        if elsewhere && let Some(whole) = self.context.whole.upgrade() {
            whole.refresh();
        }
        true
    }

    /// Some slots in which this receiver has no ticket any more that may get a message. From now on
    /// `hears` returns `false` for them. `begun` is how many subscriptions begin.
    fn unneeded(&self, looked: &mut Looked, begun: usize) -> Vec<u16> {
        let mut unneeded = Vec::new();
        self.heard.send_if_modified(|heard| {
            unneeded = looked.next(&heard.slots, begun);
            unneeded.retain(|slot| !self.context.wants(*slot));
            for slot in &unneeded {
                heard.slots.remove(slot);
            }
            false
        });
        // A new request first calls `Receivers::want` and then `hears`. If it called `hears` before
        // the slot was taken out above, its `want` can be seen here.
        let (again, unneeded): (Vec<_>, Vec<_>) = unneeded
            .into_iter()
            .partition(|slot| self.context.wants(*slot));
        if !again.is_empty() {
            self.heard.send_modify(|heard| heard.slots.extend(again));
        }
        self.leaving().extend(&unneeded);
        unneeded
    }

    /// Handles a message. Runs inside the connection's driver.
    fn pushed(&self, push: &PushInfo) {
        let slot = || match push.data.first() {
            Some(Value::BulkString(channel)) => std::str::from_utf8(channel).ok().map(slots::of),
            _ => None,
        };
        match push.kind {
            PushKind::SSubscribe => {
                if let Some(slot) = slot() {
                    self.heard.send_modify(|heard| {
                        heard.slots.insert(slot);
                    });
                }
            }
            PushKind::SUnsubscribe => {
                let Some(slot) = slot() else { return };
                self.heard.send_modify(|heard| {
                    heard.slots.remove(&slot);
                });
                // If this client has not asked for this, the slot has left the node.
                if !self.leaving().remove(&slot) {
                    self.missed();
                }
            }
            PushKind::SMessage => {
                let Some(slot) = slot() else { return };
                // A replica passes on the messages of its master. The master does not count the
                // receivers at its replicas, so it may have cut the grant short. So a message from
                // a replica must not be believed. But if the map is out of date, this node may be
                // the master, and this is the only message. So the ticket then rechecks at once.
                let whole = self.context.whole.upgrade();
                let is_counted = whole.is_some_and(|whole| whole.serves(slot, &self.node));
                if let Some(events) = self.context.events.upgrade() {
                    events::tell(&events, push, is_counted);
                }
            }
            _ => {}
        }
    }

    /// Called when wake-ups may have been lost, and the slots may be at another node.
    fn missed(&self) {
        if let Some(events) = self.context.events.upgrade() {
            events.gap();
        }
        if let Some(whole) = self.context.whole.upgrade() {
            whole.refresh();
        }
    }

    fn leaving(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Which of the slots were looked at the last time: those before this one.
#[derive(Debug, Default)]
struct Looked(u16);

impl Looked {
    /// The next slots to look at, in a circle: twice as many as subscriptions begin. A circle is over
    /// when half as many subscriptions have begun as there are slots. So at most about half of the
    /// subscriptions are of slots that no ticket needs any more, and no subscription costs a look at
    /// all of them.
    fn next(&mut self, slots: &BTreeSet<u16>, begun: usize) -> Vec<u16> {
        let circle = slots.range(self.0..).chain(slots.range(..self.0));
        let next: Vec<_> = circle.take(2 * begun).copied().collect();
        self.0 = next.last().map_or(0, |last| last + 1);
        next
    }
}

/// Whether this message is the answer to a request of this kind for this channel.
fn is_answer(answer: &Value, asked: &PushKind, channel: &str) -> bool {
    let Value::Push { kind, data } = answer else {
        return false;
    };
    let of = |first: &Value| matches!(first, Value::BulkString(of) if of == channel.as_bytes());
    kind == asked && data.first().is_some_and(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subscription_looks_at_few_others_and_all_are_looked_at_in_turn() {
        let slots: BTreeSet<u16> = (0..1_000).map(|at| 16_383 - 16 * at).collect();
        let mut looked = Looked::default();

        let nexts: Vec<_> = (0..500).map(|_| looked.next(&slots, 1)).collect();

        assert!(nexts.iter().all(|next| next.len() == 2));
        assert!(nexts.concat().into_iter().eq(slots.iter().copied()));
        assert_eq!(looked.next(&slots, 5_000).len(), slots.len());
        assert!(looked.next(&BTreeSet::new(), 1).is_empty());
    }

    #[test]
    fn a_message_about_another_slot_or_of_another_kind_is_no_answer() {
        let push = |kind: &str, channel: &str| {
            let (of, length) = (kind.len(), channel.len());
            let text = format!(">3\r\n${of}\r\n{kind}\r\n${length}\r\n{channel}\r\n:1\r\n");
            redis::parse_redis_value(text.as_bytes()).unwrap()
        };
        let is_answer = |answer| is_answer(&answer, &PushKind::SSubscribe, "wake:1{a}");

        assert!(is_answer(push("ssubscribe", "wake:1{a}")));
        // The slot has left the node, and no request has asked for this message.
        assert!(!is_answer(push("sunsubscribe", "wake:1{b}")));
        assert!(!is_answer(push("sunsubscribe", "wake:1{a}")));
        assert!(!is_answer(push("ssubscribe", "wake:1{b}")));
        assert!(!is_answer(push("smessage", "wake:1{a}")));
        assert!(!is_answer(Value::Okay));
    }
}
