//! The places of a barrier, and the rule that tells when all parties of a round have come. The
//! public types are in `barrier` and `double_barrier`.
//!
//! A party's *place* is a ticket of a semaphore on the name. The party's client renews the lease of
//! the ticket, so the place ends if the process dies. The semaphore has room for exactly as many
//! whole places as the barrier has parties. The counter of the name tells how far a round is. Let
//! `last` be the number of the youngest ticket of the round. The counter is −`last` when the round
//! is *proposed*, and `last` when it is *complete*. It is 0 when a proposal was given up.
//!
//! 1. A party that has got its place lists the tickets. If there are as many whole places as
//!    parties, it proposes the round.
//! 2. Each party of a proposed round *agrees*: it reduces its place to [`AGREED`]. Then it lists
//!    the tickets again.
//! 3. If all places of the round have agreed, the party completes the round. All parties of the
//!    round pass when they see this at the counter.
//! 4. If a place of the round is gone, the party gives the proposal up. The parties that have seen
//!    the proposal take new places, because each of them has agreed, or is about to. The others
//!    keep theirs.
//!
//! A place may belong to a party that is dead, or whose future was dropped. Such a party does not
//! agree. So each party of a complete round was waiting when the last of them had got its place.
//! This is the promise of a barrier.
//!
//! The party that gets its place last sees all whole places, and the party that agrees last sees
//! that all have agreed. So each list that must be made is made. A party changes the counter only
//! if nobody has changed it since the party read it, and that read is older than the list that the
//! change is based on.
//!
//! - *A party dies before it agrees*: the others list again after a short pause, until the place of
//!   this party has ended with its lease. Then they give the proposal up.
//! - *A party agrees and dies*: the round is completed with this party. It was waiting when the
//!   last had come.
//! - *Several parties list and change the counter at the same time*: the condition lets only one
//!   change through. The others get the new count with the refusal.
//! - *An answer is lost*: the client sends the same change again, and it counts once. All parties,
//!   and also the sender, learn the state of the round from the counter, and not from the answer.
//! - *Parties come while a round is proposed or complete*: they may get places, because parties
//!   that have agreed have freed permits. Their tickets have numbers above `last`. There are never
//!   as many of these places as parties while a place of the round is left, because there is not
//!   enough room. So the next round is proposed only when all places of this round are gone.
//! - *The store loses its data*: a lost ticket never comes back, and a renewal does not create one,
//!   so its party cannot agree. A party believes a proposal only if the counter has changed since
//!   the party has read it, which was before its ticket was drawn.
//! - *Clocks*: the store draws the ticket numbers, and leases end by the store's clock. No time of
//!   one client is compared with a time of another.
//!
//! **A party that gives up** is not counted if it has not agreed. If it has agreed, it gives the
//! proposal up itself, which fails if the round is complete. In this case it passes.
//!
//! **A gap that remains**: the request with which a party agrees may be on its way when the future
//! of the party is dropped, or when its process dies. If the request arrives late, the place may
//! agree to a proposal that is younger than the end of the party. For this, the first proposal must
//! have been given up, the next must have been made, and the release of the place must be later
//! still.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;

use crate::acquire::handle::Client;
use crate::backend::{CountOp, Counted, Fault, OnlyIf, Outcome, StoreError, TicketInfo};
use crate::client::table::AtEnd;
use crate::client::watched::Watching;
use crate::clock::Instant;
use crate::counter::Counter;
use crate::error::{Error, ErrorKind, LostReason};
use crate::hold::Guard;
use crate::lock::Lock;
use crate::options::Wait;
use crate::pauses::Pauses;
use crate::request::FULL;

/// The permits of a whole place.
const PLACE: NonZeroU32 = NonZeroU32::new(3).unwrap();

/// The permits of a party that has agreed to the proposed round.
const AGREED: u32 = 2;

/// The permits that a party keeps when it leaves a double barrier.
const LEAVING: u32 = 1;

/// The pause after a request that failed.
const PAUSE: Duration = Duration::from_millis(100);

/// The longest pause between two lists of a proposed round.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// How often the counter is read while a party is inside of a double barrier. A store keeps a
/// counter for much longer than this after its last use.
const UPKEEP: Duration = Duration::from_secs(60 * 60);

/// The beginning of the error of a party that cannot find out whether it was counted.
const UNKNOWN: &str = "whether the others have gone on with this party is unknown";

/// The most parties of a barrier. This many are tested, with the program `gather`. A list of more
/// places would take a store too long.
pub(crate) const MOST_PARTIES: u32 = 2_000;

/// The places of a name, and how to take one.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    place: Lock,
    counter: Counter,
    parties: u32,
}

/// A party that has a place.
#[derive(Debug)]
pub(crate) struct Party {
    places: Places,
    guard: Guard,
    /// `None` while the party is inside of a double barrier.
    watching: Option<Watching>,
    /// The number of the party's ticket.
    ticket: u64,
    /// The version of the counter before the ticket was drawn.
    before: u64,
    /// The counter, as the last answer of the store has shown it.
    seen: Counted,
    /// Whether the store has shown an older counter than before.
    data_is_lost: bool,
    /// The youngest ticket of the proposed round to which the party agrees.
    last: Option<u64>,
    /// Whether the store has acknowledged that the party agrees.
    has_agreed: bool,
    /// The error of the last request, if it has failed.
    trouble: Option<Error>,
    /// While the party is inside of a double barrier, the task that keeps the counter in use.
    upkeep: JoinSet<()>,
}

/// How the wait of a party for the others has ended.
#[derive(Debug, PartialEq, Eq)]
enum Gathered {
    /// All have come.
    All,
    /// The party must take another place, because it has lost its place, or has agreed to a
    /// proposal that was given up.
    Again,
    /// Not all were there, and the party does not wait.
    TooFew,
}

/// How far the round of a party is, as the counter shows it.
#[derive(Debug, PartialEq, Eq)]
enum Round {
    /// No round with this party is proposed.
    Gathers,
    /// The round up to this ticket is proposed.
    Proposed(u64),
    Complete,
    GivenUp,
}

/// The places of a round, as a list shows them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Members {
    /// How many places are left.
    there: u32,
    /// How many of them have not agreed.
    undecided: u32,
    /// How long the places last whose parties are inside of the barrier, if there are any: the
    /// first of these leases ends after this time.
    inside: Option<Duration>,
}

/// The next step of a party that leaves.
enum Leaving {
    /// Every party has left or is gone. True if all parties that had entered have left.
    Done(bool),
    /// The counter has changed, so the party must try again at once.
    Again,
    /// Other parties are inside. None of their leases ends within this time.
    After(Duration),
}

impl Places {
    pub(crate) fn new(client: &Arc<Client>, name: String, parties: u32) -> Self {
        let capacity = NonZeroU32::new(parties).filter(|parties| parties.get() <= MOST_PARTIES);
        let share = capacity.and_then(|parties| Some((PLACE, parties.checked_mul(PLACE)?)));
        let share = share.ok_or_else(|| {
            let text = format!(
                "a barrier for {parties} parties is not usable: it takes 1 to {MOST_PARTIES}"
            );
            Error::config(text).of_name(&name)
        });
        Self {
            counter: Counter::new(client, name.clone()),
            place: Lock::new(client, name, share),
            parties,
        }
    }

    pub(crate) fn wait(mut self, wait: Wait) -> Self {
        self.counter = self.counter.wait(wait);
        self
    }

    pub(crate) fn ttl(mut self, ttl: Duration) -> Self {
        self.place = self.place.ttl(ttl);
        self
    }

    pub(crate) fn label(mut self, label: &'static str) -> Self {
        self.place = self.place.label(label);
        self
    }

    /// Takes a place, and waits until all parties of the round have one. If the future is dropped,
    /// the keeper releases the place.
    pub(crate) async fn gather(&self) -> Result<Party, Error> {
        let outcome = self.gathered().await;
        outcome.map_err(|error| self.counter.named(error))
    }

    async fn gathered(&self) -> Result<Party, Error> {
        let shared = &self.counter.client().shared;
        let began = shared.clock.now();
        let give_up = self.give_up(began);
        self.place.check()?;
        let mut party = self.take_place(give_up).await?;
        loop {
            match shared.by(give_up, party.until_all_have_come()).await {
                Some(Ok(Gathered::All)) => return Ok(party),
                Some(Ok(Gathered::Again)) => {
                    drop(party);
                    party = self.take_another_place(give_up).await?;
                    continue;
                }
                Some(Ok(Gathered::TooFew)) => {}
                Some(Err(error)) => return Err(error),
                None if party.withdraws_in_time().await? => return Ok(party),
                None => {}
            }
            let waited = began.until(shared.clock.now());
            let timeout = || Error::not_complete(waited);
            return Err(party.trouble.take().unwrap_or_else(timeout));
        }
    }

    async fn take_place(&self, give_up: Instant) -> Result<Party, Error> {
        let shared = &self.counter.client().shared;
        // This read comes before the ticket is drawn: see [`Party::before`].
        let mut watching = self.counter.watch()?;
        let enough = shared.clock.now().after(shared.op_timeout);
        let seen = loop {
            match shared.by(give_up, watching.news()).await {
                Some(news) => match news? {
                    Ok(counted) => break counted,
                    Err(error) if error.fault() != Fault::Config && shared.clock.now() < enough => {
                    }
                    Err(error) => return Err(error.unavailable_unless_config()),
                },
                None => return Err(Error::unavailable("the store did not answer in time")),
            }
        };
        let wait = match self.counter.wait {
            Wait::For(wait) if !wait.is_zero() => {
                let left = shared.clock.now().until(give_up);
                Wait::For(left.max(Duration::from_millis(1)))
            }
            as_given => as_given,
        };
        let guard = match self.place.take(Some(wait)).await {
            Err(error) if error.kind() == ErrorKind::CapacityMismatch => {
                let in_use = shared.inspect(self.counter.name()?).await;
                let capacity = in_use?.first().map(|ticket| ticket.capacity);
                return Err(capacity.map_or(error, |capacity| self.mismatch(capacity)));
            }
            taken => taken?,
        };
        Ok(Party {
            places: self.clone(),
            ticket: guard.grant_id().ticket(),
            guard,
            watching: Some(watching),
            before: seen.version,
            seen,
            data_is_lost: false,
            last: None,
            has_agreed: false,
            trouble: None,
            upkeep: JoinSet::new(),
        })
    }

    /// The error when the name is in use with this capacity.
    fn mismatch(&self, in_use: u32) -> Error {
        let asked = format!("a barrier for {} parties", self.parties);
        let in_use = match (in_use == FULL.get(), in_use / PLACE, in_use % PLACE) {
            (true, ..) => "as a mutex or read/write lock".to_owned(),
            (_, parties, 0) => {
                format!("as a barrier for {parties} parties, or as a semaphore of {in_use}")
            }
            _ => format!("as a semaphore of {in_use}"),
        };
        Error::capacity_mismatch(&asked, &in_use)
    }

    /// Takes a place in the middle of the wait. The store may be down, and the party has a place
    /// no more, so this tries until the end of the wait.
    async fn take_another_place(&self, give_up: Instant) -> Result<Party, Error> {
        let shared = &self.counter.client().shared;
        loop {
            match self.take_place(give_up).await {
                Err(error) if is_transient(&error) && shared.clock.now() < give_up => {
                    tracing::debug!(%error, "no other place yet");
                    shared.alarm(shared.clock.now().after(PAUSE)).await;
                }
                outcome => return outcome,
            }
        }
    }

    fn give_up(&self, began: Instant) -> Instant {
        match self.counter.wait {
            Wait::For(Duration::ZERO) => began.after(self.counter.client().shared.op_timeout),
            Wait::For(wait) => began.after(wait),
            Wait::Forever => Instant::FAR_FUTURE,
        }
    }
}

impl Party {
    pub(crate) fn guard(&self) -> &Guard {
        &self.guard
    }

    /// Begins the stay inside of a double barrier. The counter is not watched meanwhile. It is read
    /// now and then, because a store removes a counter that nobody uses.
    ///
    /// If the place ends before the party has left, the keeper sets the counter to the count that
    /// it has. So the others that leave or look for missing parties learn of the end.
    pub(crate) fn enter(mut self) -> Self {
        self.watching = None;
        let shared = Arc::clone(&self.places.counter.client().shared);
        let name = self.guard.lease().request.name.clone();
        let wait = self.places.counter.wait;
        let keeper = shared.keeper.clone();
        let count = self.seen.count;
        let only_if = Some(OnlyIf::Count(count));
        let change = AtEnd {
            counter: name.clone(),
            op: CountOp::Set { count, only_if },
        };
        shared.change_at_end(self.guard.lease().request.id, change);
        let upkeep = async move {
            loop {
                shared.alarm(shared.clock.now().after(UPKEEP)).await;
                let read = shared.count_for_holder(&name, CountOp::Read, wait);
                if let Err(error) = read.await {
                    tracing::debug!(%error, "the counter of a barrier cannot be read");
                }
            }
        };
        self.upkeep.spawn_on(upkeep, &keeper);
        self
    }

    /// Whether this party's ticket is the youngest of its round.
    pub(crate) fn is_last(&self) -> bool {
        self.last == Some(self.ticket)
    }

    async fn until_all_have_come(&mut self) -> Result<Gathered, Error> {
        let mut pauses = Pauses::between(PAUSE, LONGEST_PAUSE);
        // A party lists once after it has got its place, and once after it has agreed. After that
        // it waits for changes of the counter. It lists again if it has tried to change the
        // counter, if a request has failed, and after a pause while others have not agreed.
        let mut lists = true;
        loop {
            if let Some(reason) = self.guard.lost_reason() {
                return self.handle_lost_place(reason).await;
            }
            let listed = match self.round()? {
                Round::Complete if self.has_agreed => return Ok(Gathered::All),
                // The answer to the request of this party is missing.
                Round::Complete => self.agree().await.map(|()| true),
                Round::GivenUp => return Ok(Gathered::Again),
                Round::Gathers if lists => self.propose().await,
                Round::Gathers if self.places.counter.wait == Wait::For(Duration::ZERO) => {
                    return Ok(Gathered::TooFew);
                }
                Round::Gathers => {
                    self.see_news(Instant::FAR_FUTURE).await?;
                    continue;
                }
                Round::Proposed(last) if self.last.is_none() => {
                    self.last = Some(last);
                    lists = true;
                    continue;
                }
                Round::Proposed(last) if lists => self.complete(last).await,
                Round::Proposed(_) => {
                    let clock = self.places.place.clock();
                    let again = clock.now().after(pauses.draw());
                    self.see_news(again).await?;
                    lists = true;
                    continue;
                }
            };
            match listed {
                Ok(has_tried) => lists = has_tried,
                // The loss was found by a request of this party. It is handled above.
                Err(error) if self.guard.lost_reason().is_some() => {
                    tracing::debug!(%error, "the place of a party is lost");
                }
                Err(error) => self.bear(error).await?,
            }
        }
    }

    fn round(&self) -> Result<Round, Error> {
        let youngest = self.seen.count.unsigned_abs();
        let is_proposed = self.seen.count < 0;
        let concerns_this = youngest >= self.ticket && self.seen.version > self.before;
        match self.last {
            Some(last) if youngest != last => Ok(Round::GivenUp),
            Some(last) if is_proposed => Ok(Round::Proposed(last)),
            Some(_) => Ok(Round::Complete),
            None if !concerns_this => Ok(Round::Gathers),
            None if is_proposed => Ok(Round::Proposed(youngest)),
            // No round is completed with a party that has not agreed.
            None => Err(lost_data()),
        }
    }

    /// Lists the places, and proposes the round if there are enough whole ones. Returns whether it
    /// has tried to. If so, `seen` has the counter as it is after the attempt.
    async fn propose(&mut self) -> Result<bool, Error> {
        let places = self.look().await?;
        let Some(last) = last_of_round(&places, self.places.parties) else {
            return Ok(false);
        };
        self.set(-signed(last)?).await.map(|_| true)
    }

    async fn agree(&mut self) -> Result<(), Error> {
        self.guard.keep_permits(AGREED).await?;
        self.has_agreed = true;
        Ok(())
    }

    /// Agrees to the proposed round. Then it completes the round or gives the proposal up, if the
    /// list of the places says so. Returns whether it has tried to.
    async fn complete(&mut self, last: u64) -> Result<bool, Error> {
        self.agree().await?;
        let members = self.members(last).await?;
        let all_agree = members.undecided == 0;
        let next = match members.there == self.places.parties {
            true if all_agree => signed(last)?,
            true => return Ok(false),
            false => 0,
        };
        self.set(next).await.map(|_| true)
    }

    /// Handles the loss of the place. A party that has agreed to no round takes another place. The
    /// same is true of a party that gives up the proposal to which it has agreed.
    async fn handle_lost_place(&mut self, reason: LostReason) -> Result<Gathered, Error> {
        let lost = self.guard.lost_for(reason);
        if !is_loss_of_place(&lost) {
            return Err(lost);
        }
        let Some(last) = self.last else {
            return Ok(Gathered::Again);
        };
        loop {
            match self.give_up_proposal(last).await {
                Ok(true) => return Ok(Gathered::Again),
                Ok(false) if self.has_agreed && self.seen.count == signed(last)? => {
                    return Ok(Gathered::All);
                }
                // There may have been other rounds since, so whether this one was completed is
                // unknown.
                Ok(false) => return Err(Error::unknown(format!("{UNKNOWN}: {lost}"))),
                Err(error) => self.bear(error).await?,
            }
        }
    }

    /// Gives the proposed round up, unless somebody has completed it or given it up. Returns
    /// whether this call has done it.
    async fn give_up_proposal(&mut self, last: u64) -> Result<bool, Error> {
        let proposed = -signed(last)?;
        while self.seen.count == proposed {
            if self.set(0).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Calls [`withdraw`](Self::withdraw) after the end of the party's wait, for at most one
    /// operation timeout. If the time ends before the answer, the keeper releases the place, as for
    /// a party whose future is dropped.
    async fn withdraws_in_time(&mut self) -> Result<bool, Error> {
        let shared = Arc::clone(&self.places.counter.client().shared);
        let by = shared.clock.now().after(shared.op_timeout);
        match shared.by(by, self.withdraw()).await {
            Some(Ok(was_counted)) => Ok(was_counted),
            Some(Err(error)) if is_transient(&error) || is_loss_of_place(&error) => {
                Err(Error::unknown(format!("{UNKNOWN}: {error}")))
            }
            Some(Err(error)) => Err(error),
            None => Err(Error::unknown(match self.trouble.take() {
                Some(error) => format!("{UNKNOWN}: {error}"),
                None => format!("{UNKNOWN}: the store did not answer in time"),
            })),
        }
    }

    /// Gives the place up. Returns whether the party was counted before, so that it passes with the
    /// others.
    async fn withdraw(&mut self) -> Result<bool, Error> {
        let Some(last) = self.last else {
            return Ok(false);
        };
        if self.give_up_proposal(last).await? {
            return Ok(false);
        }
        let is_complete = self.seen.count == signed(last)?;
        if is_complete && !self.has_agreed {
            self.agree().await?;
        }
        // Without its place, the party does not keep the others from the next round. So this round
        // may have been completed, and the store has gone on to another one.
        match self.guard.lost_reason() {
            Some(reason) if !is_complete && self.has_agreed => Err(self.guard.lost_for(reason)),
            _ => Ok(is_complete),
        }
    }

    /// Leaves a double barrier. Returns when every party of the round has left or is gone. True if
    /// all of them have left.
    pub(crate) async fn leave(&mut self) -> Result<bool, Error> {
        let shared = Arc::clone(&self.places.counter.client().shared);
        // This fails in the grace of a shutdown. Then the party reads the counter again and again.
        self.watching = self.places.counter.watch().ok();
        let began = shared.clock.now();
        let give_up = self.places.give_up(began);
        let outcome = match shared.by(give_up, self.until_all_have_left()).await {
            Some(Ok(Some(all))) => Ok(all),
            Some(Err(error)) => Err(error),
            Some(Ok(None)) | None => {
                let waited = began.until(shared.clock.now());
                let timeout = || Error::not_left(waited);
                Err(self.trouble.take().unwrap_or_else(timeout))
            }
        };
        outcome.map_err(|error| self.places.counter.named(error).of_held())
    }

    /// `None` if others are inside, and the party does not wait.
    async fn until_all_have_left(&mut self) -> Result<Option<bool>, Error> {
        let clock = self.places.place.clock().clone();
        loop {
            if let Some(error) = self.guard.loss() {
                return Err(error);
            }
            match self.try_to_leave().await {
                Ok(Leaving::Done(all)) => {
                    let shared = &self.places.counter.client().shared;
                    shared.change_nothing_at_end(self.guard.lease().request.id);
                    return Ok(Some(all));
                }
                Ok(Leaving::Again) => {}
                Ok(Leaving::After(_)) if self.places.counter.wait == Wait::For(Duration::ZERO) => {
                    return Ok(None);
                }
                Ok(Leaving::After(time)) => {
                    let again = clock.now().after(time);
                    self.see_news_of_inside(again).await?;
                }
                Err(error) => self.bear(error).await?,
            }
        }
    }

    /// Leaves, and checks whether the others have left too:
    ///
    /// 1. The party reduces its own place to [`LEAVING`]. Then it lists the places of the round.
    /// 2. If a place is whole, its party has not left yet. This party tries again later.
    /// 3. If all parties have left, this party makes the count of the counter negative. The counter
    ///    keeps this fact, because the places become free one after the other. A party that lists
    ///    them later would take a free place for that of a missing party.
    /// 4. If a place is not there although the count is not negative, its party is missing. Before
    ///    this party says so, it writes the count again. After that, no party that has listed the
    ///    places before can make the count negative: see [`outrun`](Self::outrun).
    ///
    /// So all parties get the same answer.
    async fn try_to_leave(&mut self) -> Result<Leaving, Error> {
        let last = self.last.unwrap_or_default();
        let youngest = signed(last)?;
        if self.seen.count != youngest {
            return self.after_the_end(youngest).await;
        }
        self.guard.keep_permits(LEAVING).await?;
        let members = self.members(last).await?;
        if let Some(first) = members.inside {
            return Ok(Leaving::After(first.max(PAUSE)));
        }
        if members.there == self.places.parties {
            self.set(-youngest).await?;
            return Ok(Leaving::Again);
        }
        self.outrun(|party| party.seen.count != youngest).await?;
        match self.seen.count == youngest {
            true => Ok(Leaving::Done(false)),
            false => Ok(Leaving::Again),
        }
    }

    /// Waits until the counter has changed, until the place is lost, or until the time is over. In
    /// the grace of a shutdown no counter is watched, so this reads it now and then.
    async fn see_news_of_inside(&mut self, until: Instant) -> Result<(), Error> {
        let shared = Arc::clone(&self.places.counter.client().shared);
        let before = self.seen.version;
        while self.seen.version == before
            && shared.clock.now() < until
            && self.guard.loss().is_none()
        {
            match self.see_news(until).await {
                Err(error) if error.kind() == ErrorKind::Lost(LostReason::Shutdown) => {
                    shared.alarm(shared.clock.now().after(PAUSE)).await;
                    self.read().await?;
                }
                outcome => outcome?,
            }
        }
        Ok(())
    }

    /// Handles a counter that has changed since the round was complete. The change says that the
    /// parties of this round are not inside.
    async fn after_the_end(&mut self, youngest: i64) -> Result<Leaving, Error> {
        if self.seen.count == -youngest {
            return Ok(Leaving::Done(true));
        }
        // A later round is complete. This cannot be while a place of this round exists. So this
        // party has lost its place, which `see_place` reports, or the store has lost data.
        self.see_place().await?;
        Err(lost_data())
    }

    /// Resolves when a party of the round has lost its place without leaving, for example because
    /// its process died. Returns how many such parties there are. The place of this party must be
    /// whole.
    pub(crate) async fn missing(&self) -> u32 {
        let shared = &self.places.counter.client().shared;
        let mut watching = self.places.counter.watch().ok();
        let mut version = self.seen.version;
        loop {
            if self.guard.loss().is_some() {
                return std::future::pending().await;
            }
            let look_again = match self.members(self.last.unwrap_or_default()).await {
                Ok(members) => {
                    // A party that leaves keeps the rest of its place while any party is inside.
                    // This party is inside, so a place that is not there belongs to a missing
                    // party.
                    let gone = self.places.parties.saturating_sub(members.there);
                    if gone > 0 {
                        return gone;
                    }
                    members.inside.unwrap_or_default().max(PAUSE)
                }
                Err(_) => PAUSE,
            };
            let news = async {
                let Some(watching) = &mut watching else {
                    return std::future::pending().await;
                };
                while let Ok(counted) = watching.seen(&mut None).await {
                    if std::mem::replace(&mut version, counted.version) != counted.version {
                        return;
                    }
                }
                std::future::pending().await
            };
            let _ = shared.by(shared.clock.now().after(look_again), news).await;
        }
    }

    /// Invalidates older reads of the counter: after this call, the store refuses every change by a
    /// party that has read the counter before the call. Ends early if `is_decided` is true.
    async fn outrun(&mut self, is_decided: impl Fn(&Self) -> bool) -> Result<(), Error> {
        // If the first attempt is refused, somebody has changed the counter, perhaps before the
        // call. The condition of the second attempt is the version in the first answer. If the
        // second attempt is refused too, somebody has changed the counter during the call, and
        // older reads are invalid.
        for _ in 0..2 {
            if self.set(self.seen.count).await? || is_decided(self) {
                break;
            }
        }
        Ok(())
    }

    /// Renews the place, so that the store confirms that the place exists. If the store has lost
    /// the place, it may have lost the round too.
    async fn see_place(&mut self) -> Result<(), Error> {
        while let Err(error) = self.guard.renew().await {
            self.bear(error).await?;
        }
        Ok(())
    }

    /// The places of the round up to the ticket `last` that are left. A list may leave out a ticket
    /// whose permits are reduced at that moment. The permits of a place are reduced at most twice.
    /// So if three lists leave out a place, the place is gone.
    async fn members(&self, last: u64) -> Result<Members, Error> {
        let is_member = |place: &&TicketInfo| place.ticket <= last;
        let parties = self.places.parties;
        let places = self.look().await?;
        let members = Members::of(places.iter().filter(is_member));
        if members.there >= parties {
            return Ok(members);
        }
        let mut merged = BTreeMap::new();
        for places in [places, self.look().await?, self.look().await?] {
            let of_the_round = places.iter().filter(is_member);
            merged.extend(of_the_round.map(|place| (place.ticket, place.clone())));
        }
        Ok(Members::of(merged.values()))
    }

    /// The tickets of the name. An error if a capacity is stored for the name: there might be room
    /// for more places than parties, and the rounds could not be told apart.
    async fn look(&self) -> Result<Arc<[TicketInfo]>, Error> {
        let shared = &self.places.counter.client().shared;
        let request = &self.guard.lease().request;
        let places = match &self.watching {
            Some(watching) => shared.tickets(watching).await?,
            None => shared.inspect(&request.name).await?.into(),
        };
        let own = request.capacity;
        match places.iter().find(|place| place.capacity != own.get()) {
            Some(place) => Err(self.places.mismatch(place.capacity)),
            None => Ok(places),
        }
    }

    /// Sets the counter if nobody has changed it since `seen`. Returns whether the counter was set.
    /// In both cases, `seen` has the counter from the answer.
    async fn set(&mut self, count: i64) -> Result<bool, Error> {
        let only_if = Some(OnlyIf::Version(self.seen.version));
        let counted = self.count(CountOp::Set { count, only_if }).await?;
        let is_applied = counted.outcome == Outcome::Applied;
        self.learn(counted)?;
        Ok(is_applied)
    }

    /// A request about the counter, also in the grace of a shutdown.
    async fn count(&self, op: CountOp) -> Result<Counted, Error> {
        let shared = &self.places.counter.client().shared;
        let name = &self.guard.lease().request.name;
        shared
            .count_for_holder(name, op, self.places.counter.wait)
            .await
    }

    /// Waits until a new look at the counter has updated `seen`, until the place is lost, or until
    /// the time is over.
    async fn see_news(&mut self, until: Instant) -> Result<(), Error> {
        let shared = Arc::clone(&self.places.counter.client().shared);
        let watching = match &mut self.watching {
            Some(watching) => watching,
            none => none.insert(self.places.counter.watch()?),
        };
        let mut trouble = None;
        let news = async {
            tokio::select! {
                biased;
                _ = self.guard.lost() => Ok(None),
                counted = watching.seen(&mut trouble) => counted.map(Some),
            }
        };
        let counted = shared.by(until, news).await.transpose()?;
        self.trouble = trouble.map(StoreError::unavailable_unless_config);
        match counted.flatten() {
            // The look may have begun before this party has changed the counter.
            Some(counted) if counted.version < self.seen.version => self.read().await,
            Some(counted) => self.learn(counted),
            None => Ok(()),
        }
    }

    async fn read(&mut self) -> Result<(), Error> {
        match self.count(CountOp::Read).await {
            Ok(counted) => self.learn(counted),
            Err(error) => self.bear(error).await,
        }
    }

    fn learn(&mut self, counted: Counted) -> Result<(), Error> {
        // Versions only rise.
        if counted.version < self.seen.version {
            self.data_is_lost = true;
            return Err(lost_data());
        }
        self.seen = counted;
        self.trouble = None;
        Ok(())
    }

    /// Handles a failed request: waits a moment, or returns the error if a repetition would fail
    /// too.
    async fn bear(&mut self, error: Error) -> Result<(), Error> {
        if self.data_is_lost || !is_transient(&error) {
            return Err(error);
        }
        self.trouble = Some(error);
        let shared = &self.places.counter.client().shared;
        shared.alarm(shared.clock.now().after(PAUSE)).await;
        Ok(())
    }
}

impl Drop for Party {
    fn drop(&mut self) {
        // A forked child has no keeper that could end the task.
        if self.places.counter.client().shared.is_forked() {
            self.upkeep.detach_all();
        }
    }
}

/// Whether another attempt may succeed.
fn is_transient(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown)
}

/// Whether a place has ended without anybody having asked for that.
fn is_loss_of_place(error: &Error) -> bool {
    use LostReason::{Expired, Taken};
    matches!(error.kind(), ErrorKind::Lost(Expired | Taken))
}

/// The number of a ticket as a count of the counter.
fn signed(ticket: u64) -> Result<i64, Error> {
    i64::try_from(ticket).map_err(|_| lost_data())
}

/// The youngest ticket of a round that can be proposed: there are as many whole places as parties.
fn last_of_round(places: &[TicketInfo], parties: u32) -> Option<u64> {
    let whole = places
        .iter()
        .filter(|place| place.granted && place.permits == PLACE.get());
    let tickets = whole.map(|place| place.ticket);
    let (number, last) = tickets.fold((0, 0), |(number, last), ticket| {
        (number + 1, last.max(ticket))
    });
    (number == parties).then_some(last)
}

impl Members {
    fn of<'a>(places: impl Iterator<Item = &'a TicketInfo>) -> Self {
        places.fold(Self::default(), |mut members, place| {
            members.there += 1;
            members.undecided += u32::from(place.permits > AGREED);
            if place.permits > LEAVING {
                let ends = members.inside.unwrap_or(Duration::MAX);
                members.inside = Some(ends.min(place.remaining));
            }
            members
        })
    }
}

fn lost_data() -> Error {
    Error::unavailable(
        "the store does not know this round of the barrier any more, or has tickets of an older one: it has lost data",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locks::Locks;

    fn place(ticket: u64, permits: u32) -> TicketInfo {
        let second = Duration::from_secs(1);
        TicketInfo::new(ticket, true, permits, 9, second, "host/1/x".to_owned())
    }

    #[test]
    fn a_round_is_proposed_with_as_many_whole_places_as_parties() {
        let three = [place(5, 3), place(7, 3), place(8, 3)];
        assert_eq!(last_of_round(&three, 3), Some(8));
        assert_eq!(last_of_round(&three[1..], 3), None);
        assert_eq!(last_of_round(&[], 3), None);

        for permits in [AGREED, LEAVING] {
            let of_another_round = [place(5, 3), place(7, permits), place(8, 3)];
            assert_eq!(last_of_round(&of_another_round, 3), None);
        }
        let mut one_waits = three;
        one_waits[2].granted = false;
        assert_eq!(last_of_round(&one_waits, 3), None);
    }

    #[test]
    fn the_places_of_a_round_are_counted_by_how_far_they_are() {
        let places = [place(5, PLACE.get()), place(7, AGREED), place(8, LEAVING)];
        let second = Some(Duration::from_secs(1));
        let counted = |there, undecided, inside| Members {
            there,
            undecided,
            inside,
        };
        assert_eq!(Members::of(places.iter()), counted(3, 1, second));
        assert_eq!(Members::of(places[1..].iter()), counted(2, 0, second));
        assert_eq!(Members::of(places[2..].iter()), counted(1, 0, None));
        assert_eq!(Members::of([].iter()), counted(0, 0, None));
    }

    /// The others may have completed the round with this party, and have begun another one.
    #[tokio::test]
    async fn a_party_that_gives_up_after_its_place_is_lost_does_not_know_of_its_round() {
        let locks = Locks::connect("memory:").unwrap();
        let places = Places::new(&locks.0, "a".to_owned(), 2).wait(Wait::Forever);
        let places = places.ttl(Duration::from_millis(600));
        let mut party = places.take_place(Instant::FAR_FUTURE).await.unwrap();
        assert!(!party.withdraws_in_time().await.unwrap());
        party.last = Some(party.ticket);
        party.has_agreed = true;
        assert!(!party.withdraws_in_time().await.unwrap());

        locks.force_release("a", party.ticket).await.unwrap();
        party.guard.lost().await;

        let error = party.withdraws_in_time().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown);
    }
}
