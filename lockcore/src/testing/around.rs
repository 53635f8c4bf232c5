//! Stores that wrap other stores.

use std::fmt;
use std::sync::Arc;

use crate::backend::{Answer, Backend, Capability, Connection, EventSink};

/// Returns a store that wraps each connection of `store` with `wrap`. The wrapping connection
/// implements [`Connection::inner`] and the verbs that it changes: to count requests, to refuse
/// them, or to change their answers. All other requests are passed on.
///
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicUsize, Ordering};
/// use std::time::Duration;
///
/// use lockcore::Locks;
/// use lockcore::backend::{self, Answer, Connection, Enqueued, Request};
/// use lockcore::testing::around;
///
/// #[derive(Debug)]
/// struct Counted(Arc<dyn Connection>, Arc<AtomicUsize>);
///
/// impl Connection for Counted {
///     fn inner(&self) -> Option<&Arc<dyn Connection>> {
///         Some(&self.0)
///     }
///
///     fn enqueue(&self, request: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
///         self.1.fetch_add(1, Ordering::SeqCst);
///         self.0.enqueue(request, patience)
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
pub fn around<C: Connection>(
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
    C: Connection,
    W: Fn(Arc<dyn Connection>) -> C + Send + Sync + 'static,
{
    fn capability(&self) -> Capability {
        self.store.capability()
    }

    fn connect(&self, events: EventSink) -> Answer<Arc<dyn Connection>> {
        let (connecting, wrap) = (self.store.connect(events), Arc::clone(&self.wrap));
        Box::pin(async move {
            let wrapped: Arc<dyn Connection> = Arc::new(wrap(connecting.await?));
            Ok(wrapped)
        })
    }

    fn silence(&self) -> &'static str {
        self.store.silence()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use super::*;
    use crate::backend::{Enqueued, FULL, Fault, Id, Name, Namespace, Renewed, Request};

    /// The connection of a store with sessions, which notes how long its callers wait.
    #[derive(Debug, Default)]
    struct Inner(Mutex<Vec<Duration>>);

    impl Connection for Inner {
        fn longest_ttl(&self) -> Duration {
            Duration::from_secs(5)
        }

        fn enqueue(&self, _: Arc<Request>, patience: Duration) -> Answer<Enqueued> {
            self.0.lock().unwrap().push(patience);
            Box::pin(std::future::ready(Ok(Enqueued::Gone)))
        }

        fn renew(&self, _: Vec<Arc<Request>>, patience: Duration) -> Answer<Vec<Renewed>> {
            self.0.lock().unwrap().push(patience);
            Box::pin(std::future::ready(Ok(vec![Renewed::Lost])))
        }
    }

    #[derive(Debug)]
    struct Outer(Arc<dyn Connection>);

    impl Connection for Outer {
        fn inner(&self) -> Option<&Arc<dyn Connection>> {
            Some(&self.0)
        }
    }

    fn request() -> Arc<Request> {
        let name = Name::new(Namespace::new("test").unwrap(), "a").unwrap();
        let id = Id::draw().unwrap();
        Arc::new(Request::new(name, id, FULL, FULL, Duration::from_secs(5)))
    }

    #[tokio::test]
    async fn a_connection_that_changes_nothing_passes_everything_on() {
        let inner = Arc::new(Inner::default());
        let outer = Outer(Arc::clone(&inner) as Arc<dyn Connection>);
        let (one, two) = (Duration::from_secs(1), Duration::from_secs(2));

        let enqueued = outer.enqueue(request(), one).await.unwrap();
        let renewed = outer.renew(vec![request()], two).await.unwrap();

        assert_eq!((enqueued, renewed), (Enqueued::Gone, vec![Renewed::Lost]));
        assert_eq!(*inner.0.lock().unwrap(), [one, two]);
        assert_eq!(outer.longest_ttl(), Duration::from_secs(5));
    }

    #[tokio::test]
    async fn a_verb_that_nobody_implements_is_refused() {
        let outer = Outer(Arc::new(Inner::default()));
        let error = outer.check().await.unwrap_err();
        assert_eq!(error.fault(), Fault::Config);
    }
}
