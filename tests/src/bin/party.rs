//! A process that is one party of a barrier. Lines on standard input tell it what to do.
//!
//! ```text
//! wait            → PASSED true | PASSED false        whether it was the last to come
//! rounds N        → DONE                              N rounds, each checked at the files
//! enter           → ENTERED true | ENTERED false
//! missing         → MISSING <number>                  when a party is gone that has not left
//! leave           → LEFT All | LEFT NotAll
//! ```
//!
//! Any request that fails is answered `FAILED <kind>`. The arguments are the name, the number of
//! parties, and a folder for the files. The `LOCK_…` variables choose the store, namespace, ttl and
//! wait.

use std::io::{self, BufRead as _};
use std::path::Path;
use std::time::Duration;

use lockcore::double_barrier::Inside;
use lockcore::{Error, Locks};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, parties, folder] = &arguments[..] else {
        return Err("a name, a number of parties and a folder".into());
    };
    let mut party = Party {
        locks: Locks::from_env()?,
        name,
        parties: parties.parse()?,
        folder: folder.as_ref(),
        inside: None,
    };

    // Blocking this thread for the next line delays nothing: it is the runtime's main thread, and
    // drives no other task.
    for line in io::stdin().lock().lines() {
        match party.carry_out(&line?).await {
            Ok(answer) => println!("{answer}"),
            Err(error) => {
                eprintln!("party: {error}");
                println!("FAILED {:?}", error.kind());
            }
        }
    }

    drop(party.inside);
    Ok(party.locks.shutdown(Duration::from_secs(5)).await?)
}

struct Party<'a> {
    locks: Locks,
    name: &'a str,
    parties: u32,
    folder: &'a Path,
    inside: Option<Inside>,
}

impl Party<'_> {
    async fn carry_out(&mut self, line: &str) -> Result<String, Error> {
        Ok(match line.split_once(' ').unwrap_or((line, "0")) {
            ("wait", _) => {
                let barrier = self.locks.barrier(self.name, self.parties);
                format!("PASSED {}", barrier.wait_for_all().await?.is_leader())
            }
            ("rounds", number) => {
                for round in 0..number.parse().expect("a number") {
                    self.round(round).await?;
                }
                "DONE".to_owned()
            }
            ("enter", _) => {
                let barrier = self.locks.double_barrier(self.name, self.parties);
                let inside = self.inside.insert(barrier.enter().await?);
                format!("ENTERED {}", inside.is_leader())
            }
            ("missing", _) => {
                let inside = self.inside.as_ref().expect("inside");
                format!("MISSING {}", inside.missing().await)
            }
            ("leave", _) => {
                let inside = self.inside.take().expect("inside");
                format!("LEFT {:?}", inside.leave().await?)
            }
            _ => panic!("not a command: {line:?}"),
        })
    }

    /// Writes the number of the round. After the barrier, reads the numbers of all parties. A
    /// second barrier keeps a fast party from writing its next number while others read.
    async fn round(&self, round: u32) -> Result<(), Error> {
        let barrier = self.locks.barrier(self.name, self.parties);
        let write = |name: &str, round: u32| {
            // The new file replaces the old one by a rename, so that nobody sees it half-written.
            let (new, file) = (format!(".{name}"), self.folder.join(name));
            let new = self.folder.join(new);
            std::fs::write(&new, round.to_string()).expect("written");
            std::fs::rename(new, file).expect("replaced");
        };
        write(&format!("party-{}", std::process::id()), round);
        barrier.wait_for_all().await?;
        let files = std::fs::read_dir(self.folder).expect("a folder");
        let mut numbers = 0;
        for file in files.map(|file| file.expect("a file").path()) {
            let name = file.file_name().and_then(|name| name.to_str());
            if name.is_some_and(|name| name.starts_with("party-")) {
                let number = std::fs::read_to_string(&file).expect("a number");
                assert_eq!(number, round.to_string(), "a party is in another round");
                numbers += 1;
            }
        }
        assert_eq!(numbers, self.parties, "not all have come in round {round}");
        barrier.wait_for_all().await?;
        Ok(())
    }
}
