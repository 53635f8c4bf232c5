//! `sqlite:`, with a file of its own for each fact. It has no server to start.

use std::sync::Arc;
use std::time::Duration;

use lockcore::backend::{self, Backend, Capability};

use super::{Answers, Histories, Manner, Server, ServerProcess, Stage, Store, Timings};
use crate::sqlite_file::SqliteFile;

#[derive(Debug)]
pub struct Sqlite;

impl Store for Sqlite {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    fn available(&self) -> Result<(), String> {
        Ok(())
    }

    fn capability(&self) -> Capability {
        backend::open("sqlite:locks.db").unwrap().capability() // this makes no file
    }

    fn timings(&self) -> Timings {
        Timings {
            answers: Answers::AThread,
            follows_the_dead: Duration::from_millis(200),
            tells_when_to_recheck: false,
            cuts_unheard_grants: true,
        }
    }

    fn serves_forked_children(&self) -> bool {
        false
    }

    fn start(&self) -> Box<dyn Server> {
        Box::new(SqliteFile::new())
    }

    fn shared(&self) -> Arc<dyn Server> {
        Arc::new(SqliteFile::new())
    }

    fn histories(&self) -> Option<Histories> {
        Some(Histories {
            short: 400,
            long: 250,
            available: || Ok(()),
            manner: Manner {
                slack: 2_000,
                tells_in_its_own_way: true,
                by_id: true,
                keeps_the_first_ttl: true,
                ..Manner::default()
            },
            start: || Box::new(SqliteFile::new()),
        })
    }
}

impl Server for SqliteFile {
    fn url(&self) -> String {
        self.url()
    }

    /// All litter in the file. The namespace does not matter, because each fact has its own file.
    fn litter(&self, _namespace: &str) -> Vec<String> {
        self.litter()
    }

    fn process(&self) -> Option<&dyn ServerProcess> {
        None
    }
}

impl Stage for SqliteFile {
    fn backend(&self) -> Arc<dyn Backend> {
        backend::open(&self.url()).unwrap()
    }

    /// Lets time pass by changing the times in the file, because the store's clock cannot be set.
    fn pass(&mut self, time: Duration) {
        let millis = time.as_millis();
        let earlier = |table| format!("UPDATE {table} SET expires_at = expires_at - {millis};");
        self.query(&(earlier("tickets") + &earlier("marks")));
    }

    fn lose_data(&mut self) -> bool {
        let tables = ["tickets", "marks", "names", "capacities"];
        self.query(&tables.map(|table| format!("DELETE FROM {table};")).concat());
        true
    }
}
