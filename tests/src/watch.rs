//! Watches a test program. Passes on its output and the output of its children, and searches both
//! for the passwords of its clients.

use std::io::{self, BufRead as _, BufReader, Read, Write};
use std::process::{Command, Stdio, exit};
use std::thread::{self, JoinHandle};

use crate::child::LeashedChild;

/// The password of the suite's clients, except in tests that need another one. It has no characters
/// that a URL escapes, so it looks the same everywhere.
pub const SECRET: &str = "marker-of-a-secret-5d1f0b7e";

const WATCHED: &str = "LOCKCORE_WATCHED";

/// Starts this program a second time. In the second process this returns, and the second process
/// does the work. The first process passes on the output of the second and ends with its status. If
/// a secret was printed, the first process fails.
pub fn output_for(secrets: &'static [&'static str]) {
    if std::env::var_os(WATCHED).is_some() {
        return;
    }
    let mut itself = Command::new(std::env::current_exe().unwrap());
    itself
        .args(std::env::args_os().skip(1))
        .env(WATCHED, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = LeashedChild::spawn(&mut itself, None).unwrap();
    let printed = child.std().stdout.take().unwrap();
    let complained = child.std().stderr.take().unwrap();
    let searches = [
        pass_on(printed, io::stdout(), secrets),
        pass_on(complained, io::stderr(), secrets),
    ];
    let status = child.std().wait().unwrap();
    let found: usize = searches
        .into_iter()
        .map(|search| search.join().unwrap())
        .sum();
    if found > 0 {
        eprintln!("{found} lines of the output contain a password of the tests");
        exit(1);
    }
    exit(status.code().unwrap_or(1));
}

/// Passes on a stream until it ends. Returns the number of lines that contain a secret.
fn pass_on(
    from: impl Read + Send + 'static,
    mut to: impl Write + Send + 'static,
    secrets: &'static [&'static str],
) -> JoinHandle<usize> {
    thread::spawn(move || {
        let mut from = BufReader::new(from);
        let mut line = Vec::new();
        let mut found = 0;
        while from.read_until(b'\n', &mut line).unwrap() > 0 {
            // The reader of this output may be gone. The search continues in any case.
            let _ = to.write_all(&line).and_then(|()| to.flush());
            let text = String::from_utf8_lossy(&line);
            found += usize::from(secrets.iter().any(|secret| text.contains(secret)));
            line.clear();
        }
        found
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_a_secret_is_found_wherever_it_stands() {
        let found = |text: &'static str| {
            pass_on(text.as_bytes(), Vec::new(), &["secret", "other"])
                .join()
                .unwrap()
        };

        assert_eq!(found("nothing\nat all"), 0);
        assert_eq!(found("one secret\nnone\nredis://:secret@host"), 2);
        assert_eq!(found("an other"), 1);
    }
}
