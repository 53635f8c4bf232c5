use super::repeat::repetition;
use super::*;
use crate::backend::{Fault, StoreError, Written};
use crate::counting::{Carried, Record};
use crate::name::Namespace;
use crate::token::{FencingToken, GrantId};

fn change(op: CountOp, answered: Vec<Id>) -> Arc<Count> {
    let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
    let count = Count::new(name, Id::draw().unwrap(), op);
    Arc::new(Count { answered, ..count })
}

fn add(answered: Vec<Id>) -> Arc<Count> {
    let (delta, floor) = (1, None);
    change(CountOp::Add { delta, floor }, answered)
}

fn counted(version: u64) -> Counted {
    Counted::new(1, 1, version, Outcome::Applied)
}

fn answered(version: u64) -> CountAnswer {
    CountAnswer {
        counted: counted(version),
        remembered: 1,
    }
}

#[tokio::test]
async fn changes_of_another_master_are_repeated_in_order_and_once() {
    let changed = Arc::new(Changed::default());
    let (old, new) = (Arc::from("old"), Arc::from("new"));
    let all = [add(Vec::new()), add(Vec::new()), add(Vec::new())];
    for count in &all {
        changed.note(&old, count, &answered(5));
    }
    changed.note(&new, &add(Vec::new()), &answered(9));
    let name = &all[0].name;
    let of_new = |master: &str, _: &Name| master == "new";
    assert_eq!(changed.names(of_new), std::slice::from_ref(name));
    let asked = Mutex::new(Vec::new());
    let ask = |count: Arc<Count>| {
        asked.lock().unwrap().push(count.id);
        let answer = match asked.lock().unwrap().len() {
            2 => Err(StoreError::new(Fault::Retry, "not now")),
            _ => Ok(counted(6)),
        };
        std::future::ready(answer)
    };

    let turn = || Repeating::begin(&changed, name, &new);
    let first = turn().unwrap().unwrap();
    assert!(turn().unwrap_err().is_conflict());
    let failed = first.repeat(ask).await.unwrap_err();
    assert_eq!(failed.fault(), Fault::Retry);
    let second = turn().unwrap().unwrap();
    second.repeat(ask).await.unwrap();
    assert!(turn().unwrap().is_none());

    let ids = all.map(|count| count.id);
    // Additions are repeated together.
    assert_eq!(*asked.lock().unwrap(), [ids[0], ids[1], ids[2], ids[1]]);
    assert_eq!(changed.names(of_new), []);
}

#[tokio::test]
async fn a_caller_that_goes_away_keeps_the_turn_from_nobody() {
    let changed = Arc::new(Changed::default());
    let (old, new) = (Arc::from("old"), Arc::from("new"));
    let count = add(Vec::new());
    changed.note(&old, &count, &answered(5));
    let turn = Repeating::begin(&changed, &count.name, &new)
        .unwrap()
        .unwrap();
    let (answers, answered) = tokio::sync::watch::channel(false);
    let ask = move |_| {
        let mut answered = answered.clone();
        async move {
            answered.wait_for(|answered| *answered).await.unwrap();
            Ok(counted(6))
        }
    };
    let mut tasks = tokio::task::JoinSet::new();
    let spawn = |task| drop(tasks.spawn(task));
    let caller = turn.repeat_in_task(spawn, ask);

    assert!(futures_util::future::FutureExt::now_or_never(caller).is_none());
    assert!(Repeating::begin(&changed, &count.name, &new).is_err());
    answers.send_replace(true);
    tasks.join_all().await;

    assert!(
        Repeating::begin(&changed, &count.name, &new)
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_client_looks_for_new_masters_once_a_second_and_only_for_its_own_changes() {
    let (changed, master) = (Changed::default(), Arc::from("old"));
    assert!(changed.looks().is_none());
    for _ in 0..3 {
        changed.note(&master, &add(Vec::new()), &answered(5));
    }
    let looks = changed.looks().unwrap();
    assert_eq!(looks.len(), 1);
    assert_eq!(looks[0].op, CountOp::Read);
    assert!(changed.looks().unwrap().is_empty());
}

#[test]
fn the_clients_of_a_counter_share_what_a_server_remembers_and_repeat_nothing_they_have_told() {
    const CLIENTS: usize = 10;
    let master: Arc<str> = Arc::from("old");
    let clients: [_; CLIENTS] = std::array::from_fn(|_| Arc::<Changed>::default());
    let mut answered_before: [Vec<Id>; CLIENTS] = Default::default();
    let mut remembered = HashSet::new();
    let mut most = 0;

    // The last client comes when the others have taken all there is.
    let before = (0..CLIENTS - 1).cycle().take(2 * ENOUGH);
    for at in before.chain((0..CLIENTS).cycle().take(4 * ENOUGH)) {
        let count = add(std::mem::take(&mut answered_before[at]));
        let telling = clients[at].telling(&count);
        for id in &telling.count.answered {
            assert!(remembered.remove(id), "told twice, or before the answer");
        }
        telling.answered();
        remembered.insert(count.id);
        let answered = CountAnswer {
            counted: counted(1),
            remembered: remembered.len(),
        };
        clients[at].note(&master, &count, &answered);
        answered_before[at].push(count.id);
        most = most.max(remembered.len());
    }

    assert!(most <= ENOUGH + CLIENTS, "{most}");
    for client in &clients {
        let all = client.all();
        let held: Vec<_> = all.of.values().flat_map(|latest| &latest.changes).collect();
        assert!(held.len() > ENOUGH / CLIENTS / 3, "{}", held.len());
        let is_remembered = |change: &&Recent| remembered.contains(&change.count.id);
        assert!(held.iter().all(is_remembered));
    }
}

/// A master that has some of the changes of one client, and gets all of them again.
#[tokio::test]
async fn after_the_repetition_a_counter_is_as_its_only_client_has_left_it() {
    let token = FencingToken::of_exclusive(GrantId::of_ticket(6, 0));
    for seed in 0..300 {
        let random = fastrand::Rng::with_seed(seed);
        assert_repeated(random, token).await;
    }
}

async fn assert_repeated(mut random: fastrand::Rng, token: FencingToken) {
    let changed = Arc::new(Changed::default());
    let (old, new) = (Arc::from("old"), Arc::from("new"));
    let mut master = Record::default();
    let mut promoted = master.clone();
    let mut version = 0;
    let has = random.u64(0..20);
    for time in 1..20 {
        let only_if = match random.u8(0..4) {
            0 => None,
            1 => Some(OnlyIf::Count(random.i64(0..3))),
            _ => Some(OnlyIf::Version(version)),
        };
        let op = match random.u8(0..8) {
            0 => CountOp::Write(Written::new(token, random.u8(..).to_string())),
            1..4 => CountOp::Set {
                count: random.i64(0..3),
                only_if,
            },
            floor => CountOp::Add {
                delta: random.i64(-3..4),
                floor: (floor == 4).then_some(0),
            },
        };
        let count = change(op, Vec::new());
        let counted = asked(&mut master, &count, time);
        if time < has {
            let _ = asked(&mut promoted, &count, time);
        }
        version = counted.version;
        let remembered = 1;
        let answered = CountAnswer {
            counted,
            remembered,
        };
        changed.note(&old, &count, &answered);
    }
    let name = changed.names(|_, _| false).remove(0);
    let promoted = Mutex::new(promoted);
    let ask = |count: Arc<Count>| {
        let made = asked(&mut promoted.lock().unwrap(), &count, 1_000);
        std::future::ready(Ok(made))
    };

    let turn = Repeating::begin(&changed, &name, &new).unwrap().unwrap();
    turn.repeat(ask).await.unwrap();

    let read = change(CountOp::Read, Vec::new());
    let seen = |record: &mut Record| {
        let counted = asked(record, &read, 0);
        (counted.count, counted.written.map(|written| written.text))
    };
    let there = seen(&mut promoted.lock().unwrap());
    assert_eq!(there, seen(&mut master), "{random:?}");
}

fn asked(record: &mut Record, count: &Count, time: u64) -> Counted {
    match record.carry_out(count, 0, time) {
        Carried::Answered(answer) | Carried::Changed { answer, .. } => answer,
        Carried::Crowded => panic!("the record is crowded"),
    }
}

/// A set that was acknowledged before another client's change must not undo it.
#[tokio::test]
async fn a_set_on_top_of_a_change_of_another_client_is_not_repeated() {
    let changed = Arc::new(Changed::default());
    let (old, new) = (Arc::from("old"), Arc::from("new"));
    let mut master = Record::default();
    let first = add(Vec::new());
    let counted = asked(&mut master, &first, 5);
    let only_if = Some(OnlyIf::Version(counted.version));
    let sets = [None, only_if].map(|only_if| CountOp::Set { count: 7, only_if });
    for count in [
        first,
        change(sets[1].clone(), Vec::new()),
        change(sets[0].clone(), Vec::new()),
    ] {
        let counted = asked(&mut master, &count, 6);
        let remembered = 1;
        changed.note(
            &old,
            &count,
            &CountAnswer {
                counted,
                remembered,
            },
        );
    }
    let promoted = Mutex::new(Record::default());
    let (delta, floor) = (100, None);
    let of_another = change(CountOp::Add { delta, floor }, Vec::new());
    let _ = asked(&mut promoted.lock().unwrap(), &of_another, 10);
    let ask = |count: Arc<Count>| {
        std::future::ready(Ok(asked(&mut promoted.lock().unwrap(), &count, 11)))
    };

    let name = &of_another.name;
    let turn = Repeating::begin(&changed, name, &new).unwrap().unwrap();
    turn.repeat(ask).await.unwrap();

    let read = change(CountOp::Read, Vec::new());
    assert_eq!(asked(&mut promoted.lock().unwrap(), &read, 0).count, 101);
}

#[test]
fn a_set_is_repeated_only_if_nobody_has_changed_the_counter_later() {
    let set = |only_if| CountOp::Set { count: 7, only_if };
    let recent = |op| Recent {
        at: Clock::BOOT.now(),
        master: Arc::from("old"),
        count: change(op, Vec::new()),
        after: 1,
        version: 50,
        follows: None,
    };
    let repeated = |op, read: Option<u64>| {
        let read = read.map(counted);
        repetition(&recent(op), read.as_ref()).map(|count| count.op.clone())
    };
    assert_eq!(repeated(set(None), Some(50)), None);
    assert_eq!(repeated(set(None), Some(60)), None);
    let if_version = |version| set(Some(OnlyIf::Version(version)));
    assert_eq!(repeated(set(None), Some(40)), Some(if_version(40)));
    assert_eq!(repeated(if_version(9), None), Some(if_version(9)));
}

#[test]
fn a_value_is_repeated_unless_a_later_holder_has_written() {
    let token = |number: u64| FencingToken::of_exclusive(GrantId::of_ticket(number, 0));
    let write = |number, text: &str| CountOp::Write(Written::new(token(number), text));
    let recent = Recent {
        at: Clock::BOOT.now(),
        master: Arc::from("old"),
        count: change(write(6, "six"), Vec::new()),
        after: 1,
        version: 50,
        follows: None,
    };
    let is_repeated = |there: Option<u64>, version| {
        let mut read = counted(version);
        read.written = there.map(|number| Written::new(token(number), "there"));
        repetition(&recent, Some(&read)).is_some()
    };
    // An earlier holder's value was repeated first, which has made a newer version.
    assert!(is_repeated(Some(5), 60));
    assert!(is_repeated(None, 60));
    assert!(is_repeated(Some(6), 40));
    assert!(!is_repeated(Some(6), 50));
    assert!(!is_repeated(Some(7), 40));
}

#[tokio::test]
async fn a_refused_change_is_not_repeated_and_no_later_one_follows_from_it() {
    let changed = Arc::new(Changed::default());
    let (old, new) = (Arc::from("old"), Arc::from("new"));
    let set = |version| CountOp::Set {
        count: 7,
        only_if: Some(OnlyIf::Version(version)),
    };
    let refused = change(set(1), Vec::new());
    let kept = CountAnswer {
        counted: Counted::new(1, 1, 5, Outcome::Kept),
        remembered: 1,
    };
    changed.note(&old, &refused, &kept);
    let (first, second) = (change(set(1), Vec::new()), change(set(5), Vec::new()));
    changed.note(&old, &first, &answered(5));
    changed.note(&old, &second, &answered(6));
    let asked = Mutex::new(Vec::new());
    // Another client has changed the counter at the new master.
    let ask = |count: Arc<Count>| {
        asked.lock().unwrap().push((count.id, count.op.clone()));
        std::future::ready(Ok(Counted::new(1, 1, 9, Outcome::Kept)))
    };

    let turn = Repeating::begin(&changed, &first.name, &new)
        .unwrap()
        .unwrap();
    turn.repeat(ask).await.unwrap();

    let asked = asked.into_inner().unwrap();
    assert_eq!(asked, [(first.id, set(1)), (second.id, set(5))]);
}

#[test]
fn a_read_takes_no_ids_with_it() {
    let (changed, master) = (Arc::<Changed>::default(), Arc::from("old"));
    let ids = crowd(&changed, &master);
    let read = changed.telling(&change(CountOp::Read, Vec::new()));

    assert_eq!(read.count.answered, []);
    assert_eq!(changed.all().number, LEAST + 1);
    let told = changed.telling(&add(ids.clone()));
    assert_eq!(told.count.answered, ids[..1]);
    assert_eq!(changed.all().number, LEAST);
}

#[test]
fn ids_that_a_failed_request_has_told_are_told_again() {
    let (changed, master) = (Arc::<Changed>::default(), Arc::from("old"));
    let ids = crowd(&changed, &master);
    let failed = changed.telling(&add(ids.clone()));
    assert_eq!(failed.count.answered, ids[..1]);
    assert_eq!(changed.telling(&add(Vec::new())).count.answered, []);
    drop(failed);

    let again = changed.telling(&add(Vec::new()));

    assert_eq!(again.count.answered, ids[..1]);
    again.answered();
    assert_eq!(changed.telling(&add(Vec::new())).count.answered, []);
}

#[test]
fn with_too_many_changes_a_new_one_takes_the_place_of_the_oldest_of_its_counter() {
    let (changed, master) = (Arc::<Changed>::default(), Arc::from("old"));
    let counts: Vec<_> = (0..MANY + 5).map(|_| add(Vec::new())).collect();
    for count in &counts {
        changed.note(&master, count, &answered(1));
    }

    let all = changed.all();
    assert_eq!(all.number, MANY);
    let latest = all.of.values().next().unwrap();
    assert_eq!(latest.changes[0].count.id, counts[5].id);
}

/// One change more than a client may hold back at least, at a server that remembers too many.
fn crowd(changed: &Arc<Changed>, master: &Arc<str>) -> Vec<Id> {
    let crowded = CountAnswer {
        counted: counted(1),
        remembered: 10 * ENOUGH,
    };
    let counts = (0..=LEAST).map(|_| {
        let count = add(Vec::new());
        changed.note(master, &count, &crowded);
        count.id
    });
    counts.collect()
}

#[test]
fn a_counter_that_nobody_changes_any_more_is_forgotten() {
    let (changed, master) = (Arc::<Changed>::default(), Arc::from("old"));
    let first = add(Vec::new());
    changed.note(&master, &first, &answered(1));
    let second = add(vec![first.id]);
    changed.telling(&second).answered();
    changed.note(&master, &second, &answered(2));

    let mut all = changed.all();
    all.remove_older(RECENT, Clock::BOOT.now().after(2 * RECENT));

    assert_eq!((all.of.len(), all.number), (0, 0));
    assert_eq!(all.to_tell.take(&first.name), [first.id]);
}

/// Three maps. The first master never answers, and the second one gets more counters while it is
/// asked.
#[tokio::test]
async fn a_master_that_does_not_answer_delays_the_repetition_at_no_other() {
    let (maps, new_maps) = tokio::sync::watch::channel(());
    let (begun, mut begins) = tokio::sync::mpsc::unbounded_channel();
    let repeat = |master: &'static str| {
        let (answer, answered) = tokio::sync::oneshot::channel::<()>();
        begun.send((master, answer)).unwrap();
        async move { drop(answered.await) }
    };
    let all = for_each_by_itself(new_maps, || vec!["dead", "live"], repeat);
    let steps = async {
        maps.send_replace(());
        let (dead, _never_answers) = begins.recv().await.unwrap();
        let (live, answers) = begins.recv().await.unwrap();
        assert_eq!((dead, live), ("dead", "live"));
        maps.send_replace(());
        answers.send(()).unwrap();
        // For the second map.
        let (again, answers) = begins.recv().await.unwrap();
        assert_eq!(again, "live");
        answers.send(()).unwrap();
        maps.send_replace(());
        let (again, _) = begins.recv().await.unwrap();
        assert_eq!(again, "live");
        assert!(begins.try_recv().is_err(), "one at a time at each master");
    };

    tokio::select! {
        done = tokio::time::timeout(Duration::from_secs(10), steps) => done.unwrap(),
        () = all => panic!("it ends with the connection"),
    }
}
