//! The places of a barrier, and the rule that tells when all parties of a round have come. The
//! public types are in `barrier` and `double_barrier`.
//!
//! A party's *place* is a ticket of a semaphore on the name. The party's client renews the lease of
//! the ticket, so the place ends if the process dies. The counter of the name tells which rounds
//! are over: its value is the number of the youngest ticket that has passed the barrier. So a party
//! passes the barrier when the counter has reached the number of its own ticket.
//!
//! **A round is complete** when there are as many whole places as parties, with ticket numbers
//! above the counter's value. All these tickets are granted, because the semaphore has room for
//! exactly this many places. When a party has got its place, it reads the counter and lists the
//! tickets. If the round is complete, the party sets the counter to the number of the youngest
//! ticket. The condition of this change is that nobody has changed the counter since the read. The
//! party that gets its place last sees all other places, so at least one party sees the complete
//! round.
//!
//! - *A party sees the complete round, and dies before it sets the counter*: its place stays until
//!   its lease ends, and no party passes. This is right, because one party is dead. The next party
//!   that gets this place lists the tickets again.
//! - *Two parties see that the round is complete*: the condition lets only one of them set the
//!   counter. The other gets the new value with the refusal.
//! - *The answer is lost*: the client sends the same change again, and it counts once. All parties,
//!   and also the sender, learn from the counter that the round is complete, and not from the
//!   answer.
//! - *A party comes back before the others have left*: its new ticket has a number above the
//!   counter, so it counts for the next round only. The next round cannot be complete while an
//!   older place is left, because there is not enough room.
//! - *The store restarts empty*: before a party passes, the store must confirm that the party's
//!   place exists. A lost ticket never comes back, and a renewal does not create one.
//! - *Clocks*: the store draws the ticket numbers, and leases end by the store's clock. No time of
//!   one client is compared with a time of another.
//!
//! **A party that gives up** must know whether it was counted. First it releases one permit, and
//! keeps the rest of its place. After that no list shows a complete round, because the rest of the
//! place leaves too little room. But a party that has listed the tickets before may be about to
//! change the counter. So the party that gives up then sets the counter itself, to the value that
//! the counter has. This is a new version, so the condition of every such change fails. If the
//! counter has reached the party's own ticket by then, the party was counted, and passes. Only
//! after that does the party release the rest of its place.
//!
//! **A gap that remains**: the list and the change that follows are two requests. If a party dies
//! between them, or if its future is dropped, it is counted nevertheless. The same is true of a
//! party that gives up in line, before it learns that it has a place. No party gets a wrong answer
//! because of this: when the list was made, all parties were there, and the last of them had come.
//! The party that is gone gets no answer. No store changes a ticket and a counter in one step, so
//! no order of requests closes the gap.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use crate::acquire::handle::Client;
use crate::backend::{CountOp, Counted, OnlyIf, Outcome, StoreError, TicketInfo};
use crate::client::watched::Watching;
use crate::clock::Instant;
use crate::counter::Counter;
use crate::error::{Error, ErrorKind};
use crate::hold::Guard;
use crate::lock::Lock;
use crate::options::Wait;
use crate::request::{FULL, mismatch};

/// The permits of a whole place.
const PLACE: NonZeroU32 = NonZeroU32::new(3).unwrap();

/// The permits that a party keeps when it gives up. If the party was counted meanwhile, it passes
/// with these permits.
const GIVING_UP: u32 = 2;

/// The permits that a party keeps when it leaves a double barrier.
const LEAVING: u32 = 1;

/// The pause after a request that failed.
const PAUSE: Duration = Duration::from_millis(100);

/// The most parties of a barrier.
pub(crate) const MOST_PARTIES: u32 = (FULL.get() - 1) / PLACE.get();

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
    /// The number of the party's ticket.
    ticket: u64,
    /// The counter, as the last answer of the store has shown it.
    seen: Counted,
    /// The youngest ticket of the party's round, after the round is complete.
    youngest: u64,
    /// The error of the last request, if it has failed.
    trouble: Option<Error>,
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
        // This read comes before the ticket is drawn. So if the counter has reached the ticket's
        // number already, the store has lost data.
        let seen = self.counter.change(CountOp::Read).await?;
        let wait = match self.counter.wait {
            Wait::For(wait) if !wait.is_zero() => {
                let left = shared.clock.now().until(give_up);
                Wait::For(left.max(Duration::from_millis(1)))
            }
            as_given => as_given,
        };
        let guard = self.place.take(Some(wait)).await?;
        let mut party = Party {
            places: self.clone(),
            ticket: guard.grant_id().ticket(),
            guard,
            seen,
            youngest: 0,
            trouble: None,
        };
        if party.has_gone_on() {
            return Err(lost_data());
        }
        match shared.by(give_up, party.until_all_have_come()).await {
            Some(outcome) => outcome?,
            None if party.withdraws_in_time().await? => {}
            None => {
                let waited = began.until(shared.clock.now());
                let timeout = || Error::not_complete(waited);
                return Err(party.trouble.take().unwrap_or_else(timeout));
            }
        }
        party.youngest = party.seen.value.unsigned_abs();
        let by = shared.clock.now().after(shared.op_timeout).max(give_up);
        match shared.by(by, party.see_place()).await {
            Some(seen) => seen?,
            None => {
                let text =
                    "the others have gone on, and whether this party has kept its place is unknown";
                return Err(party.unknown(text));
            }
        }
        Ok(party)
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

    /// Whether this party's ticket is the youngest of its round.
    pub(crate) fn is_last(&self) -> bool {
        self.youngest == self.ticket
    }

    /// Whether the counter has reached the number of this party's ticket. If so, the party's round
    /// is complete, and the party passes.
    fn has_gone_on(&self) -> bool {
        self.seen.value.unsigned_abs() >= self.ticket
    }

    async fn until_all_have_come(&mut self) -> Result<(), Error> {
        let mut watching = None;
        // The party that gets its place last finds the round complete. So a party lists the tickets
        // once, and then waits for a change of the counter. It lists them again in two cases: the
        // round was complete, but somebody has changed the counter between the list and this
        // party's own change; or a request has failed.
        let mut looks = true;
        while !self.has_gone_on() {
            if let Some(error) = self.guard.loss() {
                return Err(error);
            }
            if !looks {
                self.see_news(&mut watching, Instant::FAR_FUTURE).await?;
                continue;
            }
            match self.count_the_round().await {
                Ok(is_complete) => looks = is_complete,
                Err(error) => self.bear(error).await?,
            }
        }
        Ok(())
    }

    /// Sets the counter if the round is complete. Returns whether the round is complete. If so,
    /// `seen` has the counter as it is after the attempt.
    async fn count_the_round(&mut self) -> Result<bool, Error> {
        let places = self.look().await?;
        let Some(last) = last_of_round(&places, self.places.parties, self.seen.value) else {
            return Ok(false);
        };
        let last = i64::try_from(last).map_err(|_| lost_data())?;
        self.set(last).await.map(|_| true)
    }

    /// Calls [`withdraw`](Self::withdraw) after the end of the party's wait, for at most one
    /// operation timeout. If the time ends before the answer, the keeper releases the place, as for
    /// a party whose future is dropped.
    async fn withdraws_in_time(&mut self) -> Result<bool, Error> {
        let shared = Arc::clone(&self.places.counter.client().shared);
        let by = shared.clock.now().after(shared.op_timeout);
        match shared.by(by, self.withdraw()).await {
            Some(outcome) => outcome,
            None => {
                let text = "whether the others have gone on with this party is unknown";
                Err(self.unknown(text))
            }
        }
    }

    /// The error of a party that has got no answer from the store in time.
    fn unknown(&mut self, what: &str) -> Error {
        Error::unknown(match self.trouble.take() {
            Some(error) => format!("{what}: {error}"),
            None => format!("{what}: the store did not answer in time"),
        })
    }

    /// Gives the place up. Returns whether the party was counted before, so that it passes with the
    /// others.
    async fn withdraw(&mut self) -> Result<bool, Error> {
        let unknown = |error: Error| match error.kind() {
            ErrorKind::Lost(_) | ErrorKind::Config => error,
            _ => Error::unknown(format!(
                "whether the others have gone on with this party is unknown: {error}"
            )),
        };
        self.guard.keep_permits(GIVING_UP).await.map_err(unknown)?;
        self.outrun(Self::has_gone_on).await.map_err(unknown)?;
        Ok(self.has_gone_on())
    }

    /// Invalidates older reads of the counter: after this call, the store refuses every change by a
    /// party that has read the counter before the call. Ends early if `is_decided` is true.
    async fn outrun(&mut self, is_decided: impl Fn(&Self) -> bool) -> Result<(), Error> {
        // If the first attempt is refused, somebody has changed the counter, perhaps before the
        // call. The condition of the second attempt is the version in the first answer. If the
        // second attempt is refused too, somebody has changed the counter during the call, and
        // older reads are invalid.
        for _ in 0..2 {
            if self.set(self.seen.value).await? || is_decided(self) {
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

    /// Leaves a double barrier. Returns when every party of the round has left or is gone. True if
    /// all of them have left.
    pub(crate) async fn leave(&mut self) -> Result<bool, Error> {
        let shared = Arc::clone(&self.places.counter.client().shared);
        let began = shared.clock.now();
        let give_up = self.places.give_up(began);
        let outcome = match shared.by(give_up, self.until_all_have_left()).await {
            Some(outcome) => outcome,
            None => {
                let waited = began.until(shared.clock.now());
                let timeout = || Error::not_left(waited);
                Err(self.trouble.take().unwrap_or_else(timeout))
            }
        };
        outcome.map_err(|error| self.places.counter.named(error).of_held())
    }

    async fn until_all_have_left(&mut self) -> Result<bool, Error> {
        let clock = self.places.place.clock().clone();
        let mut watching = None;
        loop {
            if let Some(error) = self.guard.loss() {
                return Err(error);
            }
            match self.try_to_leave().await {
                Ok(Leaving::Done(all)) => return Ok(all),
                Ok(Leaving::Again) => {}
                Ok(Leaving::After(time)) => {
                    let again = clock.now().after(time);
                    self.see_news(&mut watching, again).await?;
                }
                Err(error) => self.bear(error).await?,
            }
        }
    }

    /// Leaves, and checks whether the others have left too:
    ///
    /// 1. The party reduces its own place to [`LEAVING`]. Then it lists the places of the round.
    /// 2. If a place is whole, its party has not left yet. This party tries again later.
    /// 3. If all parties have left, this party makes the value of the counter negative. The counter
    ///    keeps this fact, because the places become free one after the other. A party that lists
    ///    them later would take a free place for that of a missing party.
    /// 4. If a place is not there although the value is not negative, its party is missing. Before
    ///    this party says so, it writes the value again. After that, no party that has listed the
    ///    places before can make the value negative: see [`outrun`](Self::outrun).
    ///
    /// So all parties get the same answer.
    async fn try_to_leave(&mut self) -> Result<Leaving, Error> {
        let youngest = i64::try_from(self.youngest).map_err(|_| lost_data())?;
        if self.seen.value != youngest {
            return self.after_the_end(youngest).await;
        }
        self.guard.keep_permits(LEAVING).await?;
        let there = self.members().await?;
        let inside = there.iter().filter(|place| place.permits > LEAVING);
        if let Some(first) = inside.map(|place| place.remaining).min() {
            return Ok(Leaving::After(first.max(PAUSE)));
        }
        if there.len() == self.places.parties as usize {
            self.set(-youngest).await?;
            return Ok(Leaving::Again);
        }
        self.outrun(|party| party.seen.value != youngest).await?;
        match self.seen.value == youngest {
            true => Ok(Leaving::Done(false)),
            false => Ok(Leaving::Again),
        }
    }

    /// Handles a counter that has changed since the round was complete. The change says that the
    /// parties of this round are not inside.
    async fn after_the_end(&mut self, youngest: i64) -> Result<Leaving, Error> {
        if self.seen.value == -youngest {
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
        loop {
            if self.guard.loss().is_some() {
                return std::future::pending().await;
            }
            let look_again = match self.members().await {
                Ok(there) => {
                    // A party that leaves keeps the rest of its place while any party is inside.
                    // This party is inside, so a place that is not there belongs to a missing
                    // party.
                    let gone = (self.places.parties as usize).saturating_sub(there.len());
                    if gone > 0 {
                        return u32::try_from(gone).unwrap_or(u32::MAX);
                    }
                    let first = there.iter().map(|place| place.remaining).min();
                    first.unwrap_or_default().max(PAUSE)
                }
                Err(_) => PAUSE,
            };
            shared.alarm(shared.clock.now().after(look_again)).await;
        }
    }

    /// The remaining places of the party's own round, after the round is complete. A list may leave
    /// out a ticket whose permits are reduced at that moment. The permits of a place are reduced at
    /// most twice. So if three lists leave out a place, the place is gone.
    async fn members(&self) -> Result<Vec<TicketInfo>, Error> {
        let mut members = BTreeMap::new();
        for _ in 0..3 {
            let places = self.look().await?.into_iter();
            let of_the_round = places.filter(|place| place.ticket <= self.youngest);
            members.extend(of_the_round.map(|place| (place.ticket, place)));
            if members.len() >= self.places.parties as usize {
                break;
            }
        }
        Ok(members.into_values().collect())
    }

    /// The tickets of the name. An error if a capacity is stored for the name: there might be room
    /// for more places than parties, and the rounds could not be told apart.
    async fn look(&self) -> Result<Vec<TicketInfo>, Error> {
        let shared = &self.places.counter.client().shared;
        let request = &self.guard.lease().request;
        let places = shared.inspect(&request.name).await?;
        let own = request.capacity;
        match places.iter().find(|place| place.capacity != own.get()) {
            Some(place) => Err(mismatch(own, place.capacity)),
            None => Ok(places),
        }
    }

    /// Sets the counter if nobody has changed it since `seen`. Returns whether the counter was set.
    /// In both cases, `seen` has the counter from the answer.
    async fn set(&mut self, value: i64) -> Result<bool, Error> {
        let only_if = Some(OnlyIf::Version(self.seen.version));
        let counted = self
            .places
            .counter
            .change(CountOp::Set { value, only_if })
            .await?;
        let is_applied = counted.outcome == Outcome::Applied;
        self.learn(counted)?;
        Ok(is_applied)
    }

    /// Waits until a new look at the counter has updated `seen`, or until the time is over.
    async fn see_news(
        &mut self,
        watching: &mut Option<Watching>,
        until: Instant,
    ) -> Result<(), Error> {
        let shared = Arc::clone(&self.places.counter.client().shared);
        let watching = match watching {
            Some(watching) => watching,
            none => none.insert(self.places.counter.watch()?),
        };
        let mut trouble = None;
        let news = async {
            tokio::select! {
                biased;
                reason = self.guard.lost() => Err(self.guard.lost_for(reason)),
                counted = watching.seen(&mut trouble) => counted,
            }
        };
        let counted = shared.by(until, news).await.transpose()?;
        self.trouble = trouble.map(StoreError::unavailable_unless_config);
        counted.map_or(Ok(()), |counted| self.learn(counted))
    }

    fn learn(&mut self, counted: Counted) -> Result<(), Error> {
        // Versions only rise.
        if counted.version < self.seen.version {
            return Err(lost_data());
        }
        self.seen = counted;
        self.trouble = None;
        Ok(())
    }

    /// Handles a failed request: waits a moment, or returns the error if a repetition would fail
    /// too.
    async fn bear(&mut self, error: Error) -> Result<(), Error> {
        if !matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown) {
            return Err(error);
        }
        self.trouble = Some(error);
        let shared = &self.places.counter.client().shared;
        shared.alarm(shared.clock.now().after(PAUSE)).await;
        Ok(())
    }
}

/// The youngest ticket of the first round that is not over, if this round is complete. `value` is
/// the value of the counter: the rounds up to this ticket are over.
fn last_of_round(places: &[TicketInfo], parties: u32, value: i64) -> Option<u64> {
    let over = value.unsigned_abs();
    let of_the_round = places
        .iter()
        .filter(|place| place.granted && place.permits == PLACE.get() && place.ticket > over);
    let tickets = of_the_round.map(|place| place.ticket);
    let (number, last) = tickets.fold((0, 0), |(number, last), ticket| {
        (number + 1, last.max(ticket))
    });
    (number == parties).then_some(last)
}

fn lost_data() -> Error {
    Error::unavailable(
        "the store does not know this round of the barrier any more, or has tickets of an older one: it has lost data",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(ticket: u64, permits: u32) -> TicketInfo {
        let second = Duration::from_secs(1);
        TicketInfo::new(ticket, true, permits, 9, second, "host/1/x".to_owned())
    }

    #[test]
    fn a_round_is_complete_with_as_many_whole_places_as_parties() {
        let (three, two) = (
            [place(5, 3), place(7, 3), place(8, 3)],
            [place(5, 3), place(8, 3)],
        );
        assert_eq!(last_of_round(&three, 3, 0), Some(8));
        assert_eq!(last_of_round(&two, 3, 0), None);
        assert_eq!(last_of_round(&[], 3, 0), None);

        let gives_up = [place(5, 3), place(7, GIVING_UP), place(8, 3)];
        assert_eq!(last_of_round(&gives_up, 3, 0), None);
    }

    #[test]
    fn places_of_rounds_that_are_over_and_waiters_do_not_count() {
        let places = [place(5, 3), place(7, 3), place(8, 3)];
        for over in [5, -5, 8, -8] {
            assert_eq!(last_of_round(&places, 3, over), None, "{over}");
        }
        assert_eq!(last_of_round(&places[1..], 2, 5), Some(8));
        assert_eq!(last_of_round(&places[1..], 2, -5), Some(8));

        let mut waits = places;
        waits[2].granted = false;
        assert_eq!(last_of_round(&waits, 3, 0), None);
    }
}
