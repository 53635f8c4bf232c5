//! The verbs. Each verb sends its request to the node that serves the slot of its name. A batch is
//! split by names, for two reasons: a script may touch only one slot, and while a slot is moved,
//! its keys may be on two nodes. All parts are sent at once.

use std::collections::HashMap;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::oneshot;

use super::counting::Counting;
use super::routes::{Answered, Routes};
use super::slots::of_name as slot_of;
use crate::backend::redis::connection::RedisConnection;
use crate::backend::redis::hop::Hop;
use crate::backend::redis::task::Task;
use crate::backend::redis::{adopt, capacities, config, tickets};
use crate::backend::{
    Adoption, Answer, Connection, Count, Counted, Departure, Enqueued, Fault, Listing, Page,
    Released, Renewed, Resize, Resized, StoreError, TicketInfo,
};
use crate::name::Name;
use crate::request::{Id, Request};

/// A waiter rechecks after this time if this client may not receive its wake-up.
const DEAF: Duration = Duration::from_millis(500);

/// One connection to all nodes of a cluster.
#[derive(Debug)]
pub(in crate::backend::redis) struct ClusterConnection {
    routes: Arc<Routes>,
    counting: Arc<Counting>,
}

impl ClusterConnection {
    pub(super) fn of(routes: Arc<Routes>) -> Self {
        Self {
            counting: Counting::begin(&routes),
            routes,
        }
    }

    /// Sends a request about a name to the node that serves its slot.
    fn ask<T: Send + 'static, F>(
        &self,
        name: &Name,
        verb: impl Fn(RedisConnection) -> F + Send + Sync + 'static,
    ) -> Answer<T>
    where
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (routes, slot) = (Arc::clone(&self.routes), slot_of(name));
        Box::pin(async move { Ok(routes.ask(slot, verb).await?.answer) })
    }
}

impl Connection for ClusterConnection {
    fn enqueue(&self, request: Arc<Request>, _patience: Duration) -> Answer<Enqueued> {
        let routes = Arc::clone(&self.routes);
        let slot = slot_of(&request.name);
        routes.want(slot, request.ttl);
        if !request.wait {
            let name = request.name.clone();
            return self.ask(&name, move |link| {
                tickets::enqueue(link, Arc::clone(&request))
            });
        }
        if routes.hears(slot) {
            return Box::pin(enqueue(routes, slot, request));
        }
        // This enqueue has several steps, and after the first one the ticket is at the store. So a
        // task runs the steps, even if the caller's future is not polled. If the future is dropped,
        // the task ends, and the core releases the ticket.
        Box::pin(async move {
            let (tell, told) = oneshot::channel();
            let _ends_with_the_caller = Task::spawn(&routes.context.runtime.clone(), async move {
                let _ = tell.send(enqueue(routes, slot, request).await); // the caller may have gone
            });
            let ended =
                |_| StoreError::new(Fault::Unknown, "the runtime of the connection has ended");
            told.await.map_err(ended)?
        })
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, _patience: Duration) -> Answer<Vec<Renewed>> {
        let routes = Arc::clone(&self.routes);
        Box::pin(async move {
            let name = |request: &Arc<Request>| request.name.clone();
            let ask = |slot, part| renew(Arc::clone(&routes), slot, part);
            in_parts(&routes, tickets, name, Renewed::Failed, ask).await
        })
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        let routes = Arc::clone(&self.routes);
        Box::pin(async move {
            let name = |departure: &Departure| departure.request.name.clone();
            let ask = |slot, part: Vec<Departure>| {
                let routes = Arc::clone(&routes);
                async move {
                    let verb = |link| tickets::release(link, part.clone());
                    let Answered { answer, node, .. } = routes.ask(slot, verb).await?;
                    let owed = &routes.context.seeds.owed;
                    owed.acknowledged(&node.label, part, &answer);
                    Ok(answer)
                }
            };
            in_parts(&routes, tickets, name, Released::Failed, ask).await
        })
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        self.ask(&name.clone(), move |link| {
            tickets::inspect(link, name.clone())
        })
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        Box::pin(list(Arc::clone(&self.routes), listing))
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        self.ask(&name.clone(), move |link| {
            tickets::ask_back(link, name.clone(), id, Arc::clone(&ask))
        })
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        let Request { name, ttl, .. } = &*adoption.request;
        self.routes.want(slot_of(name), *ttl);
        self.ask(&name.clone(), move |link| {
            adopt::adopt(link, Arc::clone(&adoption))
        })
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        self.ask(&resize.name.clone(), move |link| {
            capacities::resize(link, Arc::clone(&resize))
        })
    }

    fn forget(&self, name: Name) -> Answer<()> {
        self.ask(&name.clone(), move |link| {
            tickets::forget(link, name.clone())
        })
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        let counting = Arc::clone(&self.counting);
        Box::pin(async move { counting.count(count).await })
    }

    fn check(&self) -> Answer<Vec<String>> {
        Box::pin(check(Arc::clone(&self.routes)))
    }
}

/// Takes a ticket. If the ticket has to wait, this client needs a subscription in its slot. Most
/// tickets need none, because they are granted at once. So this function subscribes only after the
/// first answer. A wake-up may be sent before the subscription. So the function then sends the
/// enqueue once more, and the answer says whether the ticket holds.
async fn enqueue(
    routes: Arc<Routes>,
    slot: u16,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    let verb = |link| tickets::enqueue(link, Arc::clone(&request));
    let first = routes.ask(slot, verb).await?;
    if first.heard || !matches!(first.answer, Enqueued::Waiting { .. }) {
        return Ok(first.answer);
    }
    if first.ahead {
        return Ok(looks_again(first.answer));
    }
    if let Err(error) = listen(&routes, slot, &first).await {
        if error.fault() == Fault::Config {
            return Err(StoreError::halfway(Fault::Config, error.to_string()));
        }
        tracing::debug!(%error, "a waiter cannot be woken by its node, and looks again by itself");
        return Ok(looks_again(first.answer));
    }
    // If this fails, the ticket may be at the store all the same.
    let unknown = |error: StoreError| StoreError::new(Fault::Unknown, error.to_string());
    let second = routes.ask(slot, verb).await.map_err(unknown)?;
    match second.heard {
        true => Ok(second.answer),
        false => Ok(looks_again(second.answer)),
    }
}

async fn listen<T>(
    routes: &Arc<Routes>,
    slot: u16,
    answered: &Answered<T>,
) -> Result<(), StoreError> {
    answered
        .node
        .listen(&routes.context, slot)?
        .until_heard(slot)
        .await
}

fn looks_again(mut answer: Enqueued) -> Enqueued {
    if let Enqueued::Waiting { recheck_in, .. } = &mut answer {
        *recheck_in = soon(*recheck_in);
    }
    answer
}

/// When a waiter looks again that may not be woken.
fn soon(recheck_in: Option<Duration>) -> Option<Duration> {
    Some(recheck_in.map_or(DEAF, |recheck| recheck.min(DEAF)))
}

/// Renews tickets. From the first renewal on, the client of a holder listens in the slot, so that it
/// learns at once that the ticket is asked back. Most holders are done before their first renewal,
/// and need no subscription.
async fn renew(
    routes: Arc<Routes>,
    slot: u16,
    part: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    let verb = |link| tickets::renew(link, part.clone());
    let Answered {
        mut answer,
        node,
        ahead,
        ..
    } = routes.ask(slot, verb).await?;
    let at = (!ahead).then_some(&node.address);
    let hears = |valid_for| {
        let receivers = &routes.context.seeds.receivers;
        receivers.still_wants(slot, valid_for, at)
    };
    for renewed in &mut answer {
        match renewed {
            Renewed::Waiting {
                valid_for,
                recheck_in,
                ..
            } if !hears(*valid_for) => {
                *recheck_in = soon(*recheck_in);
            }
            // If the connection cannot listen, the next renewal tells the holder.
            Renewed::Granted { valid_for } | Renewed::AskedBack { valid_for, .. } => {
                hears(*valid_for);
            }
            _ => {}
        }
    }
    Ok(answer)
}

/// Sends a request for the tickets of each name, all at once, and puts the answers in order. If a
/// part fails, the answer for its tickets is `failed`. If all parts fail, the result is the first
/// error.
///
/// If a node may be gone, the answers of the others do not wait for it: the answer for its tickets
/// is `failed` too.
async fn in_parts<T: Clone, A: Clone, F>(
    routes: &Routes,
    tickets: Vec<T>,
    name_of: impl Fn(&T) -> Name,
    failed: A,
    ask: impl Fn(u16, Vec<T>) -> F,
) -> Result<Vec<A>, StoreError>
where
    F: Future<Output = Result<Vec<A>, StoreError>>,
{
    let mut answers = vec![failed; tickets.len()];
    let mut waits = Vec::new();
    let mut parts: HashMap<Name, (Vec<usize>, Vec<T>)> = HashMap::new();
    for (at, ticket) in tickets.into_iter().enumerate() {
        let (places, part) = parts.entry(name_of(&ticket)).or_default();
        places.push(at);
        part.push(ticket);
    }
    let mut asks: FuturesUnordered<_> = parts
        .into_iter()
        .map(|(name, (places, part))| {
            let slot = slot_of(&name);
            waits.push(slot);
            let ask = ask(slot, part);
            async move { (slot, places, ask.await) }
        })
        .collect();
    let (mut answered, mut error) = (false, None);
    loop {
        // When its time is over, the core polls this once more, and then gives up the whole batch.
        // The answers that have come would then be lost. So each poll looks whether the others are
        // still worth waiting for.
        let part = std::future::poll_fn(|cx| match asks.poll_next_unpin(cx) {
            Poll::Pending if answered && waits.iter().all(|slot| routes.is_doubtful(*slot)) => {
                Poll::Ready(None)
            }
            part => part,
        });
        let Some((slot, places, outcome)) = part.await else {
            break;
        };
        match outcome {
            Ok(part) => {
                answered = true;
                for (at, answer) in places.into_iter().zip(part) {
                    answers[at] = answer;
                }
            }
            Err(failed) => {
                tracing::debug!(error = %failed, "a part of a batch has failed");
                error.get_or_insert(failed);
            }
        }
        let over = waits.iter().position(|other| *other == slot);
        over.map(|over| waits.swap_remove(over));
    }
    match error {
        Some(error) if !answered => Err(error),
        _ => Ok(answers),
    }
}

/// Lists a part of the names on one master, with one step of `SCAN`. The masters come in the order
/// of their addresses. A page begins at `<address> <cursor>`. If that master is gone, the page
/// begins at the next one.
async fn list(routes: Arc<Routes>, mut listing: Listing) -> Result<Page, StoreError> {
    let (masters, _) = routes.masters();
    let after = listing.after.take();
    let (from, stands) = match &after {
        Some(after) => after.rsplit_once(' ').unwrap_or((after, "0")),
        None => ("", "0"),
    };
    let mut masters: Vec<_> = masters
        .into_iter()
        .map(|master| (master.address.to_string(), master))
        .filter(|(address, _)| address.as_str() >= from)
        .collect();
    masters.sort_unstable_by(|one, other| one.0.cmp(&other.0));
    let mut masters = masters.into_iter();
    let Some((address, master)) = masters.next() else {
        return Ok(Page::default());
    };
    if address == from {
        listing.after = Some(stands.into());
    }
    let mut page = tickets::list(master.link().await?, listing).await?;
    page.next = match page.next {
        Some(stands) => Some(format!("{address} {stands}").into()),
        None => masters.next().map(|(next, _)| format!("{next} 0").into()),
    };
    Ok(page)
}

/// Checks each master.
async fn check(routes: Arc<Routes>) -> Result<Vec<String>, StoreError> {
    let (masters, uncovered) = routes.masters();
    let mut warnings = Vec::new();
    if uncovered > 0 {
        warnings.push(format!(
            "no node of the cluster serves {uncovered} of its slots, and locks in these slots are unavailable; see \
             redis-cli --cluster check"
        ));
    }
    for master in masters {
        let mut link = master.link().await?;
        link.hop = Some(Hop::default());
        let found = config::check(link).await;
        for warning in found.map_err(|error| routes.understood(&master, error))? {
            warnings.push(format!("{}: {warning}", master.address));
        }
    }
    Ok(warnings)
}
