//! The places of a barrier, and when all parties of a round have come. The public types are in `barrier` and
//! `double_barrier`.
//!
//! A party's *place* is a ticket of a semaphore on the name: a lease that is renewed, and that ends with the process. The
//! counter of the name keeps which rounds are over: its value is the number of the youngest ticket that has gone on. So
//! a party goes on when the counter has reached its own ticket.
//!
//! **A round is complete** when as many whole places as there are parties are younger than that number. All of them are
//! granted then, because the semaphore has room for no other. A party that has got its place reads the counter, lists the
//! tickets, and if the round is complete sets the counter to the youngest ticket, on condition that nobody has changed
//! it since it was read. The last party to get its place sees the others, so one of them sees all.
//!
//! - *That party dies before it sets the counter*: its place stays until its lease ends, and nobody goes on. That is
//!   right, because one party is dead. A party that gets the place after it looks again.
//! - *Two parties see that the round is complete*: the condition lets one of them set the counter. The other gets its
//!   value with the refusal.
//! - *The answer is lost*: the same change is sent again, and counts once. The parties learn of it from the counter, and
//!   not from the answer, and so does the one that has sent it.
//! - *A party comes back before the others have left*: its ticket is younger than the counter, and counts for the next
//!   round only. That cannot be complete while an older place is left, because there is not enough room.
//! - *The store restarts empty*: before a party goes on, the store must say that its place is still there. No ticket that
//!   is gone comes back, and renewing does not make one.
//! - *Clocks*: ticket numbers are drawn by the store, and leases end by its clock. No time of a client is compared with
//!   another.
//!
//! **A party that gives up** must know whether it was counted. It gives back one permit, and keeps the rest of its place.
//! From then on no list shows a complete round, because the rest leaves too little room. A list that was read before may
//! still lead to a change of the counter. So the party changes the counter itself, to the value that it has. After that
//! the condition of every such change fails. If the counter has reached the party's ticket by then, it was counted, and
//! goes on. Only then does it release the rest.
//!
//! **A gap that stays open**: a list and the change that follows are two requests. A party that dies between them, or
//! whose future is dropped, is counted. So is one that gives up in line, before it knows of its place. No party is told
//! anything wrong by that: at the time of the list all were there, after the last of them had come, and the one that is
//! gone is not told anything. Tickets and counters do not change together in any store, so no order of requests avoids
//! it.

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

/// The permits of a place.
const PLACE: NonZeroU32 = NonZeroU32::new(3).unwrap();

/// The rest of the place of a party that is giving up, or has gone on while it was.
const GIVING_UP: u32 = 2;

/// The rest of the place of a party that leaves a double barrier.
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
    /// The number of its ticket.
    ticket: u64,
    /// The counter, as it was seen last.
    seen: Counted,
    /// The youngest ticket of its round, once the round is complete.
    youngest: u64,
    /// The last request has failed.
    trouble: Option<Error>,
}

/// The next step of a party that leaves.
enum Leaving {
    /// All have left. Whether all that had entered did.
    Done(bool),
    /// It looks again, because the counter has changed.
    Again,
    /// Others are inside. None of their leases ends before this time.
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

    /// Takes a place and waits until all parties of the round have one. Dropping the future gives the place back.
    pub(crate) async fn gather(&self) -> Result<Party, Error> {
        let outcome = self.gathered().await;
        outcome.map_err(|error| self.counter.named(error))
    }

    async fn gathered(&self) -> Result<Party, Error> {
        let shared = &self.counter.client().shared;
        let began = shared.clock.now();
        let give_up = self.give_up(began);
        self.place.check()?;
        // Before the ticket is drawn: a counter that has reached the ticket already is not of this store's past.
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

    /// Whether it is the youngest of its round.
    pub(crate) fn is_last(&self) -> bool {
        self.youngest == self.ticket
    }

    /// Whether its round is over.
    fn has_gone_on(&self) -> bool {
        self.seen.value.unsigned_abs() >= self.ticket
    }

    async fn until_all_have_come(&mut self) -> Result<(), Error> {
        let mut watching = None;
        // The party that has its place last finds the round complete. So nobody needs to look a second time, except
        // where the counter has changed between its look and its change, or a request has failed.
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

    /// Sets the counter if the round is complete. Returns whether it is: then the counter has been seen after that.
    async fn count_the_round(&mut self) -> Result<bool, Error> {
        let places = self.look().await?;
        let Some(last) = last_of_round(&places, self.places.parties, self.seen.value) else {
            return Ok(false);
        };
        let last = i64::try_from(last).map_err(|_| lost_data())?;
        self.set(last).await.map(|_| true)
    }

    /// As [`withdraw`](Self::withdraw), for at most one operation timeout, although its wait is over. If it ends half-way,
    /// the keeper gives the place back, as that of a party whose future is dropped.
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

    /// The store has not answered in time.
    fn unknown(&mut self, what: &str) -> Error {
        Error::unknown(match self.trouble.take() {
            Some(error) => format!("{what}: {error}"),
            None => format!("{what}: the store did not answer in time"),
        })
    }

    /// Gives the place up. Returns whether the party was counted before that, and goes on with the others.
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

    /// After this, no change of the counter is carried out whose sender has read it before the call. Ends early when
    /// what the party wants to know is decided.
    async fn outrun(&mut self, is_decided: impl Fn(&Self) -> bool) -> Result<(), Error> {
        // If the first attempt is refused, somebody has changed the counter, perhaps before the call. The second one is
        // on condition of what the first has read, so if it is refused too, somebody has changed the counter since.
        for _ in 0..2 {
            if self.set(self.seen.value).await? || is_decided(self) {
                break;
            }
        }
        Ok(())
    }

    /// The store must say that the place is there: a store that has lost it may have lost the round too.
    async fn see_place(&mut self) -> Result<(), Error> {
        while let Err(error) = self.guard.renew().await {
            self.bear(error).await?;
        }
        Ok(())
    }

    /// Leaves a double barrier. Returns when all parties of the round have left or are gone, and whether all have left.
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
        outcome.map_err(|error| self.places.counter.named(error))
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

    /// Leaves, and looks whether the others have left too. That all have is for ever true, so each party may see it for
    /// itself. Whether one is missing is not: those that see that all have left go away. So it is kept in the counter: the
    /// first to see all of them makes the value negative. A party that sees that one is missing makes sure that nobody
    /// can do that any more, before it goes.
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

    /// The counter does not say any more that the parties of this round are inside.
    async fn after_the_end(&mut self, youngest: i64) -> Result<Leaving, Error> {
        if self.seen.value == -youngest {
            return Ok(Leaving::Done(true));
        }
        // Others have gone on since, and no round is complete while a place of an earlier one is there.
        self.see_place().await?;
        Err(lost_data())
    }

    /// Resolves when a party of the round is gone that has not left, with the number of those that are gone. The place of
    /// this party must be whole.
    pub(crate) async fn missing(&self) -> u32 {
        let shared = &self.places.counter.client().shared;
        loop {
            if self.guard.loss().is_some() {
                return std::future::pending().await;
            }
            let look_again = match self.members().await {
                Ok(there) => {
                    // Those that leave stay in place for as long as somebody is inside, and this party is.
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

    /// The places of the party's own round that are left, once it is complete. A list may leave out a ticket that is
    /// becoming smaller at that moment, and a place does so twice at most. So one that three lists leave out is gone.
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

    /// The tickets of the name. If a capacity was stored for it, there is room for more places than there are parties, and
    /// no round could be told from another.
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

    /// Sets the counter if it is as it was seen last. Returns whether it was. In both cases it has been seen after that.
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

    /// Waits until the counter has been seen again, or until the time has come.
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

    /// After a request that failed: waits a moment, unless it would fail again.
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

/// The youngest ticket of a round that is complete. `value` is that of the counter: the rounds up to there are over.
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
