//! Tests of the owner text that an application states about itself, and of the answers that contain
//! it.

use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use lockcore::inspect::TicketInfo;
use lockcore::{ErrorKind, Locks};

use crate::store::{
    A_FEW_MILLIS, Kind, SOON, Store, assert_nothing_left, begin, give_back, kind, tickets,
};

pub(crate) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store;
        owner_texts_of_clients_and_locks_are_shown_beside_the_process
        any_text_of_one_line_comes_back_as_it_was
        a_ticket_is_shown_with_the_text_of_its_holder
        an_owner_that_is_not_usable_is_refused_and_nothing_is_taken
        an_owner_text_is_no_part_of_the_name_and_stays_with_its_ticket
        each_ticket_is_shown_with_how_long_ago_it_was_asked_for
    ]
}

fn texts(places: &[TicketInfo]) -> Vec<Option<&str>> {
    places
        .iter()
        .map(|place| place.owner_text.as_deref())
        .collect()
}

fn named(store: &Store) -> Locks {
    store.client_with(Locks::builder().owner("billing 2.7"))
}

async fn owner_texts_of_clients_and_locks_are_shown_beside_the_process(store: Store) {
    let (billing, nobody) = (named(&store), store.client());
    let pool = |locks: &Locks| locks.semaphore("a", 9).permits(1);
    let guards = [
        pool(&billing).acquire().await.unwrap(),
        pool(&billing).owner("refund 4711").acquire().await.unwrap(),
        pool(&billing).owner("").acquire().await.unwrap(),
        pool(&nobody).acquire().await.unwrap(),
        pool(&nobody).owner("refund 4712").acquire().await.unwrap(),
    ];

    for locks in [&billing, &nobody] {
        let places = locks.inspect("a").await.unwrap();
        assert_eq!(
            texts(&places),
            [
                Some("billing 2.7"),
                Some("refund 4711"),
                None,
                None,
                Some("refund 4712")
            ]
        );
        let process = format!("/{}/", std::process::id());
        for place in &places {
            assert!(place.owner.contains(&process), "{place:?}");
            assert!(!place.owner.contains(' '), "{place:?}");
        }
        assert!(
            places[..3]
                .iter()
                .all(|place| place.owner == places[0].owner)
        );
        assert_ne!(places[2].owner, places[3].owner);
    }
    for guard in guards {
        give_back(guard).await;
    }
}

async fn any_text_of_one_line_comes_back_as_it_was(store: Store) {
    let locks = store.client();
    let longest = "ä".repeat(32);
    for text in [
        " ",
        "  a  b ",
        "a:b:c",
        "1:2:3:4:5:6",
        "%s %d %1",
        "'\"\\;--",
        "{a}/{b}",
        "ä€😀",
        "7",
        "-1",
        &longest,
    ] {
        let guard = locks
            .mutex("a")
            .owner(text)
            .wait(SOON)
            .acquire()
            .await
            .unwrap();
        let places = locks.inspect("a").await.unwrap();
        assert_eq!(texts(&places), [Some(text)]);
        assert!(places[0].granted && places[0].ticket == guard.grant_id().as_u64() >> 10);
        give_back(guard).await;
    }
    assert_nothing_left(&store, &locks, "a").await;
}

/// Each of the three tasks gets a ticket of its own. A ticket that is passed on in memory would
/// keep the text of its first holder.
async fn a_ticket_is_shown_with_the_text_of_its_holder(store: Store) {
    let locks = named(&store);
    let first = locks.mutex("a").owner("first").acquire().await.unwrap();
    let second = begin(locks.mutex("a").owner("second").wait(SOON));
    tickets(&locks, "a", 2).await;
    let third = begin(locks.mutex("a").wait(SOON));
    tickets(&locks, "a", 3).await;
    let shown = async || {
        let places = locks.inspect("a").await.unwrap();
        places.first().and_then(|place| place.owner_text.clone())
    };

    assert_eq!(shown().await.as_deref(), Some("first"));
    give_back(first).await;
    let second = second.await.unwrap().unwrap();
    assert_eq!(shown().await.as_deref(), Some("second"));
    give_back(second).await;
    let third = third.await.unwrap().unwrap();
    assert_eq!(shown().await.as_deref(), Some("billing 2.7"));
    give_back(third).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn an_owner_that_is_not_usable_is_refused_and_nothing_is_taken(store: Store) {
    let locks = store.client();
    for bad in [
        "a\nb",
        "a\r",
        "\0",
        "\u{1b}[2J",
        "a\u{2028}b",
        &"x".repeat(65),
    ] {
        let lock = locks.mutex("a").owner(bad);
        let error = lock.try_acquire().await.unwrap_err();
        assert_eq!((error.kind(), error.name()), (ErrorKind::Config, Some("a")));
        let text = error.to_string();
        assert!(
            text.contains("owner") && !text.contains(char::is_control),
            "{text:?}"
        );
        let several = Locks::all([locks.mutex("b"), lock.clone()]);
        assert_eq!(kind(several.acquire().await), ErrorKind::Config);
    }
    for name in ["a", "b"] {
        assert_nothing_left(&store, &locks, name).await;
    }
}

async fn an_owner_text_is_no_part_of_the_name_and_stays_with_its_ticket(store: Store) {
    let (locks, other) = (named(&store), store.client());
    let writer = locks.mutex("a").owner("rebuild").acquire().await;
    let mut writer = writer.unwrap();
    assert_eq!(kind(other.mutex("a").try_acquire().await), ErrorKind::Busy);
    let pool = locks.semaphore("s", 3).permits(3).owner("copy");
    let some = pool.acquire().await.unwrap();

    writer.downgrade().await.unwrap();
    some.release_permits(1).await.unwrap();

    for (name, text) in [("a", "rebuild"), ("s", "copy")] {
        let places = other.inspect(name).await.unwrap();
        assert_eq!(texts(&places), [Some(text)]);
    }
    give_back(other.rwlock("a").read().try_acquire().await.unwrap()).await;
    give_back(writer).await;
    give_back(some).await;
    assert_nothing_left(&store, &locks, "a").await;
}

async fn each_ticket_is_shown_with_how_long_ago_it_was_asked_for(store: Store) {
    let (locks, other) = (store.client(), store.client());
    let began = Instant::now();
    let holds = locks.mutex("a").acquire().await.unwrap();
    let apart = Duration::from_millis(100);
    tokio::time::sleep(apart).await;
    let waits = begin(other.mutex("a").wait(SOON));
    tickets(&locks, "a", 2).await;

    let places = locks.inspect("a").await.unwrap();

    let ages: Vec<_> = places.iter().map(|place| place.age.unwrap()).collect();
    assert!(ages[0] <= began.elapsed() + A_FEW_MILLIS, "{ages:?}");
    assert!(ages[0] + A_FEW_MILLIS >= ages[1] + apart, "{ages:?}");
    give_back(holds).await;
    give_back(waits.await.unwrap().unwrap()).await;
}
