//! Tests of the operations on the file itself, in situations that a client cannot produce at will.
//! Two handles stand for two processes.

mod histories;

use std::num::NonZeroU32;
use std::sync::mpsc;

use tempfile::TempDir;

use super::*;
use crate::backend::sqlite::adopt::adopt;
use crate::backend::sqlite::file::Handle;
use crate::backend::{Adoption, EventSink, NameInUse, News};
use crate::name::Namespace;
use crate::request::FULL;
use crate::token::MAX_TICKET;

const RECEIVER: u64 = 7;

struct Process {
    file: File<'static>,
    wakes: Wakes,
    rechecks: mpsc::Receiver<(Id, Duration)>,
}

impl Process {
    fn start(folder: &TempDir, number: i64) -> Self {
        let handle = Handle::open(&folder.path().join("locks.db")).unwrap();
        // It stays open after the test, because a value cannot borrow from itself.
        let mut file = File::of(Box::leak(Box::new(handle))).unwrap();
        file.process = number;
        let (tell, rechecks) = mpsc::channel();
        let mut wakes = Wakes::default();
        wakes.join(EventSink::new(
            RECEIVER,
            Namespace::new("test").unwrap(),
            move |news| {
                if let News::Recheck(id, after) = news {
                    tell.send((id, after)).unwrap();
                }
            },
        ));
        Self {
            file,
            wakes,
            rechecks,
        }
    }

    fn enqueue(&mut self, request: &Request) -> Result<Enqueued, StoreError> {
        enqueue(&mut self.file, &mut self.wakes, request, RECEIVER)
    }

    fn renew(&mut self, request: &Arc<Request>) -> Renewed {
        let asked = [Arc::clone(request)];
        renew(&mut self.file, &mut self.wakes, &asked).unwrap()[0]
    }

    fn release(&mut self, request: &Arc<Request>, marked: bool) -> Released {
        let leaving = [Departure {
            request: Arc::clone(request),
            enqueue_may_follow: marked,
        }];
        let released = release(&mut self.file, &mut self.wakes, &leaving);
        released.unwrap()[0]
    }

    fn places(&mut self) -> Vec<TicketInfo> {
        inspect(&mut self.file, &name("a")).unwrap()
    }

    /// Ends a ticket, as when its lease has run out.
    fn end(&mut self, request: &Request) {
        self.sql("UPDATE tickets SET expires_at = 1 WHERE id = ?1", request);
    }

    fn sql(&mut self, statement: &'static str, request: &Request) -> Vec<Row> {
        let arguments = params![request.id.to_string()];
        self.file.run(statement, arguments).unwrap()
    }

    fn told(&mut self) -> Vec<Id> {
        std::mem::take(&mut self.wakes.told)
    }
}

fn name(name: &str) -> Name {
    Name::new(Namespace::new("test").unwrap(), name).unwrap()
}

fn request(permits: u32, capacity: u32) -> Arc<Request> {
    Arc::new(Request {
        name: name("a"),
        id: Id::draw().unwrap(),
        permits: NonZeroU32::new(permits).unwrap(),
        capacity: NonZeroU32::new(capacity).unwrap(),
        ttl: Duration::from_secs(60),
        wait: true,
        name_ahead: false,
        lingers: false,
        highest_seen: 0,
        owner: "host/1/0".into(),
    })
}

fn holds(enqueued: Result<Enqueued, StoreError>) -> bool {
    match enqueued.unwrap() {
        Enqueued::Granted { .. } => true,
        Enqueued::Waiting { .. } => false,
        other => panic!("{other:?}"),
    }
}

#[test]
fn an_enqueue_repeated_in_time_is_the_same_ticket_and_after_its_lease_none() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let (first, second) = (request(1, 1), request(1, 1));
    let tickets = [
        process.enqueue(&first).unwrap(),
        process.enqueue(&second).unwrap(),
    ];

    assert_eq!(process.enqueue(&first).unwrap(), tickets[0]);
    let Enqueued::Waiting { ticket, .. } = process.enqueue(&second).unwrap() else {
        panic!("it does not wait");
    };
    assert!(matches!(tickets[1], Enqueued::Waiting { ticket: same, .. } if same == ticket));
    assert_eq!(process.places().len(), 2);

    // The expired ticket is in the file until a request removes it.
    process.end(&first);
    assert_eq!(process.enqueue(&first).unwrap(), Enqueued::Gone);
    assert_eq!(process.told(), [second.id]);
    assert_eq!(process.places().len(), 1);
}

#[test]
fn a_renewal_that_removes_the_dead_wakes_the_others_that_it_lets_in() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let (held, first, second) = (request(2, 2), request(1, 2), request(1, 2));
    assert!(holds(process.enqueue(&held)));
    for waits in [&first, &second] {
        assert!(!holds(process.enqueue(waits)));
    }
    process.end(&held);

    let renewed = process.renew(&second);

    assert!(matches!(renewed, Renewed::Granted { .. }), "{renewed:?}");
    assert_eq!(process.told(), [first.id]);
}

/// This is true even if the holder has changed since the enqueue, and in a line with tickets of
/// another process.
#[test]
fn the_first_in_line_is_told_when_the_holders_time_is_over_and_the_others_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut processes = [Process::start(&folder, 1), Process::start(&folder, 2)];
    let line = [request(1, 1), request(1, 1), request(1, 1)];
    for (at, new) in line.iter().enumerate() {
        let answer = processes[at % 2].enqueue(new).unwrap();
        let recheck = match answer {
            Enqueued::Waiting { recheck_in, .. } => recheck_in,
            _ => None,
        };
        assert_eq!(recheck.is_some(), at == 1, "{answer:?}");
    }
    assert_ne!(processes[0].renew(&line[0]), Renewed::Lost);

    for (at, waits) in line.iter().enumerate().skip(1) {
        let answer = processes[at % 2].renew(waits);
        let Renewed::Waiting { recheck_in, .. } = answer else {
            panic!("{answer:?}");
        };
        let whole = Duration::from_secs(60);
        let told = recheck_in.is_some_and(|at| at > whole / 2 && at <= whole);
        assert_eq!(
            (recheck_in.is_some(), told),
            (at == 1, at == 1),
            "{answer:?}"
        );
    }
}

/// When a ticket becomes smaller, others are granted. They would have to give their permits back if
/// the ticket became larger again.
#[test]
fn an_enqueue_repeated_neither_makes_a_ticket_larger_again_nor_smaller() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let (held, waits) = (request(3, 3), request(1, 3));
    assert!(holds(process.enqueue(&held)));
    assert!(!holds(process.enqueue(&waits)));
    let with = |permits| {
        Arc::new(Request {
            permits: NonZeroU32::new(permits).unwrap(),
            ..Request::clone(&held)
        })
    };

    assert!(holds(process.enqueue(&with(1))));
    assert_eq!(process.places()[0].permits, 3);
    assert_eq!(process.told(), []);

    assert_ne!(process.renew(&with(2)), Renewed::Lost);
    assert_eq!(process.told(), [waits.id]);
    assert!(holds(process.enqueue(&held)));
    let permits: Vec<_> = process.places().iter().map(|p| p.permits).collect();
    assert_eq!(permits, [2, 1]);
}

#[test]
fn a_batch_is_answered_in_its_order_also_where_it_names_a_ticket_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let (held, waits, unknown) = (request(3, 3), request(3, 3), request(3, 3));
    assert!(holds(process.enqueue(&held)));
    assert!(!holds(process.enqueue(&waits)));
    let smaller = Arc::new(Request {
        permits: NonZeroU32::MIN,
        ..Request::clone(&held)
    });

    let batch = [&unknown, &smaller, &waits, &held, &unknown].map(Arc::clone);
    let renewed = renew(&mut process.file, &mut process.wakes, &batch);
    assert!(
        matches!(
            renewed.as_deref(),
            Ok([
                Renewed::Lost,
                Renewed::Granted { .. },
                Renewed::Waiting { .. },
                Renewed::Granted { .. },
                Renewed::Lost,
            ])
        ),
        "{renewed:?}"
    );
    assert_eq!(process.places()[0].permits, 1);

    let batch = [(&unknown, true), (&held, false), (&unknown, false)];
    let batch = batch.map(|(request, enqueue_may_follow)| Departure {
        request: Arc::clone(request),
        enqueue_may_follow,
    });
    let released = release(&mut process.file, &mut process.wakes, &batch);
    let missing = Released::NotFound;
    assert_eq!(released.unwrap(), [missing, Released::Released, missing]);
    assert_eq!(process.told(), [waits.id]);
    assert_eq!(process.enqueue(&unknown).unwrap(), Enqueued::Gone);
}

#[test]
fn an_enqueue_after_its_release_is_refused_while_the_mark_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let (late, other) = (request(1, 1), request(1, 1));
    assert_eq!(process.release(&late, true), Released::NotFound);

    assert_eq!(process.enqueue(&late).unwrap(), Enqueued::Gone);
    assert_eq!(process.places().len(), 0);
    assert!(holds(process.enqueue(&other)));
    // The name has a row in the file now, and the mark counts in this case too.
    assert_eq!(process.enqueue(&late).unwrap(), Enqueued::Gone);
    assert_eq!(process.places().len(), 1);

    let marks = process.sql("UPDATE marks SET expires_at = 1 WHERE id = ?1", &late);
    assert!(marks.is_empty());
    assert_eq!(process.release(&other, true), Released::Released);
    let left = process.sql("SELECT id FROM marks WHERE id = ?1", &late);
    assert!(left.is_empty(), "a mark stays for ever");
}

#[test]
fn numbers_rise_over_all_that_were_drawn_or_seen_and_end_instead_of_wrapping() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let minute = 60_000_000;
    let now = unsigned(layout::wall_micros());
    let mut last = 0;
    for (seen, at_least, below) in [
        (0, now, now + minute),
        (now + 2 * minute, now + 2 * minute + 1, now + 3 * minute),
        (0, now + 2 * minute + 2, now + 3 * minute),
        // The store ignores a number that is more than a day ahead.
        (now + 2000 * minute, now + 2 * minute + 3, now + 3 * minute),
        (u64::MAX, now + 2 * minute + 4, now + 3 * minute),
    ] {
        let mut new = request(1, 1);
        Arc::get_mut(&mut new).unwrap().highest_seen = seen;
        let Enqueued::Granted { ticket, .. } = process.enqueue(&new).unwrap() else {
            panic!("it waits");
        };
        assert!(
            ticket > last && ticket >= at_least && ticket < below,
            "{ticket}"
        );
        last = ticket;
        assert_eq!(process.release(&new, false), Released::Released);
    }

    let max = i64::try_from(MAX_TICKET).unwrap();
    let set = "UPDATE names SET last = ?1";
    process.file.run(set, params![max]).unwrap();
    let error = process.enqueue(&request(1, 1)).unwrap_err();
    assert_eq!(error.fault(), Fault::Refused);
    assert_eq!(process.places().len(), 0);
}

/// A process that grants a ticket of another one shortens its lease. But a client that knows the
/// ticket ahead may have let this ticket in already, and believes in the whole lease.
#[test]
fn the_lease_of_a_waiter_that_was_named_the_ticket_ahead_is_not_shortened() {
    let folder = tempfile::tempdir().unwrap();
    let (mut ours, mut other) = (Process::start(&folder, 1), Process::start(&folder, 2));
    let all = FULL.get();
    for named in [true, false] {
        let (holds_first, mut behind, last) =
            (request(all, all), request(all, all), request(all, all));
        Arc::get_mut(&mut behind).unwrap().name_ahead = named;
        assert!(holds(ours.enqueue(&holds_first)));
        for _ in 0..2 {
            let Ok(Enqueued::Waiting { ahead, .. }) = ours.enqueue(&behind) else {
                panic!("it does not wait");
            };
            assert_eq!(ahead, named.then_some(holds_first.id));
        }

        ours.end(&holds_first);
        assert!(!holds(other.enqueue(&last)));

        let shown = other.places();
        assert!(shown[0].granted && shown.len() == 2);
        let is_whole = shown[0].remaining > Duration::from_secs(50);
        assert_eq!(is_whole, named, "{:?}", shown[0].remaining);
        for ticket in [behind, last] {
            assert_eq!(ours.release(&ticket, false), Released::Released);
        }
    }
}

/// A repetition may find another ticket ahead of it, or its own ticket may have become smaller.
#[test]
fn a_repeated_enqueue_names_the_ticket_that_is_right_ahead_by_then() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let all = FULL.get();
    let [oldest, older, mut youngest] = [(); 3].map(|()| request(all, all));
    Arc::get_mut(&mut youngest).unwrap().name_ahead = true;
    let named = |process: &mut Process| match process.enqueue(&youngest) {
        Ok(Enqueued::Waiting { ahead, .. }) => ahead,
        other => panic!("{other:?}"),
    };
    assert!(holds(process.enqueue(&oldest)));
    assert!(!holds(process.enqueue(&older)));

    assert_eq!(named(&mut process), Some(older.id));
    assert_eq!(process.release(&older, false), Released::Released);
    assert_eq!(named(&mut process), Some(oldest.id));
    let mut reads = Request::clone(&oldest);
    reads.permits = NonZeroU32::MIN;
    assert!(process.renew(&Arc::new(reads)).holds());
    assert_eq!(named(&mut process), None, "others may read beside it");
}

#[test]
fn a_full_disk_refuses_and_changes_nothing_until_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let held = request(1, 1);
    assert!(holds(process.enqueue(&held)));
    // Limits the number of pages, which has the same effect as a full disk.
    let limit = "PRAGMA max_page_count = 1";
    process.file.run(limit, &[]).unwrap();

    let mut taken = 0;
    let refused = loop {
        let mut new = request(1, 1);
        Arc::get_mut(&mut new).unwrap().name = name(&format!("n{taken}").repeat(50));
        match process.enqueue(&new) {
            Ok(_) => taken += 1,
            Err(error) => break (error, new),
        }
        assert!(taken < 1000);
    };
    assert_eq!(refused.0.fault(), Fault::Refused);
    assert!(refused.0.to_string().contains("full"), "{}", refused.0);
    assert!(process.file.over.is_none());
    let left = process.sql("SELECT id FROM tickets WHERE id = ?1", &refused.1);
    assert!(left.is_empty());

    assert!(matches!(process.renew(&held), Renewed::Granted { .. }));
    assert_eq!(process.release(&held, false), Released::Released);
    let room = "PRAGMA max_page_count = 1000000";
    process.file.run(room, &[]).unwrap();
    assert!(holds(process.enqueue(&refused.1)));
}

#[test]
fn another_boot_ends_all_leases_and_a_process_of_the_old_one_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut before = Process::start(&folder, 1);
    let (held, next) = (request(1, 1), request(1, 1));
    let Enqueued::Granted { ticket, .. } = before.enqueue(&held).unwrap() else {
        panic!("it waits");
    };
    // A process that opens the file later is of the same boot.
    assert_eq!(Process::start(&folder, 2).places().len(), 1);
    let reboot = "UPDATE store SET boot = 'another', booted_at = booted_at - 60000";
    before.file.run(reboot, &[]).unwrap();

    let mut after = Process::start(&folder, 3);
    assert_eq!(after.places(), []);
    let Enqueued::Granted { ticket: later, .. } = after.enqueue(&next).unwrap() else {
        panic!("it waits");
    };
    assert!(later > ticket);

    let error = before.enqueue(&held).unwrap_err();
    assert_eq!(error.fault(), Fault::Config);
    assert!(error.to_string().contains("another boot"), "{error}");
    assert_eq!(after.places().len(), 1);
}

/// A machine without a battery for its clock begins every boot at the same wall time.
#[test]
fn a_ticket_that_ends_too_late_for_this_boot_shows_a_boot_that_began_at_the_same_time() {
    let folder = tempfile::tempdir().unwrap();
    let mut before = Process::start(&folder, 1);
    let held = request(1, 1);
    assert!(holds(before.enqueue(&held)));
    let longer = Arc::new(Request {
        ttl: Duration::from_secs(300),
        ..Request::clone(&held)
    });
    assert!(before.renew(&longer).holds());
    let another_id = "UPDATE store SET boot = 'another'";
    before.file.run(another_id, &[]).unwrap();

    let mut container = Process::start(&folder, 2);
    assert_eq!(container.places().len(), 1);
    // The container's id is in the file, so a jump of the wall clock does not look like a reboot.
    let jump = "UPDATE store SET booted_at = booted_at - 3600000";
    container.file.run(jump, &[]).unwrap();
    assert_eq!(Process::start(&folder, 3).places().len(), 1);
    // That process has noted the beginning anew, so a container with another id is known by it.
    let unknown_again = "UPDATE store SET boot = 'another'";
    container.file.run(unknown_again, &[]).unwrap();
    assert_eq!(Process::start(&folder, 3).places().len(), 1);
    container.file.run(unknown_again, &[]).unwrap();

    // The earlier boot lasted an hour longer than this one has lasted so far.
    before.sql(
        "UPDATE tickets SET expires_at = expires_at + 3600000 WHERE id = ?1",
        &held,
    );
    let mut after = Process::start(&folder, 4);
    assert_eq!(after.places(), []);
    let error = before.enqueue(&held).unwrap_err();
    assert!(error.to_string().contains("another boot"), "{error}");
    assert!(holds(after.enqueue(&request(1, 1))));
    // The file has the id of this boot now.
    assert_eq!(Process::start(&folder, 5).places().len(), 1);
}

/// The process that grants a waiter's ticket does not know whether the waiter's process will notice
/// the grant.
#[test]
fn a_grant_that_nobody_looks_for_is_over_after_two_seconds_and_one_that_is_found_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (mut one, mut other) = (Process::start(&folder, 1), Process::start(&folder, 2));
    let (held, waits) = (request(1, 1), request(1, 1));
    assert!(holds(one.enqueue(&held)));
    assert!(!holds(other.enqueue(&waits)));

    assert_eq!(one.release(&held, false), Released::Released);
    let place = &one.places()[0];
    assert!(
        place.granted && place.remaining <= Duration::from_secs(2),
        "{place:?}"
    );
    look(&mut other.file, &mut other.wakes).unwrap();

    assert_eq!(other.told(), [waits.id]);
    assert!(one.places()[0].remaining > Duration::from_secs(50));
}

/// Without a second check, the grant would be over after two seconds, before the waiter renews.
#[test]
fn a_check_that_fails_is_repeated_and_finds_the_grant() {
    let folder = tempfile::tempdir().unwrap();
    let (mut one, mut other) = (Process::start(&folder, 1), Process::start(&folder, 2));
    let mut third = Process::start(&folder, 3);
    let (held, waits) = (request(1, 1), request(1, 1));
    assert!(holds(one.enqueue(&held)));
    assert!(!holds(other.enqueue(&waits)));
    assert_eq!(one.release(&held, false), Released::Released);

    third.file.run("BEGIN IMMEDIATE", &[]).unwrap();
    let failed = look(&mut other.file, &mut other.wakes).unwrap_err();
    assert_eq!(failed.fault(), Fault::Retry);
    assert_eq!(other.told(), []);
    // The next check waits for a short time only, although it reads first, without a wait.
    assert_eq!(other.places().len(), 1);
    assert!(other.file.blocked);
    third.file.run("ROLLBACK", &[]).unwrap();

    look(&mut other.file, &mut other.wakes).unwrap();
    assert_eq!(other.told(), [waits.id]);
    assert!(!other.file.blocked);
}

/// If the file is locked or the disk is full until the end of a ticket, nobody releases the ticket.
#[test]
fn a_process_stops_checking_when_its_last_waiter_has_ended() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let checks = |process: &Process| {
        let now = tokio::time::Instant::now();
        process.wakes.looks.look_at(now).is_some()
    };
    let with_ttl = |ttl| {
        Arc::new(Request {
            ttl,
            ..Request::clone(&request(1, 1))
        })
    };
    let waits = with_ttl(Duration::from_secs(60));
    assert!(holds(process.enqueue(&request(1, 1))));
    assert!(!holds(process.enqueue(&waits)));
    // This ticket has ended as soon as it is in line.
    assert!(!holds(process.enqueue(&with_ttl(Duration::ZERO))));

    look(&mut process.file, &mut process.wakes).unwrap();
    assert!(checks(&process));
    assert_eq!(process.release(&waits, false), Released::Released);
    assert!(!checks(&process));
}

#[test]
fn an_adoption_with_a_shorter_lease_makes_the_next_check_tell_the_first_waiter() {
    let folder = tempfile::tempdir().unwrap();
    let mut process = Process::start(&folder, 1);
    let (held, waits) = (request(1, 1), request(1, 1));
    let Enqueued::Granted { ticket, .. } = process.enqueue(&held).unwrap() else {
        panic!("it waits");
    };
    assert!(!holds(process.enqueue(&waits)));
    look(&mut process.file, &mut process.wakes).unwrap();
    let heard = process.rechecks.try_iter().last();
    assert!(heard.unwrap().1 > Duration::from_secs(50), "{heard:?}");
    let shorter = Arc::new(Request {
        ttl: Duration::from_secs(2),
        ..Request::clone(&request(1, 1))
    });

    let adoption = Adoption {
        from: held.id,
        ticket,
        enqueue_may_follow: false,
        request: shorter,
    };
    assert!(holds(adopt(&mut process.file, &adoption, RECEIVER)));
    look(&mut process.file, &mut process.wakes).unwrap();

    let (id, after) = process.rechecks.try_recv().unwrap();
    assert_eq!(id, waits.id);
    assert!(after <= Duration::from_secs(2), "{after:?}");
}

#[test]
fn a_renewal_gives_the_ttl_that_it_asks_for_and_a_look_the_one_that_was_asked_for_last() {
    let folder = tempfile::tempdir().unwrap();
    let (mut one, mut other) = (Process::start(&folder, 1), Process::start(&folder, 2));
    let (held, waits) = (request(1, 1), request(1, 1));
    assert!(holds(one.enqueue(&held)));
    assert!(!holds(other.enqueue(&waits)));
    let with = |request: &Arc<Request>, seconds| {
        Arc::new(Request {
            ttl: Duration::from_secs(seconds),
            ..Request::clone(request)
        })
    };

    for seconds in [300, 20] {
        let valid_for = Duration::from_secs(seconds);
        let renewed = one.renew(&with(&held, seconds));
        assert_eq!(renewed, Renewed::Granted { valid_for });
        let remaining = one.places()[0].remaining;
        assert!(remaining <= valid_for && remaining > valid_for - Duration::from_secs(10));
    }
    assert_ne!(other.renew(&with(&waits, 500)), Renewed::Lost);
    assert_eq!(one.release(&held, false), Released::Released);
    look(&mut other.file, &mut other.wakes).unwrap();

    assert_eq!(other.told(), [waits.id]);
    assert!(one.places()[0].remaining > Duration::from_secs(400));
}

/// The holder is dead, so no wake-up comes when its lease is over.
#[test]
fn a_waiter_that_becomes_the_first_in_line_is_told_when_to_recheck_in_every_process() {
    let folder = tempfile::tempdir().unwrap();
    let (mut one, mut other) = (Process::start(&folder, 1), Process::start(&folder, 2));
    let [held, first, second, third, last] = [(); 5].map(|()| request(1, 1));
    assert!(holds(one.enqueue(&held)));
    for waits in [&first, &second] {
        assert!(!holds(one.enqueue(waits)));
    }
    for waits in [&third, &last] {
        assert!(!holds(other.enqueue(waits)));
    }

    assert_eq!(one.release(&first, false), Released::Released);
    assert_eq!(rechecks(&mut one), [second.id]);
    // This ticket expires, and the next request removes it.
    one.end(&second);
    assert!(!holds(one.enqueue(&request(1, 1))));
    assert_eq!(rechecks(&mut one), []);
    look(&mut other.file, &mut other.wakes).unwrap();
    assert_eq!(rechecks(&mut other), [third.id]);
    // No other ticket has become the first.
    assert_eq!(other.release(&last, false), Released::Released);
    assert_eq!(rechecks(&mut other), []);
}

/// The waiters that were told to recheck when the holder's lease is over.
fn rechecks(process: &mut Process) -> Vec<Id> {
    let told = process.rechecks.try_iter();
    told.map(|(id, after)| {
        let whole = Duration::from_secs(60);
        assert!(after > whole / 2 && after <= whole, "{after:?}");
        id
    })
    .collect()
}

/// Some names with one ticket, fifty with a hundred, and one with more than that.
#[test]
fn a_page_is_summed_up_until_it_has_read_enough_tickets_and_the_shortest_lines_come_first() {
    let folder = TempDir::new().unwrap();
    let mut process = Process::start(&folder, 1);
    process
        .file
        .run(
            "WITH RECURSIVE line (line, tickets) AS (
                 SELECT 0, 101 UNION ALL SELECT line + 1, CASE WHEN line < 50 THEN 100 ELSE 1 END FROM line WHERE line < 55
             )
             INSERT INTO names (key, name, last)
             SELECT line + 1, format('test:1:{%d-%02d}', tickets, line), tickets FROM line;
             WITH RECURSIVE place (line, ticket, last) AS (
                 SELECT key, 1, last FROM names
                 UNION ALL SELECT line, ticket + 1, last FROM place WHERE ticket < last
             )
             INSERT INTO tickets (name, ticket, id, permits, capacity, ttl_millis, expires_at, receiver, process, owner)
             SELECT line, ticket, format('%d-%d', line, ticket), 1, 1, 60000, 1 << 60, 0, 0, 'host/1/0' FROM place;",
            params![],
        )
        .unwrap();
    let namespace = Namespace::new("test").unwrap();
    let mut listing = Listing::new(namespace, String::new(), 1_000);
    listing.summaries = true;

    let page = list(&mut process.file, &listing).unwrap();

    assert_eq!(page.names.len(), 56);
    assert!(page.names.is_sorted());
    let of = |tickets: &str| {
        let is_one = |used: &&NameInUse| used.name.starts_with(&format!("{tickets}-"));
        let names = page.names.iter().filter(is_one);
        names
            .map(|used| {
                used.summary
                    .as_ref()
                    .map(|line| line.holders + line.waiters)
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(of("1"), [Some(1); 5]);
    assert_eq!(
        of("100").into_iter().flatten().collect::<Vec<_>>(),
        [100; 39]
    );
    assert_eq!(of("101"), [None]);
}
