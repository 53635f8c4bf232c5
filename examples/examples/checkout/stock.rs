//! The stock: a count in a plain file, with no protection of its own, and a log of the sales; or both
//! in a table. The verdict uses only the log, so it does not depend on the lock.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockcore::Held;

use crate::table::Table;

/// The files are read and written with `std`, because they are a few bytes on a local disk. If file
/// access can take long, use `tokio::fs`.
#[derive(Debug)]
pub struct Stock {
    folder: PathBuf,
    writes: AtomicU32,
    /// With `--table`.
    table: Option<Table>,
}

/// A customer, and the way in which it buys.
#[derive(Clone, Copy, Debug)]
pub struct Buyer {
    pub process: u32,
    pub client: u32,
    pub through: Through,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Through {
    /// An HTTP request to a route with a `LockLayer`.
    Layer,
    /// A call of a function with `#[distributed_lock]`.
    Function,
}

impl Stock {
    /// Opens the stock in a folder that all processes of a run share, or in a table.
    pub fn open(folder: &Path, in_table: bool) -> io::Result<Self> {
        Ok(Self {
            folder: folder.to_owned(),
            writes: AtomicU32::new(0),
            table: in_table.then(Table::beside_the_locks).transpose()?,
        })
    }

    pub async fn fill(&self, tickets: u32) -> io::Result<()> {
        match &self.table {
            Some(table) => table.fill(tickets).await.map_err(io::Error::other),
            None => self.write_count(tickets),
        }
    }

    /// Sells one ticket, and returns its number; `None` if nothing is left.
    ///
    /// If another buyer calls this between the first and the last line, it reads the same count,
    /// and sells the same ticket. Nothing in this function prevents this. The caller must make sure
    /// that only one sale runs at a time. `held` is the lock, if there is one.
    pub async fn sell(
        &self,
        buyer: Buyer,
        waited: Duration,
        held: Option<&Held>,
    ) -> io::Result<Option<u32>> {
        if let Some(table) = &self.table {
            return table
                .sell(buyer, waited, held)
                .await
                .map_err(io::Error::other);
        }
        let ticket = fs::read_to_string(self.count())?;
        let ticket: u32 = ticket.trim().parse().map_err(io::Error::other)?;
        if ticket == 0 {
            return Ok(None);
        }
        payment().await;
        // There is no `.await` from here on. So if a purchase is cancelled, it has happened
        // completely or not at all.
        self.write_count(ticket - 1)?;
        self.append(
            "sold",
            &Sale {
                ticket,
                buyer,
                waited,
            }
            .to_string(),
        )?;
        Ok(Some(ticket))
    }

    /// Logs a purchase that failed and will be tried again.
    pub fn note_failure(&self, why: &str) -> io::Result<()> {
        self.append("failed", &why.replace('\n', " "))
    }

    /// All sales of all processes, in their order.
    pub async fn sales(&self) -> io::Result<Vec<Sale>> {
        let lines = match &self.table {
            Some(table) => table.sales().await.map_err(io::Error::other)?,
            None => self.lines("sold")?,
        };
        (lines.iter())
            .map(|line| {
                line.parse()
                    .map_err(|()| io::Error::other(format!("bad line in the log: {line}")))
            })
            .collect()
    }

    /// Why purchases failed, one line for each failure.
    pub fn failures(&self) -> io::Result<Vec<String>> {
        self.lines("failed")
    }

    fn count(&self) -> PathBuf {
        self.folder.join("stock")
    }

    /// Writes to another file and renames it. So a missing lock can cause double sales, but no
    /// damaged files.
    fn write_count(&self, tickets: u32) -> io::Result<()> {
        let write = self.writes.fetch_add(1, Ordering::Relaxed);
        let draft = self
            .folder
            .join(format!("stock.{}.{write}", std::process::id()));
        fs::write(&draft, format!("{tickets}\n"))?;
        fs::rename(draft, self.count())
    }

    /// Each line is one write in append mode, so lines of several processes do not mix.
    fn append(&self, log: &str, line: &str) -> io::Result<()> {
        let mut log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.join(log))?;
        log.write_all(format!("{line}\n").as_bytes())
    }

    fn lines(&self, log: &str) -> io::Result<Vec<String>> {
        match fs::read_to_string(self.folder.join(log)) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }
}

/// The time that a real shop needs for the payment.
pub async fn payment() {
    tokio::time::sleep(Duration::from_micros(fastrand::u64(1_000..2_000))).await;
}

/// One line of the log of sales.
#[derive(Clone, Copy, Debug)]
pub struct Sale {
    /// The count that the buyer read.
    pub ticket: u32,
    pub buyer: Buyer,
    pub waited: Duration,
}

impl fmt::Display for Sale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Buyer {
            process,
            client,
            through,
        } = self.buyer;
        write!(
            f,
            "{} {process} {client} {through} {}",
            self.ticket,
            self.waited.as_micros()
        )
    }
}

impl FromStr for Sale {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let [ticket, process, client, through, micros] = line.split(' ').collect::<Vec<_>>()[..]
        else {
            return Err(());
        };
        let through = match through {
            "layer" => Through::Layer,
            "function" => Through::Function,
            _ => return Err(()),
        };
        Ok(Self {
            ticket: ticket.parse().map_err(drop)?,
            buyer: Buyer {
                process: process.parse().map_err(drop)?,
                client: client.parse().map_err(drop)?,
                through,
            },
            waited: Duration::from_micros(micros.parse().map_err(drop)?),
        })
    }
}

impl fmt::Display for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Layer => "layer",
            Self::Function => "function",
        })
    }
}
