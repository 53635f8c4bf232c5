//! Giving a held lock to another process: [`Guard::detach`] on one side, [`Locks::adopt`] on the
//! other.

// The detach is in `hold`.

use std::time::Duration;

use humantime::format_duration;
use tracing::Instrument;
use tracing::field::{self, Empty};

use crate::acquire::Budget;
use crate::acquire::adopt::adopt;
use crate::acquire::spec::Spec;
use crate::detached::Detached;
use crate::error::Error;
use crate::hold::Guard;
use crate::locks::Locks;
use crate::options::{OnLost, OnRevoke, SHORTEST_TTL};

pub use crate::hold::DetachError;

impl Locks {
    /// Takes over a lock that another process, or another client of this one, has detached. `text`
    /// is the text that [`Guard::detach`] has returned in that process. The grant stays the same,
    /// with its [fencing token](crate::Held::fencing_token): nobody else has held the lock in
    /// between.
    ///
    /// This client needs the same store and the same namespace. It sends one request to the store,
    /// and does not wait in line. The guard is like every other guard: this client renews the
    /// lease, with the ttl that the lock had when it was detached. The drop of the guard, or
    /// [`shutdown`](Self::shutdown), releases the lock. The other settings are the defaults of
    /// [`Lock`](crate::Lock), and not the settings of the former holder. So the lease is renewed
    /// even if the former holder had turned renewal off. From now on, the store shows this client
    /// as the owner.
    ///
    /// Only one adoption succeeds. A text is of no use after its adoption, or after the ttl of its
    /// lock.
    ///
    /// # Errors
    ///
    /// [`Lost`](crate::ErrorKind::Lost) when the store does not have the grant: its lease has
    /// ended, somebody has adopted it, or it was [taken away](Self::force_release). The work under
    /// the lock may be half done. This error also comes after a [shutdown](Self::shutdown) of this
    /// client; in that case another client can use the text, unless the adoption was in flight when
    /// the shutdown began: the client may have released the lock then.
    ///
    /// [`Config`](crate::ErrorKind::Config) for a text that is damaged or of another namespace, for
    /// a ttl that this store does not accept, and at a store without this operation.
    /// [`Unavailable`](crate::ErrorKind::Unavailable) when the store is down or refuses. In these
    /// cases nothing was changed, and the text can be used again. There is one exception: if the
    /// adoption is not as durable as the URL of the store demands, the lock is released.
    ///
    /// [`Unknown`](crate::ErrorKind::Unknown) when the store did not answer within an operation
    /// timeout. If the store has made the adoption, the client releases the lock in the background.
    /// If not, the text can be used again.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped after its first poll, the effect is that of `Unknown`. No guard is
    /// left behind.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), lockcore::Error> {
    /// use lockcore::{ErrorKind, Locks};
    ///
    /// let locks = Locks::connect("memory:")?;
    /// let text = locks.mutex("video:7").acquire().await?.detach().await?;
    ///
    /// // In the other process, with a client of its own:
    /// let guard = locks.adopt(&text).await?;
    /// println!("goes on with video 7, token {}", guard.fencing_token()?);
    /// guard.release().await?;
    ///
    /// let late = locks.adopt(&text).await.expect_err("it was adopted before");
    /// assert!(matches!(late.kind(), ErrorKind::Lost(_)));
    /// # Ok(()) }
    /// ```
    pub async fn adopt(&self, text: &str) -> Result<Guard, Error> {
        // The store in memory never makes its caller wait, so a loop would not yield its thread.
        tokio::task::coop::consume_budget().await;
        let shared = &self.0.shared;
        shared.refuse_forked()?;
        let detached = Detached::parse(text, &shared.namespace)?;
        let name = &detached.name;
        let span = tracing::debug_span!(
            "adopt",
            lock = %name,
            lock.token = Empty,
            db.system.name = shared.system(),
            db.operation.name = "adopt",
            server.address = shared.address(),
            "error.type" = Empty,
        );
        let adopted = self.adopted(&detached).instrument(span.clone()).await;
        match &adopted {
            Ok(guard) => span.record("lock.token", field::display(guard.grant_id())),
            Err(error) => span.record("error.type", error.kind().code()),
        };
        adopted.map_err(|error| error.of_name(name.as_str()))
    }

    async fn adopted(&self, detached: &Detached) -> Result<Guard, Error> {
        let shared = &self.0.shared;
        let capability = &shared.capability;
        if !capability.adopts {
            return Err(Error::config(
                "a lock of this store cannot be adopted: it was detached at another store, or not at all",
            ));
        }
        let (ttl, longest) = (detached.ttl, capability.longest_ttl);
        if ttl < SHORTEST_TTL || ttl > longest {
            return Err(Error::config(format!(
                "not adopted: its ttl of {} is not usable, because this store takes {} to {}",
                format_duration(ttl),
                format_duration(SHORTEST_TTL),
                format_duration(longest)
            )));
        }
        let spec = Spec {
            client: &self.0,
            name: &detached.name,
            permits: detached.permits,
            capacity: detached.capacity,
            ttl,
            renew: true,
            owner: &self.0.owner.whole,
            through_outages: false,
            // The ticket is not shared with other tasks of this process.
            limited: true,
            linger: Duration::ZERO,
            reentrant: true,
            on_lost: OnLost::default(),
            on_revoke: OnRevoke::default(),
            label: None,
            meter: shared.meter.lock(None),
        };
        let budget = Budget::new(&spec, None);
        let lease = adopt(&spec, &budget, detached).await?;
        let guard = Guard::of_ticket(lease, spec.client.shared.clock.now(), &spec);
        tracing::debug!(grant_id = %guard.grant_id(), "lock adopted");
        Ok(guard)
    }
}
