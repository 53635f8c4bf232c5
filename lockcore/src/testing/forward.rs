//! Stores that wrap other stores.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{
    Adoption, Answer, Backend, BoxFuture, Capability, Connection, Count, Counted, Departure,
    Enqueued, EventSink, Id, Listing, Name, Page, Released, Renewed, Request, Resize, Resized,
    TicketInfo,
};

/// A [`Connection`] that wraps another one. It passes on every request, except the requests of the
/// verbs that it implements itself. It implements a verb to count requests, to refuse them, or to
/// change their answers. If `Connection` gets another verb in a later version, requests of that
/// verb are passed on too. The time limits of [`Connection::enqueue_within`] and
/// [`Connection::renew_within`] are not passed on.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
///
/// use lockcore::Locks;
/// use lockcore::backend::{self, Answer, Connection, Enqueued, Request};
/// use lockcore::testing::{Forward, around};
///
/// #[derive(Debug)]
/// struct Counted(Arc<dyn Connection>, Arc<AtomicUsize>);
///
/// impl Forward for Counted {
///     fn inner(&self) -> &Arc<dyn Connection> {
///         &self.0
///     }
///
///     fn enqueue(&self, request: Arc<Request>) -> Answer<Enqueued> {
///         self.1.fetch_add(1, Ordering::SeqCst);
///         self.0.enqueue(request)
///     }
/// }
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), lockcore::Error> {
/// let asked = Arc::new(AtomicUsize::new(0));
/// let counter = Arc::clone(&asked);
/// let store = around(backend::open("memory:")?, move |connection| {
///     Counted(connection, Arc::clone(&counter))
/// });
/// let guard = Locks::with_backend(store)?.mutex("a").acquire().await?;
/// assert_eq!(asked.load(Ordering::SeqCst), 1);
/// # drop(guard);
/// # Ok(()) }
/// ```
pub trait Forward: fmt::Debug + Send + Sync + 'static {
    /// The connection to which requests are passed on.
    fn inner(&self) -> &Arc<dyn Connection>;

    /// See [`Connection::enqueue`].
    fn enqueue(&self, request: Arc<Request>) -> Answer<Enqueued> {
        self.inner().enqueue(request)
    }

    /// See [`Connection::longest_ttl`].
    fn longest_ttl(&self) -> Duration {
        self.inner().longest_ttl()
    }

    /// See [`Connection::renew`].
    fn renew(&self, tickets: Vec<Arc<Request>>) -> Answer<Vec<Renewed>> {
        self.inner().renew(tickets)
    }

    /// See [`Connection::release`].
    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        self.inner().release(tickets)
    }

    /// See [`Connection::inspect`].
    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        self.inner().inspect(name)
    }

    /// See [`Connection::list`].
    fn list(&self, listing: Listing) -> Answer<Page> {
        self.inner().list(listing)
    }

    /// See [`Connection::ask_back`].
    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        self.inner().ask_back(name, id, ask)
    }

    /// See [`Connection::adopt`].
    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        self.inner().adopt(adoption)
    }

    /// See [`Connection::resize`].
    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        self.inner().resize(resize)
    }

    /// See [`Connection::forget`].
    fn forget(&self, name: Name) -> Answer<()> {
        self.inner().forget(name)
    }

    /// See [`Connection::count`].
    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        self.inner().count(count)
    }

    /// See [`Connection::watch`].
    fn watch(&self, name: Name) -> Answer<()> {
        self.inner().watch(name)
    }

    /// See [`Connection::unwatch`].
    fn unwatch(&self, name: Name) -> Answer<()> {
        self.inner().unwatch(name)
    }

    /// See [`Connection::check`].
    fn check(&self) -> Answer<Vec<String>> {
        self.inner().check()
    }

    /// See [`Connection::close`].
    fn close(&self) -> BoxFuture<()> {
        Arc::clone(self.inner()).close()
    }
}

/// Returns a store that wraps each connection of `store` with `wrap`.
pub fn around<C: Forward>(
    store: Arc<dyn Backend>,
    wrap: impl Fn(Arc<dyn Connection>) -> C + Send + Sync + 'static,
) -> Arc<dyn Backend> {
    Arc::new(Around {
        store,
        wrap: Arc::new(wrap),
    })
}

struct Around<W> {
    store: Arc<dyn Backend>,
    wrap: Arc<W>,
}

impl<W> fmt::Debug for Around<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Around").field(&self.store).finish()
    }
}

impl<C, W> Backend for Around<W>
where
    C: Forward,
    W: Fn(Arc<dyn Connection>) -> C + Send + Sync + 'static,
{
    fn capability(&self) -> Capability {
        self.store.capability()
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let (connecting, wrap) = (self.store.connect(events), Arc::clone(&self.wrap));
        Box::pin(async move {
            let forwarding: Arc<dyn Connection> = Arc::new(Forwarding(wrap(connecting.await?)));
            Ok(forwarding)
        })
    }

    fn silence(&self) -> &'static str {
        self.store.silence()
    }
}

/// Turns a [`Forward`] into a [`Connection`]. (There is no `impl Connection` for all `Forward`s,
/// because a call of `connection.enqueue(..)` would be ambiguous where both traits are in scope.)
#[derive(Debug)]
struct Forwarding<C>(C);

impl<C: Forward> Connection for Forwarding<C> {
    fn enqueue(&self, request: Arc<Request>) -> Answer<Enqueued> {
        self.0.enqueue(request)
    }

    fn renew(&self, tickets: Vec<Arc<Request>>) -> Answer<Vec<Renewed>> {
        self.0.renew(tickets)
    }

    fn release(&self, tickets: Vec<Departure>) -> Answer<Vec<Released>> {
        self.0.release(tickets)
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        self.0.inspect(name)
    }

    fn list(&self, listing: Listing) -> Answer<Page> {
        self.0.list(listing)
    }

    fn ask_back(&self, name: Name, id: Id, ask: Arc<str>) -> Answer<bool> {
        self.0.ask_back(name, id, ask)
    }

    fn adopt(&self, adoption: Arc<Adoption>) -> Answer<Enqueued> {
        self.0.adopt(adoption)
    }

    fn resize(&self, resize: Arc<Resize>) -> Answer<Resized> {
        self.0.resize(resize)
    }

    fn forget(&self, name: Name) -> Answer<()> {
        self.0.forget(name)
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        self.0.count(count)
    }

    fn watch(&self, name: Name) -> Answer<()> {
        self.0.watch(name)
    }

    fn unwatch(&self, name: Name) -> Answer<()> {
        self.0.unwatch(name)
    }

    fn check(&self) -> Answer<Vec<String>> {
        self.0.check()
    }

    fn close(self: Arc<Self>) -> BoxFuture<()> {
        self.0.close()
    }
}
