//! The options of a layer, and their effect on a request: whether the request may ask for its lock,
//! and with which settings.

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use http::{HeaderName, Method};
use lockcore::{Lock, Locks, OnLost, OnRevoke, Wait};

use crate::deadline::{self, Deadline};
use crate::guard::{AnyLock, LockNames};
use crate::keys::Keys;
use crate::label;
use crate::names::Names;
use crate::protocol::Protocol;
use crate::refusal::{Answers, Problem};
use crate::waiters::{Waiter, Waiters};

/// Until when a request keeps its lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HoldUntil {
    /// Until the handler has answered. The server sends the body without the lock.
    Headers,
    /// Until the response body has ended, or was dropped because the client has gone.
    #[default]
    BodyEnd,
}

/// What happens to a request for an upgraded connection (a web socket, a tunnel). The lock of such
/// a request ends with the answer, and not with the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Upgrades {
    /// The answer is 501, and the handler is not called.
    #[default]
    Refuse,
    /// The request is handled under the lock, and the lock ends with the answer. After that the
    /// connection is used **without the lock**.
    HandshakeOnly,
}

/// The options of a layer, shared by the services that it makes.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    locks: Locks,
    pub(crate) keys: Keys,
    pub(crate) side: Side,
    pub(crate) pass_options: bool,
    pub(crate) wait: Option<Wait>,
    pub(crate) through_outages: Option<bool>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) min_hold: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) linger: Option<Duration>,
    pub(crate) label: Option<&'static str>,
    pub(crate) reentrant: bool,
    pub(crate) deadline_header: Option<HeaderName>,
    pub(crate) on_lost: OnLost,
    pub(crate) on_revoke: OnRevoke,
    pub(crate) hold_until: HoldUntil,
    pub(crate) upgrades: Upgrades,
    pub(crate) waiters: Option<Arc<Waiters>>,
    pub(crate) names: Option<Arc<Names>>,
    pub(crate) token_header: bool,
    pub(crate) answers: Answers,
}

/// How requests with the same key exclude each other.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Side {
    Exclusive,
    Shared,
    SharedIfSafe,
    Permits(u32, u32),
}

/// The lock, or the locks, of one request.
pub(crate) struct Order {
    pub(crate) lock: AnyLock,
    /// The names of the locks, if the request takes several.
    pub(crate) keys: Vec<String>,
    /// Whether the lock is exclusive, and so has a fencing token.
    pub(crate) exclusive: bool,
    /// Whether the client's deadline, and not the layer's wait, ends the wait for the lock.
    pub(crate) deadline_is_the_bound: bool,
    /// While these values live, the request counts as waiting. They are dropped when the lock is
    /// taken.
    pub(crate) waiters: Vec<Waiter>,
}

impl Settings {
    pub(crate) fn new(locks: Locks, keys: Keys) -> Self {
        Self {
            label: keys.label().and_then(label::kept),
            locks,
            keys,
            side: Side::Exclusive,
            pass_options: false,
            wait: None,
            through_outages: None,
            ttl: None,
            min_hold: Duration::ZERO,
            max_hold: None,
            linger: None,
            reentrant: true,
            deadline_header: None,
            on_lost: OnLost::default(),
            on_revoke: OnRevoke::default(),
            hold_until: HoldUntil::default(),
            upgrades: Upgrades::default(),
            waiters: None,
            names: None,
            token_header: false,
            answers: Answers::default(),
        }
    }

    /// Checks before the read of the body whether the limits of this process will refuse the
    /// request. It does not count the request, because the body may never arrive.
    pub(crate) fn foresee(&self, names: &LockNames, method: &Method) -> Result<(), Problem> {
        let names = names.as_slice();
        if let Some(met) = &self.names {
            met.look(names).map_err(Problem::too_many_names)?;
        }
        // A shared lock may be granted at once, even if many requests are waiting.
        let waiters = self.waiters.as_ref().filter(|_| self.is_exclusive(method));
        match waiters.and_then(|waiters| names.iter().find(|name| waiters.is_full(name))) {
            Some(name) => Err(Problem::crowded(name.clone())),
            None => Ok(()),
        }
    }

    fn is_exclusive(&self, method: &Method) -> bool {
        match self.side {
            Side::Exclusive => true,
            Side::SharedIfSafe => !method.is_safe(),
            Side::Shared | Side::Permits(..) => false,
        }
    }

    /// Counts the names, if there is room for them. If there is no room for one name, the names
    /// before it stay counted.
    pub(crate) fn admit(&self, names: &LockNames) -> Result<(), Problem> {
        let Some(met) = &self.names else {
            return Ok(());
        };
        let admitted = names.as_slice().iter().try_for_each(|name| met.admit(name));
        admitted.map_err(Problem::too_many_names)
    }

    /// Makes the lock that a request asks for.
    pub(crate) fn order(
        &self,
        names: LockNames,
        method: &Method,
        deadline: Option<Deadline>,
    ) -> Order {
        let waiters = match &self.waiters {
            Some(waiters) => waiters.join_all(names.as_slice()),
            None => Some(Vec::new()),
        };
        let wait = match waiters {
            None => Wait::For(Duration::ZERO),
            Some(_) => self.wait.unwrap_or_else(|| self.locks.default_wait()),
        };
        let (wait, deadline_is_the_bound) = bounded(wait, deadline);
        let exclusive = self.is_exclusive(method);
        let (lock, keys) = match names {
            LockNames::One(name) => {
                let lock = self.lock(name, exclusive).wait(wait);
                (AnyLock::One(lock), Vec::new())
            }
            LockNames::All(names) => {
                let all = names.iter().map(|name| self.lock(name.clone(), exclusive));
                (AnyLock::All(Locks::all(all).wait(wait)), names)
            }
        };
        Order {
            lock,
            keys,
            exclusive,
            deadline_is_the_bound,
            waiters: waiters.unwrap_or_default(),
        }
    }

    /// How long a request that holds its lock waits for the inner service. A request that does not
    /// wait for locks waits here all the same: it had the permit of the service, and gave it back
    /// only for the time in which the store answered.
    pub(crate) fn ready_within(&self, deadline: Option<Deadline>) -> Wait {
        let wait = self.wait.filter(|wait| *wait != Wait::For(Duration::ZERO));
        bounded(wait.unwrap_or_else(|| self.locks.default_wait()), deadline).0
    }

    fn lock(&self, name: String, exclusive: bool) -> Lock {
        let locks = &self.locks;
        let mut lock = match self.side {
            Side::Exclusive => locks.mutex(name),
            Side::SharedIfSafe if exclusive => locks.rwlock(name).write(),
            Side::Shared | Side::SharedIfSafe => locks.rwlock(name).read(),
            Side::Permits(permits, of) => locks.semaphore(name, of).permits(permits),
        };
        if let Some(yes) = self.through_outages {
            lock = lock.through_outages(yes);
        }
        if let Some(ttl) = self.ttl {
            lock = lock.ttl(ttl);
        }
        if let Some(limit) = self.max_hold {
            lock = lock.max_hold(limit);
        }
        if let Some(time) = self.linger {
            lock = lock.linger(time);
        }
        if let Some(label) = self.label {
            lock = lock.label(label);
        }
        lock.min_hold(self.min_hold)
            .on_lost(self.on_lost)
            .on_revoke(self.on_revoke)
            .reentrant(self.reentrant)
    }

    /// The client's deadline, counted from now.
    pub(crate) fn deadline(&self, request: &Parts, protocol: &Protocol) -> Option<Deadline> {
        match (protocol, &self.deadline_header) {
            (Protocol::Grpc(_), _) => Deadline::after(deadline::of_grpc(&request.headers)?, true),
            (Protocol::Http, Some(name)) => {
                Deadline::after(deadline::of_header(&request.headers, name)?, false)
            }
            (Protocol::Http, None) => None,
        }
    }
}

/// The shorter one of a wait and what the client's deadline leaves for it, and whether that is the
/// deadline.
fn bounded(wait: Wait, deadline: Option<Deadline>) -> (Wait, bool) {
    match deadline.map(Deadline::wait) {
        Some(left) if !matches!(wait, Wait::For(wait) if wait <= left) => (Wait::For(left), true),
        _ => (wait, false),
    }
}
