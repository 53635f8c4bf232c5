//! Two ticket offices on one MySQL or MariaDB: the old one locks by a flag in its row, and the new one
//! by a lease. In each of them, a process is killed in the middle of a sale.
//!
//! ```text
//! LOCK_URL=mysql://user:password@127.0.0.1/database cargo run --release --example flag_row
//! ```
//!
//! The old office stays locked. Nobody can tell its dead holder from a slow one, so somebody must
//! clear the flag by hand. The new office goes on when the lease of the dead process has ended. The
//! page `guide::from_flag_row` takes a service from the old way to the new one, step by step.

use std::error::Error;
use std::future::pending;
use std::process::{ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use examples::expect;
use lockcore::Locks;
use sqlx::mysql::MySqlPool;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

type Failure = Box<dyn Error + Send + Sync>;

const TICKETS: i64 = 20;
/// A dead holder keeps the new office closed for this long at most. It is short, because this is an
/// example.
const TTL: Duration = Duration::from_secs(3);
/// How long a process of the old office asks before it gives up.
const PATIENCE: Duration = Duration::from_secs(3);
/// The pause of a process of the old office before it asks again.
const PAUSE: Duration = Duration::from_millis(20);
const IN_THE_MIDDLE: &str = "in the middle of a sale";

#[derive(Debug, Parser)]
struct Args {
    // The program uses these options to start itself.
    /// Whose tickets this process sells: those of the `old` office, or of the `new` one
    #[arg(long, hide = true)]
    office: Option<String>,
    /// Whether this process stops in the middle of its first sale
    #[arg(long, hide = true)]
    stops: bool,
}

/// A process that sells tickets.
struct Seller {
    pool: MySqlPool,
    stops: bool,
}

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let args = Args::parse();
    let url = std::env::var("LOCK_URL").unwrap_or_default();
    if !url.starts_with("mysql://") && !url.starts_with("mariadb://") {
        return Err(
            "this example is about a table of MySQL or MariaDB: set LOCK_URL to mysql://…".into(),
        );
    }
    let locks = Locks::from_env()?;
    let pool = MySqlPool::connect(&url).await?;
    let Some(office) = args.office else {
        return Ok(examples::tell([&locks], story(&pool)).await);
    };
    let stops = args.stops;
    let seller = Seller { pool, stops };
    let sells = async {
        match &*office {
            "old" => seller.sell_all_by_flag().await,
            _ => seller.sell_all_by_lease(&locks).await,
        }
    };
    Ok(examples::tell([&locks], sells).await)
}

impl Seller {
    /// Sells until nothing is left, or until nobody has been let in for too long.
    async fn sell_all_by_flag(&self) -> Result<(), Failure> {
        let mut asked = Instant::now();
        while asked.elapsed() < PATIENCE {
            let take = "UPDATE flag_row_offices SET locked = 1, locked_by = ? \
                WHERE name = 'old' AND locked = 0";
            let taken = sqlx::query(take).bind(std::process::id());
            if taken.execute(&self.pool).await?.rows_affected() == 0 {
                tokio::time::sleep(PAUSE).await;
                continue;
            }
            // If this process dies here, nobody clears the flag.
            let goes_on = self.sell("old", None).await?;
            let give_back = "UPDATE flag_row_offices SET locked = 0 WHERE name = 'old'";
            sqlx::query(give_back).execute(&self.pool).await?;
            if !goes_on {
                return Ok(());
            }
            asked = Instant::now();
        }
        Ok(())
    }

    /// Sells until nothing is left.
    async fn sell_all_by_lease(&self, locks: &Locks) -> Result<(), Failure> {
        let lock = locks.mutex("ticket-office").ttl(TTL);
        // If this process dies in the middle, its lease ends by itself. If it only loses the lease,
        // `run` drops the sale.
        let sale = async || {
            lock.run(async |held| {
                let token = held.fencing_token()?.as_i64();
                Ok::<_, lockcore::Error>(self.sell("new", Some(token)).await)
            })
            .await?
        };
        while sale().await? {}
        Ok(())
    }

    /// Sells a ticket, which needs the lock of the office: the count is read, and written later.
    /// Returns `false` if nothing is left. With a token, the row refuses the write of a holder that
    /// was overtaken.
    async fn sell(&self, office: &str, token: Option<i64>) -> Result<bool, Failure> {
        let count = "SELECT tickets FROM flag_row_offices WHERE name = ?";
        let left: i64 = sqlx::query_scalar(count)
            .bind(office)
            .fetch_one(&self.pool)
            .await?;
        if self.stops {
            println!("{IN_THE_MIDDLE}");
            pending::<()>().await;
        }
        if left == 0 {
            return Ok(false);
        }
        // A process that dies in between has sold nothing: the database keeps both writes or neither.
        let mut sale = self.pool.begin().await?;
        let write =
            "UPDATE flag_row_offices SET tickets = ?, token = ? WHERE name = ? AND token <= ?";
        let token = token.unwrap_or_default();
        let written = sqlx::query(write)
            .bind(left - 1)
            .bind(token)
            .bind(office)
            .bind(token);
        if written.execute(&mut *sale).await?.rows_affected() == 0 {
            return Err("another process has sold meanwhile".into());
        }
        let note = "INSERT INTO flag_row_sales VALUES (?, ?)";
        sqlx::query(note)
            .bind(office)
            .bind(left)
            .execute(&mut *sale)
            .await?;
        sale.commit().await?;
        Ok(true)
    }
}

/// The part of the parent process: makes the offices, and kills a holder in each of them.
async fn story(pool: &MySqlPool) -> Result<(), Failure> {
    let tables = [
        "DROP TABLE IF EXISTS flag_row_offices, flag_row_sales",
        "CREATE TABLE flag_row_offices (name VARCHAR(10) PRIMARY KEY, tickets BIGINT NOT NULL, \
         locked INT NOT NULL, locked_by INT UNSIGNED, token BIGINT NOT NULL)",
        "CREATE TABLE flag_row_sales (office VARCHAR(10) NOT NULL, ticket BIGINT NOT NULL)",
    ];
    for statement in tables {
        sqlx::query(statement).execute(pool).await?;
    }
    for office in ["old", "new"] {
        let fill = "INSERT INTO flag_row_offices VALUES (?, ?, 0, NULL, 0)";
        sqlx::query(fill)
            .bind(office)
            .bind(TICKETS)
            .execute(pool)
            .await?;
        let mut holder = start(office, true)?;
        let output = holder.stdout.take().ok_or("no output")?;
        let told = BufReader::new(output).lines().next_line().await?;
        expect(
            "the holder is in the middle",
            told.as_deref() == Some(IN_THE_MIDDLE),
        )?;
        holder.kill().await?;
        let died = Instant::now();
        let mut others = [start(office, false)?, start(office, false)?];
        for other in &mut others {
            expect("the process ends well", other.wait().await?.success())?;
        }
        println!(
            "the {office} office, {:.1} s after its holder was killed: {}",
            died.elapsed().as_secs_f64(),
            state(pool, office).await?
        );
    }

    let old: i64 = sqlx::query_scalar(
        "SELECT tickets FROM flag_row_offices WHERE name = 'old' AND locked = 1",
    )
    .fetch_one(pool)
    .await?;
    let sold: i64 = sqlx::query_scalar(
        "SELECT COUNT(DISTINCT ticket) FROM flag_row_sales WHERE office = 'new'",
    )
    .fetch_one(pool)
    .await?;
    let sales: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM flag_row_sales WHERE office = 'new'")
        .fetch_one(pool)
        .await?;
    expect("the old office has sold nothing", old == TICKETS)?;
    expect(
        "the new office has sold each ticket once",
        sold == TICKETS && sales == TICKETS,
    )?;
    sqlx::query(tables[0]).execute(pool).await?;
    println!(
        "the old office is locked for ever with {old} tickets; the new one has sold {sold} of {TICKETS}"
    );
    Ok(())
}

async fn state(pool: &MySqlPool, office: &str) -> Result<String, Failure> {
    let row = "SELECT tickets, locked, locked_by FROM flag_row_offices WHERE name = ?";
    let row: (i64, i32, Option<u32>) = sqlx::query_as(row).bind(office).fetch_one(pool).await?;
    Ok(match row {
        (left, 1, Some(process)) => {
            format!("{left} tickets left, locked by process {process}, which is dead")
        }
        (left, ..) => format!("{left} tickets left, free"),
    })
}

fn start(office: &str, stops: bool) -> Result<Child, Failure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--office", office]).kill_on_drop(true);
    if stops {
        command.arg("--stops").stdout(Stdio::piped());
    }
    Ok(command.spawn()?)
}
