//! Chooses the node that a request goes to, and keeps the map of the cluster. If an answer shows
//! that the map is out of date, or if no answer comes, this module asks for a new map.

use std::collections::{BTreeSet, HashMap};
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::context::Context;
use super::map::{Map, known_host};
use super::nodes::Node;
use super::seeds::Seeds;
use super::slots;
use super::whole::Whole;
use crate::backend::events::Timer;
use crate::backend::redis::connection::RedisConnection;
use crate::backend::redis::hop::{Hop, Redirect};
use crate::backend::redis::owed::Owed;
use crate::backend::redis::task::Task;
use crate::backend::redis::tickets;
use crate::backend::redis::views::Address;
use crate::backend::{Departure, EventSink, Fault, StoreError};
use crate::name::Name;

/// One connection to the cluster.
#[derive(Debug)]
pub(super) struct Routes {
    pub(super) context: Context,
    state: Mutex<State>,
    /// Wakes the tasks that repeat releases and changes.
    new_map: watch::Sender<()>,
    _repeats: Task,
}

#[derive(Debug)]
struct State {
    map: Map,
    nodes: HashMap<Address, Arc<Node>>,
    /// The nodes that were given up because they were silent.
    given_up: BTreeSet<Address>,
    /// The task in which this connection asks for the map, for all connections.
    refresh: Option<Task>,
    /// The task that owns the sink of events.
    alive: Option<Task>,
}

/// An answer, and the node that has sent it.
pub(super) struct Answered<T> {
    pub(super) answer: T,
    pub(super) node: Arc<Node>,
    /// Whether this client listened at the node for messages in this slot before it sent the
    /// request.
    pub(super) heard: bool,
    /// Whether the slot is being moved to the node. Such a node accepts requests for single names,
    /// but no subscriptions yet.
    pub(super) ahead: bool,
}

impl Routes {
    pub(super) fn begin(seeds: Arc<Seeds>, events: EventSink, map: Map) -> Arc<Self> {
        let (namespace, receiver) = (events.namespace().clone(), events.receiver());
        let (op_timeout, timer) = (events.op_timeout(), events.timer());
        let events = Arc::new(events);
        let runtime = Handle::current();
        let sink = Arc::downgrade(&events);
        let alive = Task::spawn(&runtime, async move {
            let _events = events;
            std::future::pending::<()>().await;
        });
        let new_map = watch::Sender::new(());
        let routes = Arc::new_cyclic(|whole: &Weak<Self>| Self {
            _repeats: Task::spawn(
                &runtime,
                Self::repeats_releases(
                    Weak::clone(whole),
                    Arc::clone(&seeds.owed),
                    timer,
                    new_map.subscribe(),
                ),
            ),
            new_map,
            context: Context {
                seeds,
                namespace,
                receiver,
                op_timeout,
                runtime,
                events: sink,
                whole: whole.clone(),
            },
            state: Mutex::new(State {
                map: map.clone(),
                nodes: HashMap::new(),
                given_up: BTreeSet::new(),
                refresh: None,
                alive: Some(alive),
            }),
        });
        let whole = Weak::clone(&routes.context.whole);
        let receivers = &routes.context.seeds.receivers;
        receivers.begin(receiver, whole);
        // The other connections get the map too. Without this, a connection that is not used would
        // not notice that a master was replaced.
        let mut is_old = false;
        for connection in receivers.connections() {
            match connection.knows_newer(&map) {
                true => is_old = true,
                false => connection.adopt(&map),
            }
        }
        if is_old {
            routes.ask_again();
        }
        routes
    }

    /// Sends a request to the node that serves a slot. If that node redirects the request to
    /// another node, sends the request there, once.
    pub(super) async fn ask<T, F>(
        self: &Arc<Self>,
        slot: u16,
        verb: impl Fn(RedisConnection) -> F,
    ) -> Result<Answered<T>, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        if self.context.seeds.question.is_wished() {
            self.ask_again();
        }
        let node = self.reached(slot).await?;
        let hop = Hop::default();
        let error = match self.ask_at(&node, slot, &hop, &verb).await {
            Ok(answered) => return Ok(answered),
            Err(error) => error,
        };
        let Some(redirect) = hop.redirect() else {
            return Err(error);
        };
        if !redirect.asking {
            // Other slots may have moved too, for example because the node was demoted.
            self.ask_again();
        }
        let Some(node) = self.follow(slot, &node, redirect) else {
            let (from, to) = (&node.address, &redirect.to);
            let text = format!(
                "{from} says that the slot {slot} is at \"{to}\", which is no address of another node; \
                 see CLUSTER SHARDS there"
            );
            return Err(StoreError::new(Fault::Retry, text));
        };
        let hop = Hop {
            asking: redirect.asking,
            ..Hop::default()
        };
        let outcome = self.ask_at(&node, slot, &hop, &verb).await;
        match (outcome, hop.redirect()) {
            (Err(_), Some(_)) => {
                let text = format!(
                    "the slot {slot} is on its way to another node of the cluster; try again when it has arrived"
                );
                Err(StoreError::new(Fault::Retry, text))
            }
            (outcome, _) => outcome,
        }
    }

    /// Returns the node that serves a slot, after waiting for its connection. If the node cannot be
    /// reached, no request was sent. In this case the function asks for the map, and returns the
    /// node of the new map.
    async fn reached(self: &Arc<Self>, slot: u16) -> Result<Arc<Node>, StoreError> {
        let node = self.master_of(slot)?;
        let asks = Asks::begin(self, &node);
        let link = node.link().await;
        asks.end(false);
        match link {
            Err(error) if error.fault() == Fault::Retry => {
                self.refreshed().await;
                self.master_of(slot)
            }
            _ => Ok(node),
        }
    }

    async fn ask_at<T, F>(
        self: &Arc<Self>,
        node: &Arc<Node>,
        slot: u16,
        hop: &Hop,
        verb: &impl Fn(RedisConnection) -> F,
    ) -> Result<Answered<T>, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let asks = Asks::begin(self, node);
        let mut heard = false;
        let (outcome, is_answered) = match node.link().await {
            Ok(mut link) => {
                link.channel = slots::channel(self.context.receiver, slot);
                link.hop = Some(Hop {
                    node: Arc::clone(&node.label),
                    ..hop.clone()
                });
                heard = node.hears(slot) && !hop.asking;
                let outcome = verb(link).await;
                // A conflict with another task of this client was found without asking the node.
                let is_unasked = |error: &StoreError| error.is_broken() || error.is_conflict();
                let is_answered = !outcome.as_ref().is_err_and(is_unasked);
                (outcome, is_answered)
            }
            Err(error) => (Err(error), false),
        };
        asks.end(is_answered);
        match outcome {
            Ok(answer) => Ok(Answered {
                answer,
                node: Arc::clone(node),
                heard,
                ahead: hop.asking,
            }),
            Err(error) => Err(self.understood(node, error)),
        }
    }

    /// Reacts to an error from a node, and returns the error for the core. The returned error never
    /// says that the connection is broken, because only the connection to this node may be broken.
    /// The connections to the other nodes work.
    pub(super) fn understood(self: &Arc<Self>, node: &Arc<Node>, error: StoreError) -> StoreError {
        match (error.fault(), error.is_broken()) {
            // The node refuses every request on this connection, because it has become a replica.
            (Fault::Retry, true) => {
                self.leave(node);
            }
            (Fault::Retry | Fault::Unknown, _) => self.ask_again(),
            (Fault::Config | Fault::Refused, _) => {}
        }
        match error.is_broken() {
            true => StoreError::new(error.fault(), error.to_string()),
            false => error,
        }
    }

    /// The node that serves a slot.
    fn master_of(self: &Arc<Self>, slot: u16) -> Result<Arc<Node>, StoreError> {
        let node = {
            let state = &mut *self.state();
            let master = state.map.master(slot).cloned();
            master.map(|address| self.node(state, address))
        };
        node.ok_or_else(|| {
            self.ask_again();
            let text = format!("no node of the cluster serves the slot {slot}; see CLUSTER SHARDS");
            StoreError::new(Fault::Retry, text)
        })
    }

    fn node(self: &Arc<Self>, state: &mut State, address: Address) -> Arc<Node> {
        match state.nodes.get(&address) {
            Some(node) if !node.is_gone() => Arc::clone(node),
            _ => {
                let node = Node::open(&self.context, address.clone());
                state.nodes.insert(address, Arc::clone(&node));
                node
            }
        }
    }

    /// The node that a redirect names. `None` if it names the node that has sent the redirect.
    fn follow(self: &Arc<Self>, slot: u16, from: &Node, redirect: &Redirect) -> Option<Arc<Node>> {
        let to = address(&redirect.to, &from.address).filter(|to| *to != from.address)?;
        let state = &mut *self.state();
        if !redirect.asking {
            state.map.moved(slot, to.clone());
        }
        let node = self.node(state, to);
        if redirect.asking {
            node.will_have_slots();
        }
        Some(node)
    }

    /// Asks for the map again, for all connections of the client, unless a question has just begun.
    fn ask_again(self: &Arc<Self>) {
        let Context {
            seeds,
            namespace,
            runtime,
            ..
        } = &self.context;
        let Some(round) = seeds.question.begin(self.context.op_timeout) else {
            return;
        };
        let nodes = self.nodes_to_ask();
        let (seeds, namespace) = (Arc::clone(seeds), namespace.clone());
        let task = Task::spawn(runtime, async move {
            let told = seeds.ask(nodes, &namespace).await;
            if !round.is_latest() {
                return;
            }
            for connection in seeds.receivers.connections() {
                match &told {
                    Ok(map) => connection.adopt(map),
                    // No node is left to ask. As after a break, the core connects again.
                    Err(error) => connection.end(error),
                }
            }
        });
        let given_up = self.state().refresh.replace(task);
        drop(given_up); // outside of the mutex, because the drop cancels the task
    }

    /// Repeats the releases whose names are at other masters by now than the ones that have
    /// acknowledged them. It begins with each new map, on all connections, because the runtime of one
    /// of them may not run.
    async fn repeats_releases(
        routes: Weak<Self>,
        owed: Arc<Owed>,
        timer: Timer,
        mut new_maps: watch::Receiver<()>,
    ) {
        let masters = || {
            let map = routes.upgrade()?.map();
            Some(move |name: &Name| {
                let master = map.master(slots::of_name(name))?;
                Some(master.to_string().into())
            })
        };
        let send = async |batch: Vec<Departure>| {
            let Some(routes) = routes.upgrade() else {
                return Vec::new(); // the client ends
            };
            let released = batch.into_iter().map(|departure| {
                let (routes, timer) = (&routes, &timer);
                async move {
                    let slot = slots::of_name(&departure.request.name);
                    let verb = |link| tickets::release(link, vec![departure.clone()]);
                    tokio::select! {
                        answer = routes.ask(slot, verb) => answer.ok()?.answer.first().copied(),
                        () = timer(routes.context.op_timeout) => None,
                    }
                }
            });
            join_all(released).await
        };
        while new_maps.changed().await.is_ok() {
            owed.repeat(masters, send, &timer).await;
        }
    }

    fn nodes_to_ask(&self) -> BTreeSet<Address> {
        let state = self.state();
        let silent = self.context.silent();
        let nodes = state.nodes.values().filter(|node| node.silence() < silent);
        let mut nodes: BTreeSet<_> = nodes.map(|node| node.address.clone()).collect();
        nodes.extend(state.map.masters());
        nodes.extend(self.context.seeds.addresses.iter().cloned());
        nodes
    }

    /// Asks for the map, unless a question has just begun. Resolves when no question is unanswered.
    async fn refreshed(self: &Arc<Self>) {
        self.ask_again();
        self.context.seeds.question.until_over().await;
    }

    /// Asks a node for its time, after a request to it was dropped without an answer. The answer to
    /// that request may still come, or may have come without being looked at. If the node then
    /// answers nothing, and has been silent for too long, it is given up.
    ///
    /// One question at a time is enough.
    fn probe(self: &Arc<Self>, node: &Arc<Node>) {
        let Some(timer) = self.context.events.upgrade().map(|sink| sink.timer()) else {
            return; // the runtime of the connection has ended
        };
        if !node.begin_probe() {
            return;
        }
        let silent = self.context.silent();
        // Half of the silence is enough: a node that is up answers this at once. The renewals of a
        // lease with a short ttl cannot wait for longer.
        let (answer, patience) = (node.tells_time(), timer(silent / 2));
        let (routes, node) = (Arc::downgrade(self), Arc::downgrade(node));
        self.context.runtime.spawn(async move {
            let is_answered = tokio::select! {
                biased;
                is_answered = answer => is_answered,
                () = patience => false,
            };
            let (Some(routes), Some(node)) = (routes.upgrade(), node.upgrade()) else {
                return;
            };
            node.end_probe(is_answered);
            if node.silence() >= silent {
                routes.give_up(&node);
            }
        });
    }

    /// Gives up a node that is silent. The next request for this node opens another connection,
    /// unless the new map has another node in its place.
    fn give_up(self: &Arc<Self>, node: &Arc<Node>) {
        if self.leave(node) {
            self.state().given_up.insert(node.address.clone());
        }
    }

    /// Closes the connection to a node, and asks for the map, because another node may serve its
    /// slots now. Returns whether this was the connection that new requests to the node would use.
    fn leave(self: &Arc<Self>, node: &Arc<Node>) -> bool {
        let known = {
            let nodes = &mut self.state().nodes;
            let known = nodes.get(&node.address);
            let is_known = known.is_some_and(|known| Arc::ptr_eq(known, node));
            is_known.then(|| nodes.remove(&node.address))
        };
        if known.is_some() {
            node.close();
            self.missed();
        }
        self.ask_again();
        known.is_some()
    }

    /// Reports to the core that wake-ups or data may have been lost.
    fn missed(&self) {
        if let Some(events) = self.context.events.upgrade() {
            events.gap();
        }
    }

    /// Notes that a ticket may be in this slot. Called before the request for this ticket is
    /// sent.
    pub(super) fn want(&self, slot: u16, ticket: Duration) {
        self.context
            .seeds
            .receivers
            .want(self.context.receiver, slot, ticket);
    }

    /// Whether this connection listens for messages in the slot, at the node that serves it.
    pub(super) fn hears(&self, slot: u16) -> bool {
        let state = self.state();
        let node = state.map.master(slot).and_then(|at| state.nodes.get(at));
        node.is_some_and(|node| node.hears(slot))
    }

    /// Whether the node that serves a slot may be gone. Such a node is silent, or was given up and
    /// has not answered since.
    pub(super) fn is_doubtful(&self, slot: u16) -> bool {
        let state = self.state();
        let Some(address) = state.map.master(slot) else {
            return true;
        };
        state.nodes.get(address).is_some_and(|node| {
            node.silence() >= self.context.silent()
                || !node.is_up() && state.given_up.contains(address)
        })
    }

    /// All masters that serve slots, and how many slots are served by no node.
    pub(super) fn masters(self: &Arc<Self>) -> (Vec<Arc<Node>>, usize) {
        let state = &mut *self.state();
        let masters = state.map.masters();
        let nodes = masters.into_iter().map(|address| self.node(state, address));
        let nodes = nodes.collect();
        (nodes, state.map.uncovered())
    }

    /// The map of this moment.
    pub(super) fn map(&self) -> Map {
        self.state().map.clone()
    }

    /// Changes with each new map.
    pub(super) fn new_maps(&self) -> watch::Receiver<()> {
        self.new_map.subscribe()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Whole for Routes {
    fn refresh(self: Arc<Self>) {
        self.ask_again();
    }

    fn knows_newer(&self, map: &Map) -> bool {
        self.state().map.is_newer_than(map)
    }

    fn adopt(&self, map: &Map) {
        let left: Vec<_> = {
            let mut state = self.state();
            let is_complete = map.uncovered() == 0;
            state.map = map.clone();
            let masters = map.masters();
            state.given_up.retain(|node| masters.contains(node));
            let is_left = |address: &Address, node: &mut Arc<Node>| {
                let is_used =
                    masters.contains(address) || node.expects_slots() && map.lists(address);
                is_complete && !is_used
            };
            state
                .nodes
                .extract_if(is_left)
                .map(|(_, node)| node)
                .collect()
        };
        // A master that was replaced may be silent. Requests on its connection would wait for its
        // answers, so the connection is closed.
        for node in &left {
            node.close();
        }
        if !left.is_empty() {
            self.missed();
        }
        self.new_map.send_replace(());
    }

    fn end(&self, error: &StoreError) {
        tracing::debug!(%error, "no node of the cluster can be asked");
        let alive = self.state().alive.take();
        drop(alive); // outside of the mutex, because the drop cancels the task
    }

    fn serves(&self, slot: u16, node: &Address) -> bool {
        self.state().map.master(slot) == Some(node)
    }

    fn hears_at(self: Arc<Self>, slot: u16, at: &Address) -> bool {
        let node = {
            let state = &mut *self.state();
            if state.map.master(slot) != Some(at) {
                state.map.moved(slot, at.clone());
            }
            self.node(state, at.clone())
        };
        let hears = node.hears(slot);
        if !hears {
            let _ = node.listen(&self.context, slot); // the next renewal asks again
        }
        hears
    }

    fn lost(self: Arc<Self>, node: &Address, was_up: bool) {
        {
            let nodes = &mut self.state().nodes;
            if nodes.get(node).is_some_and(|node| node.is_gone()) {
                nodes.remove(node);
            }
        }
        if was_up {
            self.missed();
        }
        self.ask_again();
    }
}

/// A request that is in flight to a node. If its future is dropped before the answer has come, the
/// node is asked whether it still answers.
struct Asks<'a> {
    routes: &'a Arc<Routes>,
    node: &'a Arc<Node>,
    is_over: bool,
}

impl<'a> Asks<'a> {
    fn begin(routes: &'a Arc<Routes>, node: &'a Arc<Node>) -> Self {
        if node.silence() >= routes.context.silent() {
            routes.ask_again();
        }
        node.asked();
        Self {
            routes,
            node,
            is_over: false,
        }
    }

    fn end(mut self, is_answered: bool) {
        self.is_over = true;
        if is_answered {
            self.node.answered();
        }
    }
}

impl Drop for Asks<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        if self.node.silence() >= self.routes.context.silent() {
            self.routes.ask_again();
        }
        self.routes.probe(self.node);
    }
}

/// The address in a redirection: `host:port`, or `:port`, which means the host of the node that
/// answered.
fn address(text: &str, told_by: &Address) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    Some(Address {
        host: known_host(host.to_owned(), told_by),
        port: port.parse().ok()?,
    })
}
