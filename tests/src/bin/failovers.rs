//! Measures the cost of failovers: `failovers [--rounds 20] [--cluster | --quorum | --durability
//! replicas:1]`.
//!
//! Many tasks in several processes acquire locks again and again. The store is one of these:
//!
//! - a Redis master with two replicas and three sentinels;
//! - a Redis Cluster of three masters with a replica each, where all shared locks are at one
//!   master;
//! - a quorum of five servers.
//!
//! The master of the locks is replaced repeatedly: on request, because it was killed, or because it
//! froze. In a quorum, one server after the other is killed or freezes, and comes back.
//!
//! Each holder enters a resource with its fencing token, writes once more a little later, and
//! leaves. Other tasks add to a counter at that master, and the program compares the counter with the
//! additions that were acknowledged. The resource is a Redis server of its own. It refuses a token that is lower than a token
//! that it has seen, and notices a holder that enters while another holder is inside. Some tasks of
//! each process hold a lock of their own all the time.
//!
//! Prints a row for each round, and the totals of all rounds.

#![allow(
    clippy::unwrap_used,
    reason = "a panic is the report, as in the harness"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::io::BufRead as _;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use lockcore::{Error, Guard, Locks, Release};
use redis::AsyncConnectionConfig;
use redis::aio::MultiplexedConnection;
use tests::eventually::wait_until;
use tests::process::Process;
use tests::redis_cluster::Cluster;
use tests::redis_quorum::Quorum;
use tests::redis_sentinels::Sentinels;
use tests::redis_server::RedisServer;
use tests::stores::Server as _;
use tokio::sync::watch;
use tokio::task::JoinSet;

const NAMESPACE: &str = "failovers";
/// The default ttl of the library.
const TTL: Duration = Duration::from_secs(10);
/// The time after which the sentinels replace a silent master.
const DOWN_AFTER: Duration = Duration::from_secs(1);
/// The time after which the nodes of a cluster replace a silent master.
const NODE_TIMEOUT: Duration = Duration::from_secs(2);
/// The servers of a quorum.
const VOTERS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(120);

/// The resource as a script. KEYS: the name; the hash with the totals of all names. ARGV: the
/// action; the token in 20 digits; the task. Returns 1, or 0 if the token is refused.
const RESOURCE: &str = "
local name, all, token, task = KEYS[1], KEYS[2], ARGV[2], ARGV[3]
if ARGV[1] == 'leave' then
    redis.call('SREM', name .. ':inside', task)
    return 1
end
if token < (redis.call('GET', name) or '') then
    redis.call('HINCRBY', all, 'refused', 1)
    return 0
end
redis.call('SET', name, token)
if ARGV[1] == 'write' then
    return 1
end
if redis.call('SCARD', name .. ':inside') > 0 then
    redis.call('HINCRBY', all, 'overlaps', 1)
end
redis.call('SADD', name .. ':inside', task)
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = tonumber(redis.call('HGET', all, 'last') or now)
if now - last > tonumber(redis.call('HGET', all, 'longest') or 0) then
    redis.call('HSET', all, 'longest', now - last)
end
redis.call('HSET', all, 'last', now)
redis.call('HINCRBY', all, 'grants', 1)
return 1
";

#[derive(Parser)]
#[command(name = "failovers")]
struct Arguments {
    /// Number of failovers
    #[arg(long, default_value_t = 20)]
    rounds: u32,
    /// Number of processes that put load on the servers
    #[arg(long, default_value_t = 4)]
    processes: usize,
    /// Use a Redis Cluster instead of Redis Sentinel
    #[arg(long, conflicts_with_all = ["quorum", "durability"])]
    cluster: bool,
    /// Use a quorum of five servers instead of Redis Sentinel
    #[arg(long, conflicts_with = "durability")]
    quorum: bool,
    /// With Redis Sentinel, wait for so many replicas, for example `replicas:1`
    #[arg(long)]
    durability: Option<String>,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Subcommand)]
enum Part {
    /// Runs the tasks of one process, until its input ends.
    Tasks {
        url: String,
        resource: String,
        /// The names that all processes share.
        shared: Vec<String>,
    },
}

/// In each process, `SHARING` tasks use the `NAMES` names that all processes share, `HOLDING` tasks
/// hold a lock of their own, and `COUNTING` tasks add to a counter with the first of the names.
const SHARING: usize = 12;
const HOLDING: usize = 4;
const COUNTING: usize = 2;
const HELD: usize = SHARING + HOLDING;
const NAMES: usize = 6;

fn main() {
    let arguments = Arguments::parse();
    match &arguments.part {
        Some(Part::Tasks {
            url,
            resource,
            shared,
        }) => tasks(url, resource, shared),
        None => rounds(&arguments),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum How {
    Asked,
    /// On request, but first the old master holds back all writes until its replicas have
    /// everything.
    Paused,
    Killed,
    Frozen,
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Asked => "asked for",
            Self::Paused => "paused",
            Self::Killed => "killed",
            Self::Frozen => "frozen",
        })
    }
}

/// The servers. One of them has the locks that all processes share.
enum Servers {
    Sentinels(Sentinels),
    Cluster(Cluster),
    /// All of them have the locks.
    Quorum(Quorum),
}

impl Servers {
    fn start(arguments: &Arguments) -> Self {
        match (arguments.cluster, arguments.quorum) {
            (true, _) => Self::Cluster(Cluster::start(NODE_TIMEOUT)),
            (false, true) => Self::Quorum(Quorum::start(VOTERS)),
            (false, false) => Self::Sentinels(Sentinels::start(DOWN_AFTER)),
        }
    }

    fn url(&self, durability: Option<&str>) -> String {
        match (self, durability) {
            (Self::Sentinels(set), Some(option)) => format!("{}?durability={option}", set.url()),
            (Self::Sentinels(set), None) => set.url(),
            (Self::Cluster(cluster), _) => cluster.url(),
            (Self::Quorum(set), _) => set.url(),
        }
    }

    /// The names that all processes share.
    fn names(&self) -> Vec<String> {
        let names = (0..).map(|number| format!("shared{number}"));
        match self {
            Self::Sentinels(_) | Self::Quorum(_) => names.take(NAMES).collect(),
            Self::Cluster(cluster) => {
                let master = self.master().port();
                let here = |name: &String| cluster.master_of(&key(name)).port() == master;
                names.filter(here).take(NAMES).collect()
            }
        }
    }

    fn master(&self) -> &RedisServer {
        match self {
            Self::Sentinels(set) => set.master(),
            Self::Cluster(cluster) => cluster.master_of(&key("shared0")),
            Self::Quorum(set) => &set.nodes[0],
        }
    }

    /// The servers whose keys tell what is left.
    fn keepers(&self) -> Vec<&RedisServer> {
        match self {
            Self::Sentinels(_) | Self::Cluster(_) => vec![self.master()],
            Self::Quorum(set) => set.nodes.iter().collect(),
        }
    }

    /// The ways in which the master is replaced, in turn.
    fn ways(&self) -> &[How] {
        match self {
            Self::Sentinels(_) => &[How::Asked, How::Paused, How::Killed, How::Frozen],
            Self::Cluster(_) => &[How::Asked, How::Killed, How::Frozen],
            Self::Quorum(_) => &[How::Killed, How::Frozen],
        }
    }

    /// Replaces the master in this way, and returns it when another one is known.
    fn fail(&self, how: How, round: u32) -> &RedisServer {
        let old = match self {
            Self::Sentinels(_) | Self::Cluster(_) => self.master(),
            Self::Quorum(set) => &set.nodes[round as usize % VOTERS],
        };
        match (how, self) {
            (How::Asked, Self::Sentinels(set)) => set.fail_over(),
            (How::Paused, Self::Sentinels(set)) => {
                old.command::<()>(&["CLIENT", "PAUSE", "5000", "WRITE"]);
                set.wait_until_replicated();
                set.fail_over();
            }
            (How::Asked | How::Paused, Self::Cluster(cluster)) => cluster.fail_over(old),
            (How::Asked | How::Paused, Self::Quorum(_)) => {}
            (How::Killed, _) => old.kill(),
            (How::Frozen, _) => old.freeze(),
        }
        match self {
            Self::Sentinels(set) => set.wait_for_another_master_than(old.port()),
            Self::Cluster(cluster) => {
                cluster.wait_for_another_master_than(old.port(), &key("shared0"));
            }
            Self::Quorum(_) => {}
        }
        old
    }

    fn wait_until_complete(&self) {
        match self {
            Self::Sentinels(set) => set.wait_until_complete(),
            Self::Cluster(cluster) => cluster.wait_until_complete(),
            Self::Quorum(_) => {}
        }
    }
}

/// The Redis key of a name.
fn key(name: &str) -> String {
    format!("{NAMESPACE}:1:{{{name}}}")
}

fn rounds(arguments: &Arguments) {
    let set = Servers::start(arguments);
    let url = set.url(arguments.durability.as_deref());
    let (ways, names) = (set.ways(), set.names());
    let resource = RedisServer::start();
    let mut processes: Vec<Process> = (0..arguments.processes)
        .map(|_| {
            let mut command = Command::new(std::env::current_exe().unwrap());
            let command = command.args(["tasks", &url, &resource.url()]);
            Process::start(command.args(&names))
        })
        .collect();
    let seen = |field: &str| -> u64 {
        let value: Option<u64> = resource.command(&["HGET", "all", field]);
        value.unwrap_or(0)
    };
    let grants_go_on = || {
        let before = seen("grants");
        wait_until("grants go on", PATIENCE, || seen("grants") > before + 1_000);
    };
    grants_go_on();
    let mut longest: BTreeMap<How, Vec<u64>> = BTreeMap::new();
    for round in 0..arguments.rounds {
        let how = ways[round as usize % ways.len()];
        resource.command::<()>(&["HDEL", "all", "longest"]);
        let before = (seen("overlaps"), seen("refused"));
        let began = Instant::now();
        let old = set.fail(how, round);
        let named = began.elapsed();
        grants_go_on();
        match how {
            How::Asked | How::Paused => {}
            How::Killed => old.restart(),
            How::Frozen => old.thaw(),
        }
        set.wait_until_complete();
        grants_go_on();
        let gap = seen("longest");
        longest.entry(how).or_default().push(gap);
        println!(
            "{round:>2} {how:<9} another master after {named:>6.2?}, longest without a grant {gap:>5} ms, overlaps {}, refused {}",
            seen("overlaps") - before.0,
            seen("refused") - before.1,
        );
    }
    println!();
    for (how, gaps) in &mut longest {
        gaps.sort_unstable();
        println!("longest without a grant, {how:<9} {gaps:?} ms");
    }
    let mut told: BTreeMap<String, u64> = BTreeMap::new();
    for mut process in processes.drain(..) {
        process.say("end");
        for entry in process.expect("DONE", PATIENCE).split_whitespace() {
            let (what, count) = entry.rsplit_once('=').unwrap();
            *told.entry(what.to_owned()).or_default() += count.parse::<u64>().unwrap();
        }
        process.finish(PATIENCE);
    }
    for (what, count) in &told {
        println!("{what:<40} {count}");
    }
    if !arguments.quorum {
        println!("{:<40} {}", "count:value", counted(&url, &names[0]));
    }
    for field in ["grants", "overlaps", "refused"] {
        println!("{:<40} {}", format!("resource:{field}"), seen(field));
    }
    let left = set.keepers().into_iter();
    let left = left.flat_map(|server| server.litter(NAMESPACE));
    let marks = left.filter(|key| key.contains("}:gone:")).count();
    println!("{:<40} {}", "left:marks", marks);
    println!("{:<40} {}", "left:tickets", tickets_left(&url, &names));
}

#[tokio::main]
async fn tickets_left(url: &str, names: &[String]) -> usize {
    let locks = client(url);
    let mut left = 0;
    for name in names {
        left += locks.inspect(name).await.unwrap().len();
    }
    left
}

#[tokio::main]
async fn counted(url: &str, name: &str) -> i64 {
    client(url).counter(name).get().await.unwrap().count
}

fn client(url: &str) -> Locks {
    let builder = Locks::builder().url(url).namespace(NAMESPACE).ttl(TTL);
    builder.build().unwrap()
}

type Counts = BTreeMap<String, u64>;

#[tokio::main]
async fn tasks(url: &str, resource: &str, shared: &[String]) {
    let (stop, stopped) = watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::stdin().lock().lines().next();
        let _ = stop.send(true);
    });
    let locks = client(url);
    let config = AsyncConnectionConfig::new().set_response_timeout(None);
    let resource = redis::Client::open(resource).unwrap();
    let resource = resource.get_multiplexed_async_connection_with_config(&config);
    let resource = resource.await.unwrap();
    let mut tasks = JoinSet::new();
    let counting = match url.starts_with("redlock") {
        true => 0, // a quorum has no counters
        false => COUNTING,
    };
    for number in 0..HELD + counting {
        let id = format!("{}-{number}", std::process::id());
        let name = match number {
            ..SHARING => shared[number % NAMES].clone(),
            SHARING..HELD => format!("own-{id}"),
            _ => shared[0].clone(),
        };
        let task = Task {
            locks: locks.clone(),
            name,
            id,
            resource: resource.clone(),
            counts: Counts::new(),
            stopped: stopped.clone(),
        };
        tasks.spawn(async move {
            match number {
                ..SHARING => task.shares().await,
                SHARING..HELD => task.holds().await,
                _ => task.counts_up().await,
            }
        });
    }
    let mut all = Counts::new();
    while let Some(counts) = tasks.join_next().await {
        for (what, count) in counts.unwrap() {
            *all.entry(what).or_default() += count;
        }
    }
    locks.shutdown(Duration::from_secs(10)).await.unwrap();
    let counts: Vec<_> = (all.iter().map(|(what, count)| format!("{what}={count}"))).collect();
    println!("DONE {}", counts.join(" "));
}

struct Task {
    locks: Locks,
    name: String,
    id: String,
    resource: MultiplexedConnection,
    counts: Counts,
    stopped: watch::Receiver<bool>,
}

impl Task {
    async fn shares(mut self) -> Counts {
        while !*self.stopped.borrow() {
            let Some(guard) = self.acquire("shared").await else {
                continue;
            };
            let token = guard.grant_id().as_u64();
            if self.ask("enter", token).await {
                tokio::time::sleep(Duration::from_millis(2)).await; // the work
                self.ask("write", token).await;
                self.ask("leave", token).await;
            }
            self.release("shared", guard).await;
        }
        self.counts
    }

    /// Acquires a lock and holds it until it is lost, again and again.
    async fn holds(mut self) -> Counts {
        while !*self.stopped.borrow() {
            let Some(guard) = self.acquire("own").await else {
                continue;
            };
            let mut stopped = self.stopped.clone();
            let end = async { drop(stopped.wait_for(|stopped| *stopped).await) };
            let lost = tokio::select! {
                reason = guard.lost() => Some(reason),
                () = end => None,
            };
            match lost {
                Some(reason) => self.count(format!("own:lost:{reason:?}")),
                None => self.release("own", guard).await,
            }
        }
        self.counts
    }

    /// Adds to a counter again and again.
    async fn counts_up(mut self) -> Counts {
        let sum = self.locks.counter(&self.name);
        while !*self.stopped.borrow() {
            match sum.add(1).await {
                Ok(_) => self.count("count:acknowledged".to_owned()),
                Err(error) => self.failed("count", "add", &error),
            }
            tokio::time::sleep(Duration::from_millis(2)).await; // the work
        }
        self.counts
    }

    async fn acquire(&mut self, which: &str) -> Option<Guard> {
        match self.locks.mutex(&self.name).acquire().await {
            Ok(guard) => {
                self.count(format!("{which}:acquired"));
                Some(guard)
            }
            Err(error) => {
                self.failed(which, "acquire", &error);
                // The task pauses, because after an error a client should not try again at once.
                tokio::time::sleep(Duration::from_millis(fastrand::u64(1..20))).await;
                None
            }
        }
    }

    async fn release(&mut self, which: &str, guard: Guard) {
        match guard.release().await {
            Ok(Release::Released) => {}
            Ok(_) => self.count(format!("{which}:lost:found-by-release")),
            Err(error) => self.failed(which, "release", &error),
        }
    }

    fn failed(&mut self, which: &str, what: &str, error: &Error) {
        let kind = format!("{:?}", error.kind()).replace(' ', "");
        self.count(format!("{which}:{what}:{kind}"));
    }

    fn count(&mut self, what: String) {
        *self.counts.entry(what).or_default() += 1;
    }

    async fn ask(&mut self, what: &str, token: u64) -> bool {
        let mut question = redis::cmd("EVAL");
        question.arg(RESOURCE).arg(2).arg(&self.name).arg("all");
        question.arg(what).arg(format!("{token:020}")).arg(&self.id);
        let granted: u64 = question.query_async(&mut self.resource).await.unwrap();
        granted == 1
    }
}
