//! The result of a run. It is read only from the log of the sales.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use crate::print::millis;
use crate::processes::{run_shop, run_shops};
use crate::stock::{Sale, Stock, Through};
use crate::{Args, Failure};

#[derive(Debug)]
pub struct Run {
    stock: u32,
    pub sales: Vec<Sale>,
    failures: Vec<String>,
    took: Duration,
}

impl Run {
    /// Sells a full stock, in a new folder that is removed afterwards.
    pub async fn of(
        args: &Args,
        locked: bool,
        closing: &CancellationToken,
    ) -> Result<Self, Failure> {
        let folder = tempfile::Builder::new().prefix("checkout-").tempdir()?;
        let stock = Stock::open(folder.path(), args.table)?;
        stock.fill(args.stock).await?;
        let started = Instant::now();
        match args.processes {
            1 => run_shop(&args.share(locked, 1, folder.path()), closing).await?,
            _ => run_shops(args, folder.path(), locked, closing).await?,
        }
        if closing.is_cancelled() {
            return Err(Failure::Closed);
        }
        Ok(Self {
            stock: args.stock,
            took: started.elapsed(),
            sales: stock.sales().await?,
            failures: stock.failures()?,
        })
    }

    /// If the lock works, the log contains 100, 99, … 1: each ticket once, in this order.
    pub fn check(&self) -> Result<(), Failure> {
        let sold = self.sales.iter().map(|sale| sale.ticket);
        if sold.eq((1..=self.stock).rev()) {
            return Ok(());
        }
        let what = self
            .worst()
            .unwrap_or_else(|| "tickets are missing, or in the wrong order".to_owned());
        Err(Failure::NotExact(what))
    }

    /// How many tickets each way sold, and how the run went.
    pub fn summary(&self) -> String {
        let layer = self
            .sales
            .iter()
            .filter(|sale| sale.buyer.through == Through::Layer)
            .count();
        let mut text = format!(
            "{layer} through the layer, {} through the function",
            self.sales.len() - layer
        );
        let by_process = counts(self.sales.iter().map(|sale| sale.buyer.process));
        if by_process.len() > 1 {
            let shares: Vec<_> = by_process.values().map(usize::to_string).collect();
            let _ = write!(text, "; by process: {}", shares.join(", "));
        }
        let longest = self
            .sales
            .iter()
            .map(|sale| sale.waited)
            .max()
            .unwrap_or_default();
        if !longest.is_zero() {
            let _ = write!(text, "; longest wait {}", millis(longest));
        }
        let _ = write!(text, "; {:.1} s", self.took.as_secs_f64());
        if let Some(worst) = self.worst() {
            let _ = write!(text, "; {worst}");
        }
        for (why, times) in counts(&self.failures) {
            let _ = write!(text, "\n{times} times refused and tried again: {why}");
        }
        text
    }

    /// Describes the ticket that was sold most often, if any ticket was sold twice.
    fn worst(&self) -> Option<String> {
        let by_ticket = counts(self.sales.iter().map(|sale| sale.ticket));
        let twice = by_ticket.values().filter(|times| **times > 1).count();
        let (ticket, times) = by_ticket.into_iter().max_by_key(|(_, times)| *times)?;
        (times > 1).then(|| {
            format!("{twice} tickets were sold more than once, ticket {ticket} to {times} buyers")
        })
    }
}

fn counts<K: Ord>(keys: impl IntoIterator<Item = K>) -> BTreeMap<K, usize> {
    let mut counts = BTreeMap::new();
    for key in keys {
        *counts.entry(key).or_default() += 1;
    }
    counts
}
