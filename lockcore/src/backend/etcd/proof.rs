//! The proof until when the client's lease certainly lives.

use std::time::Duration;

use crate::clock::Instant;

/// Until when the lease certainly lives.
///
/// # Who ends a lease
///
/// Only the leader ends leases, by an entry of the log that a majority must take. The leader waits
/// for one ttl since it was asked last to keep the lease. A new leader does not know when that was,
/// so it gives each lease its full ttl once more, from the moment when it begins to lead.
///
/// # Why an answered keep-alive proves nothing
///
/// A leader that is cut off from its followers goes on answering keep-alives until it notices this
/// (seen: for 1.6 s). Meanwhile the others elect a leader, which ends the lease one ttl later. So
/// the client proves a majority too, by a read that is linearizable: before the leader answers it,
/// a majority has confirmed that this leader still leads.
///
/// # A beat
///
/// A *beat* is such a read, and after its answer a keep-alive, both at one member. Let `read` be the
/// time when the read was sent, and T the term of the leader that has answered it. The member took
/// this answer, so it knew that leader then. It passes a keep-alive on only to the leader that it
/// knows, which has the term T or a later one. If both are answered, the lease lives until `read`
/// plus the ttl:
///
/// - A leader that is later than T was elected after a majority had confirmed the leader of T, and
///   that was after `read`. It waits for one ttl since it began to lead.
/// - If the leader of T has answered the keep-alive, it waits for one ttl since then.
/// - If a later leader has answered it, the leader of T could have ended the lease only before
///   that, and so could an earlier leader. Then the proof before this one was over by then. So a
///   beat counts only if the proof before it is not over yet when the answer comes.
///
/// If the member has carried out entries of two terms between the two answers, the beat is not
/// counted either. The argument does not need this, and the next beat makes up for it.
///
/// A lease that was just granted lives for one ttl since the request was sent: the leader counts
/// from the moment when it carries the request out, and a later leader begins later.
///
/// The ttl is the one that the keep-alive was answered with, if it is shorter than the one that was
/// granted. The member that has granted the lease may have raised the ttl more than the leader has: each
/// raises it to one and a half times its own election timeout. Then what the grant has proved was
/// too much.
///
/// The times are of this machine's clock, and each is read before its request is sent. An answer
/// that comes late proves no more than it did when its request was sent.
#[derive(Debug)]
pub(super) struct Proof {
    ttl: Duration,
    until: Instant,
}

impl Proof {
    /// The lease was granted, and the request was sent at this time.
    pub(super) fn new(ttl: Duration, sent: Instant) -> Self {
        Self {
            ttl,
            until: sent.after(ttl),
        }
    }

    /// A beat was answered. `read` is when its read was sent, and the terms are those of the two
    /// answers. `ttl` is in the answer to the keep-alive. Returns whether the lease certainly lives.
    pub(super) fn beat(
        &mut self,
        read: Instant,
        terms: [u64; 2],
        ttl: Duration,
        now: Instant,
    ) -> bool {
        let [of_read, of_keep_alive] = terms;
        if ttl < self.ttl {
            self.ttl = ttl;
            self.until = self.until.min(read.after(ttl));
        }
        if of_read == of_keep_alive && now < self.until {
            self.until = self.until.max(read.after(self.ttl));
        }
        now < self.until
    }

    /// The shortest time that the servers have stated for the lease.
    pub(super) fn ttl(&self) -> Duration {
        self.ttl
    }

    /// For how long the lease certainly lives from now on.
    pub(super) fn lives_for(&self, now: Instant) -> Duration {
        now.until(self.until)
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
    fn a_beat_proves_the_lease_from_the_send_of_its_read() {
        let mut proof = Proof::new(T, at(100));
        assert_eq!(proof.lives_for(at(103)), Duration::from_secs(7));
        assert!(proof.beat(at(103), [5, 5], T, at(105)));
        assert_eq!(proof.lives_for(at(105)), Duration::from_secs(8));
        assert!(proof.beat(at(102), [5, 5], T, at(106)), "it came late");
        assert_eq!(proof.lives_for(at(106)), Duration::from_secs(7));
    }

    #[test]
    fn a_beat_proves_no_more_than_the_ttl_of_its_answer() {
        let mut proof = Proof::new(T, at(100));
        assert!(proof.beat(at(101), [5, 5], T / 2, at(102)));
        assert_eq!(proof.lives_for(at(102)), Duration::from_secs(4));
        assert!(proof.beat(at(103), [5, 5], 2 * T, at(104)));
        assert_eq!(proof.lives_for(at(104)), Duration::from_secs(4));
    }

    #[test]
    fn a_beat_in_two_terms_proves_nothing() {
        let mut proof = Proof::new(T, at(100));
        assert!(proof.beat(at(103), [5, 6], T, at(104)));
        assert_eq!(proof.lives_for(at(104)), Duration::from_secs(6));
    }

    /// The leader that answers may not know yet that an earlier one has ended the lease.
    #[test]
    fn an_answer_that_comes_when_the_proof_is_over_revives_nothing() {
        let mut proof = Proof::new(T, at(100));
        assert!(!proof.beat(at(109), [5, 5], T, at(110)));
        assert_eq!(proof.lives_for(at(110)), Duration::ZERO);
    }
}
