//! The connections to the nodes, one for each node. A task per node opens the connection of this
//! node, and opens it again when it breaks. The connections to the other nodes stay open.
//!
//! The core opens a store's connection again when it breaks. That is not enough for a quorum: while
//! a majority is up, the connection as a whole works, and must not be replaced because of one node.
//! So these tasks retry and pause, which no verb does. When there is no majority any more, the
//! connection as a whole ends, and the core opens another.
//!
//! The tasks run in the runtime that has opened the connection. They end with this runtime or with
//! [`Links`].

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{FromRedisValue, RedisResult};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::super::dial::Server;
use super::super::owed::{Owed, UntilDone};
use super::super::task::Tasks;
use super::super::tickets;
use super::node::{LONGEST_TTL, Node};
use super::reported::{self, Down, Reported};
use super::tally::majority;
use crate::backend::events::Timer;
use crate::backend::{BoxFuture, Departure, EventSink, Fault, News, StoreError};
use crate::clock::{Clock, Instant};
use crate::name::Namespace;
use crate::pauses::{Pauses, jittered};

/// The longest pause before releases that a node has not acknowledged are sent to it again.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// The pause after a mistake that a person must correct. A password that is sent again and again
/// looks like an attack.
const AFTER_MISTAKE: Duration = Duration::from_secs(10);
/// If a connection breaks within this time, it counts as a failed try, and the pauses between the
/// tries keep growing.
const SETTLED: Duration = Duration::from_secs(1);
/// How long one try to connect may take. After that another try is made, because the server may
/// have another address now.
const PATIENCE: Duration = Duration::from_secs(5);
/// If a node has answered no request for this time, it gets one more request, and has to answer it
/// within the same time. Otherwise its connection is closed. The core gives the same time to an
/// operation by default. So a node that is only slow does not lose its vote.
const SILENCE: Duration = Duration::from_secs(1);
/// How long a new connection waits for the other nodes after a majority is up.
const LAST_TO_CONNECT: Duration = Duration::from_millis(50);

/// The connections. They end when this value is dropped.
#[derive(Debug)]
pub(super) struct Links {
    nodes: Arc<Nodes>,
    _tasks: JoinSet<()>,
}

/// What the client knows of the nodes.
pub(super) struct Nodes {
    servers: Arc<[Arc<Server>]>,
    views: watch::Sender<Vec<View>>,
    /// For each node, since when it has answered none of the requests that were sent to it. 0 if no
    /// request is unanswered.
    silences: Vec<Arc<AtomicU64>>,
    /// The releases that each node has not acknowledged.
    owed: Arc<[Owed]>,
    reported: Arc<[Reported]>,
    /// The number of this connection in `reported`.
    number: u64,
    /// Nothing is reported on a connection that has ended: the whole store is out of reach then.
    events: Weak<EventSink>,
    namespace: Namespace,
    receiver: u64,
    timer: Timer,
    /// Requests that are unfinished, although the caller of their verb has its answer.
    background: Tasks,
}

#[derive(Clone, Debug)]
enum View {
    /// The node was not reached yet.
    Asked,
    Up(Node),
    Down(StoreError),
}

impl Links {
    /// Connects to all nodes. Resolves when a majority is up, or cannot be any more.
    pub(super) async fn open(
        servers: Arc<[Arc<Server>]>,
        (owed, reported): (Arc<[Owed]>, Arc<[Reported]>),
        events: EventSink,
    ) -> Result<Self, StoreError> {
        let all = servers.len();
        let events = Arc::new(events);
        let nodes = Arc::new(Nodes {
            servers,
            views: watch::Sender::new(vec![View::Asked; all]),
            silences: std::iter::repeat_with(Arc::default).take(all).collect(),
            owed,
            reported,
            number: reported::connection(),
            events: Arc::downgrade(&events),
            namespace: events.namespace().clone(),
            receiver: events.receiver(),
            timer: events.timer(),
            background: Tasks::in_runtime(Handle::current()),
        });
        let mut tasks = JoinSet::new();
        for at in 0..all {
            tasks.spawn(Arc::clone(&nodes).keep_link(at));
        }
        let is_settled = |views: &Vec<View>| {
            let down = views.iter().filter(|view| matches!(view, View::Down(_)));
            count_up(views) >= majority(all) || down.count() > all - majority(all)
        };
        let mut views = nodes.views.subscribe();
        // The sender lives in `nodes`, so this cannot fail.
        let _ = views.wait_for(is_settled).await;
        // This waits for the other nodes too. A ticket at all nodes survives the loss of more nodes
        // than a ticket at a majority does. And an error should name the problems of all nodes.
        nodes.settled(LAST_TO_CONNECT).await;
        if count_up(&views.borrow()) < majority(all) {
            return Err(nodes.too_few(majority(all), &[]));
        }
        // This task drops `events` when there is no majority any more, or when the runtime ends.
        // The drop tells the core that the connection has ended.
        tasks.spawn(async move {
            let _events = events;
            let _ = views
                .wait_for(|views| count_up(views) < majority(all))
                .await;
        });
        Ok(Self {
            nodes,
            _tasks: tasks,
        })
    }

    pub(super) fn nodes(&self) -> &Arc<Nodes> {
        &self.nodes
    }

    /// Runs some work in the runtime of the connection. No caller waits for it. It may take as long
    /// as the longest ttl: after that, nothing at a node depends on it.
    pub(super) fn finish(self: &Arc<Self>, work: impl Future<Output = ()> + Send + 'static) {
        let links = Arc::clone(self);
        self.nodes.background.spawn(async move {
            tokio::select! {
                () = work => {}
                () = links.nodes.timer(LONGEST_TTL) => {}
            }
        });
    }

    /// Waits until the work in the background is done. If this future is dropped, the rest of the
    /// work is cancelled.
    ///
    /// If the connection lives in another runtime, this function does not wait, and the work
    /// continues there. That runtime may be blocked until the client that is closed here has ended.
    pub(super) async fn close(&self) {
        let background = &self.nodes.background;
        if Handle::current().id() == background.runtime.id() {
            background.joined().await;
        }
    }
}

impl Nodes {
    /// How many nodes the URL names.
    pub(super) fn count(&self) -> usize {
        self.servers.len()
    }

    pub(super) fn address(&self, at: usize) -> String {
        self.servers[at].info.addr().to_string()
    }

    /// Adds the address of the node to an error.
    pub(super) fn named(&self, at: usize, error: StoreError) -> StoreError {
        error.at(format_args!("the node {}", self.address(at)))
    }

    /// The nodes that are up.
    pub(super) fn up(&self) -> Vec<(usize, Node)> {
        let views = self.views.borrow();
        let up = views
            .iter()
            .enumerate()
            .filter_map(|(at, view)| match view {
                View::Up(node) => Some((at, node.clone())),
                View::Asked | View::Down(_) => None,
            });
        up.collect()
    }

    /// A node, if it is up and may vote on a ticket.
    pub(super) fn voter(&self, at: usize) -> Option<Node> {
        match &self.views.borrow()[at] {
            View::Up(node) if node.votes_from <= Clock::BOOT.now() => Some(node.clone()),
            View::Up(_) | View::Asked | View::Down(_) => None,
        }
    }

    /// The nodes that may vote on a ticket. An error if they are too few.
    pub(super) fn voters(&self, needed: usize) -> Result<Vec<(usize, Node)>, StoreError> {
        let now = Clock::BOOT.now();
        let mut up = self.up();
        up.retain(|(_, node)| node.votes_from <= now);
        match up.len() >= needed {
            true => Ok(up),
            false => Err(self.too_few(needed, &[])),
        }
    }

    /// Sends a request to a node. An error names the node.
    ///
    /// If the returned future is dropped, the node may carry out the request. The silence of the
    /// node is then not counted from this request.
    pub(super) fn send<T: Send + 'static>(
        self: &Arc<Self>,
        at: usize,
        node: &Node,
        verb: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> BoxFuture<Result<T, StoreError>> {
        let (nodes, end) = (Arc::clone(self), node.connection.driver.end());
        let silent_since = &self.silences[at];
        let now = Clock::BOOT.now();
        let mut listening = Listening {
            silent_since: Arc::clone(silent_since),
            began: now.as_nanos(),
        };
        let order = Ordering::Relaxed;
        if let Err(since) = silent_since.compare_exchange(0, listening.began, order, order) {
            listening.began = 0;
            let is_news = || silent_since.compare_exchange(since, now.as_nanos(), order, order);
            if Instant::from_nanos(since).until(now) >= SILENCE && is_news().is_ok() {
                self.probe(node);
            }
        }
        Box::pin(async move {
            let answer = verb.await;
            listening.silent_since.store(0, Ordering::Relaxed);
            answer.map_err(|error| {
                if error.is_broken() {
                    end.abort();
                }
                nodes.named(at, error)
            })
        })
    }

    /// Asks a node for its time, and ends its connection if it does not answer. This is a question
    /// of its own, because other answers may have arrived without being looked at: their futures
    /// may not be polled.
    fn probe(&self, node: &Node) {
        let end = node.connection.driver.end();
        self.ask_time(node, move |answer: Option<RedisResult<redis::Value>>| {
            if answer.is_none() {
                end.abort();
            }
        });
    }

    /// Reads the clock of a node again, unless that was done recently. `is_refused` says that the
    /// node has not assigned the number that was proposed.
    pub(super) fn read_clock(&self, node: &Node, is_refused: bool) {
        let asked = Clock::BOOT.now();
        if !node.wall_clock.is_due(asked, is_refused) {
            return;
        }
        let clock = Arc::clone(&node.wall_clock);
        self.ask_time(node, move |answer| {
            if let Some(Ok(time)) = answer {
                clock.set(asked, time);
            }
        });
    }

    /// Asks a node for its time in the background. `then` gets the answer, or `None` after
    /// [`SILENCE`].
    fn ask_time<T: FromRedisValue + Send + 'static>(
        &self,
        node: &Node,
        then: impl FnOnce(Option<RedisResult<T>>) + Send + 'static,
    ) {
        let mut connection = node.connection.connection.clone();
        let patience = self.timer(SILENCE);
        self.background.spawn(async move {
            let question = redis::cmd("TIME");
            tokio::select! {
                biased;
                answer = question.query_async(&mut connection) => then(Some(answer)),
                () = patience => then(None),
            }
        });
    }

    /// Keeps releases for a node until it can be reached, or until their tickets have expired there.
    pub(super) fn owe(&self, at: usize, departures: &[Departure], until_done: Option<&UntilDone>) {
        let lives = |departure: &Departure| match departure.enqueue_may_follow {
            // A server that was stopped may carry out the enqueue when it continues.
            true => LONGEST_TTL,
            false => departure.request.ttl.min(LONGEST_TTL),
        };
        self.owed[at].put(departures, lives, until_done);
    }

    /// Resolves after a time. This works even in a runtime without timers.
    pub(super) fn timer(&self, after: Duration) -> BoxFuture<()> {
        (self.timer)(after)
    }

    /// Resolves when each node is up or down, or after a time.
    pub(super) async fn settled(&self, within: Duration) {
        let mut views = self.views.subscribe();
        let is_settled = |views: &Vec<View>| !views.iter().any(|view| matches!(view, View::Asked));
        tokio::select! {
            _ = views.wait_for(is_settled) => {}
            () = self.timer(within) => {}
        }
    }

    /// The error if too few nodes have done something. Its reasons are the nodes that are down, the
    /// nodes that do not vote, and `errors`, the errors of the others.
    pub(super) fn too_few(&self, needed: usize, errors: &[StoreError]) -> StoreError {
        let (all, now) = (self.count(), Clock::BOOT.now());
        let views = self.views.borrow();
        let mut reasons = errors.to_vec();
        let up = count_up(&views);
        let mut aside = 0;
        for (at, view) in views.iter().enumerate() {
            match view {
                View::Down(error) => reasons.push(error.clone()),
                View::Asked => {
                    let text = format!("the node {} has not answered yet", self.address(at));
                    reasons.push(StoreError::new(Fault::Retry, text));
                }
                View::Up(node) if node.votes_from > now => {
                    aside += 1;
                    reasons.push(StoreError::new(Fault::Retry, self.is_aside(at, node, now)));
                }
                View::Up(_) => {}
            }
        }
        let hopeless = |faults: &[Fault]| {
            let hopeless = reasons
                .iter()
                .filter(|error| faults.contains(&error.fault()));
            hopeless.count() > all - needed
        };
        let fault = if hopeless(&[Fault::Config]) {
            Fault::Config
        } else if hopeless(&[Fault::Config, Fault::Refused]) {
            Fault::Refused
        } else {
            Fault::Retry
        };
        let worst = reasons.iter().find(|error| error.fault() == fault);
        let reason = worst.or(reasons.first()).map(|error| format!(" ({error})"));
        let vote = match aside {
            0 => String::new(),
            _ => format!(", {} of them can vote", up - aside),
        };
        StoreError::new(
            fault,
            format!(
                "{up} of {all} nodes are up{vote}, and {needed} are needed{}",
                reason.unwrap_or_default()
            ),
        )
    }

    fn is_aside(&self, at: usize, node: &Node, now: Instant) -> String {
        let rest = Duration::from_secs(now.until(node.votes_from).as_secs() + 1);
        format!(
            "the node {} has restarted and may have forgotten locks, so it does not vote for another {}; with appendonly \
             yes and appendfsync always it would vote at once",
            self.address(at),
            humantime::format_duration(rest)
        )
    }

    /// Warnings for an operator about the nodes. An error if two hosts of the URL are the same
    /// server.
    pub(super) fn warnings(&self) -> Result<Vec<String>, StoreError> {
        let (views, now) = (self.views.borrow(), Clock::BOOT.now());
        let mut warnings = Vec::new();
        for (at, view) in views.iter().enumerate() {
            match view {
                View::Down(error) if error.to_string().contains(TWICE) => return Err(error.clone()),
                View::Down(error) => warnings.push(format!("one node is missing: {error}")),
                View::Asked => warnings.push(format!(
                    "one node is missing: {} has not answered yet",
                    self.address(at)
                )),
                View::Up(node) if node.votes_from > now => {
                    warnings.push(self.is_aside(at, node, now));
                }
                View::Up(_) => {}
            }
        }
        let clocks = views
            .iter()
            .enumerate()
            .filter_map(|(at, view)| match view {
                View::Up(node) => Some((node.wall_clock.ahead(), at)),
                View::Asked | View::Down(_) => None,
            });
        let (first, last) = (clocks.clone().min(), clocks.max());
        if let (Some((behind, one)), Some((ahead, other))) = (first, last)
            && ahead - behind > 1_000_000
        {
            warnings.push(format!(
                "the clocks of the nodes differ: {} is {} ms ahead of {}; let all of them follow the same time servers",
                self.address(other),
                (ahead - behind) / 1_000,
                self.address(one)
            ));
        }
        Ok(warnings)
    }

    /// The task of a node: opens its connection, and sends it the releases that it has not
    /// acknowledged.
    async fn keep_link(self: Arc<Self>, at: usize) {
        let mut pauses = Pauses::default();
        loop {
            let opened = tokio::select! {
                opened = self.dial(at) => opened,
                () = self.timer(PATIENCE) => {
                    Err(self.servers[at].because(Fault::Retry, "it does not answer"))
                }
            };
            let since = Clock::BOOT.now();
            let opened = opened.and_then(|node| self.admit(at, &node).map(|()| node));
            self.report(at, opened.as_ref().err());
            let error = match opened {
                Ok(node) => {
                    tokio::select! {
                        biased;
                        () = node.connection.driver.ended() => {}
                        () = self.send_owed(at, &node) => {}
                    }
                    self.servers[at].because(Fault::Retry, "the connection is lost")
                }
                Err(error) => error,
            };
            if since.until(Clock::BOOT.now()) > SETTLED {
                pauses = Pauses::default();
            }
            let again = match error.fault() {
                Fault::Config => jittered(AFTER_MISTAKE),
                Fault::Retry | Fault::Refused | Fault::Unknown => pauses.draw(),
            };
            self.silences[at].store(0, Ordering::Relaxed);
            self.views
                .send_modify(|views| views[at] = View::Down(error));
            self.timer(again).await;
        }
    }

    async fn dial(&self, at: usize) -> Result<Node, StoreError> {
        let (server, events) = (&self.servers[at], Weak::clone(&self.events));
        Node::open(server, self.receiver, &self.namespace, events).await
    }

    /// Counts a node as up, unless another host of the URL leads to the same server.
    fn admit(&self, at: usize, node: &Node) -> Result<(), StoreError> {
        let mut outcome = Ok(());
        self.views.send_modify(|views| {
            let is_same =
                |view: &View| matches!(view, View::Up(other) if other.run_id == node.run_id);
            match views.iter().position(is_same).filter(|other| *other != at) {
                None => views[at] = View::Up(node.clone()),
                Some(other) => {
                    let other = self.address(other);
                    let reason =
                        format!("{TWICE} as {other}, and would vote twice; name each server once");
                    outcome = Err(self.servers[at].mistake(reason));
                }
            }
        });
        outcome
    }

    /// Reports the outcome of a try to connect to a node, if it is news.
    fn report(&self, at: usize, error: Option<&StoreError>) {
        let Some(events) = self.events.upgrade() else {
            return;
        };
        let (address, reported) = (self.address(at), &self.reported[at]);
        match error {
            None if reported.up(self.number) => events.tell(News::NodeUp(address)),
            Some(error) if reported.down(self.number, how(error)) => {
                let reason = error.to_string();
                events.tell(News::NodeDown { address, reason });
            }
            None | Some(_) => {}
        }
    }

    /// Sends the releases that this node has not acknowledged, and those that are added later. Ends
    /// when the connection ends.
    async fn send_owed(self: &Arc<Self>, at: usize, node: &Node) {
        loop {
            let mut taken = self.owed[at].next().await;
            let verb = tickets::release(node.connection.clone(), taken.departures());
            let are_done = match self.send(at, node, verb).await {
                Ok(answers) => taken.answered(answers.into_iter().map(Some)),
                Err(error) if error.is_broken() => return,
                Err(_) => false,
            };
            if !are_done {
                self.timer(jittered(LONGEST_PAUSE)).await;
            }
        }
    }
}

/// A request that waits for an answer. If its future is dropped without an answer, the node's
/// silence is not counted from this request.
struct Listening {
    silent_since: Arc<AtomicU64>,
    /// When the request was sent. 0 if an earlier request is unanswered too.
    began: u64,
}

impl Drop for Nodes {
    fn drop(&mut self) {
        for node in self.reported.iter() {
            node.ended(self.number);
        }
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let order = Ordering::Relaxed;
        let _ = self
            .silent_since
            .compare_exchange(self.began, 0, order, order);
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nodes")
            .field("servers", &self.servers)
            .finish_non_exhaustive()
    }
}

/// A part of the message about a server that is named twice.
const TWICE: &str = "it is the same server";

fn how(error: &StoreError) -> Down {
    match error.fault() {
        Fault::Config => Down::Mistake,
        Fault::Retry | Fault::Refused | Fault::Unknown => Down::OutOfReach,
    }
}

fn count_up(views: &[View]) -> usize {
    let up = views.iter().filter(|view| matches!(view, View::Up(_)));
    up.count()
}
