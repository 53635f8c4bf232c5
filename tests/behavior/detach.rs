//! Tests of locks that one process gives to another without releasing them.

mod adopted;
mod kit;
mod processes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::events::GrantEvent;
use lockcore::{Error, ErrorKind, Fair, Guard, Locks, LostReason};
use tests::eventually::eventually;
use tests::stalls::awake_since;
use tests::witness::{FencedResource, Witness};
use tokio::task::JoinSet;

use crate::giving_up::polled;
use crate::store::{
    Kind, LEASE, SOON, Store, assert_nothing_left, begin, give_back, kind, soon, tickets,
};

pub(crate) use self::adopted::facts_of_messages;
pub(crate) use self::kit::facts as facts_of_the_kit;
pub(crate) use self::processes::facts as facts_of_processes;

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    if !store.capability().adopts {
        return crate::store_facts![store;
            a_store_that_cannot_hand_a_lock_over_says_so_and_keeps_it
        ];
    }
    let mut facts = crate::store_facts![store;
        a_lock_that_is_handed_over_is_never_free_in_between
        a_lock_that_is_handed_over_keeps_its_token
        a_lock_is_adopted_once
        a_text_that_nobody_uses_is_of_no_use_after_its_ttl
        a_waiter_is_woken_when_the_adopter_releases
        a_task_that_waits_in_the_process_that_gives_asks_the_store
        a_detach_that_is_dropped_at_any_poll_releases_the_lock
        an_adoption_that_is_dropped_at_any_poll_holds_nothing
        a_lock_that_something_else_uses_is_not_detached_and_stays_held
        a_lock_with_limits_is_not_detached_and_stays_held
        readers_and_permits_are_handed_over
        views_of_a_lock_that_was_detached_say_that_it_is_released
        a_damaged_text_is_refused_and_nothing_is_lost
    ];
    facts.extend(adopted::facts(store));
    facts
}

const TAKEN: ErrorKind = ErrorKind::Lost(LostReason::Taken);

async fn held(locks: &Locks) -> Guard {
    locks.mutex("a").wait(SOON).acquire().await.unwrap()
}

fn number(guard: &Guard) -> u64 {
    guard.grant_id().as_u64()
}

/// The witness sees one visit for all processes that have the lock in turn.
async fn a_lock_that_is_handed_over_is_never_free_in_between(store: Store) {
    let clients = [store.client(), store.client()];
    let witness = Arc::new(Witness::exclusive());
    let mut others = JoinSet::new();
    for _ in 0..2 {
        let (locks, witness) = (store.client(), Arc::clone(&witness));
        others.spawn(async move {
            for _ in 0..10 {
                let guard = held(&locks).await;
                let visit = witness.enter(1);
                tokio::task::yield_now().await;
                drop(visit);
                give_back(guard).await;
            }
        });
    }
    for _ in 0..5 {
        let mut guard = held(&clients[0]).await;
        let visit = witness.enter(1);
        for to in [1, 0, 1] {
            let text = guard.detach().await.unwrap();
            tokio::task::yield_now().await;
            guard = clients[to].adopt(&text).await.unwrap();
            assert!(guard.is_valid());
        }
        drop(visit);
        give_back(guard).await;
    }
    while let Some(done) = others.join_next().await {
        done.unwrap();
    }

    assert_eq!(witness.assert_no_overlap().visits, 25);
    assert_nothing_left(&store, &store.client(), "a").await;
}

async fn a_lock_that_is_handed_over_keeps_its_token(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let resource = FencedResource::default();
    let first = held(&locks).await;
    resource.write(number(&first)).unwrap();
    // Inside the process the lock is handed over to a second task. The token counts this hand-over.
    let second = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;
    give_back(first).await;
    let second = second.await.unwrap().unwrap();
    let token = second.fencing_token().unwrap();
    resource.write(number(&second)).unwrap();

    let text = second.detach().await.unwrap();
    let adopted = other.adopt(&text).await.unwrap();

    assert_eq!(adopted.fencing_token().unwrap(), token);
    assert_eq!(adopted.name(), "a");
    resource.write(number(&adopted)).unwrap();
    // The adopter detaches the lock, and the first client adopts it back.
    let text = adopted.detach().await.unwrap();
    let again = locks.adopt(&text).await.unwrap();
    assert_eq!(again.fencing_token().unwrap(), token);
    resource.write(number(&again)).unwrap();
    let late = number(&again);
    give_back(again).await;
    let next = held(&other).await;
    assert!(next.fencing_token().unwrap() > token);
    resource.write(number(&next)).unwrap();
    assert!(resource.write(late).is_err());
    give_back(next).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_lock_is_adopted_once(store: Store) {
    let (locks, other, third) = (store.client(), store.client(), store.client());
    let text = held(&locks).await.detach().await.unwrap();
    assert_eq!(
        kind(third.mutex("a").try_acquire().await),
        ErrorKind::Busy,
        "it is free"
    );

    let adopted = other.adopt(&text).await.unwrap();

    for locks in [&other, &locks, &third] {
        let error = locks.adopt(&text).await.unwrap_err();
        assert_eq!((error.kind(), error.name()), (TAKEN, Some("a")));
        assert!(error.was_held());
    }
    adopted.ensure(Duration::from_millis(1)).await.unwrap();
    tickets(&third, "a", 1).await;
    give_back(adopted).await;
    // The text cannot be used again, not even when nobody holds the lock.
    assert_eq!(kind(other.adopt(&text).await), TAKEN);
    assert_nothing_left(&store, &locks, "a").await;

    // If several clients adopt at the same time, one succeeds.
    let text: Arc<str> = held(&locks).await.detach().await.unwrap().into();
    let mut tries = JoinSet::new();
    for _ in 0..8 {
        let (locks, text) = (store.client(), Arc::clone(&text));
        tries.spawn(async move { locks.adopt(&text).await });
    }
    let outcomes = tries.join_all().await;
    let (adopted, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
    assert_eq!((adopted.len(), refused.len()), (1, 7));
    for refused in refused {
        assert_eq!(kind(refused), TAKEN);
    }
    for adopted in adopted {
        give_back(adopted.unwrap()).await;
    }
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_text_that_nobody_uses_is_of_no_use_after_its_ttl(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let ttl = Duration::from_secs(4);
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let token = guard.fencing_token().unwrap();
    let waiter = begin(other.mutex("a").ttl(LEASE).wait(2 * SOON));
    tickets(&locks, "a", 2).await;

    let text = guard.detach().await.unwrap();
    let began = Instant::now();

    // Nobody renews the ticket, so the waiter is granted as if the holder had died.
    let next = waiter.await.unwrap().unwrap();
    let took = awake_since(began);
    assert!(took < ttl + crate::processes::moments(&store), "{took:?}");
    assert!(next.fencing_token().unwrap() > token);
    assert_eq!(kind(locks.adopt(&text).await), TAKEN);
    next.ensure(Duration::from_millis(1)).await.unwrap();
    give_back(next).await;
    assert_eq!(kind(locks.adopt(&text).await), TAKEN);
    assert_nothing_left(&store, &locks, "a").await;

    // The second part of this fact has no waiter.
    let guard = locks.mutex("a").ttl(ttl).acquire().await.unwrap();
    let text = guard.detach().await.unwrap();
    tickets(&other, "a", 0).await;
    assert_eq!(kind(other.adopt(&text).await), TAKEN);
    give_back(held(&other).await).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_waiter_is_woken_when_the_adopter_releases(store: Store) {
    let (locks, other, third) = (store.client(), store.client(), store.client());
    let guard = held(&locks).await;
    let waiter = begin(third.mutex("a").wait(2 * SOON));
    tickets(&locks, "a", 2).await;
    let adopted = other.adopt(&guard.detach().await.unwrap()).await.unwrap();
    assert!(!waiter.is_finished());

    let began = Instant::now();
    give_back(adopted).await;
    let next = soon(waiter).await.unwrap().unwrap();

    // Only a wake-up is this fast: the waiter's own renewal would come after a third of the ttl.
    assert!(awake_since(began) < LEASE / 6);
    give_back(next).await;
    assert_nothing_left(&store, &locks, "a").await;
}

/// The task waits in the lane for a ticket that its process then gives away. So the task must send
/// its own request to the store.
async fn a_task_that_waits_in_the_process_that_gives_asks_the_store(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let guard = held(&locks).await;
    let token = guard.fencing_token().unwrap();
    let waiter = begin(locks.mutex("a").wait(2 * SOON));
    tickets(&locks, "a", 2).await;

    let text = guard.detach().await.unwrap();

    let adopted = other.adopt(&text).await.unwrap();
    eventually("it stands in line at the store", SOON, async || {
        locks.inspect("a").await.unwrap().len() == 2
    })
    .await;
    assert!(!waiter.is_finished());
    give_back(adopted).await;
    let next = soon(waiter).await.unwrap().unwrap();
    assert!(next.fencing_token().unwrap() > token);
    give_back(next).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_detach_that_is_dropped_at_any_poll_releases_the_lock(store: Store) {
    let locks = store.client();
    for polls in 0.. {
        let guard = held(&locks).await;
        let ended = polled(guard.detach(), polls).await;
        let Some(text) = ended else {
            assert_nothing_left(&store, &locks, "a").await;
            continue;
        };
        give_back(locks.adopt(&text.unwrap()).await.unwrap()).await;
        println!("dropped at {polls} polls");
        break;
    }
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_adoption_that_is_dropped_at_any_poll_holds_nothing(store: Store) {
    let (locks, other) = (store.client(), store.client());
    for polls in 0.. {
        let text = held(&locks).await.detach().await.unwrap();
        let ended = polled(other.adopt(&text), polls).await;
        if let Some(adopted) = ended {
            give_back(adopted.unwrap()).await;
            println!("dropped at {polls} polls");
            break;
        }
        // If the store had carried out the adoption that was dropped, the client is releasing the
        // ticket, and the text is refused. Otherwise the text can still be used.
        match locks.adopt(&text).await {
            Ok(adopted) => give_back(adopted).await,
            Err(error) => assert_eq!(error.kind(), TAKEN),
        }
        if store.litter_but_marks().is_empty() {
            tickets(&locks, "a", 0).await;
        }
        give_back(held(&locks).await).await;
    }
    tickets(&locks, "a", 0).await;
}

async fn refused(guard: Guard) -> (ErrorKind, Guard) {
    let refused = guard.detach().await.expect_err("it was detached");
    let error = refused.error();
    let (kind, text) = (error.kind(), refused.to_string());
    assert_eq!((error.name(), error.to_string()), (Some("a"), text));
    let guard = refused.into_guard();
    assert!(guard.is_valid());
    (kind, guard)
}

async fn a_lock_that_something_else_uses_is_not_detached_and_stays_held(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let guard = held(&locks).await;
    let second = guard.reenter().unwrap();
    let (busy, guard) = refused(guard).await;
    assert_eq!(busy, ErrorKind::Busy);
    give_back(second).await;

    // Work in `scope` has a guard of its own.
    let (end, ends) = tokio::sync::oneshot::channel::<()>();
    let work = tokio::spawn(guard.scope(async { ends.await.unwrap() }));
    let (busy, guard) = refused(guard).await;
    assert_eq!(busy, ErrorKind::Busy);
    end.send(()).unwrap();
    work.await.unwrap().unwrap();

    // A lock with an inner hold, which is in use by the body around it.
    let inner = locks.mutex("a");
    let around = guard.held();
    around
        .while_held(async {
            let inner = inner.acquire().await.unwrap();
            let (busy, inner) = refused(inner).await;
            assert_eq!(busy, ErrorKind::Busy);
            give_back(inner).await;
        })
        .await
        .unwrap();

    // Readers of one process share a ticket, unless each request has its own.
    let text = guard.detach().await.unwrap();
    give_back(other.adopt(&text).await.unwrap()).await;
    let read = locks.rwlock("a").read();
    let (one, two) = (read.acquire().await.unwrap(), read.acquire().await.unwrap());
    let one = match store.fair {
        Fair::Strict => one,
        _ => {
            let (busy, one) = refused(one).await;
            assert_eq!(busy, ErrorKind::Busy);
            one
        }
    };
    give_back(two).await;
    let text = one.detach().await.unwrap();
    give_back(other.adopt(&text).await.unwrap()).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_lock_with_limits_is_not_detached_and_stays_held(store: Store) {
    let locks = store.client();
    let lock = locks.mutex("a");
    for limited in [lock.clone().max_hold(LEASE), lock.clone().min_hold(LEASE)] {
        let (mistake, guard) = refused(limited.acquire().await.unwrap()).await;
        assert_eq!(mistake, ErrorKind::Config);
        drop(guard);
        let ticket = locks.inspect("a").await.unwrap();
        for place in ticket {
            locks.force_release("a", place.ticket).await.unwrap();
        }
    }
    // A lock without renewal can be detached. The adopter renews it.
    let guard = lock.renew(false).acquire().await.unwrap();
    let text = guard.detach().await.unwrap();
    give_back(locks.adopt(&text).await.unwrap()).await;
    tickets(&locks, "a", 0).await;
}

async fn readers_and_permits_are_handed_over(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let beside = other.rwlock("a").read().acquire().await.unwrap();
    let reader = locks.rwlock("a").read().acquire().await.unwrap();
    let id = reader.grant_id();
    let adopted = other.adopt(&reader.detach().await.unwrap()).await.unwrap();
    assert_eq!(adopted.grant_id(), id);
    assert!(adopted.fencing_token().is_err());
    give_back(beside).await;
    assert_eq!(kind(locks.mutex("a").try_acquire().await), ErrorKind::Busy);
    give_back(adopted).await;

    // A writer that was downgraded is detached as a reader.
    let mut writer = locks.rwlock("a").write().acquire().await.unwrap();
    writer.downgrade().await.unwrap();
    let adopted = other.adopt(&writer.detach().await.unwrap()).await.unwrap();
    assert!(adopted.fencing_token().is_err());
    give_back(locks.rwlock("a").read().try_acquire().await.unwrap()).await;
    give_back(adopted).await;
    give_back(locks.mutex("a").try_acquire().await.unwrap()).await;

    let pool = |locks: &Locks| locks.semaphore("s", 5);
    let three = pool(&locks).permits(3).acquire().await.unwrap();
    let one = pool(&other).permits(1).acquire().await.unwrap();
    three.release_permits(1).await.unwrap();
    let adopted = other.adopt(&three.detach().await.unwrap()).await.unwrap();
    assert_eq!(pool(&locks).available().await.unwrap(), 2);
    adopted.release_permits(1).await.unwrap();
    assert_eq!(pool(&locks).available().await.unwrap(), 3);
    give_back(adopted).await;
    give_back(one).await;
    give_back(pool(&locks).permits(5).try_acquire().await.unwrap()).await;
    for name in ["a", "s"] {
        assert_nothing_left(&store, &locks, name).await;
    }
}

async fn views_of_a_lock_that_was_detached_say_that_it_is_released(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let mut events = locks.events();
    let mut grants = locks.mutex("a").grants();
    let guard = held(&locks).await;
    let id = guard.grant_id();
    let view = guard.held();
    let lost = view.clone();
    let lost = tokio::spawn(async move { lost.lost().await });

    let text = guard.detach().await.unwrap();

    let released = ErrorKind::Lost(LostReason::Released);
    for _ in 0..2 {
        assert!(!view.is_valid());
        assert_eq!(view.remaining(), Duration::ZERO);
        assert_eq!(kind(view.ensure(Duration::from_millis(1)).await), released);
        assert_eq!(kind(view.set_value("x").await), released);
        assert_eq!(kind(view.scope(async {}).await), released);
        assert_eq!(polled(view.lost(), 1).await, Some(LostReason::Released));
        // The views are checked once before the adoption and once after it.
        if let Ok(adopted) = other.adopt(&text).await {
            give_back(adopted).await;
        }
    }
    assert_eq!(soon(lost).await.unwrap(), LostReason::Released);
    assert!(polled(events.recv(), 1).await.is_none(), "a loss was told");
    for told in [GrantEvent::Granted(id), GrantEvent::Detached(id)] {
        assert_eq!(soon(grants.recv()).await, Some(told));
    }
    assert!(polled(grants.recv(), 1).await.is_none(), "more was told");
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_damaged_text_is_refused_and_nothing_is_lost(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let text = held(&locks).await.detach().await.unwrap();
    let abroad = Locks::builder()
        .namespace("abroad")
        .backend(store.backend());
    let abroad = abroad.build().unwrap();

    for damaged in [
        "",
        "a",
        &text[1..],
        &text[..text.len() - 1],
        &text.replace(".a.", ".b."),
        &text.repeat(2),
        &"x".repeat(100_000),
    ] {
        let error = other.adopt(damaged).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(!format!("{error} {error:#?}").contains(&text[10..42]));
    }
    let error = abroad.adopt(&text).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("abroad"), "{error}");

    let adopted = other.adopt(&format!("{text}\n")).await.unwrap();
    give_back(adopted).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn a_store_that_cannot_hand_a_lock_over_says_so_and_keeps_it(store: Store) {
    let locks = store.client();
    let guard = held(&locks).await;

    let (mistake, guard) = refused(guard).await;

    assert_eq!(mistake, ErrorKind::Config);
    let error: Error = guard.detach().await.unwrap_err().into();
    assert!(
        error
            .to_string()
            .contains("and let the other process take it"),
        "{error}"
    );
    // The guard was dropped with the error.
    assert_nothing_left(&store, &locks, "a").await;
    let builder = Locks::builder().namespace(&store.namespace);
    let stranger = builder.url("memory:").build().unwrap();
    let text = held(&stranger).await.detach().await.unwrap();
    assert_eq!(kind(locks.adopt(&text).await), ErrorKind::Config);
}
