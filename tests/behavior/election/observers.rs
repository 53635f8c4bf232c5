//! Tests of the observers of an election: in the end they always see the newest leader.

use std::sync::Arc;
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::backend::{self, Answer, Backend, BoxFuture, Capability, Connection, EventSink};
use lockcore::election::{Leader, Leaders};
use lockcore::testing::{Store as Kit, Verb};
use lockcore::value::Written;
use lockcore::{ErrorKind, FencingToken, Locks, LostReason};
use tests::eventually::eventually;

use super::take_from;
use crate::faults::{builder, patient};
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, kind, soon};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_observer_sees_each_leader_its_values_and_that_nobody_leads
        an_observer_that_comes_late_sees_who_leads
        a_slow_observer_sees_the_newest_leader_and_not_all
        a_leader_that_was_taken_away_does_not_count_any_more
        observers_are_told_of_the_end_of_a_leader_however_it_ends
        a_leader_writes_and_reads_its_value_while_its_client_is_shut_down
    ]
}

pub(crate) fn facts_of_servers(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        an_observer_that_was_cut_off_while_leaders_changed_sees_the_newest
        a_candidate_waits_until_its_server_is_back
    ]
}

pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, DEFAULT;
        a_leader_that_dies_without_a_successor_is_gone_with_its_lease
        a_candidate_whose_value_cannot_be_written_does_not_lead
        an_election_at_a_store_without_counters_is_refused_and_takes_no_lock
    ]
}

pub(super) async fn leads(locks: &Locks, text: &str) -> Leader {
    soon(locks.election("a").value(text).campaign())
        .await
        .unwrap()
}

async fn next(leaders: &mut Leaders) -> Option<Written> {
    soon(leaders.next()).await.unwrap()
}

/// Reads until this leader is returned. It is the last leader, so only earlier leaders may be
/// returned before it.
async fn sees(leaders: &mut Leaders, token: FencingToken) -> Written {
    loop {
        match next(leaders).await {
            Some(seen) if seen.token == token => return seen,
            _ => {}
        }
    }
}

async fn an_observer_sees_each_leader_its_values_and_that_nobody_leads(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut leaders = other.election("a").observe();
    assert_eq!(next(&mut leaders).await, None);
    for text in ["one", "", "three"] {
        let leader = leads(&locks, text).await;
        let expected = |text: &str| Some(Written::new(leader.token(), text));
        assert_eq!(next(&mut leaders).await, expected(text));
        leader.set_value("moved").await.unwrap();
        assert_eq!(next(&mut leaders).await, expected("moved"));
        leader.resign().await.unwrap();
        assert_eq!(next(&mut leaders).await, None);
    }
    // The last value is still there.
    assert_eq!(
        &*locks.value("a").get().await.unwrap().unwrap().text,
        "moved"
    );
}

/// Holders may finish their work during a shutdown.
async fn a_leader_writes_and_reads_its_value_while_its_client_is_shut_down(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let leader = leads(&locks, "begun").await;
    let closing = locks.clone();
    let shutdown = tokio::spawn(async move { closing.shutdown(4 * SOON).await });
    let new = locks.mutex("b").wait(SOON);
    eventually("it takes no more locks", SOON, async || {
        let outcome = new.acquire().await;
        matches!(outcome, Err(error) if error.kind() == ErrorKind::Lost(LostReason::Shutdown))
    })
    .await;

    leader.set_value("done").await.unwrap();
    assert_eq!(&*leader.value().await.unwrap().unwrap().text, "done");
    leader.resign().await.unwrap();

    soon(shutdown).await.unwrap().unwrap();
    let left = other.value("a").get().await.unwrap();
    assert_eq!(&*left.unwrap().text, "done");
}

async fn an_observer_that_comes_late_sees_who_leads(store: Store) {
    let (locks, other) = (store.client(), store.client());
    drop(leads(&locks, "earlier").await);
    let leader = leads(&locks, "now").await;
    let mut leaders = other.election("a").observe();
    let expected = Written::new(leader.token(), "now");
    assert_eq!(next(&mut leaders).await, Some(expected.clone()));
    assert_eq!(
        next(&mut other.election("a").observe()).await,
        Some(expected)
    );
    leader.resign().await.unwrap();
    assert_eq!(next(&mut other.election("a").observe()).await, None);
}

async fn a_slow_observer_sees_the_newest_leader_and_not_all(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut leaders = other.election("a").observe();
    assert_eq!(next(&mut leaders).await, None);
    for round in 0..5 {
        leads(&locks, &round.to_string())
            .await
            .resign()
            .await
            .unwrap();
    }
    let last = leads(&locks, "last").await;

    // An earlier leader may come first, if it was read before the last leader wrote its value.
    // After the last leader, none of them may come.
    let seen = loop {
        if let Some(seen) = next(&mut leaders).await {
            break seen;
        }
    };
    assert!(seen.token <= last.token());
    if seen.token < last.token() {
        sees(&mut leaders, last.token()).await;
    }
}

async fn a_leader_that_was_taken_away_does_not_count_any_more(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut leaders = other.election("a").observe();
    let first = leads(&locks, "first").await;
    sees(&mut leaders, first.token()).await;
    take_from(&first, &other).await;
    // The end of the first leader has written nothing. The observer learns of it by the next
    // leader's value.
    let second = leads(&other, "second").await;
    assert!(second.token() > first.token());
    let seen = sees(&mut leaders, second.token()).await;
    assert_eq!(&*seen.text, "second");
    drop(first);
}

/// An observer looks again by itself when the lease ends that it has seen. Those who follow the value
/// do not, so they show that the store has told them.
async fn observers_are_told_of_the_end_of_a_leader_however_it_ends(store: Store) {
    let mut ends = vec!["dropped", "refused", "shut down"];
    if store.capability().asks_back {
        ends.push("revoked");
    }
    let other = store.client();
    for end in ends {
        // A holder learns from its renewals that it is asked for.
        let builder = Locks::builder()
            .op_timeout(STALL)
            .ttl(Duration::from_secs(6));
        let locks = store.client_with(builder);
        let leader = leads(&locks, end).await;
        let (token, mut leaders) = (leader.token(), other.election("a").observe());
        sees(&mut leaders, token).await;
        let mut changes = other.value("a").changes();
        let expected = Some(Written::new(token, end));
        assert_eq!(soon(changes.next()).await.unwrap(), expected);

        let mut kept = None;
        match end {
            "dropped" => drop(leader),
            "refused" => {
                let second = leader.held().scope(std::future::pending::<()>());
                let refused = leader.detach().await.unwrap_err();
                drop(second);
                soon(refused.into_guard().release()).await.unwrap();
            }
            "revoked" => {
                kept = Some(leader);
                let revoked = other.revoke("a", token.ticket(), Duration::ZERO, end);
                soon(revoked).await.unwrap();
            }
            _ => {
                kept = Some(leader);
                let _ = soon(locks.shutdown(Duration::ZERO)).await;
            }
        }

        assert_eq!(soon(changes.next()).await.unwrap(), expected, "{end}");
        assert_eq!(next(&mut leaders).await, None, "{end}");
        drop(kept);
    }
}

async fn an_observer_that_was_cut_off_while_leaders_changed_sees_the_newest(store: Store) {
    let server = store.kind.start();
    let (proxy, url) = server.process().unwrap().through_a_proxy();
    let cut_off = patient(url).build().unwrap();
    let locks = patient(server.url()).build().unwrap();
    let mut leaders = cut_off.election("a").observe();
    let mut last = leads(&locks, "first").await;
    sees(&mut leaders, last.token()).await;
    let mut events = cut_off.events();
    for round in 0..3 {
        proxy.cut();
        assert_eq!(
            soon(events.recv()).await,
            Some(lockcore::events::Event::Suspended)
        );
        for term in 0..3 {
            last.resign().await.unwrap();
            last = leads(&locks, &format!("{round}.{term}")).await;
        }
        proxy.restore();

        let seen = sees(&mut leaders, last.token()).await;
        assert_eq!(*seen.text, format!("{round}.2"));
        assert_eq!(
            soon(events.recv()).await,
            Some(lockcore::events::Event::Restored)
        );
    }
    // The last change that the observer misses may also be that nobody leads.
    proxy.cut();
    assert_eq!(
        soon(events.recv()).await,
        Some(lockcore::events::Event::Suspended)
    );
    last.resign().await.unwrap();
    proxy.restore();
    assert_eq!(next(&mut leaders).await, None);
}

async fn a_candidate_waits_until_its_server_is_back(store: Store) {
    let server = store.kind.start();
    let (proxy, url) = server.process().unwrap().through_a_proxy();
    let builder = builder(url).op_timeout(Duration::from_secs(4));
    let locks = builder.build().unwrap();
    proxy.cut();
    let election = locks.election("a").value("first");
    let candidate = tokio::spawn(async move { election.campaign().await });
    // This takes one operation timeout.
    let fails = locks.mutex("b").wait(SOON).acquire().await;
    assert_eq!(kind(fails), ErrorKind::Unavailable);

    assert!(!candidate.is_finished());
    proxy.restore();

    let leader = soon(candidate).await.unwrap().unwrap();
    leader.resign().await.unwrap();
}

async fn a_leader_that_dies_without_a_successor_is_gone_with_its_lease(_: Store) {
    let kit = Kit::new();
    let ttl = Duration::from_secs(6);
    let other = kit.client_with(Locks::builder()).unwrap();
    let locks = kit.client_with(Locks::builder().ttl(ttl)).unwrap();
    let leader = leads(&locks, "alone").await;
    let mut leaders = other.election("a").observe();
    sees(&mut leaders, leader.token()).await;

    // From here on, no renewal reaches the store, and no message tells the observer.
    for _ in 0..50 {
        kit.lose_next_request(Verb::Renew);
    }

    assert_eq!(next(&mut leaders).await, None);
    assert!(!leader.is_valid());
}

async fn a_candidate_whose_value_cannot_be_written_does_not_lead(_: Store) {
    let kit = Kit::new();
    let locks = kit.client().unwrap();
    kit.fail_next(Verb::Count, backend::Fault::Refused);
    let at_once = locks.election("a").wait(Duration::ZERO);
    let refused = soon(at_once.campaign()).await;
    assert_eq!(kind(refused), ErrorKind::Unavailable);
    // The refused candidate has released its lock. Another candidate need not wait for the lease to
    // end.
    drop(leads(&locks, "next").await);
    // A candidate that waits tries again by itself. So does a run. Its first write is refused, and the reply to its second write is
    // lost, so the client repeats it.
    kit.fail_next(Verb::Count, backend::Fault::Refused);
    drop(leads(&locks, "in the end").await);
    kit.fail_next(Verb::Count, backend::Fault::Refused);
    kit.lose_next_reply(Verb::Count);
    let election = locks.election("b");
    let led = election.run_as_leader(async |leader| {
        std::ops::ControlFlow::Break(leader.fencing_token().unwrap())
    });
    let token = soon(led).await.unwrap();
    assert_eq!(locks.value("b").get().await.unwrap().unwrap().token, token);
}

async fn an_election_at_a_store_without_counters_is_refused_and_takes_no_lock(_: Store) {
    /// Memory as a store that has no counters.
    #[derive(Debug)]
    struct Without(Arc<dyn Backend>);

    impl Backend for Without {
        fn capability(&self) -> Capability {
            self.0.capability().counters(false).watches(false)
        }

        fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
            let connecting: BoxFuture<_> = self.0.connect(events);
            connecting
        }
    }

    let memory = backend::open("memory:").unwrap();
    let locks = Locks::with_backend(Arc::new(Without(memory))).unwrap();
    let error = soon(locks.election("a").campaign()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("counters"), "{error}");
    assert!(locks.mutex("a").try_acquire().await.is_ok());
}
