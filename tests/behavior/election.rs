//! Tests of elections: which candidate leads, what happens when its leadership ends, and what
//! observers see.

mod kit;
mod observers;
mod processes;

use std::future::pending;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use libtest_mimic::Trial;
use lockcore::election::{Election, Leader};
use lockcore::value::Written;
use lockcore::{Error, ErrorKind, Held, Locks, OnRevoke, Release};
use tests::witness::{FencedResource, Witness};
use tokio::sync::mpsc;

pub(crate) use self::observers::facts_of_servers;
pub(crate) use self::processes::facts as facts_of_processes;
use crate::giving_up::{drop_at_every_poll, polled};
use crate::listing::listed;
use crate::store::{DEFAULT, Kind, SOON, STALL, Store, assert_nothing_left, kind, soon, tickets};

/// Facts for all stores with counters.
pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    let mut facts = crate::store_facts![store;
        one_of_many_candidates_leads_at_a_time
        a_leader_that_resigns_is_followed_by_another_candidate_of_its_process
    ];
    facts.extend(crate::store_facts![store, DEFAULT;
        a_body_whose_leadership_is_lost_is_dropped_and_begins_again
        a_body_decides_whether_its_candidate_goes_on
        a_leader_cannot_campaign_for_its_own_office
        dropped_futures_of_candidates_leave_nothing
        a_campaign_with_a_wait_ends_with_it
        a_candidate_whose_value_is_too_long_does_not_stand
        candidates_are_listed_with_their_own_texts
    ]);
    if store.capability().asks_back {
        facts.extend(crate::store_facts![store, DEFAULT;
            a_body_that_can_be_repeated_stops_as_soon_as_somebody_asks_for_its_office
        ]);
    }
    if store.capability().adopts {
        facts.extend(crate::store_facts![store, DEFAULT;
            a_leadership_moves_to_another_client_and_observers_see_no_change
        ]);
    }
    facts.extend(observers::facts(store));
    facts
}

/// Facts about the store for tests.
pub(crate) fn facts_of_the_kit(store: Kind) -> Vec<Trial> {
    let mut facts = observers::facts_of_the_kit(store);
    facts.extend(kit::facts(store));
    facts
}

/// Ends the leader's grant as an operator does. The leader learns of it from the store.
async fn take_from(leader: &Leader, operator: &Locks) {
    let ticket = leader.token().ticket();
    let ended = soon(operator.force_release(leader.name(), ticket)).await;
    assert_eq!(ended.unwrap(), Release::Released);
}

async fn one_of_many_candidates_leads_at_a_time(store: Store) {
    const TERMS: u32 = 5;
    let witness = Arc::new(Witness::exclusive());
    let resource = Arc::new(FencedResource::default());
    let mut candidates = tokio::task::JoinSet::new();
    for locks in [store.client(), store.client(), store.client()] {
        // Each client has two candidates.
        for _ in 0..2 {
            let (witness, resource) = (Arc::clone(&witness), Arc::clone(&resource));
            let election = locks.election("a");
            candidates.spawn(async move {
                for _ in 0..TERMS {
                    let leader = soon(election.campaign()).await.unwrap();
                    let visit = witness.write();
                    let token = leader.token().as_i64().unsigned_abs();
                    assert!(resource.log().highest < token, "not greater than before");
                    resource.write(token).unwrap();
                    tokio::task::yield_now().await;
                    resource.write(token).unwrap();
                    drop(visit);
                    assert_eq!(leader.resign().await.unwrap(), Release::Released);
                }
            });
        }
    }
    while let Some(done) = candidates.join_next().await {
        done.unwrap();
    }
    assert_eq!(witness.assert_no_overlap().visits, u64::from(6 * TERMS));
    assert_eq!(resource.log().refused, 0);
    assert_nothing_left(&store, &store.client(), "a").await;
}

async fn a_leader_that_resigns_is_followed_by_another_candidate_of_its_process(store: Store) {
    let locks = store.client();
    let first = soon(locks.election("a").campaign()).await.unwrap();
    let next = locks.election("a").value("second");
    let next = tokio::spawn(async move { next.campaign().await });
    tickets(&locks, "a", 2).await;
    assert!(!next.is_finished());

    let token = first.token();
    assert_eq!(soon(first.resign()).await.unwrap(), Release::Released);

    let second = soon(next).await.unwrap().unwrap();
    assert!(second.token() > token);
    let told = locks.value("a").get().await.unwrap().unwrap();
    assert_eq!((told.token, &*told.text), (second.token(), "second"));
}

async fn a_candidate_whose_value_is_too_long_does_not_stand(store: Store) {
    let locks = store.client();
    let leader = soon(locks.election("a").campaign()).await.unwrap();
    let candidate = locks.election("a").value("x".repeat(1_025));

    let error = soon(candidate.campaign()).await.unwrap_err();

    assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("a")));
    assert!(error.to_string().contains("1025 bytes"), "{error}");
    assert_eq!(soon(leader.resign()).await.unwrap(), Release::Released);
    let longest = locks.election("a").value("x".repeat(1_024));
    let leader = soon(longest.campaign()).await.unwrap();
    assert_eq!(soon(leader.resign()).await.unwrap(), Release::Released);
}

async fn a_body_whose_leadership_is_lost_is_dropped_and_begins_again(store: Store) {
    // A leader learns from its renewals that its lock was taken away.
    let quick = Locks::builder()
        .op_timeout(STALL)
        .ttl(Duration::from_secs(6));
    let (locks, operator) = (store.client_with(quick), store.client());
    let witness = Arc::new(Witness::exclusive());
    let (began, mut terms) = mpsc::unbounded_channel();
    let running = tokio::spawn({
        let (election, witness) = (locks.election("a"), Arc::clone(&witness));
        async move {
            election
                .run_as_leader(async |leader| {
                    let _visit = witness.write();
                    began.send(leader.fencing_token().unwrap()).unwrap();
                    pending::<ControlFlow<()>>().await
                })
                .await
        }
    });
    let mut last = None;
    for _ in 0..3 {
        let token = soon(terms.recv()).await.unwrap();
        assert!(Some(token) > last, "{token} after {last:?}");
        last = Some(token);
        let ended = operator.force_release("a", token.ticket()).await;
        assert_eq!(ended.unwrap(), Release::Released);
    }
    soon(terms.recv()).await.unwrap();
    running.abort();
    assert_eq!(witness.assert_no_overlap().visits, 4);
    assert_nothing_left(&store, &operator, "a").await;
}

async fn a_body_decides_whether_its_candidate_goes_on(store: Store) {
    let locks = store.client();
    let rounds = AtomicU32::new(0);
    let election = locks.election("a");
    let outcome = election.run_as_leader(async |leader| {
        assert!(leader.is_valid());
        match rounds.fetch_add(1, Ordering::SeqCst) {
            0..3 => ControlFlow::Continue(()),
            round => ControlFlow::Break(round),
        }
    });
    assert_eq!(soon(outcome).await.unwrap(), 3);
    assert_nothing_left(&store, &locks, "a").await;
    // An error that another try would only repeat is returned at once.
    let long = election.clone().value("x".repeat(1_025));
    for wrong in [locks.election(""), long] {
        let refused = wrong.run_as_leader(async |_| ControlFlow::Break(()));
        assert_eq!(kind(soon(refused).await), ErrorKind::Config);
    }
    assert_nothing_left(&store, &locks, "a").await;
    soon(locks.shutdown(SOON)).await.unwrap();
    let ended = election.run_as_leader(async |_| ControlFlow::Break(()));
    assert!(matches!(kind(soon(ended).await), ErrorKind::Lost(_)));
}

async fn a_leader_cannot_campaign_for_its_own_office(store: Store) {
    let election = store.client().election("a");
    let inner = election.clone();
    let outcome =
        election.run_as_leader(async |_| ControlFlow::Break(inner.campaign().await.map(drop)));
    let inner = soon(outcome).await.unwrap();
    assert_eq!(kind(inner), ErrorKind::WouldDeadlock);
}

async fn leads_and_resigns(election: Election) -> Result<Release, Error> {
    election.campaign().await?.resign().await
}

/// The futures are dropped while a candidate campaigns, writes its value or waits behind a leader,
/// and while a leader resigns.
async fn dropped_futures_of_candidates_leave_nothing(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let leads_at_once = async || {
        // If a ticket were left behind, this candidate would wait until the end of its lease.
        let next = soon(other.election("a").campaign()).await.unwrap();
        assert_eq!(soon(next.resign()).await.unwrap(), Release::Released);
        assert_nothing_left(&store, &other, "a").await;
        if store.capability().lists {
            assert_eq!(listed(&other, "", 0).await, [""; 0]);
        }
    };
    let drops = drop_at_every_poll(
        async || leads_and_resigns(locks.election("a").value("dropped")),
        &leads_at_once,
    )
    .await;
    println!("{drops} drops");

    for polls in 1..=drops {
        let leader = soon(other.election("a").campaign()).await.unwrap();
        let election = locks.election("a");
        let behind = polled(election.campaign(), polls);
        tokio::select! {
            // The `select!` ends as soon as the candidate is in line. The candidate is not polled
            // after that.
            biased;
            outcome = behind => assert!(outcome.is_none(), "two lead"),
            () = tickets(&other, "a", 2) => {}
        }
        leader.resign().await.unwrap();
        leads_at_once().await;
    }
}

async fn a_campaign_with_a_wait_ends_with_it(store: Store) {
    let (locks, other) = (store.client(), store.client());
    other.ready(SOON).await.unwrap();
    let leader = soon(locks.election("a").campaign()).await.unwrap();
    let short = other.election("a").wait(SOON / 2);
    assert_eq!(kind(soon(short.campaign()).await), ErrorKind::Timeout);
    take_from(&leader, &other).await;
    let next = soon(short.wait(SOON).campaign()).await.unwrap();
    assert!(next.token() > leader.token());
}

async fn candidates_are_listed_with_their_own_texts(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let leads = locks.election("a").owner("in zone 1");
    let leader = soon(leads.campaign()).await.unwrap();
    let waits = other.election("a").owner("in zone 2");
    let candidate = tokio::spawn(async move { waits.campaign().await });
    tickets(&locks, "a", 2).await;

    let places = locks.inspect("a").await.unwrap();

    let texts = places.iter().map(|place| place.owner_text.as_deref());
    assert!(
        texts.eq([Some("in zone 1"), Some("in zone 2")]),
        "{places:?}"
    );
    leader.resign().await.unwrap();
    drop(soon(candidate).await.unwrap().unwrap());
    let wrong = locks.election("a").owner("two\nlines");
    assert_eq!(kind(wrong.campaign().await), ErrorKind::Config);
}

/// The grace is longer than the fact may take.
async fn a_body_that_can_be_repeated_stops_as_soon_as_somebody_asks_for_its_office(store: Store) {
    let quick = Locks::builder()
        .op_timeout(STALL)
        .ttl(Duration::from_secs(6));
    let (locks, other) = (store.client_with(quick), store.client());
    let (began, mut terms) = mpsc::unbounded_channel();
    let election = locks.election("a").on_revoke(OnRevoke::Cancel);
    let running = tokio::spawn(async move {
        let body = async |leader: Held| {
            began.send(leader.fencing_token().unwrap()).unwrap();
            pending::<ControlFlow<()>>().await
        };
        election.run_as_leader(body).await
    });
    let first = soon(terms.recv()).await.unwrap();
    let next = other.election("a");
    let next = tokio::spawn(async move { next.campaign().await });
    tickets(&other, "a", 2).await;

    let revoked = other.revoke("a", first.ticket(), 100 * SOON, "for a test");

    assert_eq!(soon(revoked).await.unwrap(), Release::Released);
    let next = soon(next).await.unwrap().unwrap();
    // The candidate that was asked stands in line again.
    tickets(&other, "a", 2).await;
    next.resign().await.unwrap();
    assert!(soon(terms.recv()).await.unwrap() > first);
    running.abort();
}

async fn a_leadership_moves_to_another_client_and_observers_see_no_change(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let leader = soon(locks.election("a").value("here").campaign()).await;
    let (leader, mut leaders) = (leader.unwrap(), other.election("a").observe());
    let token = leader.token();
    let told = soon(leaders.next()).await.unwrap();
    assert_eq!(told, Some(Written::new(token, "here")));

    let text = soon(leader.detach()).await.unwrap();
    let guard = soon(other.adopt(&text)).await.unwrap();

    assert_eq!(guard.fencing_token().unwrap(), token);
    guard.set_value("there").await.unwrap();
    let told = soon(leaders.next()).await.unwrap();
    assert_eq!(told, Some(Written::new(token, "there")));
}
