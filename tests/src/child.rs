//! A child process that never outlives its test. Dropping the value kills the child, and a panic
//! drops the value too. If the test process itself is killed, it drops nothing. Then a watcher
//! kills the child.
//!
//! The watcher is a shell. Its standard input is a pipe from the test process. When the test
//! process ends in any way, the pipe closes, and the shell kills the child. (`PR_SET_PDEATHSIG`
//! would need `unsafe` code between fork and exec. It also fires when the *thread* that started the
//! child ends, which is too early in a test.)

use std::io::{self, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::eventually::poll;

/// The watcher's script. `$1` is the child, and `$2` is a folder to remove, or nothing. `$3` is the
/// number of the signal at which the child ends by itself, or nothing. If a line comes, the child
/// was reaped: another process may have its process id by now. If the input ends without a line,
/// the test process has ended.
const WATCH: &str = r#"
read -r line && exit 0
tries=100
[ -z "$3" ] || kill -"$3" "$1"
while [ -n "$3" ] && kill -0 "$1" && [ "$tries" -gt 0 ]; do sleep 0.1; tries=$((tries - 1)); done
kill -KILL "$1"
[ -z "$2" ] || rm -rf -- "$2"
"#;

/// A child that runs, or that has ended by itself and has not been reaped yet.
#[derive(Debug)]
pub struct LeashedChild {
    child: Child,
    watcher: Child,
}

impl LeashedChild {
    /// Starts the command. `litter` is a temporary folder. If the test process is killed, the
    /// watcher removes this folder.
    ///
    /// The child and the watcher get process groups of their own. So Ctrl-C at a terminal ends only
    /// the test process, which ends them.
    pub fn spawn(command: &mut Command, litter: Option<&Path>) -> io::Result<Self> {
        Self::spawn_to_end_by(None, command, litter)
    }

    /// [`spawn`](Self::spawn), for a child that would leave something to the machine if it were
    /// killed. The watcher sends it this signal, and kills it only if it does not end within ten
    /// seconds.
    pub(crate) fn spawn_to_end_by(
        signal: Option<Signal>,
        command: &mut Command,
        litter: Option<&Path>,
    ) -> io::Result<Self> {
        let child = command.process_group(0).spawn()?;
        let watcher = Command::new("sh")
            .args(["-c", WATCH, "watcher", &child.id().to_string()])
            .arg(litter.unwrap_or(Path::new("")))
            .args(signal.map(|signal| signal.as_raw().to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn();
        match watcher {
            Ok(watcher) => Ok(Self { child, watcher }),
            Err(error) => {
                kill_and_reap(child);
                Err(error)
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The exit status, if the child has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// Sends SIGSTOP. Returns when every thread of the child has stopped.
    pub fn freeze(&mut self) {
        self.signal(Signal::STOP);
        waitid(WaitId::Pid(self.id()), WaitIdOptions::STOPPED).unwrap_or_else(|error| {
            panic!("child {} did not stop: {error}", self.pid());
        });
    }

    /// Sends SIGCONT.
    pub fn thaw(&mut self) {
        self.signal(Signal::CONT);
    }

    /// Sends SIGTERM, and SIGCONT for a frozen child. Panics if the child does not end within this
    /// time.
    pub fn stop(self, within: Duration) -> ExitStatus {
        self.stop_by(Signal::TERM, within)
    }

    /// [`stop`](Self::stop) with another signal.
    pub(crate) fn stop_by(mut self, signal: Signal, within: Duration) -> ExitStatus {
        self.signal(signal);
        // `signal` would panic if the child had ended meanwhile. The process id belongs to the
        // child until the child is reaped.
        kill_process(self.id(), Signal::CONT).unwrap();
        let status = poll(within, || self.ended());
        status.unwrap_or_else(|| {
            panic!(
                "child {} did not end within {within:?} of {signal:?}",
                self.pid()
            )
        })
    }

    /// Sends SIGKILL and reaps the child. A frozen child dies of it too.
    pub fn kill(self) {
        drop(self);
    }

    pub(crate) fn std(&mut self) -> &mut Child {
        &mut self.child
    }

    pub(crate) fn signal(&mut self, signal: Signal) {
        // This must be checked first: if the child was reaped, another process may have its process
        // id.
        if let Some(status) = self.ended() {
            panic!("child {} has ended by itself: {status}", self.pid());
        }
        kill_process(self.id(), signal).unwrap();
    }

    fn id(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for LeashedChild {
    fn drop(&mut self) {
        // Nothing here may panic, because the test may already be panicking.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(mut pipe) = self.watcher.stdin.take() {
            let _ = pipe.write_all(b"reaped\n");
        }
        let _ = self.watcher.wait();
    }
}

fn kill_and_reap(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::eventually::wait_until;

    const SOON: Duration = Duration::from_secs(10);

    fn sleeper() -> LeashedChild {
        LeashedChild::spawn(Command::new("sleep").arg("600"), None).unwrap()
    }

    /// The state letter of a process. Z is a zombie, which nobody has reaped. `None` if there is no
    /// such process.
    fn state(pid: u32) -> Option<char> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    #[test]
    fn a_dropped_child_is_gone_also_when_it_was_frozen() {
        let mut child = sleeper();
        let pid = child.pid();

        child.freeze();
        assert_eq!(state(pid), Some('T'));
        drop(child);

        assert_eq!(state(pid), None);
    }

    #[test]
    fn a_panic_takes_the_child_with_it() {
        let child = sleeper();
        let pid = child.pid();

        let panicked = std::thread::spawn(move || {
            let _child = child;
            std::panic::resume_unwind(Box::new("as a failing test does"));
        })
        .join();

        assert!(panicked.is_err());
        assert_eq!(state(pid), None);
    }

    #[test]
    fn a_thawed_child_runs_again_and_can_be_frozen_again() {
        let mut child = sleeper();

        child.freeze();
        child.thaw();
        wait_until("runs again", SOON, || state(child.pid()) == Some('S'));
        child.freeze();

        assert_eq!(state(child.pid()), Some('T'));
    }

    #[test]
    fn the_watcher_kills_the_child_and_removes_its_folder_when_we_vanish() {
        let litter = tempfile::tempdir().unwrap().keep();
        let mut child =
            LeashedChild::spawn(Command::new("sleep").arg("600"), Some(&litter)).unwrap();

        drop(child.watcher.stdin.take()); // the kernel does this when the test process is killed

        wait_until("child killed", SOON, || child.ended().is_some());
        wait_until("folder removed", SOON, || !litter.exists());
    }

    #[test]
    fn the_watcher_lets_a_child_end_by_itself_when_we_vanish() {
        let folder = tempfile::tempdir().unwrap();
        let (begun, ended) = (folder.path().join("begun"), folder.path().join("ended"));
        // Not SIGQUIT: a shell that starts the tests in the background makes them ignore it.
        let script = r#"trap 'kill $!; : > "$2"; exit' TERM; sleep 600 & : > "$1"; wait"#;
        let mut command = Command::new("sh");
        command.args(["-c", script, "child"]).args([&begun, &ended]);
        let signal = Some(Signal::TERM);
        let mut child = LeashedChild::spawn_to_end_by(signal, &mut command, None).unwrap();
        wait_until("begun", SOON, || begun.exists());

        drop(child.watcher.stdin.take());

        wait_until("child ended", SOON, || child.ended().is_some());
        assert!(ended.exists());
    }

    #[test]
    fn the_watcher_spares_the_folder_of_a_child_that_was_dropped() {
        let litter = tempfile::tempdir().unwrap();
        let child =
            LeashedChild::spawn(Command::new("sleep").arg("600"), Some(litter.path())).unwrap();

        drop(child);

        assert!(litter.path().exists());
    }
}
