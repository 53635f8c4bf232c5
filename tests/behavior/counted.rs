//! Provides a store that wraps another store and counts the calls. Facts use counts, because counts
//! are exact and measured times are not. The store can also refuse renewals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use lockcore::backend::{
    Answer, Backend, Connection, Departure, Enqueued, Fault, Listing, Name, Page, Released,
    Renewed, Request, StoreError, TicketInfo,
};
use lockcore::testing::around;

/// The number of calls of each verb.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    enqueued: AtomicUsize,
    released: AtomicUsize,
    renewals: AtomicUsize,
    inspected: AtomicUsize,
    hides_summaries: AtomicBool,
    refuses_renewals: AtomicBool,
}

impl Counts {
    pub(crate) fn enqueued(&self) -> usize {
        self.enqueued.load(Ordering::SeqCst)
    }

    /// Renewal requests. One request may name many tickets.
    pub(crate) fn renewals(&self) -> usize {
        self.renewals.load(Ordering::SeqCst)
    }

    /// The number of lines that were read.
    pub(crate) fn inspected(&self) -> usize {
        self.inspected.load(Ordering::SeqCst)
    }

    /// From now on the list has no summaries, like that of a store that cannot sum up lines.
    pub(crate) fn hide_summaries(&self) {
        self.hides_summaries.store(true, Ordering::SeqCst);
    }

    /// Starts or stops refusing renewals, like a store that has trouble for a while.
    pub(crate) fn refuse_renewals(&self, yes: bool) {
        self.refuses_renewals.store(yes, Ordering::SeqCst);
    }

    /// The number of tickets that were enqueued or released.
    pub(crate) fn all(&self) -> usize {
        self.enqueued() + self.released.load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
pub(crate) struct Counted {
    connection: Arc<dyn Connection>,
    counts: Arc<Counts>,
}

impl Counted {
    pub(crate) fn around(store: Arc<dyn Backend>) -> (Arc<dyn Backend>, Arc<Counts>) {
        let counts = Arc::<Counts>::default();
        let counter = Arc::clone(&counts);
        let counted = around(store, move |connection| Self {
            connection,
            counts: Arc::clone(&counter),
        });
        (counted, counts)
    }
}

impl Connection for Counted {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
        self.counts.enqueued.fetch_add(1, Ordering::SeqCst);
        self.connection.enqueue(request, patience)
    }

    fn renew(&self, tickets: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
        self.counts.renewals.fetch_add(1, Ordering::SeqCst);
        if self.counts.refuses_renewals.load(Ordering::SeqCst) {
            let error = StoreError::new(Fault::Retry, "not now");
            return Box::pin(std::future::ready(Err(error)));
        }
        self.connection.renew(tickets, patience)
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        self.counts
            .released
            .fetch_add(tickets.len(), Ordering::SeqCst);
        self.connection.release(tickets)
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        self.counts.inspected.fetch_add(1, Ordering::SeqCst);
        self.connection.inspect(name)
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        let page = self.connection.list(listing);
        let hides_summaries = self.counts.hides_summaries.load(Ordering::SeqCst);
        Box::pin(async move {
            let mut page = page.await?;
            if hides_summaries {
                for used in &mut page.names {
                    used.summary = None;
                }
            }
            Ok(page)
        })
    }
}
