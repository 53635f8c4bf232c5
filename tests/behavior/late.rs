//! Provides the store for tests with answers that come late: a list or a value may be out of date
//! when the client gets it. For requests that come late, the kit has `Hold`.

use std::sync::{Arc, Mutex};

use lockcore::Locks;
use lockcore::backend::{Answer, Connection, Count, CountOp, Counted, Name, TicketInfo};
use lockcore::testing::{Store as Kit, around};
use tokio::sync::oneshot;

use crate::store::{STALL, soon};

/// The answers that are held back. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct LateAnswers(Arc<Mutex<Vec<Awaited>>>);

/// An answer that is held back. The client gets it when this value is dropped.
#[derive(Debug)]
pub(crate) struct LateAnswer {
    read: oneshot::Receiver<()>,
    _way: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Awaited {
    what: What,
    read: oneshot::Sender<()>,
    way: oneshot::Receiver<()>,
}

#[derive(Debug, PartialEq)]
enum What {
    /// A list of the tickets of a name, with this many tickets.
    List(usize),
    /// A value with this text.
    Value(String),
}

#[derive(Debug)]
struct Late {
    connection: Arc<dyn Connection>,
    answers: LateAnswers,
}

impl LateAnswers {
    /// A client whose answers can be held back. Its operations do not time out meanwhile, and its
    /// leases last longer than a fact takes.
    pub(crate) fn client_of(&self, kit: &Kit) -> Locks {
        let answers = self.clone();
        let store = around(Arc::new(kit.clone()), move |connection| Late {
            connection,
            answers: answers.clone(),
        });
        let builder = Locks::builder().op_timeout(STALL).ttl(100 * STALL);
        builder.backend(store).build().unwrap()
    }

    /// Holds back the next list with this many tickets.
    pub(crate) fn hold_list(&self, tickets: usize) -> LateAnswer {
        self.hold(What::List(tickets))
    }

    /// Holds back the next answer to a read of a value with this text.
    pub(crate) fn hold_value(&self, text: &str) -> LateAnswer {
        self.hold(What::Value(text.to_owned()))
    }

    fn hold(&self, what: What) -> LateAnswer {
        let ((read, has_read), (go_on, way)) = (oneshot::channel(), oneshot::channel());
        self.0.lock().unwrap().push(Awaited { what, read, way });
        LateAnswer {
            read: has_read,
            _way: go_on,
        }
    }

    /// Waits if an answer of this kind is to be held back.
    async fn pass(&self, what: What) {
        let awaited = {
            let mut all = self.0.lock().unwrap();
            let found = all.iter().position(|awaited| awaited.what == what);
            found.map(|at| all.remove(at))
        };
        if let Some(Awaited { read, way, .. }) = awaited {
            let _ = read.send(());
            let _ = way.await;
        }
    }
}

impl LateAnswer {
    /// Waits until the store has answered, so the answer is being held back.
    pub(crate) async fn is_made(&mut self) {
        soon(&mut self.read).await.unwrap();
    }

    /// Passes the answer to the client.
    pub(crate) fn let_go(self) {}
}

impl Connection for Late {
    fn inner(&self) -> Option<&Arc<dyn Connection>> {
        Some(&self.connection)
    }

    fn inspect(&self, name: Name) -> Answer<Vec<TicketInfo>> {
        let (answer, answers) = (self.connection.inspect(name), self.answers.clone());
        Box::pin(async move {
            let list = answer.await?;
            answers.pass(What::List(list.len())).await;
            Ok(list)
        })
    }

    fn count(&self, count: Arc<Count>) -> Answer<Counted> {
        let reads = count.op == CountOp::Read;
        let (answer, answers) = (self.connection.count(count), self.answers.clone());
        Box::pin(async move {
            let counted = answer.await?;
            if reads && let Some(written) = &counted.written {
                answers.pass(What::Value((*written.text).to_owned())).await;
            }
            Ok(counted)
        })
    }
}
