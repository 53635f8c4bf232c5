//! The tool with stores that have a server, and on a terminal.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of the tests too: a panic is the report"
)]

mod kit;

use libtest_mimic::{Arguments, Conclusion, Trial};
use tests::fact::fact;
use tests::postgres_server::PostgresServer;
use tests::redis_server::RedisServer;
use tests::zookeeper_server::ZooKeeperServer;

use kit::Shop;

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
            go(PostgresServer::start().url());
        }),
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
    let facts: [Fact; 2] = [
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
    let report = shop.prints(&["doctor"]);

    assert_eq!(report.lines().count(), 6, "{report}");
    assert!(
        report.lines().all(|line| line.starts_with("ok ")),
        "{report}"
    );
}

fn bench(shop: &Shop) {
    let report = shop.prints(&["bench", "--time", "2s", "--tasks", "3", "--json"]);

    assert_eq!(report.lines().count(), 4, "{report}");
    assert!(!report.contains("\"times\":0"), "{report}");
    assert_eq!(shop.prints(&["ls"]), "");
}
