//! Provides the real store that a history runs on: its clients, which connect and disconnect, a
//! clock that the test moves, and the messages that arrive. `model` says which messages should
//! arrive.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockcore::backend::Namespace;
use lockcore::backend::{
    Backend, Capability, Connection, Departure, EventSink, Fault, Id, Listing, News, Released,
    Resize, ResizeOp, ResizeOutcome, Resized, Wake,
};
use lockcore::inspect::Summary;
use tests::eventually::eventually;
use tests::stores::{Histories, Manner, Stage};

use super::model::Model;
use super::{CLIENTS, History, Key, NAMES, NAMESPACE, Order, STATED, STRIDE, Step, With};
use crate::hostile::random_id;
use crate::store::{PATIENCE, SOON};

/// One look in so many also lists the names.
const LISTED: usize = 4;

/// How far the same age may be apart in two answers.
const NEAR: Duration = Duration::from_millis(STRIDE / 2);

/// A store whose clock the test moves, and its clients. It plays one history after another, each
/// with new names.
pub(super) struct World {
    stage: Box<dyn Stage>,
    manner: Manner,
    capability: Capability,
    backend: Arc<dyn Backend>,
    /// `None` while the client is disconnected.
    clients: [Option<Arc<dyn Connection>>; CLIENTS],
    /// Renews and releases for all clients, like the keeper of the core. It never gets a wake-up.
    keeper: Arc<dyn Connection>,
    tell: mpsc::Sender<(usize, News)>,
    told: mpsc::Receiver<(usize, News)>,
    histories: u64,
}

impl World {
    pub(super) async fn new(played: Histories, capability: Capability) -> Self {
        let stage = (played.start)();
        let backend = stage.backend();
        let (tell, told) = mpsc::channel();
        let mut world = Self {
            keeper: connect(&*backend, CLIENTS, &tell).await,
            stage,
            manner: played.manner,
            capability,
            backend,
            clients: [const { None }; CLIENTS],
            tell,
            told,
            histories: 0,
        };
        world.connect_all().await;
        world
    }

    async fn connect_all(&mut self) {
        for client in 0..CLIENTS {
            if self.clients[client].is_none() {
                self.clients[client] = Some(connect(&*self.backend, client, &self.tell).await);
            }
        }
    }

    /// Plays a history. An error names the first step after which the store differs from the rule.
    pub(super) async fn play(&mut self, history: &History) -> Result<(), String> {
        let mut outcome = Ok(());
        for attempt in 0..20 {
            // The machine may be busy for some seconds.
            tokio::time::sleep(attempt * Duration::from_millis(50)).await;
            self.connect_all().await;
            self.histories += 1;
            let began = Instant::now();
            outcome = self.play_once(history).await;
            // On a busy machine the store's clock may run further than the model allows. A history
            // that took so long proves nothing, so it is played again.
            let slack = self.manner.slack;
            if slack == 0 || began.elapsed() < Duration::from_millis(slack / 2) {
                return outcome;
            }
        }
        // A wake-up that does not come takes time, too.
        let steps = history.steps.len();
        panic!("no history of {steps} steps in a second; the last attempt: {outcome:?}\n{history}");
    }

    async fn play_once(&mut self, history: &History) -> Result<(), String> {
        let mut model = Model::new(history, self.histories, self.manner, self.capability);
        self.stage.begin();
        // A history that failed may have left messages. This one does not count them.
        let _ = self.look(&mut model).await;
        model.told_to_look.clear();
        for (number, step) in history.steps.iter().enumerate() {
            let outcome = self.step(step, &mut model).await;
            outcome.map_err(|complaint| format!("step {number}, {step:?}: {complaint}"))?;
        }
        // Releases all tickets, several times, so that each connection is checked once more.
        let everything = Step::Release((0..history.requests.len()).collect(), false);
        for _ in 0..CLIENTS {
            let outcome = self.step(&everything, &mut model).await;
            outcome.map_err(|complaint| format!("at the end: {complaint}"))?;
        }
        Ok(())
    }

    async fn step(&mut self, step: &Step, model: &mut Model) -> Result<(), String> {
        let with_session = self.capability.sessions;
        let mut step = step.clone();
        if let Step::Renew(_, With { ttl, .. }) = &mut step
            && self.manner.keeps_the_first_ttl
        {
            *ttl = None;
        }
        let here = |tickets: &[usize]| {
            let here = |ticket: &&usize| self.clients[model.wishes[**ticket].client].is_some();
            tickets.iter().filter(here).copied().collect()
        };
        // On a store with sessions, a disconnected client has no tickets. Nothing can be sent for
        // it either.
        let possible = match &step {
            // The store makes all tickets of a batch smaller before it answers for any of them, so
            // only the first is renewed.
            Step::Renew(tickets, with) if with_session && with.most.is_some() => {
                &Step::Renew(here(&tickets[..1]), *with)
            }
            // A renewal of several tickets may find only later that one of them was adopted.
            Step::Renew(tickets, with)
                if with_session && tickets.iter().any(|ticket| model.given.contains(ticket)) =>
            {
                &Step::Renew(here(&tickets[..1]), *with)
            }
            Step::Renew(tickets, with) if with_session => &Step::Renew(here(tickets), *with),
            Step::Release(tickets, may) if with_session => &Step::Release(here(tickets), *may),
            Step::Pass(_) | Step::LoseData if with_session => return Ok(()),
            step => step,
        };
        match possible {
            Step::Enqueue(ticket) => {
                let Some(connection) = &self.clients[model.wishes[*ticket].client] else {
                    return Ok(());
                };
                let request = model.request(*ticket);
                let answer = connection
                    .enqueue(Arc::clone(&request), PATIENCE)
                    .await
                    .unwrap();
                let wakes = self.look(model).await?;
                model.enqueued(*ticket, &request, answer, self.micros(), &wakes)?;
                return self.expect(wakes, model).await;
            }
            Step::Renew(tickets, with) => {
                // If a store gets the renewal of an expired ticket that it knows, it computes the
                // grants of the name, and wakes clients. The model can tell which clients only if
                // all clients are connected and no other ticket is renewed with this one. Otherwise
                // the step is skipped.
                let expired = tickets.iter().any(|ticket| model.expired.contains(ticket));
                if expired && (model.connected != [true; CLIENTS] || tickets.len() > 1) {
                    return Ok(());
                }
                let mut answers = Vec::new();
                for (connection, batch) in self.batches(tickets, model) {
                    let requests = batch.iter().map(|ticket| model.renewal(*ticket, *with));
                    answers.extend(
                        connection
                            .renew(requests.collect(), PATIENCE)
                            .await
                            .unwrap(),
                    );
                }
                let wakes = self.look(model).await?;
                model.renew_together(tickets, *with);
                for (ticket, answer) in tickets.iter().zip(answers) {
                    model.renewed(*ticket, *with, answer, &wakes)?;
                }
                model.of_one_batch(tickets, &wakes)?;
                return self.expect(wakes, model).await;
            }
            Step::Release(tickets, enqueue_may_follow) => {
                let mut answers = Vec::new();
                for (connection, batch) in self.batches(tickets, model) {
                    let departures = batch
                        .iter()
                        .map(|ticket| Departure::new(model.request(*ticket), *enqueue_may_follow));
                    answers.extend(connection.release(departures.collect()).await.unwrap());
                }
                let wakes = self.look(model).await?;
                for (at, (ticket, answer)) in tickets.iter().zip(answers).enumerate() {
                    // If a batch names a ticket twice, the store may find the ticket twice.
                    let again = tickets[..at].contains(ticket) && answer == Released::Released;
                    if again {
                        continue;
                    }
                    model.released(*ticket, *enqueue_may_follow, answer)?;
                }
                model.of_one_batch(tickets, &wakes)?;
                return self.expect(wakes, model).await;
            }
            Step::Adopt { from, to } => {
                let Some(connection) = &self.clients[model.wishes[*to].client] else {
                    return Ok(());
                };
                let Some(adoption) = model.adoption(*from, *to) else {
                    return Ok(());
                };
                let answer = connection.adopt(Arc::new(adoption)).await.unwrap();
                let wakes = self.look(model).await?;
                model.adopted(*from, *to, answer, &wakes)?;
                model.given.insert(*from);
                return self.expect(wakes, model).await;
            }
            // A store without stored capacities leaves these steps out.
            Step::Resize { .. } if !self.capability.resizes => return Ok(()),
            Step::Resize {
                client,
                name,
                capacity,
                order,
            } => {
                let Some(connection) = &self.clients[*client] else {
                    return Ok(());
                };
                let ask = |id, op| Resize::new(model.names[*name].clone(), id, op);
                let is_late = *order == Order::Late;
                let (id, mut op) = (change_id(), ResizeOp::Read);
                let mut read = resize(&**connection, ask(change_id(), op)).await;
                let mut answer = read;
                // A store may forget the last change when nothing is stored, so a client that is
                // not late may have to read twice, as the core does.
                for _ in 0..2 {
                    op = ResizeOp::Set {
                        capacity: *capacity,
                        after: if is_late {
                            Some(change_id())
                        } else {
                            read.change
                        },
                        stated: STATED,
                    };
                    answer = resize(&**connection, ask(id, op)).await;
                    if answer.outcome != ResizeOutcome::Kept || is_late {
                        break;
                    }
                    read = resize(&**connection, ask(change_id(), ResizeOp::Read)).await;
                }
                if *order == Order::Twice && answer.outcome == ResizeOutcome::Applied {
                    let again = resize(&**connection, ask(id, op)).await;
                    // A store may not remember who has forgotten a capacity.
                    let kept = Resized::new(None, None, ResizeOutcome::Kept);
                    if again != answer && (capacity.is_some() || again != kept) {
                        return Err(format!("answered {answer:?}, and then {again:?}"));
                    }
                }
                let wakes = self.look(model).await?;
                model.resized(*name, *capacity, is_late, read, answer, &wakes)?;
                return self.expect(wakes, model).await;
            }
            Step::Pass(strides) => {
                self.stage.pass(Duration::from_millis(strides * STRIDE));
                model.now += strides * STRIDE;
            }
            Step::Disconnect(client) => {
                self.disconnect(*client).await;
                model.disconnect(*client);
            }
            Step::Connect(client) => {
                // A connected client is disconnected first, so that its new connection gets all
                // further wake-ups.
                self.disconnect(*client).await;
                model.disconnect(*client);
                self.clients[*client] = Some(connect(&*self.backend, *client, &self.tell).await);
                model.connected[*client] = true;
            }
            Step::LoseData => {
                if !self.stage.lose_data() {
                    return Ok(());
                }
                model.lose_data();
            }
            Step::Evict(name, key) => {
                let state = model.names[*name].key(1, 512);
                let evicted = match key {
                    Key::State => self.stage.evict(&state),
                    Key::Ends => self.stage.evict(&format!("{state}:ends")),
                };
                if !evicted {
                    return Ok(());
                }
                model.evict(*name, *key);
            }
        }
        let wakes = self.look(model).await?;
        self.expect(wakes, model).await
    }

    /// Splits tickets by the connection that renews and releases them: the keeper, or the client
    /// itself on a store with sessions. Keeps the order.
    fn batches<'a>(
        &self,
        tickets: &'a [usize],
        model: &Model,
    ) -> Vec<(Arc<dyn Connection>, &'a [usize])> {
        if !self.capability.sessions {
            return vec![(Arc::clone(&self.keeper), tickets)];
        }
        let client = |ticket: &usize| model.wishes[*ticket].client;
        let of_one = tickets.chunk_by(|one, next| client(one) == client(next));
        of_one
            .map(|batch| {
                let connection = self.clients[client(&batch[0])].as_ref();
                (Arc::clone(connection.unwrap()), batch)
            })
            .collect()
    }

    /// Compares the wake-ups with the model. Messages that a server sends by itself may come later
    /// than its answers. So this waits for those that must come.
    async fn expect(&self, mut wakes: Vec<(usize, Wake)>, model: &mut Model) -> Result<(), String> {
        if self.manner.wakes_late {
            let by = Instant::now() + SOON;
            while model.is_still_to_wake(&wakes) && Instant::now() < by {
                // Other tasks of this thread deliver the messages, so this wait must not block the
                // thread.
                tokio::time::sleep(Duration::from_millis(1)).await;
                wakes.extend(self.heard(model)?);
            }
        }
        model.expect_wakes(wakes)
    }

    fn heard(&self, model: &mut Model) -> Result<Vec<(usize, Wake)>, String> {
        let in_its_own_way = self.manner.tells_in_its_own_way;
        let wake = |(client, news)| match news {
            // The keeper's connection may look for the tickets that it renews for a client without a
            // connection.
            News::Granted(wake)
                if in_its_own_way && client == CLIENTS && model.is_unheard(wake.id) =>
            {
                None
            }
            News::Granted(wake) => Some(Ok((client, wake))),
            News::Recheck(..) if in_its_own_way => None,
            News::Recheck(id, after) => {
                model.told_to_look.push((client, id, after));
                None
            }
            other => Some(Err(format!("client {client} was told of {other:?}"))),
        };
        self.told.try_iter().filter_map(wake).collect()
    }

    /// Returns the wake-ups that arrived since the last call. Keeps the results of
    /// [`inspect`](Connection::inspect) for [`Model::expect_wakes`].
    ///
    /// Before a connection answers, it delivers what was published earlier. So this calls `inspect`
    /// on every connection that has waiters, and on one of the others in turn.
    async fn look(&self, model: &mut Model) -> Result<Vec<(usize, Wake)>, String> {
        model.looks += 1;
        let turn = model.looks % CLIENTS;
        let looks: Vec<_> = (self.clients.iter().enumerate())
            .filter(|(client, _)| *client == turn || model.waits(*client))
            .filter_map(|(client, connection)| Some((client, connection.as_ref()?)))
            .map(|(client, connection)| {
                let name = (model.looks + client) % NAMES;
                let look = connection.inspect(model.names[name].clone());
                (name, tokio::spawn(look)) // all calls run at the same time
            })
            .collect();
        model.seen.clear();
        for (name, look) in looks {
            model.seen.push((name, look.await.unwrap().unwrap()));
        }
        if self.capability.lists && model.looks.is_multiple_of(LISTED) {
            self.list(model).await?;
        }
        self.heard(model)
    }

    /// Compares the summaries of the names with the lines that `inspect` has shown. A name without a
    /// summary is one for which the core asks with `inspect`.
    async fn list(&self, model: &Model) -> Result<(), String> {
        let namespace = Namespace::new(NAMESPACE).unwrap();
        let mut listing = Listing::new(namespace, format!("{}-", self.histories), 1_000);
        listing.summaries = true;
        let mut listed = Vec::new();
        loop {
            let page = self.keeper.list(listing.clone()).await.unwrap();
            listed.extend(page.names);
            listing.after = page.next;
            if listing.after.is_none() {
                break;
            }
        }
        for (name, line) in &model.seen {
            let name = format!("{}-{name}", self.histories);
            let mut found = listed.iter().filter(|used| used.name == name).peekable();
            let is_listed = found.peek().is_some() || line.is_empty();
            let expected = Summary::of(line);
            let mut summaries = found.filter_map(|used| used.summary.as_ref());
            if !is_listed || !summaries.all(|shown| is_like(shown, &expected)) {
                return Err(format!("lists {listed:?}, and inspect shows {line:?}"));
            }
        }
        Ok(())
    }

    async fn disconnect(&mut self, client: usize) {
        let Some(connection) = self.clients[client].take() else {
            return;
        };
        if self.capability.sessions {
            connection.close().await;
        } else {
            drop(connection);
        }
        eventually("the server has noticed", SOON, async || {
            self.stage.has_seen_the_end_of(NAMESPACE, client)
        })
        .await;
    }

    /// Shortens a failing history: leaves out ever smaller pieces of it, as long as the rest fails
    /// too.
    pub(super) async fn shrink(
        &mut self,
        mut history: History,
        mut complaint: String,
    ) -> (History, String) {
        let mut piece = history.steps.len() / 2;
        while piece > 0 {
            let mut at = 0;
            while at < history.steps.len() {
                let mut shorter = history.clone();
                shorter
                    .steps
                    .drain(at..(at + piece).min(history.steps.len()));
                match self.play(&shorter).await {
                    Err(again) => (history, complaint) = (shorter, again),
                    Ok(()) => at += piece,
                }
            }
            piece /= 2;
        }
        (history, complaint)
    }

    /// The store's wall clock in microseconds.
    fn micros(&self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + self.stage.ahead();
        now.as_micros() as u64
    }
}

/// Whether two summaries of one line, made one after the other, have the same tickets. Time passes in
/// steps that are longer than [`NEAR`], so an expired ticket would be seen.
fn is_like(shown: &Summary, expected: &Summary) -> bool {
    let is_near = |shown: Option<Duration>, expected: Option<Duration>| match (shown, expected) {
        (Some(shown), Some(expected)) => shown.abs_diff(expected) < NEAR,
        (shown, expected) => shown == expected,
    };
    let counts = |line: &Summary| (line.holders, line.waiters);
    counts(shown) == counts(expected)
        && counts(shown) != (0, 0)
        && shown.owner == expected.owner
        && shown.owner_text == expected.owner_text
        && is_near(shown.since, expected.since)
        && is_near(shown.longest_wait, expected.longest_wait)
}

/// The id of one change of a stored capacity.
fn change_id() -> Id {
    Id::parse(&random_id()).unwrap()
}

/// Sends the request again after [`Fault::Retry`], as the core does.
async fn resize(connection: &dyn Connection, request: Resize) -> Resized {
    let request = Arc::new(request);
    loop {
        match connection.resize(Arc::clone(&request)).await {
            Ok(resized) => return resized,
            Err(error) if error.fault() == Fault::Retry => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    }
}

async fn connect(
    backend: &dyn Backend,
    client: usize,
    tell: &mpsc::Sender<(usize, News)>,
) -> Arc<dyn Connection> {
    let tell = tell.clone();
    let namespace = Namespace::new(NAMESPACE).unwrap();
    let events = EventSink::new(client as u64, namespace, move |news| {
        let _ = tell.send((client, news));
    });
    backend.connect(events).await.unwrap()
}
