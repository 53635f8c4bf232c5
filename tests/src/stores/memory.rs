//! `memory:`. In its place the suite uses the store of [`lockcore::testing`], whose clients can act
//! as several processes.

use std::sync::Arc;
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};
use lockcore::{Builder, Error, Locks, testing};

use super::{Answers, Histories, Manner, Server, ServerProcess, Stage, Store, Timings};

const URL: &str = "memory:";

#[derive(Debug)]
pub struct Memory;

impl Store for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn available(&self) -> Result<(), String> {
        Ok(())
    }

    fn capability(&self) -> Capability {
        backend::open(URL).unwrap().capability()
    }

    fn timings(&self) -> Timings {
        Timings {
            answers: Answers::TheCall,
            follows_the_dead: Duration::from_millis(200),
            tells_when_to_recheck: true,
            cuts_unheard_grants: true,
        }
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(testing::Store::new())
    }

    fn shared(&self) -> Arc<dyn Server> {
        Arc::new(testing::Store::new())
    }

    fn histories(&self) -> Option<Histories> {
        Some(Histories {
            short: 10_000,
            long: 10_000,
            available: || Ok(()),
            manner: Manner {
                tells_first: true,
                ..Manner::default()
            },
            start: || {
                let store = testing::Store::new();
                store.clock().stop();
                Box::new(Stopped(store))
            },
        })
    }
}

impl Server for testing::Store {
    /// The URL of a memory store. A process that uses it gets a memory store of its own.
    fn url(&self) -> String {
        URL.into()
    }

    fn backend(&self) -> Arc<dyn Backend> {
        Arc::new(self.clone())
    }

    fn client(&self, builder: Builder) -> Result<Locks, Error> {
        self.client_with(builder)
    }

    fn litter(&self, _namespace: &str) -> Vec<String> {
        Vec::new()
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

struct Stopped(testing::Store);

impl Stage for Stopped {
    fn backend(&self) -> Arc<dyn Backend> {
        Arc::new(self.0.clone())
    }

    /// Clears the store, because it has one sequence of ticket numbers for all names.
    fn begin(&mut self) {
        self.0.lose_data();
    }

    fn pass(&mut self, time: Duration) {
        self.0.clock().advance(time);
    }

    fn lose_data(&mut self) -> bool {
        self.0.lose_data();
        true
    }
}
