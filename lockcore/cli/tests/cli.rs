//! The tool as people use it: real processes, a store in a file, exit codes and output.

#![allow(
    clippy::unwrap_used,
    reason = "the helpers of the tests too: a panic is the report"
)]

mod kit;

use std::process::Stdio;

use kit::{Running, Shop, runs, until};

// ---- run

#[test]
fn scripts_under_one_name_exclude_each_other() {
    let shop = Shop::new();
    std::fs::write(shop.path("count"), "0\n").unwrap();
    // Reads, gives others time to read the same, and writes.
    let script = "read n < count; sleep 0.01; echo $((n + 1)) > count";
    let mut all: Vec<_> = (0..12)
        .map(|_| shop.start(&["run", "--wait", "forever", "count", "sh", "-c", script]))
        .collect();

    for one in &mut all {
        assert!(one.ended().success());
    }

    assert_eq!(shop.read("count"), "12\n");
}

#[test]
fn the_exit_code_is_that_of_the_command() {
    let shop = Shop::new();

    assert_eq!(shop.code(&["run", "job", "true"]), 0);
    assert_eq!(shop.code(&["run", "job", "sh", "-c", "exit 3"]), 3);
    assert_eq!(
        shop.code(&["run", "job", "--", "sh", "-c", "kill -TERM $$"]),
        128 + 15
    );
    assert_eq!(shop.code(&["run", "job", "no-such-command"]), 127);
    assert_eq!(shop.code(&["run", "job", "/"]), 126);
    assert_eq!(shop.prints(&["inspect", "job"]), "job: free\n");
}

#[test]
fn the_command_knows_its_lock_and_gets_a_higher_token_each_time() {
    let shop = Shop::new();
    let script = "echo $LOCKCORE_NAME $LOCKCORE_TOKEN";
    let run = || shop.prints(&["run", "job", "sh", "-c", script]);
    let token = |printed: &str| -> u64 {
        let (name, token) = printed.trim().split_once(' ').unwrap();
        assert_eq!(name, "job");
        token.parse().unwrap()
    };

    let (first, second) = (run(), run());

    assert!(token(&first) < token(&second), "{first} {second}");
    let shared = shop.prints(&["run", "--shared", "job", "sh", "-c", script]);
    assert_eq!(shared, "job\n", "a shared lock has no fencing token");
}

#[test]
fn a_shared_lock_under_a_mutex_does_not_get_the_token_of_the_mutex() {
    let shop = Shop::new();
    let tool = env!("CARGO_BIN_EXE_lockcore");
    let script = "echo $LOCKCORE_NAME ${LOCKCORE_TOKEN-none}";
    let inner = [tool, "run", "--shared", "page", "sh", "-c", script];

    let printed = shop.prints(&[&["run", "job"], &inner[..]].concat());

    assert_eq!(printed, "page none\n");
}

#[test]
fn a_lock_that_is_held_has_an_exit_code_of_its_own_and_a_holder() {
    let shop = Shop::new();
    let _holder = shop.start(&["run", "job", "sleep", "1000"]);
    shop.ticket("job", true);

    let busy = shop.outcome(&["run", "--try", "job", "touch", "ran"]);

    assert_eq!(busy.status.code(), Some(75));
    let said = String::from_utf8(busy.stderr).unwrap();
    assert!(
        said.contains("held by") && said.contains("(sleep)"),
        "{said}"
    );
    assert_eq!(
        shop.code(&["run", "-w", "1s", "-E", "9", "job", "touch", "ran"]),
        9
    );
    // Cron sends a mail for each line.
    let no_failure = shop.outcome(&["run", "--try", "-E", "0", "job", "touch", "ran"]);
    assert_eq!(no_failure.status.code(), Some(0));
    assert_eq!((no_failure.stdout, no_failure.stderr), (vec![], vec![]));
    assert!(!shop.path("ran").exists());
}

#[test]
fn a_candidate_whose_wait_is_over_has_an_exit_code_of_its_own() {
    let shop = Shop::new();
    let _leader = shop.start(&["elect", "boss", "sleep", "1000"]);
    shop.ticket("boss", true);
    let elect = |more: &[&str]| {
        let words = [&["elect", "--wait", "0s"], more, &["boss", "touch", "ran"]];
        shop.outcome(&words.concat())
    };

    let late = elect(&[]);
    assert_eq!(late.status.code(), Some(75));
    let said = String::from_utf8(late.stderr).unwrap();
    assert!(said.contains("held by"), "{said}");
    assert_eq!(elect(&["-E", "9"]).status.code(), Some(9));
    let no_failure = elect(&["-E", "0"]);
    assert_eq!(no_failure.status.code(), Some(0));
    assert_eq!((no_failure.stdout, no_failure.stderr), (vec![], vec![]));
    assert!(!shop.path("ran").exists());
}

#[test]
fn readers_share_and_a_semaphore_has_its_permits() {
    let shop = Shop::new();
    let _reader = shop.start(&["run", "--shared", "page", "sleep", "1000"]);
    shop.ticket("page", true);
    let _permit = shop.start(&["run", "--of", "2", "pool", "sleep", "1000"]);
    shop.ticket("pool", true);

    assert_eq!(shop.code(&["run", "-n", "--shared", "page", "true"]), 0);
    assert_eq!(shop.code(&["run", "-n", "page", "true"]), 75);
    assert_eq!(shop.code(&["run", "-n", "--of", "2", "pool", "true"]), 0);
    assert_eq!(
        shop.code(&["run", "-n", "--permits", "2", "--of", "2", "pool", "true"]),
        75
    );
    // All permits of a semaphore are not a mutex, so there is no fencing token.
    let _whole = shop.start(&["run", "--of", "1", "whole", "sleep", "1000"]);
    shop.ticket("whole", true);
    let line = shop.prints(&["inspect", "--json", "whole"]);
    assert!(line.contains("\"first_token\":null"), "{line}");
    let table = shop.prints(&["inspect", "whole"]);
    assert!(table.contains("1 of 1"), "{table}");
    let script = "echo $LOCKCORE_TOKEN > token; sleep 1000";
    let _mutex = shop.start(&["run", "job", "sh", "-c", script]);
    let token = shop.written("token");
    let table = shop.prints(&["inspect", "job"]);
    assert!(table.contains(token.trim()), "{table}");
}

#[test]
fn the_command_is_ended_when_the_lock_is_lost() {
    let shop = Shop::new();
    let script =
        "trap 'echo ended > end; exit' TERM; echo began > begin; while :; do sleep 0.1; done";
    let ttl = ["--ttl", "5s"];
    let holder = shop.start(&[&["run"], &ttl[..], &["job", "sh", "-c", script]].concat());
    shop.written("begin");

    shop.prints(&["release", "job", &shop.ticket("job", true)]);

    let (code, said) = holder.said();
    assert_eq!(code, 70, "{said}");
    assert!(said.contains("the lock is lost (Taken)"), "{said}");
    assert_eq!(shop.read("end"), "ended\n");
}

#[test]
fn a_command_that_ignores_the_end_or_is_stopped_is_killed() {
    let shop = Shop::new();
    for (name, script) in [
        (
            "ignores",
            "trap '' TERM; echo $$ > ignores; while :; do sleep 0.1; done",
        ),
        ("stopped", "echo $$ > stopped; kill -STOP $$; sleep 1000"),
    ] {
        let words = [
            "run", "--ttl", "5s", "--grace", "200ms", name, "sh", "-c", script,
        ];
        let holder = shop.start(&words);
        let pid = shop.written(name);

        shop.prints(&["release", name, &shop.ticket(name, true)]);

        let (code, said) = holder.said();
        assert_eq!(code, 70, "{said}");
        assert!(!runs(&pid), "{name} runs without its lock");
    }
}

#[test]
fn a_command_is_killed_at_the_loss_if_the_tool_is_told_so() {
    let shop = Shop::new();
    let script = "trap 'echo > asked' TERM; echo $$ > pid; while :; do sleep 0.05; done";
    let words = ["run", "--ttl", "5s", "--on-lost", "kill", "--grace", "10m"];
    let holder = shop.start(&[&words[..], &["job", "sh", "-c", script]].concat());
    let pid = shop.written("pid");

    shop.prints(&["release", "job", &shop.ticket("job", true)]);

    let (code, said) = holder.said();
    assert_eq!(code, 70, "{said}");
    assert!(!runs(&pid) && !shop.path("asked").exists());
}

/// Ends its work in good order: it notes SIGTERM, and goes on until it may end.
const NOTES_THE_END: &str = "exec 2> /dev/null; trap 'echo > asked' TERM; echo > began; until [ -e go ]; do sleep 0.05; done; exit 5";

#[test]
fn a_command_does_not_depend_on_who_reads_what_the_tool_says() {
    let shop = Shop::new();
    let words = [
        "run",
        "--on-revoke",
        "term",
        "job",
        "sh",
        "-c",
        NOTES_THE_END,
    ];
    let full = std::fs::File::options().write(true).open("/dev/full");
    let mut tool = shop.tool(&words);
    let mut holder = tool
        .env("RUST_LOG", "trace")
        .stderr(full.unwrap())
        .spawn()
        .unwrap();
    shop.written("began");
    let ticket = shop.ticket("job", true);
    let _asks = shop.start(&["revoke", "--within", "10m", "job", &ticket]);
    shop.written("asked");

    std::fs::write(shop.path("go"), "").unwrap();

    let status = until("the end of the tool", || holder.try_wait().unwrap());
    assert_eq!(status.code(), Some(5));
}

#[test]
fn a_signal_for_the_command_does_not_wait_for_a_reader_that_has_stalled() {
    let shop = Shop::new();
    // The pipe has no room for anything more.
    let full = "head -c 65536 /dev/zero >&2; exec \"$0\" \"$@\"";
    let words = ["run", "--ttl", "5s", "job", "sh", "-c", NOTES_THE_END];
    let mut holder = Shop::begin(shop.through("sh", &["-c", full], &words));
    shop.written("began");

    shop.prints(&["release", "job", &shop.ticket("job", true)]);

    shop.written("asked");
    std::fs::write(shop.path("go"), "").unwrap();
    assert_eq!(holder.ended().code(), Some(70));
}

#[test]
fn a_command_may_go_on_without_its_lock_if_it_is_told_so() {
    let shop = Shop::new();
    let script = "echo began > begin; until [ -e go ]; do sleep 0.05; done; exit 5";
    let words = ["run", "--ttl", "5s", "--on-lost", "ignore", "job"];
    let said = std::fs::File::create(shop.path("said")).unwrap();
    let mut tool = shop.tool(&[&words[..], &["sh", "-c", script]].concat());
    let mut holder = Running::of(tool.stderr(said).spawn().unwrap());
    shop.written("begin");
    shop.prints(&["release", "job", &shop.ticket("job", true)]);
    let is_said = || shop.read("said").contains("the command goes on without it");
    until("the loss", || is_said().then_some(()));

    std::fs::write(shop.path("go"), "").unwrap();

    assert_eq!(holder.ended().code(), Some(5));
}

#[cfg(target_os = "linux")]
#[test]
fn a_command_does_not_outlive_a_tool_that_is_killed() {
    let shop = Shop::new();
    let mut holder = shop.start(&["run", "job", "sh", "-c", "echo $$ > pid; exec sleep 1000"]);
    let pid = shop.written("pid");

    holder.signal("-KILL");
    holder.ended();

    until("the end of the command", || (!runs(&pid)).then_some(()));
}

#[test]
fn a_signal_reaches_all_that_the_command_has_started() {
    let shop = Shop::new();
    // Without a terminal the command and the processes that it starts are one group. One of them
    // needs some time to end.
    let cleans_up = "trap 'until [ -e go ]; do sleep 0.05; done; exit' TERM; echo > ready";
    let script = format!("({cleans_up}; while :; do sleep 0.1; done) & echo $! > pid; wait");
    let words = ["run", "job", "sh", "-c", &script];
    let mut detached = shop.through("setsid", &["--wait"], &words);
    let mut holder = detached.spawn().unwrap();
    let pid = shop.written("pid");
    shop.written("ready");
    let owner = shop.prints(&["inspect", "--json", "job"]);
    // The owner is host/pid/client.
    let lockcore = owner
        .split("\"owner\":\"")
        .nth(1)
        .unwrap()
        .split('/')
        .nth(1)
        .unwrap();

    let kill = std::process::Command::new("kill")
        .args(["-TERM", lockcore])
        .status();

    assert!(kill.unwrap().success());
    // The command itself ends at once, and the lock stays taken while the other process works.
    assert_eq!(shop.code(&["run", "-w", "1s", "job", "true"]), 75);
    assert!(runs(&pid));
    std::fs::write(shop.path("go"), "").unwrap();
    until("the end of the tool", || holder.try_wait().unwrap());
    until("the end of the process behind the command", || {
        (!runs(&pid)).then_some(())
    });
    assert_eq!(shop.prints(&["inspect", "job"]), "job: free\n");
}

/// As the first process of a container is to the tool: orphans that nobody else takes become children
/// of this process, which never reads how they have ended.
#[cfg(target_os = "linux")]
fn leave_orphans() {
    use rustix::process::{getpid, set_child_subreaper};
    set_child_subreaper(Some(getpid())).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn a_process_that_nobody_reaps_does_not_keep_the_tool_waiting() {
    leave_orphans();
    let shop = Shop::new();
    // Without a terminal, so that the command has a process group. The second process of the group
    // has lost its parent, and ends at SIGTERM, as the command does.
    let script = "(sleep 1000 & echo $! > pid); echo > began; sleep 1000";
    let words = ["run", "--ttl", "5s", "job", "sh", "-c", script];
    let mut holder = shop.through("setsid", &["--wait"], &words).spawn().unwrap();
    shop.written("began");

    shop.prints(&["release", "job", &shop.ticket("job", true)]);

    let status = until("the end of the tool", || holder.try_wait().unwrap());
    assert_eq!(status.code(), Some(70));
    assert!(!runs(&shop.read("pid")));
}

#[cfg(target_os = "linux")]
#[test]
fn an_orphan_of_the_command_is_reaped_while_the_command_goes_on() {
    let shop = Shop::new();
    let script = "(sh -c 'echo $$ > pid' &); echo > began; sleep 1000";
    let _holder = shop.start(&["run", "job", "sh", "-c", script]);
    shop.written("began");
    let pid = shop.written("pid");

    let process = std::path::Path::new("/proc").join(pid.trim());
    until("the end of the orphan", || {
        (!process.exists()).then_some(())
    });
}

#[test]
fn a_waiter_that_is_interrupted_leaves_the_line() {
    let shop = Shop::new();
    let _holder = shop.start(&["run", "job", "sleep", "1000"]);
    shop.ticket("job", true);
    let mut waiter = shop.start(&["run", "-w", "forever", "job", "touch", "ran"]);
    shop.ticket("job", false);

    // Not SIGINT: a shell that starts the tests in the background lets all of them ignore it.
    waiter.signal("-TERM");

    assert_eq!(waiter.ended().code(), Some(128 + 15));
    let line = shop.prints(&["inspect", "--json", "job"]);
    assert_eq!(line.lines().count(), 1, "{line}");
    assert!(!shop.path("ran").exists());
}

// ---- for operators

#[test]
fn a_holder_is_told_why_it_is_asked_and_the_next_one_gets_the_lock() {
    let shop = Shop::new();
    let words = [
        "run",
        "--ttl",
        "5s",
        "--on-revoke",
        "term",
        "job",
        "sleep",
        "1000",
    ];
    let holder = shop.start(&words);
    let ticket = shop.ticket("job", true);
    let mut next = shop.start(&["run", "-w", "forever", "job", "true"]);
    shop.ticket("job", false);

    let revoked = shop.prints(&[
        "revoke", "--within", "60s", "--why", "deploy", "job", &ticket,
    ]);

    assert_eq!(revoked, format!("job: ticket {ticket} has ended\n"));
    let (code, said) = holder.said();
    assert_eq!(code, 128 + 15, "{said}");
    assert!(
        said.contains("asks for the lock within 1m: deploy"),
        "{said}"
    );
    assert!(next.ended().success());
}

#[test]
fn a_holder_is_named_by_its_token_too_and_one_that_is_gone_has_an_exit_code_of_its_own() {
    let shop = Shop::new();
    let script = "echo $LOCKCORE_TOKEN > token; sleep 1000";
    let holder = shop.start(&["run", "--ttl", "5s", "job", "sh", "-c", script]);
    let token = shop.written("token");
    let token = token.trim();
    let ticket = shop.ticket("job", true);
    let line = shop.prints(&["inspect", "--json", "job"]);
    assert!(
        line.contains(&format!("\"first_token\":\"{token}\"")),
        "{line}"
    );

    assert_eq!(
        shop.prints(&["release", "job", token]),
        format!("job: ticket {ticket} has ended\n")
    );

    assert_eq!(holder.said().0, 70);
    for command in ["release", "revoke"] {
        for gone in [&ticket, token] {
            let outcome = shop.outcome(&[command, "job", gone]);
            assert_eq!(outcome.status.code(), Some(66), "{command}");
            assert_eq!(outcome.stdout, b"");
        }
    }
}

#[test]
fn ls_shows_each_name_with_its_holder_and_its_waiters() {
    let shop = Shop::new();
    let _holder = shop.start(&["run", "order:1", "sleep", "1000"]);
    shop.ticket("order:1", true);
    let _waiter = shop.start(&["run", "-w", "forever", "order:1", "true"]);
    shop.ticket("order:1", false);
    let _other = shop.start(&["run", "other", "sleep", "1000"]);
    shop.ticket("other", true);

    assert_eq!(shop.prints(&["ls", "--names"]), "order:1\nother\n");
    let table = shop.prints(&["ls", "order:"]);
    let row: Vec<_> = table.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[..3], ["order:1", "1", "1"], "{table}");
    assert!(table.contains("(sleep)"), "{table}");
    assert_eq!(shop.prints(&["ls", "nothing"]), "");
}

#[test]
fn a_name_with_control_characters_does_not_reach_the_terminal() {
    let shop = Shop::new();
    let name = "evil\u{1b}[2J\nname";
    let _holder = shop.start(&["run", name, "sleep", "1000"]);
    shop.ticket(name, true);

    let names = shop.prints(&["ls", "--names"]);

    assert_eq!(names, "evil\\u{1b}[2J\\nname\n");
    assert!(
        shop.prints(&["ls", "--json"])
            .contains("evil\\u001b[2J\\nname")
    );
}

#[test]
fn a_reader_that_has_seen_enough_ends_watch_without_a_word() {
    let shop = Shop::new();
    let _holder = shop.start(&["run", "job", "sleep", "1000"]);
    shop.ticket("job", true);
    let mut watch = shop.tool(&["watch", "--every", "50ms", "job"]);
    let mut watch = watch
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = std::io::BufReader::new(watch.stdout.take().unwrap());
    let mut first = String::new();
    std::io::BufRead::read_line(&mut out, &mut first).unwrap();
    assert!(first.contains("holds"), "{first}");

    drop(out);
    let _waiter = shop.start(&["run", "-w", "forever", "job", "true"]);

    let status = until("the end of watch", || watch.try_wait().unwrap());
    assert!(status.success());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut watch.stderr.take().unwrap(), &mut said).unwrap();
    assert_eq!(said, "");
}

/// The line of a crontab that the guide shows, on two machines.
#[test]
fn the_crontab_of_the_recipe_runs_its_script_on_one_machine() {
    let shop = Shop::new();
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/guide/recipes.md");
    let recipes = std::fs::read_to_string(guide).unwrap();
    let mut of_tool = recipes.lines().filter_map(|line| {
        let (crontab, words) = line.split_once(" lockcore run ")?;
        crontab.starts_with("0 3 * * *").then_some(words)
    });
    let words = of_tool.next().unwrap().split_whitespace();
    let words: Vec<_> = std::iter::once("run").chain(words).collect();
    // Another process writes it. A file that this one writes cannot be executed while a child that a
    // test beside this one has just started has it open too.
    let script = "echo '#!/bin/sh\necho $LOCKCORE_NAME >> reports' > report.sh; chmod +x report.sh";
    let mut writer = std::process::Command::new("sh");
    let written = writer
        .args(["-c", script])
        .current_dir(shop.path("."))
        .status();
    assert!(written.unwrap().success());

    for _machine in 0..2 {
        let outcome = shop.outcome(&words);

        assert!(outcome.status.success(), "{outcome:?}");
        assert_eq!((outcome.stdout, outcome.stderr), (vec![], vec![]));
    }

    assert_eq!(shop.read("reports"), "nightly-report\n");
}

#[test]
fn ctrl_c_ends_each_command_that_waits_and_leaves_nothing() {
    let shop = Shop::new();
    let _holder = shop.start(&["run", "job", "sleep", "1000"]);
    let ticket = shop.ticket("job", true);
    shop.prints(&["latch", "set", "ready", "1"]);
    let commands: [&[&str]; 8] = [
        &["run", "--wait", "forever", "job", "touch", "ran"],
        &["run", "other", "sleep", "1000"],
        &["elect", "job", "touch", "ran"],
        &["watch", "job"],
        &["latch", "wait", "--wait", "forever", "ready"],
        &["counter", "watch", "hits"],
        &["bench", "--time", "10m"],
        &["revoke", "--within", "10m", "job", &ticket],
    ];

    for words in commands {
        // In the background, a shell lets all that it starts ignore the signal.
        let mut tool = shop.through("env", &["--default-signal=INT"], words);
        let said = std::fs::File::create(shop.path("said")).unwrap();
        // The tool listens to signals before this line of the log.
        tool.env("RUST_LOG", "info")
            .stdout(Stdio::null())
            .stderr(said);
        let mut tool = Running::of(tool.spawn().unwrap());
        until("the client", || {
            shop.read("said").contains("client started").then_some(())
        });

        tool.signal("-INT");

        assert_eq!(tool.ended().code(), Some(128 + 2), "{words:?}");
        assert_eq!(shop.prints(&["ls", "--names"]), "job\n", "{words:?}");
        let line = shop.prints(&["inspect", "--json", "job"]);
        assert_eq!(line.lines().count(), 1, "{line}");
        assert!(!shop.path("ran").exists());
    }
}

#[test]
fn a_pipe_that_nobody_reads_is_no_failure() {
    let shop = Shop::new();
    let _holder = shop.start(&["run", "job", "sleep", "1000"]);
    let ticket = shop.ticket("job", true);
    let commands: [&[&str]; 7] = [
        &["ls"],
        &["ls", "--json"],
        &["inspect", "job"],
        &["counter", "get", "hits"],
        &["doctor"],
        &["completions", "bash"],
        &["release", "job", &ticket],
    ];

    for words in commands {
        let mut tool = shop.tool(words);
        let mut tool = tool
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(tool.stdout.take());

        let outcome = tool.wait_with_output().unwrap();

        assert_eq!(outcome.status.code(), Some(0), "{words:?} {outcome:?}");
        assert_eq!(outcome.stderr, b"", "{words:?} {outcome:?}");
    }
}

#[test]
fn doctor_tries_each_operation() {
    let shop = Shop::new();

    let report = shop.prints(&["doctor"]);

    kit::is_good(&report, 0);
    assert_eq!(shop.prints(&["ls"]), "");
}

#[test]
fn doctor_finds_a_large_log_of_sqlite_whatever_the_log_says() {
    let shop = Shop::new();
    let _holder = shop.start(&["run", "job", "sleep", "1000"]);
    shop.ticket("job", true);
    let log = std::fs::File::options()
        .write(true)
        .open(shop.path("locks.db-wal"));
    log.unwrap().set_len(65 << 20).unwrap();

    for quiet in ["off", "trace"] {
        let mut doctor = shop.tool(&["doctor", "--json"]);
        let outcome = doctor.env("RUST_LOG", quiet).output().unwrap();

        assert_eq!(outcome.status.code(), Some(1));
        let report = String::from_utf8(outcome.stdout).unwrap();
        let mut warnings = report.lines().filter(|line| line.contains("\"warn\""));
        let warning = warnings.next().unwrap();
        assert!(warning.contains("locks.db-wal has 65 MiB"), "{report}");
        assert_eq!(warnings.next(), None);
    }
}

#[test]
fn bench_measures_round_trips_and_hand_overs() {
    let shop = Shop::new();

    let report = shop.prints(&["bench", "--time", "1s", "--tasks", "3", "--json"]);

    assert_eq!(report.lines().count(), 4, "{report}");
    assert!(!report.contains("\"times\":0"), "{report}");
    assert_eq!(shop.prints(&["ls"]), "");
}

#[test]
fn top_needs_a_terminal() {
    let top = Shop::new().outcome(&["top"]);

    assert_eq!(top.status.code(), Some(64));
    let said = String::from_utf8(top.stderr).unwrap();
    assert!(said.contains("lockcore watch"), "{said}");
}

#[test]
fn each_command_has_a_manual_page() {
    let shop = Shop::new();

    shop.prints(&["man", "pages"]);

    assert!(shop.read("pages/lockcore.1").contains("lockcore\\-run(1)"));
    assert!(shop.read("pages/lockcore-run.1").contains(".TH"));
}

#[test]
fn each_kind_of_failure_has_its_exit_code() {
    let shop = Shop::new();
    let code = |url: &str, words: &[&str]| {
        let mut tool = shop.tool(words);
        tool.env("LOCK_URL", url).output().unwrap().status.code()
    };
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = port.local_addr().unwrap().port();
    drop(port);

    assert_eq!(shop.code(&["run"]), 64);
    assert_eq!(
        shop.code(&["run", "--shared", "--of", "3", "job", "true"]),
        64
    );
    let more_than_all = ["run", "--permits", "5", "--of", "3", "job", "true"];
    assert_eq!(shop.code(&more_than_all), 64);
    assert_eq!(
        shop.code(&["run", "--ttl", "3000000000s", "job", "true"]),
        78
    );
    assert_eq!(
        code(
            &format!("redis://127.0.0.1:{nobody}"),
            &["run", "job", "true"]
        ),
        Some(69)
    );
    assert_eq!(code("foo:", &["ls"]), Some(78));
    assert_eq!(code("memory:", &["ls"]), Some(78));
}

// ---- other primitives

#[test]
fn candidates_lead_one_after_the_other() {
    let shop = Shop::new();
    let script = "echo $0 >> leaders; until [ -e $0.go ]; do sleep 0.05; done";
    let campaign = |who: &str| shop.start(&["elect", "boss", "--", "sh", "-c", script, who]);
    let mut first = campaign("a");
    shop.ticket("boss", true);
    let mut second = campaign("b");
    shop.ticket("boss", false);
    std::fs::write(shop.path("b.go"), "").unwrap();

    std::fs::write(shop.path("a.go"), "").unwrap();

    assert!(first.ended().success() && second.ended().success());
    assert_eq!(shop.read("leaders"), "a\nb\n");
}

#[test]
fn a_script_waits_for_a_latch_and_counts() {
    let shop = Shop::new();
    shop.prints(&["latch", "set", "ready", "2"]);
    assert_eq!(shop.code(&["latch", "set", "ready", "2"]), 75);
    assert_eq!(shop.code(&["latch", "wait", "-w", "1s", "ready"]), 75);

    assert_eq!(shop.prints(&["latch", "down", "ready"]), "1\n");
    assert_eq!(shop.prints(&["latch", "down", "ready"]), "0\n");

    assert_eq!(shop.prints(&["latch", "wait", "ready"]), "");
    assert_eq!(shop.prints(&["counter", "add", "hits", "5"]), "5\n");
    assert_eq!(shop.prints(&["counter", "add", "hits", "-2"]), "3\n");
    assert_eq!(shop.prints(&["counter", "get", "hits"]), "3\n");
}

#[test]
fn what_a_step_has_changed_is_told_in_json_too() {
    let shop = Shop::new();
    let steps: [(&[&str], &str); 7] = [
        (
            &["latch", "set", "ready", "2"],
            r#"{"name":"ready","count":2}"#,
        ),
        (&["latch", "down", "ready"], r#"{"name":"ready","count":1}"#),
        (
            &["latch", "count", "ready"],
            r#"{"name":"ready","count":1}"#,
        ),
        (
            &["latch", "reset", "ready"],
            r#"{"name":"ready","count":0}"#,
        ),
        (&["latch", "wait", "ready"], r#"{"name":"ready","count":0}"#),
        (
            &["counter", "add", "a\"b", "-5"],
            r#"{"name":"a\"b","count":-5}"#,
        ),
        (&["counter", "get", "hits"], r#"{"name":"hits","count":0}"#),
    ];
    for (words, json) in steps {
        let printed = shop.prints(&[words, &["--json"]].concat());
        assert_eq!(printed, format!("{json}\n"));
    }
    let holder = shop.start(&["run", "--ttl", "5s", "job", "sleep", "1000"]);
    let ticket = shop.ticket("job", true);
    let release = ["release", "--json", "job", &ticket];
    let told = |ended| format!("{{\"name\":\"job\",\"ticket\":{ticket},\"ended\":{ended}}}\n");

    assert_eq!(shop.prints(&release), told(true));
    holder.said();

    let again = shop.outcome(&release);
    assert_eq!(again.status.code(), Some(66));
    assert_eq!(String::from_utf8(again.stdout).unwrap(), told(false));
}

#[test]
fn completions_know_the_commands_and_hide_the_internal_one() {
    let script = Shop::new().prints(&["completions", "bash"]);

    assert!(script.contains("inspect") && script.contains("revoke"));
    assert!(!script.contains("__start"), "an internal command");
}
