//! The workloads W3 and W4: many tasks at one lock, in one process and in several.

use std::fs::File;
use std::process::Command;
use std::time::Duration;

use tests::measure::now;
use tests::process::Process;
use tests::turns::{self, Contention, Turn};

use crate::floor::{SECOND, Turns};
use crate::program::{self, Policy, SOON, last_line, load};
use crate::store::Asked;
use crate::table::{Bar, Samples, Table};
use crate::{Bench, floor};

/// The time from the command to the start. It is long enough for every process to receive the
/// command.
const LEAD: Duration = Duration::from_millis(50);

pub(crate) fn one_process(bench: &Bench, table: &mut Table) {
    let contest = Contest {
        workload: "W3",
        processes: 1,
        tasks: 64,
    };
    for policy in &bench.policies {
        contest.judge(bench, *policy, table);
    }
}

/// How many processes run in the measurements that show the trend and have no bar.
const PROCESSES: [usize; 3] = [1, 2, 8];

pub(crate) fn several_processes(bench: &Bench, table: &mut Table) {
    let of = |processes| Contest {
        workload: "W4",
        processes,
        tasks: 16,
    };
    for policy in &bench.policies {
        of(4).judge(bench, *policy, table);
        for processes in PROCESSES {
            of(processes).show(bench, *policy, table);
        }
    }
}

/// The pause between two tries of a peer that polls, in milliseconds. With its default pause of 200
/// ms, rslock makes only a tenth of these hand-overs.
const POLL_MS: &str = "10";

/// Several processes with the same number of tasks each. All tasks want one lock.
struct Contest {
    workload: &'static str,
    processes: usize,
    tasks: usize,
}

impl Contest {
    /// Runs the floor, the peer and our lock in turns. Adds their figures to `samples`, and returns
    /// the peer's name.
    fn run(
        &self,
        bench: &Bench,
        policy: Policy,
        what: &str,
        samples: &mut Samples,
    ) -> Option<&'static str> {
        let Bench { store, secs, .. } = bench;
        let Self {
            workload,
            processes,
            tasks,
        } = self;
        let mut peer_name = None;
        for run in bench.each_run(what) {
            let key = format!("{workload}-{}-{}-{run}", policy.name(), now());
            let folder = tempfile::tempdir().unwrap();
            let out = |process: usize| folder.path().join(process.to_string());
            let second = store.terms.floor.and_then(|floor| floor.second);
            match store.terms.floor.map(|floor| &floor.turns) {
                None => {}
                Some(Turns::Here(contend)) => samples.add("floor", contend(*tasks, *secs)),
                Some(Turns::OfProcesses { .. }) => {
                    store.put_token(&key);
                    let floor = run_all(bench, *processes, |process| {
                        floor::contend(&store.url, *tasks, *secs, &key, &out(process))
                    });
                    samples.add("floor", floor.contention.true_hand_overs_s);
                    if let Some(packets) = floor.packets_each() {
                        samples.add("floor packets", packets);
                    }
                    store.forget(&key);
                    if second.is_some() {
                        let key = format!("{SECOND}{key}");
                        let second = run_all(bench, *processes, |process| {
                            floor::contend(&store.url, *tasks, *secs, &key, &out(process))
                        });
                        samples.add("second", second.contention.true_hand_overs_s);
                    }
                }
            }
            if let Some((name, _)) = program::peer(store, "w3") {
                let key = format!("peer-{key}");
                let mode = format!("w3 {tasks} {secs} {key} 0");
                let peer = run_all(bench, *processes, |process| {
                    let (_, mut command) = program::peer(store, &mode).unwrap();
                    command.args(["--poll", POLL_MS]).arg(out(process));
                    command
                });
                peer_name = Some(name);
                samples.add("peer", peer.contention.true_hand_overs_s);
            }
            let ours = run_all(bench, *processes, |process| {
                let mut command = load(store, policy, &format!("w3 {tasks} {secs} {key} 0"));
                command.arg(out(process));
                command
            });
            ours.add_to(samples);
        }
        peer_name
    }

    /// Adds only the hand-overs per second, and whether a lock has failed.
    fn show(&self, bench: &Bench, policy: Policy, table: &mut Table) {
        let what = format!("{} of {} {}", self.workload, self.processes, policy.name());
        let mut samples = Samples::default();
        let peer = self.run(bench, policy, &what, &mut samples);
        let floor_name = bench.store.terms.floor.map_or("", |floor| floor.turn);
        table
            .row(&what, TRUE, samples.median("true"), "/s")
            .floor(floor_name, samples.median("floor"));
        if let Some(name) = peer {
            table
                .row(&what, BESIDE_A_PEER, samples.median("true"), "/s")
                .floor(name, samples.median("peer"));
        }
        add_failures(table, &what, &samples);
    }

    fn judge(&self, bench: &Bench, policy: Policy, table: &mut Table) {
        let store = &bench.store;
        let is_w4 = self.workload == "W4";
        let what = format!("{} {}", self.workload, policy.name());
        let mut samples = Samples::default();
        let peer = self.run(bench, policy, &what, &mut samples);
        let bars = match is_w4 {
            true => &store.terms.four_processes,
            false => &store.terms.one_process,
        };
        let floor_name = store.terms.floor.map_or("", |floor| floor.turn);
        table
            .row(&what, TRUE, samples.median("true"), "/s")
            .floor(floor_name, samples.median("floor"))
            .bar(bars.bar(policy));
        if let Some(name) = peer {
            let sixty = is_w4 && policy == Policy::Default;
            table
                .row(&what, BESIDE_A_PEER, samples.median("true"), "/s")
                .floor(name, samples.median("peer"))
                .bar(sixty.then_some(Bar::TimesFloor(60.0)));
        }
        let second = store.terms.floor.and_then(|floor| floor.second);
        if let Some((name, beside)) = second.zip(samples.median("second")) {
            table
                .row(&what, BESIDE_A_PEER, samples.median("true"), "/s")
                .floor(name, Some(beside));
        }
        table.row(&what, "hand-overs", samples.median("all"), "/s");
        let fair = match policy {
            Policy::Strict if !is_w4 && store.is_shared() => Some(Bar::AtLeast(0.95)),
            // This means that no task gets more than 1.5 times as many turns as another.
            Policy::Default if is_w4 => Some(Bar::AtLeast(1.0 / 1.5)),
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
            .bar((is_w4 && policy == Policy::Default).then_some(Bar::OfFloor(3.0)));
        add_requests(
            table,
            &what,
            policy,
            &samples,
            floor_name,
            store.servers_asked(),
        );
        table.row(&what, "our CPU per hand-over", samples.median("cpu"), "µs");
        add_failures(table, &what, &samples);
    }
}

const TRUE: &str = "true hand-overs";
const BESIDE_A_PEER: &str = "true hand-overs, a peer's beside them";

/// Adds the cost of each hand-over at the server.
fn add_requests(
    table: &mut Table,
    what: &str,
    policy: Policy,
    samples: &Samples,
    floor_name: &'static str,
    servers: usize,
) {
    if let Some(scripts) = samples.median("scripts") {
        // With several servers, each request goes to all of them. Tasks that ask together share a
        // ticket, and need fewer.
        let most = |bar| (policy == Policy::Strict && servers == 1).then_some(Bar::AtMost(bar));
        table
            .row(what, "scripts per hand-over", scripts, "")
            .bar(most(2.0));
        table
            .row(
                what,
                "publish per hand-over",
                samples.median("publishes"),
                "",
            )
            .bar(most(1.0));
        for (figure, name, unit) in [
            ("other", "other requests per hand-over", ""),
            ("inside", "calls in scripts per hand-over", ""),
            ("micros", "time in scripts per hand-over", "µs"),
        ] {
            table.row(what, name, samples.median(figure), unit);
        }
    }
    if let Some(packets) = samples.median("packets") {
        table
            .row(what, "requests per hand-over", packets, "")
            .floor(floor_name, samples.median("floor packets"));
    }
    if let Some(cpu) = samples.median("server cpu") {
        table.row(what, "server CPU per hand-over", cpu, "µs");
    }
}

fn add_failures(table: &mut Table, what: &str, samples: &Samples) {
    for figure in ["overlaps", "errors"] {
        table
            .row(what, figure, samples.most(figure), "")
            .bar(Bar::Never);
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

/// Starts the processes and lets them begin at the same time. Then reads the file that each process
/// has written. The last argument of its command names this file.
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
            // Makes the numbers of tasks in different processes different.
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
        let Some(asked) = &self.asked else { return };
        samples.add("server cpu", asked.cpu_s * 1e6 / each);
        if let Some(redis) = &asked.redis {
            samples.add("scripts", redis.scripts / each);
            samples.add("publishes", redis.publishes / each);
            samples.add("other", redis.other_requests / each);
            samples.add("inside", redis.inside_scripts / each);
            samples.add("micros", redis.script_micros() / each);
        }
    }

    /// The requests that a server received for each acquisition. `None` for Redis, whose commands are
    /// counted, and if nothing is counted.
    fn packets_each(&self) -> Option<f64> {
        let asked = self.asked.as_ref().filter(|asked| asked.redis.is_none())?;
        Some(asked.requests / self.each())
    }

    fn each(&self) -> f64 {
        self.acquisitions.max(1.0)
    }
}
