//! The arguments, as clap reads them.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand, ValueEnum, value_parser};
use lockcore::Wait;
use lockcore::counter::Counter as Count;
use lockcore::semaphore::Semaphore;

/// The most bytes of a text that people read: an owner, or why a lock is asked for.
const LONGEST_TEXT: usize = 64;
/// The most bytes of a name.
const LONGEST_NAME: usize = 4_096;
/// The most permits of a semaphore.
const MOST_PERMITS: i64 = Semaphore::MAX_PERMITS as i64;
/// The largest count of a latch.
const MOST_COUNT: u64 = Count::MAX.unsigned_abs();
/// The most time that a holder can be given.
const LONGEST_GRACE: Duration = Duration::from_secs(86_400);

/// Distributed locks for scripts and operators.
///
/// LOCK_URL says which store keeps the locks: redis://host, zookeeper://host, sqlite:PATH and more.
/// The other LOCK_… variables have the same meaning as for a service that uses the library. The URL
/// is no option, because everybody on a machine can read the options of a process, and a URL may
/// have a password.
///
/// Exit codes: the code of the command that was run; 1 doctor has found what to change; 64 wrong arguments; 66 there is no
/// such ticket; 69 the store does not answer or refuses, or the latch was never set; 70 the lock was lost and the command was ended; 71
/// the machine refuses to start a process; 75 held by another, or the wait is over; 78 a mistake in
/// the configuration; 126 and 127 as in a shell; 128 and the number of the signal that ended the
/// command, or lockcore.
#[derive(Debug, Parser)]
#[command(name = "lockcore", version, max_term_width = 100)]
pub(crate) struct Args {
    /// The first part of all names (LOCK_NAMESPACE)
    #[arg(long, global = true)]
    pub(crate) namespace: Option<String>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    /// Reads the arguments, and checks those that have to fit each other.
    pub(crate) fn read(
        words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
    ) -> Result<Self, clap::Error> {
        let args = Self::try_parse_from(words)?;
        let mistake = match &args.command {
            Command::Run(run) => run.mistake(),
            _ => None,
        };
        match mistake {
            Some(text) => Err(Self::command().error(ErrorKind::ValueValidation, text)),
            None => Ok(args),
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Ls(Ls),
    Inspect(Inspect),
    Watch(Watch),
    Top(Top),
    Revoke(Revoke),
    Release(Release),
    Elect(Elect),
    Latch(Latch),
    Counter(Counter),
    Doctor(Doctor),
    Bench(Bench),
    /// Prints a completion script
    Completions {
        shell: clap_complete::Shell,
    },
    /// Writes the manual pages, one of each command, into a folder
    Man {
        folder: PathBuf,
    },
}

impl Command {
    /// What `inspect` shows of this process beside its number, if LOCK_OWNER does not say it: the
    /// name of the command that runs under the lock, as far as an owner may have it.
    pub(crate) fn owner(&self) -> Option<String> {
        let under = match self {
            Self::Run(run) => &run.under,
            Self::Elect(elect) => &elect.under,
            _ => return None,
        };
        if std::env::var_os("LOCK_OWNER").is_some() {
            return None;
        }
        let program = Path::new(under.command.first()?)
            .file_name()?
            .to_string_lossy();
        let mut owner: String = program.chars().filter(|c| is_of_a_line(*c)).collect();
        while owner.len() > LONGEST_TEXT {
            owner.pop();
        }
        Some(owner)
    }
}

/// Runs a command while this process holds a lock, as flock(1) does on one machine.
///
/// The lease is renewed while the command runs. If the lock is lost, the command is ended. When the
/// command has ended by itself, the lock is released, even if the command leaves processes behind.
/// The command finds the name in LOCKCORE_NAME, and for an exclusive lock the fencing token in
/// LOCKCORE_TOKEN.
///
/// Signals are passed on to the command and to all that it has started. After such a signal, or the
/// loss of the lock, the tool waits until all of them have ended. Without a terminal, they are one
/// process group. With a terminal, they are in the process group of lockcore, which Ctrl-C reaches
/// as a whole, and other signals are sent to each of them. (For that, Linux shows who has started
/// whom. On other systems with a terminal, only the command itself gets these signals.) If Ctrl-C
/// ends the command, the tool waits for the others too, unless the command catches it and then ends
/// by itself.
///
/// On Linux, if lockcore itself is killed, the kernel kills the command, but not what the command
/// has started, and not a command that changes its user (sudo).
#[derive(Debug, clap::Args)]
pub(crate) struct Run {
    /// The name of the lock
    #[arg(value_parser = name)]
    pub(crate) name: String,
    /// How long to wait for the lock, for example 30s, or forever (LOCK_WAIT)
    #[arg(short, long, value_parser = wait)]
    pub(crate) wait: Option<Wait>,
    /// Do not wait
    #[arg(short = 'n', long = "try", conflicts_with = "wait")]
    pub(crate) try_only: bool,
    /// Takes the read side: any number of processes at once, but not together with the write side
    #[arg(short, long, conflicts_with_all = ["permits", "of"])]
    pub(crate) shared: bool,
    /// Takes this many permits of a semaphore
    #[arg(long, requires = "of", value_name = "K", value_parser = value_parser!(u32).range(1..))]
    pub(crate) permits: Option<u32>,
    /// The permits of the semaphore in total
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(1..=MOST_PERMITS))]
    pub(crate) of: Option<u32>,
    /// How long the lock stays taken if this machine dies (LOCK_TTL)
    #[arg(long, value_parser = at_least_50ms)]
    pub(crate) ttl: Option<Duration>,
    /// The lock stays taken for at least this long. At ZooKeeper and etcd, where a lock ends with the
    /// session of its process, lockcore itself stays until then
    #[arg(long, value_parser = humantime::parse_duration)]
    pub(crate) min_hold: Option<Duration>,
    /// The lock is lost after this time
    #[arg(long, value_parser = humantime::parse_duration)]
    pub(crate) max_hold: Option<Duration>,
    /// The exit code if the lock is held by another, or the wait is over. With 0 this is no failure,
    /// and nothing is said
    #[arg(short = 'E', long, default_value_t = crate::exit::BUSY, value_name = "CODE")]
    pub(crate) busy_exit_code: u8,
    #[command(flatten)]
    pub(crate) under: Under,
}

impl Run {
    fn mistake(&self) -> Option<String> {
        if let (Some(permits), Some(of)) = (self.permits, self.of)
            && permits > of
        {
            return Some(format!("a semaphore of {of} never has {permits} permits"));
        }
        let is_over_before = self.max_hold.is_some_and(|most| self.min_hold > Some(most));
        is_over_before.then(|| "--min-hold is longer than --max-hold".into())
    }
}

/// Runs a command while this process is the leader.
///
/// The candidates of a name lead one after the other, in the order in which they came. The command
/// starts when this process becomes the leader, and is ended if it loses the leadership. When the
/// command ends, the next candidate leads. The command finds the name in LOCKCORE_NAME and the
/// fencing token in LOCKCORE_TOKEN.
#[derive(Debug, clap::Args)]
pub(crate) struct Elect {
    /// The name of the election
    #[arg(value_parser = name)]
    pub(crate) name: String,
    /// What observers are told about this leader, for example its address
    #[arg(long, default_value = "")]
    pub(crate) value: String,
    /// How long to wait for the leadership
    #[arg(short, long, value_parser = wait, default_value = "forever")]
    pub(crate) wait: Wait,
    /// How long nobody leads if this machine dies (LOCK_TTL)
    #[arg(long, value_parser = at_least_50ms)]
    pub(crate) ttl: Option<Duration>,
    /// The exit code if the wait is over. With 0 this is no failure, and nothing is said
    #[arg(short = 'E', long, default_value_t = crate::exit::BUSY, value_name = "CODE")]
    pub(crate) busy_exit_code: u8,
    #[command(flatten)]
    pub(crate) under: Under,
}

/// A command, and what becomes of it if the lock is lost.
#[derive(Debug, clap::Args)]
pub(crate) struct Under {
    /// What to do with the command when the lock is lost
    #[arg(long, value_enum, default_value_t = OnLost::Term)]
    pub(crate) on_lost: OnLost,
    /// What to do when somebody asks for the lock
    #[arg(long, value_enum, default_value_t = OnRevoke::Finish)]
    pub(crate) on_revoke: OnRevoke,
    /// How long the command has between SIGTERM and SIGKILL when the lock is lost
    #[arg(long, value_parser = humantime::parse_duration, default_value = "5s")]
    pub(crate) grace: Duration,
    /// The command and its arguments; no shell is in between
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLost {
    /// SIGTERM, and SIGKILL after the grace. Until then another may hold the lock too
    Term,
    /// SIGKILL at once
    Kill,
    /// It goes on without the lock
    Ignore,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnRevoke {
    /// It goes on until it ends, or until the time that was granted is over and the lock is lost
    Finish,
    /// SIGTERM at once
    Term,
}

/// Lists the names that are in use: who holds each, and how many wait.
#[derive(Debug, clap::Args)]
pub(crate) struct Ls {
    /// Only names that begin with this
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// Only the names, without who holds each
    #[arg(long)]
    pub(crate) names: bool,
    /// One JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Shows the holders and the waiters of a name, in the order of the line.
///
/// TOKEN is the fencing token of the first holder of a ticket. A process that hands the ticket on from
/// task to task adds one each time. A ticket that shares the name with others has no token.
#[derive(Debug, clap::Args)]
pub(crate) struct Inspect {
    #[arg(value_parser = name)]
    pub(crate) name: String,
    /// One JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Prints a line at each change of a name: who came, who holds, who is gone.
///
/// If the store does not answer, it says so once, and looks again until the store does. With --prefix,
/// the line of a name where nobody waits is read again only if its summary has changed, and at each
/// tenth look: so a holder that is asked for its lock may be shown later there.
#[derive(Debug, clap::Args)]
pub(crate) struct Watch {
    pub(crate) name: String,
    /// Watches all names that begin with this
    #[arg(long)]
    pub(crate) prefix: bool,
    /// How often to look; changes in between are not seen
    #[arg(long, value_parser = at_least_50ms, default_value = "1s")]
    pub(crate) every: Duration,
    /// One JSON object per line
    #[arg(long)]
    pub(crate) json: bool,
}

/// Shows the names in use all the time, sorted by how many wait, and the line of each.
///
/// The keys are at the bottom of the screen. A holder can be asked for its lock. A screen of 100 columns
/// shows the fencing tokens too. A look costs the store a few requests for each thousand names (about
/// sixteen at ZooKeeper), and one more for each name with a long line. Redis walks over all keys of the
/// database, also with a prefix: one more request for each thousand keys.
#[derive(Debug, clap::Args)]
pub(crate) struct Top {
    /// Only names that begin with this
    #[arg(default_value = "")]
    pub(crate) prefix: String,
    /// The shortest time between two looks
    #[arg(long, value_parser = at_least_50ms, default_value = "1s")]
    pub(crate) every: Duration,
}

/// Asks a holder to give its lock up, and waits until it has.
///
/// The holder learns of it within a third of its ttl, and has the given time to finish. Then its
/// client stops the work, and the next in line gets the lock.
#[derive(Debug, clap::Args)]
pub(crate) struct Revoke {
    #[arg(value_parser = name)]
    pub(crate) name: String,
    /// The ticket of the holder, as inspect shows it, or its fencing token (LOCKCORE_TOKEN)
    pub(crate) ticket: u64,
    /// How much time the holder has, at most a day
    #[arg(long, value_parser = grace, default_value = "30s")]
    pub(crate) within: Duration,
    /// What the holder is told: one line of at most 64 bytes
    #[arg(long, value_parser = short_line, default_value = "")]
    pub(crate) why: String,
    /// One JSON object in place of the text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Takes a lock away from its holder at once.
///
/// The next in line gets it at once. The holder may go on until its client learns of the loss, at its
/// next renewal. If there is time, use revoke. This is for a holder that hangs, or that is gone and
/// has left a long lease.
#[derive(Debug, clap::Args)]
pub(crate) struct Release {
    #[arg(value_parser = name)]
    pub(crate) name: String,
    /// The ticket of the holder, as inspect shows it, or its fencing token (LOCKCORE_TOKEN)
    pub(crate) ticket: u64,
    /// One JSON object in place of the text
    #[arg(long)]
    pub(crate) json: bool,
}

/// A count that others wait for: it opens at zero
#[derive(Debug, clap::Args)]
pub(crate) struct Latch {
    /// One JSON object per line, with the count
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) step: LatchStep,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LatchStep {
    /// Sets the count, if the latch is at zero
    Set {
        #[arg(value_parser = name)]
        name: String,
        #[arg(value_parser = value_parser!(u64).range(1..=MOST_COUNT))]
        count: u64,
    },
    /// Counts down, and prints the new count
    Down {
        #[arg(value_parser = name)]
        name: String,
        #[arg(value_parser = value_parser!(u64).range(1..=MOST_COUNT), default_value_t = 1)]
        by: u64,
    },
    /// Waits until the count is zero
    Wait {
        #[arg(value_parser = name)]
        name: String,
        /// How long (LOCK_WAIT)
        #[arg(short, long, value_parser = wait)]
        wait: Option<Wait>,
    },
    /// Prints the count
    Count {
        #[arg(value_parser = name)]
        name: String,
    },
    /// Sets the count to zero
    Reset {
        #[arg(value_parser = name)]
        name: String,
    },
}

/// A number that many processes change
#[derive(Debug, clap::Args)]
pub(crate) struct Counter {
    /// One JSON object per line
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) step: CounterStep,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CounterStep {
    /// Prints the count
    Get {
        #[arg(value_parser = name)]
        name: String,
    },
    /// Adds to the count, and prints the new one
    Add {
        #[arg(value_parser = name)]
        name: String,
        #[arg(value_parser = count(), default_value_t = 1, allow_negative_numbers = true)]
        by: i64,
    },
    /// Sets the count, and prints it
    Set {
        #[arg(value_parser = name)]
        name: String,
        #[arg(value_parser = count(), allow_negative_numbers = true)]
        count: i64,
    },
    /// Prints the count, and each new one
    Watch {
        #[arg(value_parser = name)]
        name: String,
    },
}

/// Measures how fast the store is from here: round trips, and hand-overs between two clients.
///
/// The names are its own: one, and one for each task. Nothing of them stays in use, but most stores
/// remember a name for some time after its last use. Redis keeps a short record of each for a day,
/// and SQLite a row for at least a day. The two clients are in this process, on
/// one thread, and take locks in strict order. A store that others use at the same time gets the
/// load too. On SQLite, a client learns of a change in its own process at once, and of one in
/// another process only when it looks again: there a hand-over between processes takes longer.
#[derive(Debug, clap::Args)]
pub(crate) struct Bench {
    /// How long to measure in all
    #[arg(long, value_parser = bench_time, default_value = "8s")]
    pub(crate) time: Duration,
    /// How many tasks work at the same time
    #[arg(long, value_parser = value_parser!(u32).range(1..=1_000), default_value_t = 16)]
    pub(crate) tasks: u32,
    /// One JSON object per line, with times in seconds
    #[arg(long)]
    pub(crate) json: bool,
}

/// Checks the store: connects, reads its settings, tries each operation, and says what to change.
///
/// Each line begins with ok, warn (change this), skipped (not looked at, or this store cannot do it)
/// or FAILED. The exit code is 1 if there is a line with warn, and 69 if one operation has failed. The
/// names that it uses are its own. To list names, Redis walks over the keys of the database until it
/// has found one name. This is skipped if it takes more than five seconds.
#[derive(Debug, clap::Args)]
pub(crate) struct Doctor {
    /// One JSON object per line, with times in seconds
    #[arg(long)]
    pub(crate) json: bool,
}

fn bench_time(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match (Duration::from_secs(1)..=Duration::from_secs(600)).contains(&time) {
        true => Ok(time),
        false => Err("from 1s to 10m".into()),
    }
}

fn wait(text: &str) -> Result<Wait, humantime::DurationError> {
    match text {
        "forever" => Ok(Wait::Forever),
        _ => humantime::parse_duration(text).map(Wait::For),
    }
}

/// A ttl, or the time between two looks.
fn at_least_50ms(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match time < Duration::from_millis(50) {
        true => Err("the shortest time is 50ms".into()),
        false => Ok(time),
    }
}

fn grace(text: &str) -> Result<Duration, String> {
    let grace = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    match grace > LONGEST_GRACE {
        true => Err("the longest time is a day".into()),
        false => Ok(grace),
    }
}

fn name(text: &str) -> Result<String, String> {
    match text.len() {
        1..=LONGEST_NAME => Ok(text.into()),
        length => Err(format!(
            "a name has 1 to {LONGEST_NAME} bytes, and this has {length}"
        )),
    }
}

fn short_line(text: &str) -> Result<String, String> {
    match text.len() <= LONGEST_TEXT && text.chars().all(is_of_a_line) {
        true => Ok(text.into()),
        false => Err(format!(
            "one line of at most {LONGEST_TEXT} bytes, without control characters"
        )),
    }
}

/// Some programs show the two Unicode characters as a line break.
fn is_of_a_line(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}')
}

fn count() -> clap::builder::RangedI64ValueParser<i64> {
    value_parser!(i64).range(-Count::MAX..=Count::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn a_command_needs_no_dashes_in_front_of_it() {
        for dashes in [&["--"][..], &[]] {
            let words = ["lockcore", "run", "--try", "job"].iter().chain(dashes);
            let words = words.chain(&["sh", "-c", "exit 3", "--try"]);
            let Command::Run(run) = Args::read(words).unwrap().command else {
                panic!("another command");
            };
            assert!(run.try_only);
            assert_eq!(run.under.command, ["sh", "-c", "exit 3", "--try"]);
        }
    }

    #[test]
    fn an_argument_that_can_never_be_right_is_refused() {
        let why = "x".repeat(LONGEST_TEXT + 1);
        let name = "x".repeat(LONGEST_NAME + 1);
        let wrong: [&[&str]; 17] = [
            &["run", "--permits", "5", "--of", "3", "job", "true"],
            &["run", "--permits", "0", "--of", "3", "job", "true"],
            &["run", "--of", "0", "job", "true"],
            &["run", "--of", "1073741824", "job", "true"],
            &["run", "--ttl", "0s", "job", "true"],
            &["run", "--min-hold", "2s", "--max-hold", "1s", "job", "true"],
            &["run", "", "true"],
            &["run", &name, "true"],
            &["elect", "--ttl", "1ms", "job", "true"],
            &["latch", "set", "ready", "0"],
            &["latch", "down", "ready", "0"],
            &["latch", "down", "ready", "9007199254740992"],
            &["counter", "add", "hits", "9007199254740992"],
            &["counter", "set", "hits", "-9007199254740992"],
            &["revoke", "--within", "2d", "job", "7"],
            &["revoke", "--why", &why, "job", "7"],
            &["revoke", "--why", "two\u{2028}lines", "job", "7"],
        ];
        for words in wrong {
            let error = Args::read([&["lockcore"], words].concat()).unwrap_err();
            assert!(error.use_stderr(), "{words:?}: {error}");
        }
        let right: [&[&str]; 8] = [
            &["run", "--permits", "3", "--of", "3", "job", "true"],
            &["run", "--of", "1073741823", "job", "true"],
            &["run", "--min-hold", "1s", "--max-hold", "1s", "job", "true"],
            &["run", "--ttl", "50ms", &name[1..], "true"],
            &["latch", "down", "ready", "9007199254740991"],
            &["counter", "set", "hits", "-9007199254740991"],
            &["revoke", "--within", "1d", "--why", &why[1..], "job", "7"],
            &["latch", "down", "--json", "ready"],
        ];
        for words in right {
            let args = Args::read([&["lockcore"], words].concat());
            assert!(args.is_ok(), "{words:?}: {args:?}");
        }
    }

    #[test]
    fn the_owner_of_a_command_is_one_short_line() {
        let owner = |program: &str| {
            let words = ["lockcore", "run", "job", program];
            Args::read(words).unwrap().command.owner()
        };

        assert_eq!(
            owner("/bin/re\u{2028}po\nrt.sh").as_deref(),
            Some("report.sh")
        );
        assert_eq!(owner(&"é".repeat(40)), Some("é".repeat(32)));
    }
}
