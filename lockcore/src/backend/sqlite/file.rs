//! The open file: whether it is a file of this store, how it waits for other processes, and what its
//! failures mean. The texts of the statements are in `layout`. The one thread that uses the file is
//! in `driver`.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, ToSql, params};

use super::config::{self, Identity};
use super::layout::{self, Boot};
use super::statements::{Row, Statements, column};
use crate::backend::{Fault, StoreError};

/// How long an operation waits for a file that another process has locked. A transaction takes some
/// 50 µs. But on an overloaded machine, a process may have to wait for a core in the middle of a
/// transaction. And a checkpoint waits for the disk. The limit is short compared with the operation
/// timeout. An operation that fails within the operation timeout has a known outcome.
const PATIENCE: Duration = Duration::from_millis(250);

/// The limit in place of [`PATIENCE`] after the previous wait was in vain, because the thread must
/// answer the next callers in time.
const LITTLE_PATIENCE: Duration = Duration::from_millis(5);

/// A `PRAGMA data_version` that SQLite never gives.
pub(super) const NEVER: i64 = 0;

/// How many enqueues and requests about counters come between two steps of the sweep. A step checks
/// 1,000 names, which is four for each name that may have been added.
const SWEEP_EVERY: u64 = 250;

/// The first SQLite, 3.51.3, in which a checkpoint and a commit that begins the log anew at the same
/// time cannot lose pages. The file has a log and several connections, which is what that needs.
const WAL_IS_SOUND: i32 = 3_051_003;

/// SQLite's handle of the file. It is closed when this is dropped.
pub(super) struct Handle {
    path: PathBuf,
    identity: Identity,
    connection: Connection,
}

impl Handle {
    pub(super) fn open(path: &Path) -> Result<Self, StoreError> {
        config::make(path)?;
        let identity = Identity::of(path)?;
        // Only one thread uses the handle.
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags);
        let connection = connection.map_err(|error| failed(path, &error).error)?;
        // `run_within` waits for a locked file. SQLite's own wait begins with a pause of a
        // millisecond, which is as long as twenty transactions.
        let busy = connection.busy_timeout(Duration::ZERO);
        busy.map_err(|error| failed(path, &error).error)?;
        Ok(Self {
            path: path.to_owned(),
            identity,
            connection,
        })
    }
}

/// The open file of this store.
pub(super) struct File<'h> {
    handle: &'h Handle,
    statements: Statements<'h>,
    /// See `schema/tables.sql`.
    pub(super) epoch: i64,
    /// Tells the tickets of this process from the tickets of other processes.
    pub(super) process: i64,
    /// Whether the write-ahead log could be turned on.
    wal: bool,
    /// Whether the last operation that locks the file found it locked for its whole wait.
    pub(super) blocked: bool,
    /// The reason why the file must be opened again.
    pub(super) over: Option<StoreError>,
    /// The value of `PRAGMA data_version` at the last check that succeeded: see `tickets::look`.
    pub(super) looked_at: i64,
    enqueued: u64,
    swept: i64,
}

impl<'h> File<'h> {
    /// Checks that the file is one of this store, creates its tables if it is new, and determines
    /// which boot its times belong to.
    pub(super) fn of(handle: &'h Handle) -> Result<Self, StoreError> {
        let mut file = Self {
            handle,
            statements: Statements::new(&handle.connection),
            epoch: 0,
            process: process(),
            wal: false,
            blocked: false,
            over: None,
            looked_at: NEVER,
            enqueued: 0,
            swept: 0,
        };
        file.prepare()?;
        Ok(file)
    }

    fn prepare(&mut self) -> Result<(), StoreError> {
        self.run(layout::SETTINGS, &[])?;
        self.check_layout()?;
        let mode = self.run("PRAGMA journal_mode = WAL", &[])?;
        let mode = mode
            .first()
            .map(|row| column::<String>(row, "journal_mode"));
        self.wal = mode.transpose()?.as_deref() == Some("wal");
        if !self.wal {
            // The rollback journal needs more syncs for the file to survive a power failure.
            self.run("PRAGMA synchronous = FULL", &[])?;
        }
        self.run(layout::SCRATCH, &[])?;
        self.run("BEGIN IMMEDIATE", &[])?;
        match self.settle() {
            Ok(()) => self.run("COMMIT", &[]).map(drop),
            Err(error) => {
                self.roll_back();
                Err(error)
            }
        }?;
        if Identity::of(self.path())? != self.handle.identity {
            return Err(moved(self.path()));
        }
        self.sweep()
    }

    /// Creates the tables that are missing, and empties them after a reboot. The caller has begun a
    /// transaction, so exactly one of several processes that come first does this.
    fn settle(&mut self) -> Result<(), StoreError> {
        if self.check_layout()? {
            self.run(layout::TABLES, &[])?;
        }
        self.run(layout::COUNTERS, &[])?;
        self.run(layout::CAPACITIES, &[])?;
        let now = Boot::now()?;
        let rows = self.run("SELECT epoch, boot, booted_at FROM store", &[])?;
        let last = rows.first().map(|row| {
            let boot = Boot {
                ids: column(row, "boot")?,
                booted_at: column(row, "booted_at")?,
            };
            Ok::<_, StoreError>((column::<i64>(row, "epoch")?, boot))
        });
        let last = last.transpose()?;
        if let Some((epoch, boot)) = &last {
            if boot.has_id_of(&now) {
                self.epoch = *epoch;
                if boot.began_with(&now) {
                    return Ok(());
                }
                // The wall clock was set. Containers with other ids compare the beginnings.
                let set = "UPDATE store SET booted_at = ?1";
                return self.run(set, params![now.booted_at]).map(drop);
            }
            if boot.began_with(&now) && !self.find_ticket_of_another_clock()? {
                self.epoch = *epoch;
                let ids = boot.with_id_of(&now);
                let add = "UPDATE store SET boot = ?1";
                return self.run(add, params![ids]).map(drop);
            }
        }
        self.epoch = last.map_or(1, |(epoch, _)| epoch + 1);
        // All tickets and marks are of an earlier boot, and no process outlives a boot.
        for statement in [
            "DELETE FROM tickets",
            "DELETE FROM marks",
            "DELETE FROM store",
        ] {
            self.run(statement, &[])?;
        }
        let (epoch, used) = (self.epoch, layout::now_millis() / 1000);
        let begins = params![epoch, now.ids, now.booted_at, used];
        self.run(layout::BEGIN_EPOCH, begins).map(drop)
    }

    /// Finds out whether a ticket ends later than its whole ttl from now. A request that gives a ticket a new
    /// end counts its ttl from the time of the request. So in the boot of the request no ticket
    /// ends that late, and this end belongs to the clock of an earlier boot.
    ///
    /// The caller has locked the file. So all ends in the file were computed from earlier readings
    /// of the clock.
    fn find_ticket_of_another_clock(&mut self) -> Result<bool, StoreError> {
        let later =
            "SELECT EXISTS (SELECT 1 FROM tickets WHERE expires_at > ?1 + ttl_millis) AS later";
        let rows = self.run(later, params![layout::now_millis()])?;
        let row = rows.first().ok_or_else(no_answer)?;
        Ok(column::<i64>(row, "later")? != 0)
    }

    /// Checks that the file is empty, or a file of this store with this layout version. Every other
    /// file is an error. Returns whether it is empty.
    fn check_layout(&mut self) -> Result<bool, StoreError> {
        let rows = self.run(
            "SELECT (SELECT application_id FROM pragma_application_id) AS application, \
             (SELECT user_version FROM pragma_user_version) AS version, \
             (SELECT count(*) FROM sqlite_schema) AS tables, \
             EXISTS (SELECT 1 FROM pragma_table_info('tickets') WHERE name = 'named') AS named",
            &[],
        )?;
        let row = rows.first().ok_or_else(no_answer)?;
        let (application, version): (i64, i64) =
            (column(row, "application")?, column(row, "version")?);
        if application == 0 && version == 0 && column::<i64>(row, "tables")? == 0 {
            return Ok(true);
        }
        let why = if application != layout::APPLICATION {
            "it is the database of another program; locks need a file of their own".to_owned()
        } else if version != i64::from(layout::VERSION) {
            format!(
                "it has layout version {version} and this library writes {}; all processes that share a file need \
                 versions that agree",
                layout::VERSION
            )
        } else if column::<i64>(row, "named")? == 0 {
            "a version of this library before the first release has made it, with other tables; remove it while no \
             process uses it"
                .to_owned()
        } else {
            return Ok(false);
        };
        let text = format!("cannot use {}: {why}", self.path().display());
        Err(StoreError::new(Fault::Config, text))
    }

    /// Runs a text of statements. If this fails, none of the statements has an effect, unless the
    /// fault is [`Fault::Unknown`].
    pub(super) fn run(
        &mut self,
        text: &'static str,
        arguments: &[&dyn ToSql],
    ) -> Result<Vec<Row>, StoreError> {
        self.run_within([PATIENCE, LITTLE_PATIENCE], text, arguments)
    }

    /// Runs a text of statements, and waits while another process has the file locked. It waits for
    /// at most the first duration, or for the second if the previous wait was in vain.
    fn run_within(
        &mut self,
        patience: [Duration; 2],
        text: &'static str,
        arguments: &[&dyn ToSql],
    ) -> Result<Vec<Row>, StoreError> {
        let patience = patience[usize::from(self.blocked)];
        let began = std::time::Instant::now();
        let mut pause = Duration::from_micros(30);
        loop {
            let error = match self.statements.run(text, arguments) {
                Ok(rows) => {
                    self.blocked = false;
                    return Ok(rows);
                }
                Err(error) => error,
            };
            if !is_locked(&error) {
                return Err(self.failed(&error));
            }
            self.roll_back();
            if began.elapsed() >= patience {
                self.blocked = true;
                let text = format!("another process keeps {} locked", self.path().display());
                return Err(StoreError::new(Fault::Retry, text));
            }
            // The thread has nothing else to do, and tokio's timers are too coarse.
            std::thread::sleep(pause.mul_f64(0.5 + fastrand::f64()));
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// The same as [`run`](Self::run), for statements about tickets. Fails if the path names
    /// another file by now, because other processes would not see the change.
    pub(super) fn transact(
        &mut self,
        text: &'static str,
        arguments: &[&dyn ToSql],
    ) -> Result<Vec<Row>, StoreError> {
        self.check_place()?;
        self.run(text, arguments)
    }

    /// The same as [`transact`](Self::transact), for statements that only read.
    pub(super) fn read(
        &mut self,
        text: &'static str,
        arguments: &[&dyn ToSql],
    ) -> Result<Vec<Row>, StoreError> {
        self.check_place()?;
        self.run_reading(text, arguments)
    }

    /// With a write-ahead log, statements that only read succeed while the file is locked. So their
    /// success does not end `blocked`.
    fn run_reading(
        &mut self,
        text: &'static str,
        arguments: &[&dyn ToSql],
    ) -> Result<Vec<Row>, StoreError> {
        let blocked = self.blocked && self.wal;
        let rows = self.run(text, arguments)?;
        self.blocked = blocked;
        Ok(rows)
    }

    /// The same as [`transact`](Self::transact), for requests that the core repeats until their
    /// time is over. After a wait in vain, the next request of this kind does not wait at all. So
    /// its outcome is known when its time is over.
    pub(super) fn transact_repeated(
        &mut self,
        text: &'static str,
        arguments: &[&dyn ToSql],
    ) -> Result<Vec<Row>, StoreError> {
        self.check_place()?;
        self.run_within([PATIENCE, Duration::ZERO], text, arguments)
    }

    fn path(&self) -> &'h Path {
        &self.handle.path
    }

    fn check_place(&mut self) -> Result<(), StoreError> {
        let error = match Identity::of(self.path()) {
            Ok(identity) if identity == self.handle.identity => return Ok(()),
            Err(error) if error.fault() == Fault::Config => error,
            Ok(_) | Err(_) => moved(self.path()),
        };
        self.over = Some(error.clone());
        Err(error)
    }

    /// Another boot, or another machine, has taken the file over. This handle cannot change
    /// anything any more.
    pub(super) fn taken_over(&self) -> StoreError {
        let text = format!(
            "{} was taken over from another boot or another machine; a file is for the processes of one machine",
            self.path().display()
        );
        StoreError::new(Fault::Config, text)
    }

    /// A number that changes when another process commits anything. This reads a counter in shared
    /// memory.
    pub(super) fn data_version(&mut self) -> Result<i64, StoreError> {
        let rows = self.run_reading("PRAGMA data_version", &[])?;
        column(rows.first().ok_or_else(no_answer)?, "data_version")
    }

    fn failed(&mut self, error: &rusqlite::Error) -> StoreError {
        let failed = failed(self.path(), error);
        if failed.must_reopen {
            // Closing the file ends the transaction.
            self.over = Some(failed.error.clone());
        } else {
            self.roll_back();
        }
        failed.error
    }

    /// Ends the transaction that a failed statement may have left open.
    fn roll_back(&mut self) {
        let outcome = self.statements.run("ROLLBACK", &[]);
        if let Err(error) = outcome
            && primary_code(&error) != Some(SQLITE_ERROR)
        {
            // `SQLITE_ERROR` means that there is no transaction. After any other error, the
            // transaction may be open.
            self.over = Some(failed(self.path(), &error).error);
        }
    }

    pub(super) fn sweep_now_and_then(&mut self) {
        self.enqueued += 1;
        if self.enqueued.is_multiple_of(SWEEP_EVERY) && self.over.is_none() {
            // If this step fails, the next one begins at the same name.
            let _ = self.sweep();
        }
    }

    /// One step of the sweep. After the last name, the sweep begins again at the first.
    fn sweep(&mut self) -> Result<(), StoreError> {
        let (after, epoch) = (self.swept, self.epoch);
        let (now, micros) = (layout::now_millis(), layout::wall_micros());
        let rows = self.transact(layout::SWEEP, params![after, now, micros, epoch])?;
        let last = rows.first().map(|row| column::<Option<i64>>(row, "last"));
        self.swept = last.transpose()?.flatten().unwrap_or(0);
        Ok(())
    }

    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = config::warnings(self.path());
        if !is_sound() {
            warnings.push(format!(
                "SQLite {} can damage a file with a write-ahead log, very seldom, when one process commits while another \
                 tidies the log; let cargo take a version of rusqlite with SQLite 3.51.3 or later",
                rusqlite::version()
            ));
        }
        if !self.wal {
            warnings.push(format!(
                "the write-ahead log of {} cannot be turned on, so that every lock waits for the disk: does its file \
                 system have shared memory?",
                self.path().display()
            ));
        }
        warnings
    }
}

/// Whether this SQLite keeps each commit, also in a file with a write-ahead log.
pub(super) fn is_sound() -> bool {
    rusqlite::version_number() >= WAL_IS_SOUND
}

/// The number of this process, drawn once. If a second driver follows the first in one process, it
/// recognizes the tickets of the first by this number. A forked child has its parent's random
/// number, but another process id, so it counts as another process.
fn process() -> i64 {
    static PROCESS: OnceLock<i64> = OnceLock::new();
    let drawn = *PROCESS.get_or_init(|| fastrand::i64(..));
    drawn.wrapping_add(i64::from(std::process::id()))
}

fn no_answer() -> StoreError {
    StoreError::new(Fault::Unknown, "SQLite: a statement gave no row")
}

fn moved(path: &Path) -> StoreError {
    let text = format!(
        "{} was removed or replaced; the locks in it are lost",
        path.display()
    );
    StoreError::new(Fault::Retry, text)
}

// https://www.sqlite.org/rescode.html
const SQLITE_ERROR: i32 = 1;
const SQLITE_PERM: i32 = 3;
const SQLITE_BUSY: i32 = 5;
const SQLITE_LOCKED: i32 = 6;
const SQLITE_NOMEM: i32 = 7;
const SQLITE_READONLY: i32 = 8;
const SQLITE_CORRUPT: i32 = 11;
const SQLITE_FULL: i32 = 13;
const SQLITE_CANTOPEN: i32 = 14;
const SQLITE_AUTH: i32 = 23;
const SQLITE_NOTADB: i32 = 26;

fn result_code(error: &rusqlite::Error) -> Option<i32> {
    match error {
        rusqlite::Error::SqlInputError { error, .. } => Some(error.extended_code),
        error => Some(error.sqlite_error()?.extended_code),
    }
}

/// The low byte of the extended result code.
fn primary_code(error: &rusqlite::Error) -> Option<i32> {
    result_code(error).map(|code| code & 0xff)
}

fn is_locked(error: &rusqlite::Error) -> bool {
    matches!(primary_code(error), Some(SQLITE_BUSY | SQLITE_LOCKED))
}

struct Failed {
    error: StoreError,
    /// The handle cannot be used any more, or perhaps cannot.
    must_reopen: bool,
}

/// The meaning of a failure for the request. Its transaction has been rolled back, or will be when
/// the file is closed.
fn failed(path: &Path, error: &rusqlite::Error) -> Failed {
    // SQLite does not report the reason.
    let may_lack_a_right = matches!(
        primary_code(error),
        Some(SQLITE_CANTOPEN | SQLITE_READONLY | SQLITE_PERM)
    );
    if may_lack_a_right && let Some(why) = config::lacks(path) {
        let text = format!("cannot use {}: {why}", path.display());
        return Failed {
            error: StoreError::new(Fault::Config, text),
            must_reopen: true,
        };
    }
    let (fault, must_reopen, hint) = match primary_code(error) {
        Some(SQLITE_BUSY | SQLITE_LOCKED) => (Fault::Retry, false, ""),
        Some(SQLITE_FULL) => (
            Fault::Refused,
            false,
            " (the disk, or the user's share of it, is full)",
        ),
        Some(SQLITE_NOMEM) => (Fault::Refused, false, ""),
        Some(SQLITE_READONLY) => (
            Fault::Config,
            true,
            " (this process may not write the file, or the folder it lies in)",
        ),
        Some(SQLITE_PERM | SQLITE_AUTH) => (Fault::Config, true, ""),
        Some(SQLITE_CANTOPEN) => (
            Fault::Retry,
            true,
            " (are there file descriptors left? `ulimit -n`)",
        ),
        Some(SQLITE_NOTADB) => (
            Fault::Config,
            true,
            " (it is something else; locks need a file of their own)",
        ),
        Some(SQLITE_CORRUPT) => (
            Fault::Config,
            true,
            " (stop all processes that use it and remove it, with its -wal and -shm; tokens go on rising)",
        ),
        // A statement does not fit the tables. Either they are from a version before the first
        // release, or somebody has changed them.
        Some(SQLITE_ERROR) => (
            Fault::Config,
            true,
            " (its tables are not those of this version of lockcore: remove it, with its -wal and -shm, \
             while no process uses it)",
        ),
        // The disk failed, or the error is not in this list.
        _ => {
            let text = format!(
                "cannot use {}: SQLite: {}",
                path.display(),
                told(path, error)
            );
            return Failed {
                error: StoreError::broken(text),
                must_reopen: true,
            };
        }
    };
    let text = format!(
        "cannot use {}: SQLite: {}{hint}",
        path.display(),
        told(path, error)
    );
    Failed {
        error: StoreError::new(fault, text),
        must_reopen,
    }
}

/// What SQLite says, without the statement, and without the path, which is in our text already.
fn told(path: &Path, error: &rusqlite::Error) -> String {
    let text = match error {
        rusqlite::Error::SqlInputError { msg, .. } => msg.clone(),
        error => error.to_string(),
    };
    let path = format!(": {}", path.display());
    let text = text.strip_suffix(&path).unwrap_or(&text);
    match result_code(error) {
        Some(code) => format!("{text} (code {code})"),
        None => text.to_owned(),
    }
}
