//! Tests with a server that denies a command in the middle of an adoption, or of a change of the
//! stored capacity.

use std::collections::BTreeSet;

use libtest_mimic::Trial;
use redis::{Connection, PubSub, Value};
use tests::redis_server::RedisServer;

use super::denied::{commands, without};
use super::{
    ENDS, KEY, LINE, connect, end_lease, enqueue, expires, id, now, record, release, script,
};
use crate::store::{Kind, SOON, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        an_adoption_that_is_denied_a_command_gives_the_ticket_to_one_client
        a_change_of_the_capacity_that_is_denied_a_command_counts_once
    ]
}

/// A name before the verb.
#[derive(Clone, Copy, Debug)]
struct Scene {
    /// The tickets, oldest first, and the permits of each, out of ten.
    line: &'static [(&'static str, u64)],
    /// The ticket whose lease is over.
    dead: Option<&'static str>,
    /// The capacity that is stored.
    stored: Option<u64>,
}

const LINES: [&[(&str, u64)]; 6] = [
    &[],
    &[("a", 10)],
    &[("a", 10), ("w", 10), ("x", 10)],
    &[("a", 4), ("w", 8), ("x", 2)],
    &[("a", 4), ("b", 3), ("w", 5), ("x", 2)],
    &[("a", 4), ("b", 3), ("w", 2)],
];

fn scenes() -> impl Iterator<Item = Scene> {
    let stored = [None, Some(6)];
    LINES.into_iter().flat_map(move |line| {
        let names = line.iter().map(|(name, _)| Some(*name));
        let dead = [None].into_iter().chain(names.take(1));
        dead.flat_map(move |dead| stored.map(|stored| Scene { line, dead, stored }))
    })
}

/// What a verb has done, as it answers when it is sent again with full rights.
#[derive(Clone, Debug, PartialEq)]
struct Outcome {
    answer: Value,
    stored: i64,
    /// The tickets, oldest first: the name, the permits, whether it holds, and whether its lease
    /// ends soon.
    tickets: Vec<(String, String, bool, bool)>,
    /// The waiters that were told of their turn.
    woken: Vec<String>,
}

struct Stage<'a> {
    server: &'a RedisServer,
    /// Hears the messages for the waiters.
    ears: PubSub<'a>,
    /// The commands that were denied after the script had changed something.
    halfway: BTreeSet<String>,
}

const CHANNEL: &str = "t:1:wake:00";

impl<'a> Stage<'a> {
    fn new(server: &'a RedisServer, connection: &'a mut Connection) -> Self {
        connection.set_read_timeout(Some(SOON)).unwrap();
        let mut ears = connection.as_pubsub();
        ears.subscribe(CHANNEL).unwrap();
        Self {
            server,
            ears,
            halfway: BTreeSet::new(),
        }
    }

    fn set_up(&mut self, scene: Scene) {
        self.server.flush();
        if let Some(stored) = scene.stored {
            let capacity = stored.to_string();
            self.send(&change("first", ["set", &capacity, "", "10"]));
        }
        for (name, permits) in scene.line {
            enqueue(self.server, name, &permits.to_string(), "60000");
        }
        if let Some(dead) = scene.dead {
            end_lease(self.server, dead);
        }
        self.woken();
    }

    /// The tickets whose clients were told of their turn since the last call.
    fn woken(&mut self) -> Vec<String> {
        self.server.command::<()>(&["PUBLISH", CHANNEL, "the end"]);
        let mut woken = Vec::new();
        loop {
            let message: String = self.ears.get_message().unwrap().get_payload().unwrap();
            match message.split_once(' ') {
                Some(("the", "end")) => return woken,
                Some((id, number)) if !number.starts_with("again") => {
                    woken.push(id.trim_start_matches('.').to_owned());
                }
                _ => {}
            }
        }
    }

    fn send(&self, call: &[String]) -> Value {
        let call: Vec<_> = call.iter().map(String::as_str).collect();
        self.server.command(&call)
    }

    /// Sends a call without the right to a command. Returns whether the call has failed after it has
    /// changed something.
    #[must_use]
    fn deny(&mut self, call: &[String], command: &str, case: &str) -> bool {
        let before = self.everything();
        let call: Vec<_> = call.iter().map(String::as_str).collect();
        let denied: Result<Value, _> =
            without(self.server, command, || self.server.try_command(&call));
        if denied.is_ok() || self.everything() == before {
            return false;
        }
        self.halfway.insert(command.to_owned());
        // The client of this verb may have died, and nobody may use this name again. So each key
        // must expire. The exception is a stored capacity, which stays until it is forgotten.
        for key in self.server.keys("*") {
            let life: i64 = self.server.command(&["PTTL", &key]);
            let state = || self.server.command::<String>(&["GET", KEY]);
            let stays = key == KEY && state().as_bytes().get(16) == Some(&b'R');
            assert!(life > 0 || stays, "{case}: {key} stays");
        }
        true
    }

    /// All data of the name, as text.
    fn everything(&self) -> String {
        let all = "local rows = redis.call('HGETALL', KEYS[2]) table.sort(rows) \
            return {redis.call('GET', KEYS[1]), rows, redis.call('KEYS', '*'), \
            redis.call('ZRANGE', KEYS[3], '0', '-1', 'WITHSCORES')}";
        let all: Value = self.server.command(&["EVAL", all, "3", KEY, LINE, ENDS]);
        format!("{all:?}")
    }

    fn outcome(&mut self, answer: Value) -> Outcome {
        let mut woken = self.woken();
        woken.sort();
        let reply: Vec<Value> = redis::from_redis_value(self.send(&eval("inspect", &[]))).unwrap();
        let number = |at: usize| redis::from_redis_value::<i64>(reply[at].clone()).unwrap();
        let (stored, holders) = (number(1), number(2) as usize);
        let records = reply[3..].iter().enumerate().map(|(at, record)| {
            let record: String = redis::from_redis_value(record.clone()).unwrap();
            (record, at < holders)
        });
        let mut records: Vec<_> = records.collect();
        records.sort();
        let tickets = records.into_iter().map(|(record, holds)| {
            let name = record[29..61].trim_start_matches('.').to_owned();
            let ends_soon = expires(self.server, &name) < now(self.server) + 30_000;
            (name, record[62..72].to_owned(), holds, ends_soon)
        });
        Outcome {
            answer,
            stored,
            tickets: tickets.collect(),
            woken,
        }
    }

    /// Releases all tickets, and takes all permits.
    fn empty(&self, outcome: &Outcome, case: &str) {
        for (name, ..) in &outcome.tickets {
            assert!(release(self.server, name, "0") <= 1, "{case}: {name}");
        }
        let all = if outcome.stored < 0 {
            10
        } else {
            outcome.stored
        };
        let taken = enqueue(self.server, "all", &all.to_string(), "60000");
        assert_eq!(taken[0], 0, "{case}: permits are lost");
        if all < 10 {
            let one_more = enqueue(self.server, "one more", "1", "60000");
            assert_eq!(one_more[0], 1, "{case}: there are too many permits");
        }
    }
}

/// The commands that a script may call after it has changed something. Every script calls the others
/// first, so without one of them it changes nothing.
fn later_commands() -> Vec<String> {
    let mut commands = commands();
    commands.retain(|command| !["time", "get", "hdel", "set"].contains(&command.as_str()));
    commands
}

/// The command line for a script.
fn eval(verb: &str, arguments: &[String]) -> Vec<String> {
    let call = ["EVAL", &script(verb), "1", KEY].map(String::from);
    [&call[..], arguments].concat()
}

/// The call that changes the capacity. The arguments are the name of the change, what to do, the
/// capacity, the last change that the client has read, and the capacity that it states.
fn change(name: &str, [verb, capacity, after, stated]: [&str; 4]) -> Vec<String> {
    let after = match after {
        "" => String::new(),
        name => id(name),
    };
    let arguments = [&id(name), verb, capacity, &after, stated].map(String::from);
    eval("resize", &arguments)
}

/// The call that gives a ticket to the new id `to`. The release of the id so far leaves a mark.
fn adoption(server: &RedisServer, from: &str, to: &str) -> Vec<String> {
    let record = record(server, from).unwrap();
    let (number, permits, capacity) = (&record[..16], &record[62..72], &record[73..83]);
    let (from, to) = (id(from), id(to));
    let arguments = [
        &from, number, permits, capacity, &to, "60000", "00:me", "60000",
    ];
    eval("adopt", &arguments.map(String::from))
}

/// The client sends the same adoption again. Another client may have asked for the same ticket in
/// between. One of the two gets the ticket, as if no command had been denied.
async fn an_adoption_that_is_denied_a_command_gives_the_ticket_to_one_client(_: Store) {
    let server = RedisServer::start();
    let mut connection = connect(&server);
    let mut stage = Stage::new(&server, &mut connection);
    for scene in scenes() {
        for (from, _) in scene.line {
            stage.set_up(scene);
            let answer = stage.send(&adoption(stage.server, from, "n"));
            let expected = stage.outcome(answer);
            for command in later_commands() {
                for another_asks in [false, true] {
                    let case = format!("{scene:?}, {from} without {command}, {another_asks}");
                    stage.set_up(scene);
                    let ours = adoption(stage.server, from, "n");

                    if !stage.deny(&ours, &command, &case) {
                        break;
                    }
                    let other = match another_asks {
                        true => {
                            let theirs = ours.iter().map(|word| word.replace(&id("n"), &id("o")));
                            stage.send(&theirs.collect::<Vec<_>>())
                        }
                        false => Value::Int(0),
                    };
                    let answer = match (other, stage.send(&ours)) {
                        (Value::Int(0), answer) => answer,
                        (answer, Value::Int(0)) => answer,
                        both => panic!("{case}: answered {both:?}"),
                    };

                    let mut outcome = stage.outcome(answer);
                    // The client that had the ticket may be told of its turn before the verb fails.
                    outcome.woken.retain(|name| name != from);
                    for (name, ..) in &mut outcome.tickets {
                        if name == "o" {
                            *name = "n".into();
                        }
                    }
                    agree(&outcome, &expected, &command, &case);
                    let found = stage.outcome(Value::Nil);
                    stage.empty(&found, &case);
                }
            }
        }
    }
    let halfway = &stage.halfway;
    assert!(halfway.len() >= 8, "denied half-way: {halfway:?}");
}

fn agree(outcome: &Outcome, expected: &Outcome, denied: &str, case: &str) {
    let mut expected = expected.clone();
    if denied == "publish" {
        // The waiter learns of its turn from its next renewal.
        expected.woken.retain(|name| outcome.woken.contains(name));
    }
    assert_eq!(*outcome, expected, "{case}");
}

async fn a_change_of_the_capacity_that_is_denied_a_command_counts_once(_: Store) {
    let server = RedisServer::start();
    let mut connection = connect(&server);
    let mut stage = Stage::new(&server, &mut connection);
    for scene in scenes() {
        let after = if scene.stored.is_some() { "first" } else { "" };
        for op in [
            ["set", "12", after, "10"],
            ["set", "3", after, "10"],
            ["forget", "", after, "10"],
            ["keep", "", "", ""],
        ] {
            let ours = change("ours", op);
            stage.set_up(scene);
            let answer = stage.send(&ours);
            let expected = stage.outcome(answer);
            for command in later_commands() {
                let case = format!("{scene:?}, {op:?} without {command}");
                stage.set_up(scene);

                if !stage.deny(&ours, &command, &case) {
                    continue;
                }
                let answer = stage.send(&ours);

                let outcome = stage.outcome(answer);
                agree(&outcome, &expected, &command, &case);
                stage.empty(&outcome, &case);
            }
        }
    }
    let halfway = &stage.halfway;
    assert!(halfway.len() >= 8, "denied half-way: {halfway:?}");
}
