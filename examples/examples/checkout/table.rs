//! The same stock in a table of PostgreSQL, in the database that has the locks. A sale is one
//! transaction. It holds the lock, so the table needs no column for a fencing token.

use std::env;
use std::io;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use lockcore::Held;
use lockcore::fencing::sql::{HOLD, postgres_key};
use tokio_postgres::{Client, NoTls};

use crate::stock::{Buyer, Sale, payment};

const TABLES: &str = "DROP TABLE IF EXISTS checkout_stock, checkout_sales; \
    CREATE TABLE checkout_stock (tickets integer NOT NULL); \
    CREATE TABLE checkout_sales (number bigserial, line text NOT NULL)";

#[derive(Debug)]
pub struct Table {
    url: String,
    /// Connections that no sale uses at the moment.
    idle: Mutex<Vec<Client>>,
}

impl Table {
    /// The database in LOCK_URL, whose user must have the right to make tables. Options behind a `?`
    /// are for the locks. Of several hosts, the one that takes writes.
    pub fn beside_the_locks() -> io::Result<Self> {
        let url = env::var("LOCK_URL").map_err(io::Error::other)?;
        let url = url.split('?').next().unwrap_or_default();
        let url = format!("{url}?target_session_attrs=read-write");
        let idle = Mutex::default();
        Ok(Self { url, idle })
    }

    pub async fn fill(&self, tickets: u32) -> Result<(), tokio_postgres::Error> {
        let client = self.client().await?;
        let fill = format!("{TABLES}; INSERT INTO checkout_stock VALUES ({tickets})");
        client.batch_execute(&fill).await
    }

    /// As [`Stock::sell`](crate::stock::Stock::sell). With a lock, no other process gets the lock
    /// before the transaction ends, even if this process is stopped in between for longer than the
    /// lease.
    ///
    /// No client of this example gives up a purchase that it has begun. If yours do, let a task that
    /// owns a guard run the transaction: see `lockcore::fencing::sql`.
    pub async fn sell(
        &self,
        buyer: Buyer,
        waited: Duration,
        held: Option<&Held>,
    ) -> Result<Option<u32>, Box<dyn std::error::Error + Send + Sync>> {
        let mut client = self.client().await?;
        let sale = client.transaction().await?;
        if let Some(held) = held {
            let token = held.fencing_token()?.as_i64();
            sale.query_one(HOLD, &[&postgres_key(held), &token]).await?;
        }
        let row = sale.query_one("SELECT tickets FROM checkout_stock", &[]);
        let tickets: i32 = row.await?.get(0);
        let ticket = u32::try_from(tickets)?;
        if ticket > 0 {
            payment().await;
            let line = Sale {
                ticket,
                buyer,
                waited,
            };
            sale.execute("UPDATE checkout_stock SET tickets = $1", &[&(tickets - 1)])
                .await?;
            let insert = "INSERT INTO checkout_sales (line) VALUES ($1)";
            sale.execute(insert, &[&line.to_string()]).await?;
        }
        sale.commit().await?;
        self.idle().push(client);
        Ok((ticket > 0).then_some(ticket))
    }

    /// The lines of the log of sales, in their order.
    pub async fn sales(&self) -> Result<Vec<String>, tokio_postgres::Error> {
        let lines = "SELECT line FROM checkout_sales ORDER BY number";
        let rows = self.client().await?.query(lines, &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    async fn client(&self) -> Result<Client, tokio_postgres::Error> {
        let idle = self.idle().pop();
        if let Some(client) = idle {
            return Ok(client);
        }
        let (client, connection) = tokio_postgres::connect(&self.url, NoTls).await?;
        // It ends with the client. Its errors are those of the requests, too.
        tokio::spawn(async move { drop(connection.await) });
        Ok(client)
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Client>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
