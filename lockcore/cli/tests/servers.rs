//! The tool with stores that have a server, and on a terminal.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of the tests too: a panic is the report"
)]

mod kit;

use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Conclusion, Trial};
use tests::etcd_server::EtcdServer;
use tests::fact::fact;
use tests::mysql_server::MysqlServer;
use tests::postgres_server::PostgresServer;
use tests::proxy::Proxy;
use tests::redis_server::RedisServer;
use tests::zookeeper_server::ZooKeeperServer;

use kit::{Running, Shop, is_good, runs, until};

type Fact = (&'static str, fn(&Shop));

fn main() -> std::process::ExitCode {
    let facts: [Fact; 4] = [
        ("a_holder_is_seen_and_asked_and_the_next_one_runs", revoke),
        ("a_lock_is_taken_away_from_a_holder_that_hangs", release),
        ("doctor_tries_each_operation", doctor),
        ("bench_measures_round_trips_and_hand_overs", bench),
    ];
    let on = |store: &str, needs: Result<(), String>, begin: fn(&dyn Fn(String))| -> Vec<Trial> {
        let trial = |&(name, body): &Fact| {
            let name = format!("{store}::{name}");
            let body = move || begin(&|url| body(&Shop::at(url)));
            fact(name, needs.clone(), body)
        };
        facts.iter().map(trial).collect()
    };
    let trials = [
        on("redis", RedisServer::available(), |go| {
            go(RedisServer::start().url());
        }),
        on("zookeeper", ZooKeeperServer::available(), |go| {
            go(ZooKeeperServer::start().url());
        }),
        on("postgres", PostgresServer::available(), |go| {
            // In the tests it does not write to the disk otherwise, which doctor would find.
            go(PostgresServer::with(&["fsync=on"]).url());
        }),
        findings(),
        sessions(),
        outages(),
        on_a_terminal(),
    ];
    let arguments = Arguments::from_args();
    let Conclusion { num_failed, .. } =
        libtest_mimic::run(&arguments, trials.into_iter().flatten().collect());
    u8::from(num_failed > 0).into()
}

fn on_a_terminal() -> Vec<Trial> {
    let tmux = std::process::Command::new("tmux").arg("-V").output();
    let needs = tmux
        .map(drop)
        .map_err(|_| "tmux is not installed".to_owned());
    let facts: [Fact; 7] = [
        ("a_loss_ends_all_that_a_command_has_started", lost),
        ("what_ignores_the_end_of_a_command_is_killed", killed),
        ("what_was_there_before_a_command_goes_on", before),
        ("a_lock_waits_for_what_cleans_up_after_ctrl_c", interrupted),
        ("ls_and_inspect_show_blocks_on_a_narrow_terminal", blocks),
        ("top_shows_a_line_and_asks_its_holder", top),
        ("top_fits_a_narrow_terminal_and_ends_with_ctrl_c", narrow),
    ];
    let trial = |(name, body): Fact| {
        fact(format!("terminal::{name}"), needs.clone(), move || {
            body(&Shop::new())
        })
    };
    facts.map(trial).into()
}

/// Starts a process that does this, writes its number into `pid`, and waits for it.
fn in_the_background(work: &str) -> String {
    format!("({work}; echo > ready; while :; do sleep 0.1; done) & echo $! > pid; wait")
}

fn lost(shop: &Shop) {
    let cleans_up = "trap 'echo > asked; until [ -e go ]; do sleep 0.05; done; exit' TERM";
    let script = in_the_background(cleans_up);
    let words = ["run", "--ttl", "5s", "--grace", "10m", "job", "sh", "-c"];
    let screen = shop.screen(80, 12, &[&words[..], &[&script]].concat());
    shop.written("ready");
    let pid = shop.written("pid");

    shop.prints(&["release", "job", &shop.ticket("job", true)]);

    // The command itself ends at once.
    shop.written("asked");
    assert!(runs(&pid), "it was killed");
    std::fs::write(shop.path("go"), "").unwrap();
    screen.shows("restored");
    assert!(!runs(&pid), "it runs without its lock");
}

fn killed(shop: &Shop) {
    let script = in_the_background("trap '' TERM");
    let words = ["run", "--ttl", "5s", "--grace", "200ms", "job", "sh", "-c"];
    let screen = shop.screen(80, 12, &[&words[..], &[&script]].concat());
    shop.written("ready");
    let pid = shop.written("pid");

    shop.prints(&["release", "job", &shop.ticket("job", true)]);

    screen.shows("restored");
    assert!(!runs(&pid), "it runs without its lock");
}

/// A shell that becomes the tool leaves to it what it has started.
fn before(shop: &Shop) {
    let tool = env!("CARGO_BIN_EXE_lockcore");
    let script = format!(
        "(until [ -e go ]; do sleep 0.05; done) & echo $! > pid; \
         exec {tool} run --ttl 5s job sh -c 'echo > ready; sleep 1000'"
    );
    // The outer lock is there only to have the shell on the terminal.
    let screen = shop.screen(80, 12, &["run", "outer", "sh", "-c", &script]);
    shop.written("ready");
    let pid = shop.written("pid");

    shop.prints(&["release", "job", &shop.ticket("job", true)]);

    screen.shows("restored");
    assert!(runs(&pid), "it was ended with the command");
    std::fs::write(shop.path("go"), "").unwrap();
}

fn interrupted(shop: &Shop) {
    let cleans_up = "trap 'echo > asked; until [ -e go ]; do sleep 0.05; done; exit' INT; \
                     echo $$ > pid; echo > ready; while :; do sleep 0.1; done";
    // Other than a shell, it does not wait for its program then.
    let find = ["find", ".", "-maxdepth", "0", "-exec"];
    let words = [
        &["run", "job"][..],
        &find,
        &["sh", "-c", cleans_up, "{}", "+"],
    ];
    let screen = shop.screen(80, 12, &words.concat());
    shop.written("ready");
    let pid = shop.written("pid");

    screen.press(&["C-c"]);

    shop.written("asked");
    assert_eq!(shop.code(&["run", "--try", "job", "true"]), 75);
    assert!(runs(&pid), "it was killed");
    std::fs::write(shop.path("go"), "").unwrap();
    screen.shows("restored");
    assert!(!runs(&pid), "it runs without its lock");
}

fn top(shop: &Shop) {
    let holder = ["run", "--on-revoke", "term", "order:1", "sleep", "1000"];
    let mut holder = shop.start(&holder);
    shop.ticket("order:1", true);
    let _other = shop.start(&["run", "stock", "sleep", "1000"]);
    let _next = shop.start(&["run", "--wait", "forever", "order:1", "sleep", "1000"]);
    shop.ticket("order:1", false);
    shop.ticket("stock", true);

    let screen = shop.screen(80, 12, &["top"]);
    screen.shows("2 names, by waiters");
    let text = screen.text();
    assert!(text.find("order:1") < text.find("stock"), "{text}");
    screen.press(&["Enter"]);
    screen.shows("order:1: 1 hold, 1 wait");
    screen.press(&["r"]);
    screen.shows("y/n: 30s to finish for ");
    screen.press(&["y"]);

    screen.shows("has ended");
    screen.shows("order:1: 1 hold, 0 wait");
    holder.ended();
    screen.press(&["q"]);
    screen.ends();
}

fn blocks(shop: &Shop) {
    let _holder = shop.start(&["run", "order:1", "sleep", "1000"]);
    shop.ticket("order:1", true);

    for (words, heads) in [
        (&["ls"][..], ["NAME ", "HOLDERS ", "HELD BY "]),
        (&["inspect", "order:1"], ["TICKET ", "PERMITS ", "OWNER "]),
    ] {
        let screen = shop.screen(40, 20, words);
        screen.shows("restored");
        let text = screen.text();
        for head in heads {
            let begins = |line: &str| line.starts_with(head);
            assert_eq!(
                text.lines().filter(|line| begins(line)).count(),
                1,
                "{text}"
            );
        }
    }
}

fn narrow(shop: &Shop) {
    let _holder = shop.start(&["run", "order:1", "sleep", "1000"]);
    shop.ticket("order:1", true);

    let screen = shop.screen(80, 12, &["top", "order:"]);
    screen.shows("HELD BY");
    screen.resize(40);
    screen.shows("WAITERS  LONGEST WAIT\n");
    screen.press(&["/", "x"]);
    screen.shows("0 names of order:, with \"x\"");
    screen.press(&["C-c"]);
    screen.ends();
}

fn revoke(shop: &Shop) {
    let script =
        "trap 'echo ended > ended; exit' TERM; echo began > began; while :; do sleep 0.1; done";
    let words = ["run", "--on-revoke", "term", "job", "sh", "-c", script];
    let mut holder = shop.start(&words);
    shop.written("began");
    let ticket = shop.ticket("job", true);
    assert_eq!(shop.code(&["run", "--try", "job", "touch", "ran"]), 75);
    let mut next = shop.start(&[
        "run",
        "--wait",
        "forever",
        "job",
        "sh",
        "-c",
        "echo next > next",
    ]);
    shop.ticket("job", false);
    let names = shop.prints(&["ls"]);
    assert!(names.contains("job"), "{names}");

    shop.prints(&["revoke", "--why", "deploy", "job", &ticket]);

    assert_eq!(shop.written("next"), "next\n");
    assert_eq!(shop.read("ended"), "ended\n");
    assert!(next.ended().success());
    holder.ended();
    assert!(!shop.path("ran").exists());
    assert_eq!(shop.prints(&["inspect", "job"]), "job: free\n");
}

fn release(shop: &Shop) {
    let holder = shop.start(&["run", "--ttl", "5s", "job", "sleep", "1000"]);
    let ticket = shop.ticket("job", true);

    shop.prints(&["release", "job", &ticket]);

    let (code, said) = holder.said();
    assert_eq!(code, 70, "{said}");
    assert_eq!(shop.code(&["run", "--wait", "forever", "job", "true"]), 0);
}

fn doctor(shop: &Shop) {
    is_good(&shop.prints(&["doctor"]), 0);
}

fn sessions() -> Vec<Trial> {
    vec![
        fact(
            "zookeeper::a_lock_stays_for_its_min_hold",
            ZooKeeperServer::available(),
            || {
                min_hold(&Shop::at(ZooKeeperServer::start().url()));
            },
        ),
        fact(
            "etcd::a_lock_stays_for_its_min_hold",
            EtcdServer::available(),
            || {
                min_hold(&Shop::at(EtcdServer::start().url()));
            },
        ),
    ]
}

fn outages() -> Vec<Trial> {
    let facts: [(&str, fn()); 3] = [
        ("watch_goes_on_after_an_outage", watch_goes_on),
        (
            "a_command_is_ended_when_its_lease_is_over",
            store_down_during_a_run,
        ),
        (
            "a_command_that_has_ended_keeps_its_exit_code",
            store_down_after_a_run,
        ),
    ];
    let trial = |(name, body): (&str, fn())| {
        fact(format!("outage::{name}"), RedisServer::available(), body)
    };
    facts.map(trial).into()
}

/// A lock that ends with the session of its process stays taken for as long as the tool stays.
fn min_hold(shop: &Shop) {
    let began = Instant::now();
    // Longer than a ttl, and than an operation may take: for that long, the end of the client waits
    // anyway.
    let hold = ["run", "--min-hold", "12s", "job"];
    let mut first = shop.start(&[&hold[..], &["sh", "-c", "echo > done"]].concat());
    shop.written("done");
    assert_eq!(shop.code(&["run", "--try", "job", "true"]), 75);

    assert!(first.ended().success());

    assert!(
        began.elapsed() >= Duration::from_secs(12),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(shop.code(&["run", "job", "true"]), 0);

    // A service manager that ends the tool does not wait for it.
    let mut second = shop.start(&[
        "run",
        "--min-hold",
        "10m",
        "job",
        "sh",
        "-c",
        "echo > again",
    ]);
    shop.written("again");
    second.signal("-TERM");
    let code = second.ended().code();
    // The command may have got the signal too.
    assert!([Some(0), Some(128 + 15)].contains(&code), "{code:?}");
}

/// Until it may end.
const WORKS: &str = "echo > began; until [ -e go ]; do sleep 0.05; done; exit 5";

fn store_down_during_a_run() {
    let server = RedisServer::start();
    let shop = Shop::at(server.url());
    let holder = shop.start(&["run", "--ttl", "2s", "job", "sh", "-c", WORKS]);
    shop.written("began");

    server.kill();

    let (code, said) = holder.said();
    assert_eq!(code, 70, "{said}");
    assert!(
        said.contains("the lock is lost (Expired): the command is ended"),
        "{said}"
    );
}

fn store_down_after_a_run() {
    let server = RedisServer::start();
    let shop = Shop::at(server.url());
    let holder = shop.start(&["run", "--ttl", "10m", "job", "sh", "-c", WORKS]);
    shop.written("began");
    server.kill();

    std::fs::write(shop.path("go"), "").unwrap();

    let (code, said) = holder.said();
    assert_eq!(code, 5, "{said}");
    assert!(
        said.contains("lockcore: "),
        "nobody learns that the lock is not released: {said}"
    );
}

fn watch_goes_on() {
    let server = RedisServer::start();
    let shop = Shop::at(server.url());
    let mut watch = shop.tool(&["watch", "--every", "50ms", "job"]);
    watch.env("LOCK_OP_TIMEOUT", "1s").env("RUST_LOG", "off");
    let file = |name: &str| std::fs::File::create(shop.path(name)).unwrap();
    let watch = watch.stdout(file("changes")).stderr(file("said"));
    let mut watch = Running::of(watch.spawn().unwrap());
    let mut first = shop.start(&["run", "--ttl", "1s", "job", "sleep", "1000"]);
    let shows = |file: &str, part: &str, times: usize| {
        until(part, || {
            (shop.read(file).matches(part).count() >= times).then_some(())
        });
    };
    shows("changes", "holds", 1);

    server.kill();
    shows("said", "looking again", 1);
    first.ended();
    server.restart();

    let _second = shop.start(&["run", "job", "sleep", "1000"]);
    shows("said", "answers again", 1);
    shows("changes", "is gone", 1);
    shows("changes", "holds", 2);
    // On a busy machine, a look may come too late in between, and is said too.
    let said = shop.read("said");
    let is_of_an_outage = |(at, line): (usize, &str)| match at % 2 {
        0 => line.ends_with("looking again"),
        _ => line.contains("answers again"),
    };
    assert!(said.lines().enumerate().all(is_of_an_outage), "{said}");
    watch.signal("-TERM");
    assert_eq!(watch.ended().code(), Some(128 + 15));
}

/// Stores that are made wrong on purpose, and what `doctor` says of each.
fn findings() -> Vec<Trial> {
    vec![
        fact(
            "doctor::redis_that_evicts_keys",
            RedisServer::available(),
            || {
                let server = RedisServer::with(&["--maxmemory-policy", "allkeys-lru"]);
                let report = finds(&Shop::at(server.url()), "");
                assert!(
                    report.contains("Set maxmemory-policy noeviction"),
                    "{report}"
                );
            },
        ),
        fact(
            "doctor::redis_that_tells_nothing",
            RedisServer::available(),
            || {
                let server = RedisServer::start();
                let user = [
                    "ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all", "-info",
                ];
                let () = server.command(&user);
                let report = Shop::at(server.url_with_user("ann", "secret")).prints(&["doctor"]);
                let is_told = |line: &str| line.starts_with("skipped INFO is not permitted");
                assert_eq!(
                    report.lines().filter(|line| is_told(line)).count(),
                    1,
                    "{report}"
                );
            },
        ),
        fact(
            "doctor::zookeeper_behind_a_proxy_that_loses_events",
            ZooKeeperServer::available(),
            || {
                let server = ZooKeeperServer::start();
                let proxy = Proxy::to(server.port());
                proxy.lose_events();
                let url = format!("zookeeper://127.0.0.1:{}", proxy.port());
                let doctor = Shop::at(url).outcome(&["doctor"]);
                let report = String::from_utf8(doctor.stdout).unwrap();
                for messages in ["wake-ups of the store", "changes of a counter"] {
                    let warning = format!("warn    most {messages} have not reached");
                    assert!(report.contains(&warning), "{report}");
                }
                assert_eq!(doctor.status.code(), Some(1), "{report}");
            },
        ),
        fact(
            "doctor::postgres_that_does_not_write",
            PostgresServer::available(),
            || {
                let server = PostgresServer::with(&["fsync=off"]);
                let report = finds(&Shop::at(server.url()), "");
                assert!(report.contains("Set fsync on"), "{report}");
            },
        ),
        fact(
            "doctor::postgres_with_an_unlogged_table",
            PostgresServer::available(),
            || {
                let server = PostgresServer::with(&["fsync=on"]);
                let tables = server.query("SELECT tablename FROM pg_tables WHERE schemaname = 'lockcore1' AND tablename NOT IN (SELECT conrelid::regclass::text FROM pg_constraint WHERE contype = 'f')");
                server.query(&format!("ALTER TABLE lockcore1.{} SET UNLOGGED", tables[0]));
                let report = finds(&Shop::at(server.url()), "");
                assert!(report.contains("is UNLOGGED"), "{report}");
            },
        ),
        fact(
            "doctor::mysql_that_writes_later",
            MysqlServer::available(),
            || {
                let server = MysqlServer::with(&["--innodb-flush-log-at-trx-commit=2"]);
                let report = finds(&Shop::at(server.url()), "");
                assert!(
                    report.contains("innodb_flush_log_at_trx_commit is not 1"),
                    "{report}"
                );
            },
        ),
        fact(
            "doctor::zookeeper_with_short_sessions",
            ZooKeeperServer::available(),
            || {
                let server = ZooKeeperServer::with(&["maxSessionTimeout=2000"]);
                let report = finds(&Shop::at(server.url()), "10s");
                assert!(
                    report.contains("Raise the server's maxSessionTimeout"),
                    "{report}"
                );
            },
        ),
        fact(
            "doctor::etcd_with_long_leases",
            EtcdServer::available(),
            || {
                let server = EtcdServer::with(&["--election-timeout", "5000"]);
                let report = finds(&Shop::at(server.url()), "1s");
                assert!(
                    report.contains("Its least ttl follows from its election timeout"),
                    "{report}"
                );
            },
        ),
    ]
}

/// The report, in which one line is a warning, and all others are good.
fn finds(shop: &Shop, ttl: &str) -> String {
    let mut doctor = shop.tool(&["doctor"]);
    if !ttl.is_empty() {
        doctor.env("LOCK_TTL", ttl);
    }
    let outcome = doctor.env("RUST_LOG", "off").output().unwrap();
    let report = String::from_utf8(outcome.stdout).unwrap();
    is_good(&report, 1);
    assert_eq!(outcome.status.code(), Some(1), "{report}");
    report
}

fn bench(shop: &Shop) {
    let report = shop.prints(&["bench", "--time", "2s", "--tasks", "3", "--json"]);

    assert_eq!(report.lines().count(), 4, "{report}");
    assert!(!report.contains("\"times\":0"), "{report}");
    assert_eq!(shop.prints(&["ls"]), "");
}
