//! The reports of a client about itself: log lines, and events for listeners.

use std::sync::Arc;

use humantime::format_duration;
use tracing::Level;

use super::events::{Event, EventListener, GrantListener, Teller};
use super::lease::Lease;
use super::settings::Defaults;
use super::shared::Shared;
use super::table::Overload;
use crate::backend::{Fault, Renewed, StoreError};
use crate::meter::Renewal;
use crate::options::{Fair, Wait};
use crate::sync::atomic::Ordering;

impl Shared {
    /// Logs the start of the client, once, on the caller's thread.
    pub(crate) fn tell_start(&self) {
        let Defaults {
            ttl,
            wait,
            through_outages,
            linger,
            fair,
        } = &self.defaults;
        let wait = match wait {
            Wait::For(wait) => format_duration(*wait).to_string(),
            Wait::Forever => "forever".to_owned(),
        };
        let fair = match fair {
            Fair::Local(bound) => format_duration(*bound).to_string(),
            Fair::Strict => "strict".to_owned(),
        };
        tracing::info!(
            store = self.store(),
            namespace = self.namespace.as_str(),
            owner = &*self.owner,
            ttl = %format_duration(*ttl),
            wait,
            through_outages,
            linger = %format_duration(*linger),
            fair,
            "lock client started"
        );
    }

    /// Logs one line at the end of the client, even if the client is shut down and its last handle
    /// is dropped after that. `left` is the number of locks that it could not release.
    pub(crate) fn tell_end(&self, left: usize) {
        if self.told_end.swap(true, Ordering::SeqCst) {
            return;
        }
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        match left {
            0 => self.log(Level::INFO, move || {
                tracing::info!(store, owner = &*owner, "lock client ended");
            }),
            _ => self.log(Level::WARN, move || {
                tracing::warn!(
                    store,
                    owner = &*owner,
                    left,
                    "lock client ended; the locks that are left end with their leases"
                );
            }),
        }
    }

    /// The store is out of reach. This logs one warning per outage, however many connections break
    /// and however often the client tries to reconnect. It logs one more if the cause turns out to
    /// be a mistake that a person must correct.
    pub(crate) fn suspended(&self, error: &StoreError) {
        let is_news = |mistake| self.teller.suspended(self.clock.now(), mistake);
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        let error = error.clone();
        match is_news(error.fault() == Fault::Config) {
            true => self.log(Level::WARN, move || {
                tracing::warn!(store, owner = &*owner, %error, "the lock store is out of reach");
            }),
            false => self.log(Level::DEBUG, move || {
                tracing::debug!(store, owner = &*owner, %error, "the lock store is still out of reach");
            }),
        }
    }

    pub(crate) fn restored(&self) {
        if let Some(since) = self.teller.restored() {
            let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
            let after = since.until(self.clock.now());
            self.log(Level::WARN, move || {
                tracing::warn!(store, owner = &*owner, ?after, "the lock store is back");
            });
        }
    }

    /// The address leads to another server than before.
    pub(crate) fn moved(&self, address: String) {
        self.teller.tell(|| Event::Moved(address.clone()));
        let text = "the address leads to another server, which may not have the locks";
        self.warn_of_address(address, text);
    }

    fn warn_of_address(&self, address: String, text: &'static str) {
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        self.log(Level::WARN, move || {
            tracing::warn!(store, owner = &*owner, address, "{text}");
        });
    }

    /// A warning about the settings of the store.
    pub(crate) fn warn(&self, warning: String) {
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        self.log(Level::WARN, move || {
            tracing::warn!(store, owner = &*owner, "lock store: {warning}");
        });
    }

    /// The store goes on without one of its nodes.
    pub(crate) fn node_down(&self, address: String, reason: String) {
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        self.teller.tell(|| Event::NodeDown(address));
        self.log(Level::WARN, move || {
            tracing::warn!(
                store,
                owner = &*owner,
                reason,
                "the lock store has lost a node"
            );
        });
    }

    pub(crate) fn node_up(&self, address: String) {
        self.teller.tell(|| Event::NodeUp(address.clone()));
        self.warn_of_address(address, "a node of the lock store is back");
    }

    /// Reports what the store has answered to renewals. A ticket counts as refused when its renewal
    /// fails twice in a row. The first failure alone does not count, because it may only mean that
    /// an earlier request for the ticket, such as its enqueue, was interrupted.
    pub(crate) fn renewals_answered(&self, leases: &[Arc<Lease>], answers: &[Renewed]) {
        self.count_renewals(answers);
        let mut accepted = false;
        for (lease, answer) in leases.iter().zip(answers) {
            match answer {
                Renewed::Granted { .. } | Renewed::AskedBack { .. } | Renewed::Waiting { .. } => {
                    lease.renewal_accepted();
                    accepted = true;
                }
                Renewed::Failed if lease.renewal_refused() > 1 => {
                    let name = lease.request.name.as_str().escape_debug();
                    let text = format!("it cannot renew the ticket of \"{name}\"");
                    self.tell_refusal(StoreError::new(Fault::Unknown, text));
                }
                Renewed::Failed | Renewed::Lost => {}
            }
        }
        if accepted {
            self.tell_acceptance();
        }
    }

    /// Counts the answers of the store to renewals.
    pub(super) fn count_renewals(&self, answers: &[Renewed]) {
        let count = |what| answers.iter().filter(|answer| **answer == what).count();
        let (lost, failed) = (count(Renewed::Lost), count(Renewed::Failed));
        let renewed = answers.len() - lost - failed;
        self.meter.renewals(Renewal::Renewed, renewed);
        self.meter.renewals(Renewal::Lost, lost);
        self.meter.renewals(Renewal::Failed, failed);
    }

    /// The store has refused all these renewals, on a working connection.
    pub(crate) fn renewals_refused(&self, leases: &[Arc<Lease>], error: &StoreError) {
        for lease in leases {
            lease.renewal_refused();
        }
        self.tell_refusal(error.clone());
    }

    /// The store cannot answer the renewals of all held leases in time. So some leases are left out,
    /// and are lost.
    pub(crate) fn tell_overload(&self, overload: Overload) {
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        self.log(Level::WARN, move || {
            let Overload {
                leases,
                left_out,
                rate,
            } = overload;
            tracing::warn!(
                store,
                owner = &*owner,
                leases,
                left_out,
                renewals_per_second = rate as u64,
                "the lock store does not answer fast enough to renew all leases; hold fewer, or set \
                 a longer ttl"
            );
        });
    }

    /// Logs a warning, unless one was logged since renewals were last accepted.
    fn tell_refusal(&self, error: StoreError) {
        // If there is an outage, its warning is enough.
        let news = !self.teller.is_suspended() && !self.refusing.swap(true, Ordering::SeqCst);
        let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
        if news {
            self.log(Level::WARN, move || {
                tracing::warn!(store, owner = &*owner, %error, "the lock store refuses renewals");
            });
        }
    }

    /// A renewal was accepted. Logs one line if renewals were refused before and no ticket is
    /// refused any more.
    fn tell_acceptance(&self) {
        if !self.refusing.load(Ordering::SeqCst) {
            return;
        }
        let now = self.clock.now();
        let is_refused = |lease: &Lease| lease.is_refused() && lease.deadline() > now;
        let table = self.table();
        if (table.leases.values()).any(|tracked| is_refused(&tracked.lease)) {
            return;
        }
        drop(table);
        if self.refusing.swap(false, Ordering::SeqCst) {
            let (store, owner) = (self.store().to_owned(), Arc::clone(&self.owner));
            self.log(Level::WARN, move || {
                tracing::warn!(
                    store,
                    owner = &*owner,
                    "the lock store accepts renewals again"
                );
            });
        }
    }

    /// A listener for the events of this client.
    pub(crate) fn listen(self: &Arc<Self>) -> EventListener {
        if self.is_forked() {
            // In a forked child the client is gone, so there are no events.
            return Teller::default().listen();
        }
        let listener = self.teller.listen();
        self.await_restoration();
        listener
    }

    /// A listener for the grants of a lock in this client.
    pub(crate) fn listen_to_grants(&self, name: String) -> GrantListener {
        if self.is_forked() {
            return Teller::default().listen_to_grants(name);
        }
        self.teller.listen_to_grants(name)
    }

    /// Called when a listener may wait for the news that the store is back. If so, this opens the
    /// keeper's connection, because perhaps nobody else opens a connection.
    pub(crate) fn await_restoration(self: &Arc<Self>) {
        // The order matters: in a forked child the later conditions must not be evaluated.
        if self.is_forked()
            || !self.teller.is_suspended()
            || !self.teller.is_heard()
            || self.links.have_ended()
        {
            return;
        }
        match self.links.up(&self.keeper) {
            // The keeper's connection is up. The outage came from another connection, which is not
            // needed any more.
            Some(_) => self.restored(),
            None => drop(self.link(&self.keeper)),
        }
    }
}
