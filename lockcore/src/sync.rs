//! The synchronization types of the core: its mutexes, atomics, notifications and channels. They
//! come from std and tokio. In the tests with `loom`, other types replace them, which loom can stop
//! before every step.
//!
//! Code must not hold a mutex of std while it uses one of these types. All threads of a loom model
//! share one system thread, which would wait for itself.

#[cfg(all(test, lockcore_loom))]
pub(crate) use modelled::{Mutex, MutexGuard, Notify, atomic, oneshot};
#[cfg(not(all(test, lockcore_loom)))]
pub(crate) use {
    std::sync::{Mutex, MutexGuard, atomic},
    tokio::sync::{Notify, oneshot},
};

/// The types for loom. Loom has mutexes and atomics. The notifications and channels are those of
/// tokio, which loom does not know. So before every use of them there is a step that loom can
/// order. A use counts as one indivisible step, as tokio promises; the code inside tokio is not
/// modelled.
#[cfg(all(test, lockcore_loom))]
mod modelled {
    use std::pin::Pin;
    use std::task::{Context, Poll};

    pub(crate) use loom::sync::{Mutex, MutexGuard};
    use tokio::sync::futures;

    /// A step that loom can order. Each object of tokio has one, and takes the step before every
    /// use of the object, so that loom tries the uses in every order. A step is an `AcqRel`
    /// operation, as a use inside tokio is: a later step sees everything that came before an
    /// earlier step.
    #[derive(Debug, Default)]
    struct Step(loom::sync::atomic::AtomicUsize);

    impl Step {
        fn take(&self) {
            self.0.fetch_add(1, atomic::Ordering::AcqRel);
        }
    }

    /// The atomics of loom, with a step before every use. When a second thread reads a value, loom
    /// forgets that the first thread has read it. So loom does not try a change between the two
    /// reads. With the step, loom tries it. In contrast to `Step`, this step is `Relaxed`: it gives
    /// no memory ordering. So a read can return an outdated value wherever the real atomic can.
    pub(crate) mod atomic {
        pub(crate) use loom::sync::atomic::Ordering;
        use loom::sync::atomic::{self, AtomicUsize};

        macro_rules! atomic {
            ($name:ident, $value:ty, { $($method:ident($($argument:ident: $kind:ty),*) -> $result:ty;)* }) => {
                #[derive(Debug)]
                pub(crate) struct $name {
                    step: AtomicUsize,
                    atomic: atomic::$name,
                }

                #[allow(dead_code, reason = "as many methods as std's have")]
                impl $name {
                    pub(crate) fn new(value: $value) -> Self {
                        Self {
                            step: AtomicUsize::new(0),
                            atomic: atomic::$name::new(value),
                        }
                    }

                    $(pub(crate) fn $method(&self, $($argument: $kind),*) -> $result {
                        self.step.fetch_add(1, Ordering::Relaxed);
                        self.atomic.$method($($argument),*)
                    })*

                    pub(crate) fn fetch_update(
                        &self,
                        set: Ordering,
                        fetch: Ordering,
                        update: impl FnMut($value) -> Option<$value>,
                    ) -> Result<$value, $value> {
                        self.step.fetch_add(1, Ordering::Relaxed);
                        self.atomic.fetch_update(set, fetch, update)
                    }
                }
            };
        }

        macro_rules! atomic_number {
            ($name:ident, $value:ty) => {
                atomic!($name, $value, {
                    load(order: Ordering) -> $value;
                    store(value: $value, order: Ordering) -> ();
                    swap(value: $value, order: Ordering) -> $value;
                    compare_exchange(old: $value, new: $value, set: Ordering, fetch: Ordering) -> Result<$value, $value>;
                    fetch_add(value: $value, order: Ordering) -> $value;
                    fetch_sub(value: $value, order: Ordering) -> $value;
                    fetch_min(value: $value, order: Ordering) -> $value;
                    fetch_max(value: $value, order: Ordering) -> $value;
                });
            };
        }

        atomic_number!(AtomicU8, u8);
        atomic_number!(AtomicU16, u16);
        atomic_number!(AtomicU32, u32);
        atomic_number!(AtomicU64, u64);
        atomic!(AtomicBool, bool, {
            load(order: Ordering) -> bool;
            store(value: bool, order: Ordering) -> ();
            swap(value: bool, order: Ordering) -> bool;
        });
    }

    #[derive(Debug, Default)]
    pub(crate) struct Notify {
        step: Step,
        notify: tokio::sync::Notify,
    }

    impl Notify {
        pub(crate) fn new() -> Self {
            Self::default()
        }

        pub(crate) fn notify_one(&self) {
            self.step.take();
            self.notify.notify_one();
        }

        pub(crate) fn notify_waiters(&self) {
            self.step.take();
            self.notify.notify_waiters();
        }

        pub(crate) fn notified(&self) -> Notified<'_> {
            self.step.take();
            Notified {
                step: &self.step,
                notified: Box::pin(self.notify.notified()),
            }
        }
    }

    pub(crate) struct Notified<'a> {
        step: &'a Step,
        notified: Pin<Box<futures::Notified<'a>>>,
    }

    impl Notified<'_> {
        pub(crate) fn enable(mut self: Pin<&mut Self>) -> bool {
            self.step.take();
            self.notified.as_mut().enable()
        }
    }

    impl Future for Notified<'_> {
        type Output = ();

        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            self.step.take();
            self.notified.as_mut().poll(cx)
        }
    }

    pub(crate) mod oneshot {
        use std::pin::Pin;
        use std::sync::Arc;
        use std::task::{Context, Poll};

        use tokio::sync::oneshot;

        use super::Step;

        pub(crate) fn channel<T>() -> (Sender<T>, Receiver<T>) {
            let step = Arc::new(Step::default());
            let (sender, receiver) = oneshot::channel();
            let sender = Sender {
                step: Arc::clone(&step),
                sender: Some(sender),
            };
            (sender, Receiver { step, receiver })
        }

        pub(crate) struct Sender<T> {
            step: Arc<Step>,
            /// `None` after it has sent.
            sender: Option<oneshot::Sender<T>>,
        }

        impl<T> Sender<T> {
            pub(crate) fn send(mut self, value: T) -> Result<(), T> {
                self.step.take();
                match self.sender.take() {
                    Some(sender) => sender.send(value),
                    None => Err(value),
                }
            }

            pub(crate) fn is_closed(&self) -> bool {
                self.step.take();
                self.sender.as_ref().is_none_or(oneshot::Sender::is_closed)
            }
        }

        impl<T> Drop for Sender<T> {
            fn drop(&mut self) {
                if self.sender.is_some() {
                    self.step.take();
                }
            }
        }

        pub(crate) struct Receiver<T> {
            step: Arc<Step>,
            receiver: oneshot::Receiver<T>,
        }

        impl<T> Receiver<T> {
            pub(crate) fn close(&mut self) {
                self.step.take();
                self.receiver.close();
            }
        }

        impl<T> Future for Receiver<T> {
            type Output = Result<T, oneshot::error::RecvError>;

            fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
                self.step.take();
                Pin::new(&mut self.receiver).poll(cx)
            }
        }

        impl<T> Drop for Receiver<T> {
            fn drop(&mut self) {
                self.step.take();
            }
        }
    }
}
