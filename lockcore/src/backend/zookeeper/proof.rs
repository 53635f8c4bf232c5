//! The proof until when a session certainly lives.

use std::collections::VecDeque;
use std::time::Duration;

use crate::clock::Instant;

/// How old the newest commit may become while there are tickets, as a part of the session timeout.
/// The age is checked at every probe, so the third probe after a commit finds that the commit is
/// too old. By then the commit is as old as the proof by probes is at best. So this check makes no
/// lease shorter.
const CHECK: u32 = 4;

/// Until when the session certainly lives. This needs two proofs.
///
/// # What the leader has heard
///
/// The leader ends a session if it has not heard of the session for the session timeout. A server
/// that is not the leader answers reads and pings by itself. It reports the active sessions to the
/// leader with the leader's own pings, every half tick. So an answered ping proves nothing: a
/// server that is cut off from its leader continues to answer for seconds after the session's nodes
/// are gone.
///
/// A `sync` is answered through the leader, and the leader refuses it if the session has ended. So
/// a `sync` that succeeds proves that the session was alive at the leader at that time. It does not
/// prove when the leader last heard of the session.
///
/// The time when the leader heard of the session follows from two probes. Requests and reports of
/// active sessions go from a server to the leader in one stream. Suppose that an earlier probe was
/// answered at least half a tick before a later probe was sent. Then, in that stream, a report that
/// includes the earlier probe comes before the later probe. So if the later probe is answered, the
/// leader has this report, and keeps the session until the send of the *earlier* probe plus the
/// timeout. (This is also true on a new connection. To take the session over, the new server had to
/// ask the leader after the earlier probe, and the leader noted the session.)
///
/// The session timeout is at least two ticks, so a quarter of it is at least half a tick.
///
/// # Whether the leader led
///
/// A `sync` does not prove a quorum. A leader without followers answers it until the leader notices
/// that it has no followers, after `syncLimit` (seen: for 11 s). By then the followers may have
/// elected another leader. A new leader gives each session its full timeout once, and then ends it.
///
/// Only a commit proves that the leader led. A commit needs the acknowledgement of a majority. A
/// server that has promised to follow a later leader acknowledges nothing to an earlier leader. So
/// if a request of this session was committed, a majority followed that leader *after* the request
/// was sent. Each later leader has a majority too, and at least one server is in both majorities.
/// So each later leader began after the send of the request, and keeps the session at least until
/// that send plus the timeout. An earlier leader has not ended the session, because the request
/// would then have been refused. An earlier leader cannot end the session later either, because it
/// has no majority.
///
/// Every write is committed, even one that fails because a node exists or does not exist. If there
/// are tickets, and this session makes no other write, the session sends a `multi` that checks a
/// node and changes nothing.
///
/// # Together
///
/// The leader that ends the session is the leader that our probes have reached, or a later one.
/// Hence the session lives until the earlier of two times plus the timeout: the send of the earlier
/// probe, and the send of the committed request. Both times are read before the send, on this
/// machine's clock, and both only rise. An answer that is late or comes twice proves no more than
/// it proved when its request was sent.
#[derive(Debug)]
pub(super) struct Proof {
    timeout: Duration,
    /// The leader heard of the session at this time or later.
    heard: Instant,
    /// The send time of our newest committed request.
    committed: Instant,
    /// Probes that were answered, but perhaps not reported to the leader yet: when each was sent,
    /// and when it was answered.
    answered: VecDeque<(Instant, Instant)>,
}

impl Proof {
    /// The leader itself creates a session, and the creation is committed. So the first proof needs
    /// no second probe.
    pub(super) fn new(timeout: Duration, sent: Instant) -> Self {
        Self {
            timeout,
            heard: sent,
            committed: sent,
            answered: VecDeque::new(),
        }
    }

    pub(super) fn answered(&mut self, sent: Instant, now: Instant) {
        while let Some(&(earlier, answered)) = self.answered.front()
            && answered.after(self.timeout / 4) <= sent
        {
            self.heard = self.heard.max(earlier);
            self.answered.pop_front();
        }
        self.answered.push_back((sent, now));
    }

    /// A request that was sent at this time was committed.
    pub(super) fn committed(&mut self, sent: Instant) {
        self.committed = self.committed.max(sent);
    }

    /// Whether a commit is needed now.
    pub(super) fn wants_a_commit(&self, now: Instant) -> bool {
        self.committed.after(self.timeout / CHECK) <= now
    }

    /// For how long from now on the session certainly lives.
    pub(super) fn lives_for(&self, now: Instant) -> Duration {
        now.until(self.heard.min(self.committed).after(self.timeout))
    }

    /// For how long from now on the session certainly lives, provided that the leader leads. While
    /// there are no tickets, nothing checks that it leads.
    pub(super) fn heard_for(&self, now: Instant) -> Duration {
        now.until(self.heard.after(self.timeout))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn an_answered_probe_proves_the_one_before_it_and_not_itself() {
        let mut proof = Proof::new(T, at(100));
        assert_eq!(proof.heard_for(at(100)), T);

        proof.answered(at(103), at(103));
        assert_eq!(proof.heard_for(at(103)), Duration::from_secs(7));
        proof.answered(at(106), at(106));
        assert_eq!(proof.heard_for(at(106)), Duration::from_secs(7));
    }

    /// The server reports the session only with the leader's next ping.
    #[test]
    fn a_probe_right_after_another_proves_nothing_of_it() {
        let mut proof = Proof::new(T, at(100));
        proof.answered(at(103), at(103));
        proof.answered(at(104), at(104));
        assert_eq!(proof.heard_for(at(104)), Duration::from_secs(6));

        proof.answered(at(107), at(107));
        assert_eq!(proof.heard_for(at(107)), Duration::from_secs(7));
    }

    /// It is unknown when the server read the probe. It may have been just before the answer.
    #[test]
    fn a_probe_that_was_answered_late_was_perhaps_read_late() {
        let mut proof = Proof::new(T, at(100));
        proof.answered(at(101), at(105));
        proof.answered(at(106), at(106));
        assert_eq!(proof.heard_for(at(106)), Duration::from_secs(4));
    }

    /// A leader without followers continues to answer probes.
    #[test]
    fn probes_alone_prove_nothing_beyond_the_last_commit() {
        let mut proof = Proof::new(T, at(100));
        for second in [103, 106, 109] {
            proof.answered(at(second), at(second));
        }
        assert_eq!(proof.lives_for(at(109)), Duration::from_secs(1));
        assert_eq!(proof.heard_for(at(109)), Duration::from_secs(7));

        assert!(proof.wants_a_commit(at(109)));
        proof.committed(at(109));
        proof.committed(at(108)); // its answer was late
        assert!(!proof.wants_a_commit(at(109)));
        assert_eq!(proof.lives_for(at(109)), Duration::from_secs(7));
    }

    #[test]
    fn a_session_that_was_not_heard_of_for_its_timeout_is_over() {
        let proof = Proof::new(T, at(100));
        assert_eq!(proof.lives_for(at(111)), Duration::ZERO);
    }
}
