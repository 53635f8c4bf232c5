//! The workloads W3 and W4: many tasks at one lock, in one process and in four.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use tests::measure::now;
use tests::process::Process;
use tests::turns::{self, Contention, Turn};

use crate::floor::Turns;
use crate::program::{self, Policy, SOON, last_line, load};
use crate::store::Asked;
use crate::table::{Bar, Samples, Table};
use crate::{Bench, floor};

/// The time from the command to the start. By then every process has received the command.
const LEAD: Duration = Duration::from_millis(50);

pub(crate) fn one_process(bench: &Bench, table: &mut Table) {
    measure(bench, table, "W3", 1, 64);
}

pub(crate) fn four_processes(bench: &Bench, table: &mut Table) {
    measure(bench, table, "W4", 4, 16);
}

/// How often a peer that polls looks again. The default of rslock is 200 ms, with which it gets a tenth of the
/// hand-overs.
const POLL_MS: &str = "10";

fn measure(bench: &Bench, table: &mut Table, workload: &str, processes: usize, tasks: usize) {
    let Bench { store, secs, .. } = bench;
    let floor = store.terms.floor;
    let floor_name = floor.map_or("", |floor| floor.turn);
    let bars = match workload {
        "W3" => &store.terms.one_process,
        _ => &store.terms.four_processes,
    };
    for policy in &bench.policies {
        let what = format!("{workload} {}", policy.name());
        let mut samples = Samples::default();
        let mut peer_name = None;
        for run in bench.each_run(&what) {
            let key = format!("{workload}-{}-{}-{run}", policy.name(), now());
            let folder = tempfile::tempdir().unwrap();
            let out = |process: usize| folder.path().join(process.to_string());
            match floor.map(|floor| &floor.turns) {
                None => {}
                Some(Turns::Here(contend)) => samples.add("floor", contend(tasks, *secs)),
                Some(Turns::OfProcesses { .. }) => {
                    store.put_token(&key);
                    let floor = run_all(bench, processes, |process| {
                        floor::contend(&store.url, tasks, *secs, &key, &out(process))
                    });
                    samples.add("floor", floor.contention.true_hand_overs_s);
                    if let Some(packets) = floor.packets_each() {
                        samples.add("floor packets", packets);
                    }
                    store.forget(&key);
                }
            }
            if let Some((name, _)) = program::peer(store, "w3") {
                let key = format!("peer-{key}");
                let mode = format!("w3 {tasks} {secs} {key} 0");
                let peer = run_all(bench, processes, |process| {
                    let (_, mut command) = program::peer(store, &mode).unwrap();
                    command.args(["--poll", POLL_MS]).arg(out(process));
                    command
                });
                peer_name = Some(name);
                samples.add("peer", peer.contention.true_hand_overs_s);
            }
            let ours = run_all(bench, processes, |process| {
                let mut command = load(store, *policy, &format!("w3 {tasks} {secs} {key} 0"));
                command.arg(out(process));
                command
            });
            ours.add_to(&mut samples);
        }

        table
            .row(&what, "true hand-overs", samples.median("true"), "/s")
            .floor(floor_name, samples.median("floor"))
            .bar(bars.bar(*policy));
        if let Some(name) = peer_name {
            let sixty = workload == "W4" && *policy == Policy::Default;
            table
                .row(
                    &what,
                    "true hand-overs, a peer's beside them",
                    samples.median("true"),
                    "/s",
                )
                .floor(name, samples.median("peer"))
                .bar(sixty.then_some(Bar::TimesFloor(60.0)));
        }
        table.row(&what, "hand-overs", samples.median("all"), "/s");
        let fair = match (workload, policy) {
            ("W3", Policy::Strict) if store.is_shared() => Some(Bar::AtLeast(0.95)),
            // This is a ratio of at most 1.5 the other way round.
            ("W4", Policy::Default) => Some(Bar::AtLeast(1.0 / 1.5)),
            _ => None,
        };
        table
            .row(&what, "min/max per task", samples.median("min/max"), "")
            .bar(fair);
        table.row(&what, "wait mean", samples.median("mean"), "µs");
        table.row(&what, "wait p50", samples.median("p50"), "µs");
        table
            .row(&what, "wait p99", samples.median("p99"), "µs")
            .floor("mean", samples.median("mean"))
            .bar((workload == "W4" && *policy == Policy::Default).then_some(Bar::OfFloor(3.0)));
        if let Some(scripts) = samples.median("scripts") {
            let exact = |bar| (*policy == Policy::Strict).then_some(Bar::Exactly(bar));
            let per = "per hand-over";
            table
                .row(&what, format!("scripts {per}"), scripts, "")
                .bar(exact(2.0));
            table
                .row(
                    &what,
                    format!("publish {per}"),
                    samples.median("publishes"),
                    "",
                )
                .bar(exact(1.0));
            let other = samples.median("other");
            table.row(&what, format!("other requests {per}"), other, "");
            let inside = samples.median("inside");
            table.row(&what, format!("calls in scripts {per}"), inside, "");
            let micros = samples.median("micros");
            table.row(&what, format!("time in scripts {per}"), micros, "µs");
            let cpu = samples.median("server cpu");
            table.row(&what, format!("server CPU {per}"), cpu, "µs");
        }
        if let Some(packets) = samples.median("packets") {
            let floor = samples.median("floor packets");
            table
                .row(&what, "packets per hand-over", packets, "")
                .floor(floor_name, floor);
        }
        table.row(&what, "our CPU per hand-over", samples.median("cpu"), "µs");
        for figure in ["overlaps", "errors"] {
            table
                .row(&what, figure, samples.most(figure), "")
                .bar(Bar::Never);
        }
    }
}

/// The result of a run.
struct Outcome {
    contention: Contention,
    acquisitions: f64,
    errors: f64,
    /// The processor time of all processes, in seconds.
    cpu_s: f64,
    asked: Option<Asked>,
}

/// Starts the processes, lets them begin at the same time, and reads the file that each wrote, which is its last
/// argument.
fn run_all(bench: &Bench, processes: usize, command: impl Fn(usize) -> Command) -> Outcome {
    let commands: Vec<Command> = (0..processes).map(command).collect();
    let mut running = Vec::new();
    for mut command in commands {
        let process = Process::start(&mut command);
        let out = command.get_args().last().unwrap().to_owned();
        running.push((process, out));
    }
    for (process, _) in &mut running {
        process.expect("READY", SOON);
    }
    let before = bench.store.reading();
    let start = now() + LEAD.as_nanos() as u64;
    for (process, _) in &mut running {
        process.say(&start.to_string());
    }

    let (mut errors, mut cpu_s, mut acquisitions) = (0.0, 0.0, 0.0);
    let mut turns: Vec<Turn> = Vec::new();
    for (number, (process, out)) in running.iter_mut().enumerate() {
        let report = last_line(process);
        errors += report.figure("errors");
        cpu_s += report.figure("cpu_s");
        acquisitions += report.figure("acquisitions");
        let rows = turns::read(&mut File::open(out).unwrap()).unwrap();
        turns.extend(rows.into_iter().map(|turn| Turn {
            // Gives tasks of different processes different numbers.
            task: turn.task + 1_000 * number as u64,
            ..turn
        }));
    }
    let asked = bench.store.asked_since(&before);
    for (process, _) in running {
        process.finish(SOON);
    }
    Outcome {
        asked,
        contention: Contention::of(&turns, start, bench.secs),
        acquisitions,
        errors,
        cpu_s,
    }
}

impl Outcome {
    fn add_to(&self, samples: &mut Samples) {
        let Contention {
            fewest,
            most,
            waits,
            ..
        } = &self.contention;
        samples.add("true", self.contention.true_hand_overs_s);
        samples.add("all", self.contention.hand_overs_s);
        samples.add("min/max", *fewest as f64 / (*most).max(1) as f64);
        samples.add("mean", waits.mean_us());
        samples.add("p50", waits.percentile_us(50));
        samples.add("p99", waits.percentile_us(99));
        samples.add("overlaps", self.contention.overlaps as f64);
        samples.add("errors", self.errors);
        let each = self.each();
        samples.add("cpu", self.cpu_s * 1e6 / each);
        if let Some(packets) = self.packets_each() {
            samples.add("packets", packets);
        }
        if let Some(redis) = self.asked.as_ref().and_then(|asked| asked.redis.as_ref()) {
            samples.add("scripts", redis.scripts / each);
            samples.add("publishes", redis.publishes / each);
            samples.add("other", redis.other_requests / each);
            samples.add("inside", redis.inside_scripts / each);
            samples.add("micros", redis.script_micros() / each);
            samples.add("server cpu", redis.cpu_s * 1e6 / each);
        }
    }

    /// The packets that a ZooKeeper received per acquisition.
    fn packets_each(&self) -> Option<f64> {
        let asked = self.asked.as_ref().filter(|asked| asked.redis.is_none())?;
        Some(asked.requests / self.each())
    }

    fn each(&self) -> f64 {
        self.acquisitions.max(1.0)
    }
}
