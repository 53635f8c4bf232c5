//! The stock: a count in a plain file, as careless as a real one, and beside it a log of what was sold. The log is what
//! a run is judged by, so that the lock does not vouch for itself.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The files are read and written with `std`: a few bytes on a local disk. Where that can block, use `tokio::fs`.
#[derive(Debug)]
pub struct Stock {
    folder: PathBuf,
    writes: AtomicU32,
}

/// A customer, and the way he came.
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
    /// The stock in a folder that all processes of a run share.
    pub fn open(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
            writes: AtomicU32::new(0),
        }
    }

    pub fn fill(&self, tickets: u32) -> io::Result<()> {
        self.write_count(tickets)
    }

    /// Sells one ticket, and says which; `None` when nothing is left.
    ///
    /// A buyer that comes between the first line and the last reads the same count, and sells the same ticket. Nothing in
    /// here prevents that: being alone is the caller's business.
    pub async fn sell(&self, buyer: Buyer, waited: Duration) -> io::Result<Option<u32>> {
        let ticket = fs::read_to_string(self.count())?;
        let ticket: u32 = ticket.trim().parse().map_err(io::Error::other)?;
        if ticket == 0 {
            return Ok(None);
        }
        // The moment that a real shop spends on the payment.
        tokio::time::sleep(Duration::from_micros(fastrand::u64(1_000..2_000))).await;
        // No `.await` from here on: a purchase that is cancelled has either happened or not.
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

    /// Notes a purchase that failed and is tried again.
    pub fn note_failure(&self, why: &str) -> io::Result<()> {
        self.append("failed", &why.replace('\n', " "))
    }

    /// Everything that was sold, by all processes, in the order of the sales.
    pub fn sales(&self) -> io::Result<Vec<Sale>> {
        self.lines("sold")?
            .iter()
            .map(|line| {
                line.parse()
                    .map_err(|()| io::Error::other(format!("bad line in the log: {line}")))
            })
            .collect()
    }

    /// Why purchases failed, one line each.
    pub fn failures(&self) -> io::Result<Vec<String>> {
        self.lines("failed")
    }

    fn count(&self) -> PathBuf {
        self.folder.join("stock")
    }

    /// Written beside the file and moved into place: without the lock tickets shall be sold twice, not files torn.
    fn write_count(&self, tickets: u32) -> io::Result<()> {
        let write = self.writes.fetch_add(1, Ordering::Relaxed);
        let draft = self
            .folder
            .join(format!("stock.{}.{write}", std::process::id()));
        fs::write(&draft, format!("{tickets}\n"))?;
        fs::rename(draft, self.count())
    }

    /// One write in append mode per line: lines of several processes do not mix.
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

/// A line of the log.
#[derive(Clone, Copy, Debug)]
pub struct Sale {
    /// The count that the buyer saw.
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
