//! Tests that compare the short cuts of the scripts with the rest of the same scripts.

use libtest_mimic::Trial;
use redis::{Connection, PubSub, Value};
use tests::redis_server::RedisServer;

use super::{ENDS, KEY, LINE, UNSEEN, connect, id, script};
use crate::store::{Kind, SOON, Store};

pub(super) fn facts(store: Kind) -> Vec<Trial> {
    crate::store_facts![store, crate::store::DEFAULT;
        a_short_cut_does_what_the_rest_of_its_script_does
    ]
}

/// Plays random histories at two servers. One of them has the scripts as they are. The other has
/// scripts without short cuts. After each step, the answers, the messages and the tickets are the
/// same. Both servers have the same clock, which stands still during a step.
async fn a_short_cut_does_what_the_rest_of_its_script_does(_: Store) {
    const HISTORIES: u64 = 1_200;
    let servers = [RedisServer::start(), RedisServer::start()];
    let mut ears = servers.each_ref().map(connect);
    let [with, without] = ears.each_mut();
    let mut with = Side::new(&servers[0], with, &Scripts::whole());
    let mut without = Side::new(&servers[1], without, &Scripts::without_short_cuts());

    for seed in 0..HISTORIES {
        let mut random = fastrand::Rng::with_seed(seed);
        let history = History::random(&mut random);
        with.begin();
        without.begin();
        let (mut now, mut before) = (START, Vec::new());
        let mut ids = Ids::default();
        for (at, step) in history.steps.iter().enumerate() {
            now += random.u64(1..5);
            if let Step::Pass(millis) = step {
                now += millis * 1_000;
            }
            before.retain(|ticket: &Ticket| ticket.expires > now / 1_000);
            ids.renew(step, &before);
            let [seen, expected] = [&mut with, &mut without].map(|side| {
                let seen = side.play(step, &ids, history.capacity, now);
                seen.without_what_may_differ(step, &ids, &before)
            });
            assert_eq!(seen, expected, "seed {seed}: step {at} of {history:#?}");
            before = seen.tickets;
        }
    }

    let (taken, not_taken) = (with.short_cuts(), without.short_cuts());
    println!("taken: {taken:?}");
    assert!(taken.iter().all(|taken| *taken > 50), "{taken:?}");
    assert_eq!(not_taken, [0; COUNTED.len()]);
}

/// The server's time in microseconds when a history begins.
const START: u64 = 1_795_000_000_000_000;

/// Nobody hears the messages for the last of these clients.
const CLIENTS: [&str; 3] = ["00", "01", "02"];

const TICKETS: usize = 8;

#[derive(Debug)]
struct History {
    capacity: u32,
    steps: Vec<Step>,
}

#[derive(Debug)]
enum Step {
    Enqueue {
        ticket: usize,
        client: &'static str,
        permits: u32,
        ttl: u64,
        wait: bool,
    },
    /// With a time in milliseconds, each release leaves a mark.
    Release(Vec<usize>, Option<u64>),
    Renew(usize, u32),
    Pass(u64),
    /// The server loses one of the keys of the name.
    Evict(&'static str),
}

impl History {
    /// The requests are for a mutex, for a read/write lock, or for a semaphore with different
    /// numbers of permits.
    fn random(random: &mut fastrand::Rng) -> Self {
        const FULL: u32 = 1 << 30;
        let (capacity, sizes) = random
            .choice([
                (FULL, &[FULL][..]),
                (FULL, &[FULL, FULL, FULL, 1]),
                (FULL, &[FULL, 1, 1]),
                (10, &[10, 10, 10, 3]),
                (10, &[10, 3, 1]),
                (3, &[1, 2]),
                (3, &[1]),
            ])
            .unwrap();
        let steps = (0..random.usize(10..40)).map(|_| Step::random(random, sizes));
        let steps = steps.collect();
        Self { capacity, steps }
    }
}

impl Step {
    fn random(random: &mut fastrand::Rng, sizes: &[u32]) -> Self {
        let permits = random.choice(sizes).copied().unwrap();
        match random.u8(..100) {
            0..45 => Self::Enqueue {
                ticket: random.usize(..TICKETS),
                client: random.choice(CLIENTS).unwrap(),
                permits,
                ttl: random.choice([60_000, 60_000, 60_000, 5_000]).unwrap(),
                wait: random.u8(..10) > 0,
            },
            45..78 => {
                let count = random.choice([1, 1, 1, 2, 5]).unwrap();
                let tickets = (0..count).map(|_| random.usize(..TICKETS)).collect();
                let mark = Some(60_000).filter(|_| random.u8(..80) == 0);
                Self::Release(tickets, mark)
            }
            78..92 => Self::Renew(random.usize(..TICKETS), permits),
            92..99 => Self::Pass(random.choice([100, 3_000, 6_000, 6_000, 30_000]).unwrap()),
            _ => Self::Evict(random.choice([KEY, LINE, ENDS]).unwrap()),
        }
    }
}

/// The scripts of one server.
struct Scripts([(&'static str, String); 4]);

/// The short cuts that are counted: an enqueue that holds beside others, one that waits, a release,
/// and a renewal.
const COUNTED: [&str; 4] = ["joins", "waits", "releases", "renews"];

const RENEWED: &str = "if renew_alone(i, was) then";

/// Where the release tries its short cuts.
const SHORT_CUT: &str = "local done, found = pcall(short_cut, key, ARGV[i])";

impl Scripts {
    /// The scripts as they are, but their clock is a list at the server, and they count how often
    /// they take a short cut.
    fn whole() -> Self {
        let mut scripts = Self(["enqueue", "release", "renew", "inspect"].map(|verb| {
            let script = script(verb);
            assert!(script.contains("redis.call('TIME')"), "{verb}");
            let clock = "redis.call('LRANGE', 'clock', '0', '-1')";
            (verb, script.replace("redis.call('TIME')", clock))
        }));
        let count = |what| format!("redis.call('INCR', 'taken:{what}')");
        let [joins, waits, releases, renews] = COUNTED.map(count);
        let joined = "if type(denied) ~= 'table' then return number end";
        scripts.replace(
            "enqueue",
            joined,
            &joined.replace("return", &(joins + " return")),
        );
        let stands = "return {1, number, ttl, first == next";
        scripts.replace("enqueue", stands, &format!("{waits} {stands}"));
        let released = format!("{SHORT_CUT} if found then {releases} end");
        scripts.replace("release", SHORT_CUT, &released);
        scripts.replace("renew", RENEWED, &format!("{RENEWED} {renews}"));
        scripts
    }

    fn without_short_cuts() -> Self {
        let mut scripts = Self::whole();
        scripts.replace("enqueue", "if is_next and (", "if false and (");
        scripts.replace("enqueue", "if not is_next or not was or", "if true or");
        let alone = "if was and string.sub(was, 30, 61) == ARGV[1] then";
        scripts.replace("release", alone, "if false then");
        scripts.replace("release", SHORT_CUT, "local done, found = true");
        scripts.replace("renew", RENEWED, "if false then");
        scripts
    }

    fn replace(&mut self, verb: &str, from: &str, to: &str) {
        let script = self.0.iter_mut().find(|script| script.0 == verb);
        let text = &mut script.unwrap().1;
        assert_eq!(text.matches(from).count(), 1, "{verb}: {from}");
        *text = text.replace(from, to);
    }
}

/// One of the servers.
struct Side<'a> {
    server: &'a RedisServer,
    connection: Connection,
    ears: PubSub<'a>,
    /// The scripts, by which the server knows them.
    hashes: Vec<(&'static str, String)>,
}

/// What can be seen of a step.
#[derive(Debug, PartialEq)]
struct Seen {
    answer: Value,
    messages: Vec<String>,
    /// The last number of the name.
    last: Option<String>,
    /// The tickets that have not expired, oldest first.
    tickets: Vec<Ticket>,
    /// The keys of the name that do not expire.
    stay: Vec<String>,
}

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Ticket {
    number: String,
    holds: bool,
    /// In milliseconds.
    expires: u64,
    /// The id, and what follows in the record.
    rest: String,
}

impl Ticket {
    fn id(&self) -> &str {
        &self.rest[..32]
    }
}

impl Seen {
    /// A script may know an expired ticket for longer than another. So the answer about such a
    /// ticket may differ. If a release finds no ticket, the holder may be told once more.
    fn without_what_may_differ(mut self, step: &Step, ids: &Ids, before: &[Ticket]) -> Self {
        let Step::Release(tickets, _) = step else {
            return self;
        };
        let is_gone = |ticket: &usize| before.iter().all(|known| known.id() != ids.of(*ticket));
        let answers = match &mut self.answer {
            Value::Array(answers) => answers.as_mut_slice(),
            answer => std::slice::from_mut(answer),
        };
        for (ticket, answer) in tickets.iter().zip(answers) {
            if is_gone(ticket) && *answer == Value::Int(1) {
                *answer = Value::Int(0);
            }
        }
        if tickets.iter().any(is_gone) {
            let again = |message: &String| {
                let mut holders = before.iter().filter(|known| known.holds);
                holders.any(|known| message.contains(&format!("{} {}", known.id(), known.number)))
            };
            self.messages.retain(|message| !again(message));
            self.messages.sort();
            self.messages.dedup();
        }
        self
    }
}

/// The ids of the tickets. A client uses no id again, so a ticket that is enqueued after its lease
/// has another id.
#[derive(Default)]
struct Ids {
    uses: [usize; TICKETS],
    enqueued: [bool; TICKETS],
}

impl Ids {
    fn renew(&mut self, step: &Step, before: &[Ticket]) {
        let Step::Enqueue { ticket, .. } = *step else {
            return;
        };
        let lives = before.iter().any(|known| known.id() == self.of(ticket));
        if self.enqueued[ticket] && !lives {
            self.uses[ticket] += 1;
        }
        self.enqueued[ticket] = true;
    }

    fn of(&self, ticket: usize) -> String {
        id(&format!("t{ticket}.{}", self.uses[ticket]))
    }
}

const END: &str = "t:1:wake:end";

impl<'a> Side<'a> {
    fn new(server: &'a RedisServer, ears: &'a mut Connection, scripts: &Scripts) -> Self {
        ears.set_read_timeout(Some(SOON)).unwrap();
        let mut ears = ears.as_pubsub();
        ears.subscribe(END).unwrap();
        for client in &CLIENTS[..CLIENTS.len() - 1] {
            ears.subscribe(format!("t:1:wake:{client}")).unwrap();
        }
        let hash = |(verb, script): &(&'static str, String)| {
            (*verb, server.command(&["SCRIPT", "LOAD", script]))
        };
        Self {
            server,
            connection: connect(server),
            ears,
            hashes: scripts.0.iter().map(hash).collect(),
        }
    }

    fn begin(&self) {
        self.server.command::<()>(&["DEL", "clock"]);
        self.server.command::<()>(&["RPUSH", "clock", "0", "0"]);
        for key in self.server.keys("t:*") {
            self.server.command::<()>(&["DEL", &key]);
        }
    }

    /// How often each of [`COUNTED`] was taken.
    fn short_cuts(&self) -> [u64; COUNTED.len()] {
        COUNTED.map(|what| {
            let taken: Option<u64> = self.server.command(&["GET", &format!("taken:{what}")]);
            taken.unwrap_or(0)
        })
    }

    fn play(&mut self, step: &Step, ids: &Ids, capacity: u32, now: u64) -> Seen {
        let name = |ticket: &usize| ids.of(*ticket);
        let call = match step {
            Step::Enqueue {
                ticket,
                client,
                permits,
                ttl,
                wait,
            } => {
                let id = name(ticket);
                let record = format!("+{ttl:012}{id}:{permits:010}:{capacity:010}:{client}:me");
                let mut arguments = vec![record, UNSEEN.into()];
                arguments.extend((!wait).then(|| "0".into()));
                self.call("enqueue", 1, arguments)
            }
            Step::Release(tickets, mark) => {
                let mark = mark.map(|mark| mark.to_string()).unwrap_or_default();
                let ids = tickets.iter().map(|ticket| name(ticket) + &mark);
                self.call("release", tickets.len(), ids.collect())
            }
            Step::Renew(ticket, permits) => {
                let arguments = vec![name(ticket), format!("{permits:010}"), "60000".into()];
                self.call("renew", 1, arguments)
            }
            Step::Pass(_) => redis::Cmd::ping(),
            Step::Evict(key) => redis::Cmd::del(*key),
        };
        let (seconds, micros) = (now / 1_000_000, now % 1_000_000);
        const STAY: &str = "local stay = {} \
            for _, key in ipairs(redis.call('KEYS', 't:*')) do \
                if redis.call('PTTL', key) < 0 then stay[#stay + 1] = key end \
            end \
            return stay";
        let mut all = redis::pipe();
        all.cmd("LSET").arg(&["clock", "0"]).arg(seconds).ignore();
        all.cmd("LSET").arg(&["clock", "1"]).arg(micros).ignore();
        all.add_command(call);
        all.cmd("PUBLISH").arg(&[END, ""]).ignore();
        all.add_command(self.call("inspect", 1, Vec::new()));
        all.cmd("GET").arg(KEY);
        all.cmd("EVAL").arg(&[STAY, "0"]);
        type Answers = (Value, Vec<Value>, Option<String>, Vec<String>);
        let (answer, inspected, state, stay): Answers = all.query(&mut self.connection).unwrap();
        Seen {
            answer,
            messages: self.heard(),
            last: state.map(|state| state[..16].to_owned()),
            tickets: alive(&inspected, now),
            stay,
        }
    }

    fn call(&self, verb: &str, tickets: usize, arguments: Vec<String>) -> redis::Cmd {
        let (_, hash) = self.hashes.iter().find(|hash| hash.0 == verb).unwrap();
        let mut call = redis::cmd("EVALSHA");
        call.arg(hash).arg(tickets).arg([KEY].repeat(tickets));
        call.arg(arguments);
        call
    }

    fn heard(&mut self) -> Vec<String> {
        let mut heard = Vec::new();
        loop {
            let message = self.ears.get_message().unwrap();
            if message.get_channel_name() == END {
                return heard;
            }
            let text: String = message.get_payload().unwrap();
            heard.push(format!("{} {text}", message.get_channel_name()));
        }
    }
}

/// The tickets in an answer of `inspect`, without those that have expired.
fn alive(inspected: &[Value], now: u64) -> Vec<Ticket> {
    let number = |digits: &str| digits.parse::<u64>().unwrap();
    let holders: usize = redis::from_redis_value(inspected[2].clone()).unwrap();
    let tickets = inspected[3..].iter().enumerate().map(|(at, record)| {
        let record: String = redis::from_redis_value(record.clone()).unwrap();
        let expires = match record[16..29].strip_prefix('+') {
            Some(behind) => number(&record[..13]) + number(behind),
            None => number(&record[16..29]),
        };
        Ticket {
            number: record[..16].to_owned(),
            holds: at < holders,
            expires,
            rest: record[29..].to_owned(),
        }
    });
    let is_alive = |ticket: &Ticket| ticket.expires > now / 1_000;
    let mut tickets: Vec<_> = tickets.filter(is_alive).collect();
    tickets.sort();
    tickets
}
