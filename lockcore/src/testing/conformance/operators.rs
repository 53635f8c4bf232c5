//! The contract at the connection, for the requests that operators make: asking the holder to give
//! a ticket up, and listing names.

use std::collections::BTreeSet;
use std::time::Duration;

use super::fact::{Fact, group_of};
use super::kit::{Asker, PATIENCE, Store, with};
use super::steps::{SOON, eventually};
use crate::backend::{Capability, FULL, Listing, NameInUse, Released, Renewed, Summary};

pub(super) fn all() -> Vec<Fact> {
    let asks_back = |capability: &Capability| match capability.asks_back {
        true => Ok(()),
        false => Err("it does not ask holders to give their tickets up"),
    };
    let lists = |capability: &Capability| match capability.lists {
        true => Ok(()),
        false => Err("it does not list names"),
    };
    let listing = group_of!["operators", false, lists;
        each_name_in_use_is_on_a_page_and_no_other_is
        a_prefix_is_taken_literally
        of_a_name_that_is_too_long_for_the_store_the_beginning_is_listed
        the_list_sums_up_each_line_as_it_is_shown
    ];
    let asking = group_of!["operators", false, asks_back;
        a_holder_that_is_asked_back_learns_it_at_its_renewal
        an_ask_changes_nothing_else_about_its_ticket
        an_ask_for_a_ticket_of_another_name_or_for_none_finds_nothing
        a_waiter_that_is_asked_back_learns_it_when_it_holds
    ];
    [listing, asking].concat()
}

const GRACE: Duration = Duration::from_secs(7);

async fn a_holder_that_is_asked_back_learns_it_at_its_renewal(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    // A store may answer in other code for a batch than for a single ticket, and for one of several
    // holders. So all three cases are checked.
    let (writer, readers) = (store.writer("a"), ["b", "b"].map(|name| store.reader(name)));
    let tickets = [&writer, &readers[0], &readers[1]];
    for ticket in tickets {
        ours.holds(ticket).await;
    }

    for (asked, others) in [(&writer, 2), (&readers[0], 1), (&readers[1], 0)] {
        assert!(
            other
                .ask_back(asked, "7000 host/2/client needs it: now")
                .await
        );
        let Renewed::AskedBack { grace, valid_for } = ours.renew(asked).await else {
            panic!("it does not learn that it was asked back");
        };
        assert_eq!(grace, GRACE);
        assert!(!valid_for.is_zero() && valid_for <= asked.ttl);
        let batch = tickets.map(std::sync::Arc::clone).to_vec();
        let answers = ours.connection.renew(batch, PATIENCE).await.unwrap();
        let granted = |answer: &&Renewed| matches!(answer, Renewed::Granted { .. });
        assert_eq!(
            answers.iter().filter(granted).count(),
            others,
            "{answers:?}"
        );
        assert!(answers.iter().all(|answer| answer.holds()), "{answers:?}");
    }
    // A later ask-back replaces the earlier one.
    assert!(other.ask_back(&writer, "0 host/2/client ").await);
    let renewed = ours.renew(&writer).await;
    let at_once = |grace: Duration| grace.is_zero();
    assert!(
        matches!(renewed, Renewed::AskedBack { grace, .. } if at_once(grace)),
        "{renewed:?}"
    );
    for ticket in tickets {
        assert_eq!(ours.release(ticket).await, Released::Released);
    }
    // The next ticket of the name is not asked back.
    let next = store.writer("a");
    other.holds(&next).await;
    assert!(matches!(other.renew(&next).await, Renewed::Granted { .. }));
    ours.close().await;
    other.close().await;
}

async fn an_ask_changes_nothing_else_about_its_ticket(store: Store) {
    let (ours, other) = (store.connect().await, store.connect().await);
    let holds = with(&store.request("a"), |request| {
        request.owner = "host/1/client shop 7: a b".into();
    });
    let number = ours.holds(&holds).await;
    let waits = store.writer("a");
    other.waits(&waits).await;

    assert!(other.ask_back(&holds, "7000 host/2/client why: a b").await);

    let line = other.inspect(store.name("a")).await;
    let [place, behind] = &line[..] else {
        panic!("{line:?}");
    };
    assert_eq!((place.ticket, place.granted), (number, true));
    assert_eq!((place.permits, place.capacity), (FULL.get(), FULL.get()));
    assert_eq!(place.owner, "host/1/client");
    assert_eq!(place.owner_text.as_deref(), Some("shop 7: a b"));
    let asked = place.asked_back.as_ref().expect("the ask is not shown");
    assert_eq!(
        (asked.by.as_str(), asked.why.as_str()),
        ("host/2/client", "why: a b")
    );
    assert_eq!(asked.grace, GRACE);
    assert!(place.remaining > Duration::ZERO && place.remaining <= holds.ttl);
    assert_eq!(behind.asked_back, None);
    assert!(!behind.granted);
    // A repetition of the enqueue finds the ticket.
    assert_eq!(ours.holds(&holds).await, number);
    assert_eq!(ours.release(&holds).await, Released::Released);
    eventually("the other client's ticket holds", SOON, async || {
        matches!(other.renew(&waits).await, Renewed::Granted { .. })
    })
    .await;
    ours.close().await;
    other.close().await;
}

async fn an_ask_for_a_ticket_of_another_name_or_for_none_finds_nothing(store: Store) {
    let client = store.connect().await;
    let (holds, elsewhere) = (store.writer("a"), store.writer("b"));
    client.holds(&holds).await;
    client.holds(&elsewhere).await;

    let mixed_up = with(&holds, |request| request.name = elsewhere.name.clone());
    for nobody in [&mixed_up, &store.writer("a"), &store.writer("c")] {
        assert!(!client.ask_back(nobody, "0 host/2/client x").await);
    }

    for ticket in [&holds, &elsewhere] {
        assert!(matches!(
            client.renew(ticket).await,
            Renewed::Granted { .. }
        ));
        assert_eq!(client.release(ticket).await, Released::Released);
        assert!(!client.ask_back(ticket, "0 host/2/client x").await);
    }
    client.close().await;
}

async fn a_waiter_that_is_asked_back_learns_it_when_it_holds(store: Store) {
    let client = store.connect().await;
    let (holds, waits) = (store.writer("a"), store.writer("a"));
    client.holds(&holds).await;
    client.waits(&waits).await;

    assert!(client.ask_back(&waits, "7000 host/2/client x").await);
    assert!(matches!(
        client.renew(&waits).await,
        Renewed::Waiting { .. }
    ));
    assert_eq!(client.release(&holds).await, Released::Released);

    // The client may answer the first renewal from what it knows already.
    assert!(client.renew(&waits).await.holds());
    let renewed = client.renew(&waits).await;
    assert!(
        matches!(renewed, Renewed::AskedBack { grace: GRACE, .. }),
        "{renewed:?}"
    );
    client.close().await;
}

/// The names of all pages, sorted. A name may be on two pages, but is returned once.
async fn listed(client: &Asker, store: &Store, prefix: &str, limit: u32) -> Vec<NameInUse> {
    pages(
        client,
        Listing::new(store.names(), prefix.to_owned(), limit),
    )
    .await
}

/// The same with summaries, except for those that the store leaves to the core.
pub(super) async fn summed_up(client: &Asker, store: &Store, limit: u32) -> Vec<NameInUse> {
    let mut listing = Listing::new(store.names(), String::new(), limit);
    listing.summaries = true;
    let mut names = pages(client, listing).await;
    names.dedup_by(|one, other| one.name == other.name);
    names
}

async fn pages(client: &Asker, mut listing: Listing) -> Vec<NameInUse> {
    let mut names = BTreeSet::new();
    loop {
        let page = client.connection.list(listing.clone()).await.unwrap();
        for name in page.names {
            names.insert(name);
        }
        match page.next {
            Some(next) => listing.after = Some(next),
            None => return names.into_iter().collect(),
        }
    }
}

fn whole(names: &[&str]) -> Vec<NameInUse> {
    let mut names: Vec<_> = names
        .iter()
        .map(|name| NameInUse::new((*name).to_owned()))
        .collect();
    names.sort_unstable();
    names
}

async fn each_name_in_use_is_on_a_page_and_no_other_is(store: Store) {
    let (client, other) = (store.connect().await, store.connect().await);
    assert_eq!(listed(&client, &store, "", 10).await, []);
    let names: Vec<String> = (0..23).map(|number| format!("order:{number}")).collect();
    let mut held = Vec::new();
    for name in &names {
        let request = store.writer(name);
        client.holds(&request).await;
        held.push(request);
    }
    // A name with holders and waiters is listed once, and so is a name with several holders.
    let waits = store.writer("order:0");
    other.waits(&waits).await;
    for _ in 0..2 {
        client.holds(&store.reader("read")).await;
    }

    let mut all: Vec<&str> = names.iter().map(String::as_str).collect();
    for limit in [1, 2, 7, 23, 1000] {
        assert_eq!(
            listed(&client, &store, "order:", limit).await,
            whole(&all),
            "{limit}"
        );
    }
    assert_eq!(listed(&other, &store, "order:1", 3).await.len(), 11);
    assert_eq!(listed(&other, &store, "other", 3).await, []);
    for request in &held[1..] {
        assert_eq!(client.release(request).await, Released::Released);
    }
    all.truncate(1);
    assert_eq!(listed(&other, &store, "order:", 5).await, whole(&all));
    assert_eq!(client.release(&held[0]).await, Released::Released);
    // The waiter of "order:0" holds now.
    all.push("read");
    assert_eq!(listed(&other, &store, "", 5).await, whole(&all));
    client.close().await;
    other.close().await;
}

async fn a_prefix_is_taken_literally(store: Store) {
    let client = store.connect().await;
    let names = [
        "*",
        "**",
        "a*",
        "a",
        "ab",
        "?",
        "[a]",
        "[",
        "a]",
        "\\",
        "\\*",
        "%",
        "_",
        "%41",
        "A",
        "{a}",
        "}",
        "a}b",
        "~",
        "a:line",
        "a\0b",
        "a\r\nb",
        "a b",
        "'; --",
        "\u{2028}",
        "\u{e000}",
        "\u{fffd}",
        "\u{10ffff}",
        "😀",
        "ä",
        "../..",
        "/",
    ];
    for name in names {
        client.holds(&store.writer(name)).await;
    }

    assert_eq!(listed(&client, &store, "", 6).await, whole(&names));
    for prefix in names {
        let wanted: Vec<&str> = names
            .into_iter()
            .filter(|name| name.starts_with(prefix))
            .collect();
        assert_eq!(
            listed(&client, &store, prefix, 6).await,
            whole(&wanted),
            "{prefix:?}"
        );
    }
    client.close().await;
}

async fn of_a_name_that_is_too_long_for_the_store_the_beginning_is_listed(store: Store) {
    let client = store.connect().await;
    let name = format!("a b/{}", "x".repeat(4000));
    client.holds(&store.writer(&name)).await;

    for prefix in ["", "a b/", &name[..300]] {
        let names = listed(&client, &store, prefix, 6).await;
        let [used] = &names[..] else {
            panic!("{names:?}");
        };
        assert!(
            name.starts_with(&used.name) && used.name.len() > 400,
            "{used:?}"
        );
        assert_eq!(used.is_whole, used.name == name);
    }
    client.close().await;
}

/// Checks that the list sums up a line as `inspect` shows it. A store need not sum up a long line.
pub(super) async fn agrees(client: &Asker, store: &Store, name: &str, limit: u32) {
    let names = summed_up(client, store, limit).await;
    let found = names.into_iter().find(|used| used.name == name);
    let line = client.inspect(store.name(name)).await;
    assert_eq!(found.is_some(), !line.is_empty(), "{name}");
    let Some(listed) = found.and_then(|used| used.summary) else {
        return;
    };
    let mut shown = Summary::of(&line);
    // The line was shown later, so everything in it is older. The clocks are of two machines.
    for (listed, shown) in [
        (listed.since, &mut shown.since),
        (listed.longest_wait, &mut shown.longest_wait),
    ] {
        assert_eq!(listed.is_some(), shown.is_some(), "{name}");
        assert!(listed <= *shown, "{name}: {listed:?}, then {shown:?}");
        *shown = listed;
    }
    assert_eq!(listed, shown, "{name}");
}

async fn the_list_sums_up_each_line_as_it_is_shown(store: Store) {
    let (client, other) = (store.connect().await, store.connect().await);
    client.holds(&store.writer("held")).await;
    for _ in 0..3 {
        client.holds(&store.reader("read")).await;
    }
    let names = ["held", "read", "long", "pool"];
    for (name, waiters) in [("read", 2), ("long", 150)] {
        if name == "long" {
            client.holds(&store.writer(name)).await;
        }
        for _ in 0..waiters {
            other.waits(&store.writer(name)).await;
        }
    }
    for permits in [2, 1, 2, 3] {
        let request = store.permits("pool", permits, 3);
        let _ = client.enqueue(&request).await;
    }
    let named = with(&store.writer("held"), |request| {
        request.owner = "host/1/client billing".into();
    });
    other.waits(&named).await;

    for limit in [1, 3, 1000] {
        for name in names {
            agrees(&client, &store, name, limit).await;
            agrees(&other, &store, name, limit).await;
        }
    }
    let listed = summed_up(&client, &store, 1000).await;
    assert_eq!(listed.len(), names.len());
    client.close().await;
    other.close().await;
}
