//! A connection of somebody else, which has its own transaction.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{ChildStdin, ChildStdout, Stdio};

use super::MysqlServer;
use crate::child::LeashedChild;

/// What the server answers behind the statements of a call.
const END: &str = "end of the answers";

/// A connection as the harness's user. It ends when this value is dropped, and its transaction is
/// rolled back.
#[derive(Debug)]
pub struct Session {
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    _program: LeashedChild,
}

impl MysqlServer {
    /// Opens a connection that stays open.
    pub fn session(&self) -> Session {
        let mut command = self.client();
        // A statement that fails does not end the program.
        command.args(["--unbuffered", "--force"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = LeashedChild::spawn(&mut command, None).unwrap();
        let pipes = program.std();
        Session {
            input: pipes.stdin.take().unwrap(),
            output: BufReader::new(pipes.stdout.take().unwrap()).lines(),
            _program: program,
        }
    }
}

impl Session {
    /// Runs statements, and returns their rows. Blocks until the last one has ended. A statement that
    /// fails has no row.
    pub fn run(&mut self, statements: &str) -> Vec<String> {
        let rows = self.try_run(statements);
        rows.unwrap_or_else(|| panic!("{statements}: the connection has ended"))
    }

    /// The same. `None` if the server has not let the program in.
    pub fn try_run(&mut self, statements: &str) -> Option<Vec<String>> {
        writeln!(self.input, "{statements}; SELECT '{END}';").ok()?;
        let mut rows = Vec::new();
        loop {
            match self.output.next()?.ok()? {
                row if row == END => return Some(rows),
                row => rows.push(row),
            }
        }
    }
}
