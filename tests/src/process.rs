//! Helper processes. They read commands as lines on standard input and answer with lines on
//! standard output. [`Holder`] talks to the program `holder` of this package, which acquires and
//! releases locks through the public API. A helper may be killed or frozen while it holds
//! something. Its standard error is passed through.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use crate::child::LeashedChild;
use crate::eventually::poll;

/// The time for answers that only a busy machine may delay.
const ANSWER: Duration = Duration::from_secs(20);

/// A helper process. Dropping the value kills the process.
#[derive(Debug)]
pub struct Process {
    child: LeashedChild,
    /// `None` when the input has been closed.
    input: Option<ChildStdin>,
    lines: mpsc::Receiver<String>,
}

impl Process {
    /// Starts the command with pipes for its standard input and output.
    pub fn start(command: &mut Command) -> Self {
        let child = LeashedChild::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()), None);
        let mut child = child.unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let input = child.std().stdin.take();
        let output = child.std().stdout.take().unwrap();
        let (line, lines) = mpsc::channel();
        // This thread ends when the output of the child ends.
        thread::spawn(move || {
            for text in BufReader::new(output).lines().map_while(Result::ok) {
                if line.send(text).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            input,
            lines,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Writes a line to the input of the process.
    pub fn say(&mut self, line: &str) {
        let input = self.input.as_mut().expect("its input is closed");
        if let Err(error) = writeln!(input, "{line}") {
            panic!("told {line:?} to process {}: {error}", self.pid());
        }
    }

    /// Closes the input of the process. Its output can still be read.
    pub fn close_input(&mut self) {
        self.input = None;
    }

    /// The next line of the process, or `None` if none comes within the time.
    pub fn hear(&mut self, within: Duration) -> Option<String> {
        match self.lines.recv_timeout(within) {
            Ok(line) => Some(line),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("process {} has ended", self.pid()),
        }
    }

    /// Reads the next line, which must begin with `word`, and returns the rest of it. Panics if
    /// another line comes, or none within the time.
    pub fn expect(&mut self, word: &str, within: Duration) -> String {
        let line = poll(within, || self.hear(Duration::from_millis(100)))
            .unwrap_or_else(|| panic!("no {word} within {within:?}"));
        match line.strip_prefix(word) {
            Some(rest) => rest.trim_start().to_owned(),
            None => panic!("expected {word}, heard {line:?}"),
        }
    }

    /// Sends SIGKILL.
    pub fn kill(self) {
        self.child.kill();
    }

    /// Sends SIGSTOP. Returns when the process has stopped.
    pub fn freeze(&mut self) {
        self.child.freeze();
    }

    /// Sends SIGCONT.
    pub fn thaw(&mut self) {
        self.child.thaw();
    }

    /// Sends this signal, for example SIGTERM as a deployment does.
    pub fn signal(&mut self, signal: Signal) {
        self.child.signal(signal);
    }

    /// Panics if the process has ended.
    pub fn expect_alive(&mut self) {
        if let Some(status) = self.child.ended() {
            panic!("process {} has ended: {status}", self.pid());
        }
    }

    /// Waits until the process has ended, and returns its exit status.
    pub fn ended(&mut self, within: Duration) -> ExitStatus {
        let status = poll(within, || self.child.ended());
        status.unwrap_or_else(|| panic!("process {} goes on", self.pid()))
    }

    /// Closes the input, after which the process should end by itself.
    pub fn finish(self, within: Duration) {
        let Self {
            mut child,
            input,
            lines: _lines,
        } = self;
        drop(input);
        crate::eventually::wait_until("the process ends with its input", within, || {
            child.ended().is_some()
        });
    }
}

/// A process with one client and one lock.
#[derive(Debug)]
pub struct Holder(Process);

/// How a [`Holder`] is started.
#[derive(Clone, Debug)]
pub struct HolderOptions {
    pub url: String,
    /// The lock: `mutex NAME`, `read NAME`, `write NAME`, or `permits K N NAME`.
    pub lock: String,
    pub namespace: String,
    pub ttl: Duration,
    pub wait: Duration,
    pub renew: bool,
    /// Further environment variables.
    pub variables: Vec<(String, String)>,
}

impl HolderOptions {
    /// A mutex with defaults that suit most tests: renewed, and with a wait that is longer than a
    /// test needs.
    pub fn mutex(url: &str, name: &str) -> Self {
        Self {
            url: url.into(),
            lock: format!("mutex {name}"),
            namespace: "lock".into(),
            ttl: Duration::from_secs(2),
            wait: 3 * ANSWER,
            renew: true,
            variables: Vec::new(),
        }
    }
}

impl Holder {
    /// Starts the program. It sends nothing to the store yet. In a test of this package the program
    /// is `env!("CARGO_BIN_EXE_holder")`.
    pub fn start(program: impl AsRef<OsStr>, options: &HolderOptions) -> Self {
        let mut command = Command::new(program);
        command
            .args(options.lock.split(' '))
            .args((!options.renew).then_some("--no-renew"))
            // A long timeout: a stalled machine must not look like a failing store.
            .env("LOCK_OP_TIMEOUT", "30s")
            .envs(options.variables.iter().cloned())
            .env("LOCK_URL", &options.url)
            .env("LOCK_NAMESPACE", &options.namespace)
            .env("LOCK_TTL", format!("{}ms", options.ttl.as_millis()))
            .env("LOCK_WAIT", format!("{}ms", options.wait.as_millis()));
        Self(Process::start(&mut command))
    }

    /// Acquires the lock and returns the token. Panics if the lock is not granted.
    pub fn acquire(&mut self) -> u64 {
        self.ask_to_acquire();
        self.held(ANSWER)
    }

    /// Tells the process to wait for the lock. [`held`](Self::held) waits until it holds it.
    pub fn ask_to_acquire(&mut self) {
        self.0.say("acquire");
    }

    /// Waits until the process holds the lock, and returns the token.
    pub fn held(&mut self, within: Duration) -> u64 {
        self.0.expect("HELD", within).parse().unwrap()
    }

    /// Tries without waiting. Returns the token, or the kind of the error.
    pub fn try_acquire(&mut self) -> Result<u64, String> {
        self.0.say("try");
        self.held_or_failed()
    }

    fn held_or_failed(&mut self) -> Result<u64, String> {
        let answer = self.0.hear(ANSWER).expect("no answer");
        match answer.split_once(' ') {
            Some(("HELD", token)) => Ok(token.parse().unwrap()),
            Some(("FAILED", kind)) => Err(kind.into()),
            _ => panic!("expected HELD or FAILED, heard {answer:?}"),
        }
    }

    /// Detaches the lock, and returns the text for the next process.
    pub fn detach(&mut self) -> String {
        self.0.say("detach");
        self.0.expect("DETACHED", ANSWER)
    }

    /// Adopts a lock from its text. Returns the token, or the kind of the error.
    pub fn adopt(&mut self, text: &str) -> Result<u64, String> {
        self.0.say(&format!("adopt {text}"));
        self.held_or_failed()
    }

    /// Downgrades the write hold, so that readers are granted.
    pub fn downgrade(&mut self) {
        self.0.say("downgrade");
        assert_eq!(self.0.expect("DOWNGRADED", ANSWER), "");
    }

    /// Releases the lock, and returns `Released` or `AlreadyLost`.
    pub fn release(&mut self) -> String {
        self.0.say("release");
        self.0.expect("RELEASED", ANSWER)
    }

    /// Whether the guard of the process considers itself valid.
    pub fn is_valid(&mut self) -> bool {
        self.0.say("valid");
        self.0.expect("VALID", ANSWER).parse().unwrap()
    }

    /// Waits until the guard of the process is lost, and returns the reason.
    pub fn lost(&mut self, within: Duration) -> String {
        self.0.say("lost");
        self.0.expect("LOST", within)
    }

    pub fn process(&mut self) -> &mut Process {
        &mut self.0
    }

    /// Closes the input. After that the process drops its guard, shuts its client down and ends.
    pub fn finish(self, within: Duration) {
        self.0.finish(within);
    }

    /// Sends SIGKILL, whatever the process holds or waits for.
    pub fn kill(self) {
        self.0.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Process {
        Process::start(Command::new("sh").args(["-c", script]))
    }

    #[test]
    fn lines_go_in_and_come_out() {
        let mut echo = shell("while read -r line; do echo \"GOT $line\"; done");

        echo.say("a b");

        assert_eq!(echo.expect("GOT", ANSWER), "a b");
        echo.finish(ANSWER);
    }

    #[test]
    fn a_frozen_process_answers_after_the_thaw() {
        let mut echo = shell("while read -r line; do echo \"GOT $line\"; done");

        echo.freeze();
        echo.say("a");
        assert_eq!(echo.hear(Duration::from_millis(50)), None);
        echo.thaw();

        assert_eq!(echo.expect("GOT", ANSWER), "a");
    }

    #[test]
    #[should_panic(expected = "expected HELD, heard \"FAILED Busy\"")]
    fn an_unexpected_line_is_shown() {
        let mut process = shell("echo FAILED Busy; read -r line");

        process.expect("HELD", ANSWER);
    }

    #[test]
    #[should_panic(expected = "has ended")]
    fn a_process_that_ended_is_not_waited_for() {
        let mut process = shell("exit 1");

        process.hear(ANSWER);
    }
}
