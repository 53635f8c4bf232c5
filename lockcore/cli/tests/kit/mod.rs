//! Starts the tool, and waits for what it does. By default the store is a SQLite file in a temporary
//! folder: it works across processes and needs no server.

#![allow(dead_code, reason = "each test program uses a part")]

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Longer than any stall of a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Shop {
    folder: TempDir,
    url: String,
}

impl Shop {
    pub fn new() -> Self {
        Self::at("sqlite:locks.db")
    }

    /// With the store at this URL.
    pub fn at(url: impl Into<String>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let url = url.into();
        Self { folder, url }
    }

    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    /// What is in a file, or nothing if there is no file.
    pub fn read(&self, file: &str) -> String {
        std::fs::read_to_string(self.path(file)).unwrap_or_default()
    }

    /// The tool, in the folder.
    pub fn tool(&self, words: &[&str]) -> Command {
        let mut tool = Command::new(env!("CARGO_BIN_EXE_lockcore"));
        tool.args(words).current_dir(self.folder.path());
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with("LOCK_") {
                tool.env_remove(variable);
            }
        }
        tool.env("LOCK_URL", &self.url);
        // A stalled machine must not look like a store that is down.
        tool.env("LOCK_OP_TIMEOUT", "8s");
        // As cron and service managers start it: without a terminal.
        tool.stdin(Stdio::null());
        tool
    }

    /// Another program with the tool and these words as its last arguments, and with what the tool
    /// has: variables, folder, no terminal.
    pub fn through(&self, program: &str, arguments: &[&str], words: &[&str]) -> Command {
        let tool = self.tool(words);
        let mut other = Command::new(program);
        other.args(arguments).arg(tool.get_program());
        other.args(tool.get_args()).stdin(Stdio::null());
        other.current_dir(self.folder.path());
        for (variable, value) in tool.get_envs() {
            match value {
                Some(value) => other.env(variable, value),
                None => other.env_remove(variable),
            };
        }
        other
    }

    /// Runs the tool to its end.
    pub fn outcome(&self, words: &[&str]) -> Output {
        self.tool(words).output().unwrap()
    }

    pub fn code(&self, words: &[&str]) -> i32 {
        self.outcome(words).status.code().unwrap()
    }

    /// What the tool prints, if it succeeds.
    pub fn prints(&self, words: &[&str]) -> String {
        let output = self.outcome(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts the tool. It is killed when the test ends.
    pub fn start(&self, words: &[&str]) -> Running {
        Self::begin(self.tool(words))
    }

    /// Starts the tool, or the program in front of it. It is killed when the test ends.
    pub fn begin(mut tool: Command) -> Running {
        // Not the output of the test: a command that is left behind would keep it open.
        tool.stdout(Stdio::null()).stderr(Stdio::piped());
        let child = tool.spawn().unwrap();
        Running(child)
    }

    /// The tool on a terminal of this size, in tmux.
    pub fn screen(&self, columns: u32, rows: u32, words: &[&str]) -> Screen {
        // The server of a screen that was dropped may still be ending.
        static SCREENS: AtomicU32 = AtomicU32::new(0);
        let number = SCREENS.fetch_add(1, Ordering::Relaxed);
        let screen = Screen {
            socket: self.path(&format!("tmux-{number}")),
        };
        let (columns, rows) = (columns.to_string(), rows.to_string());
        let socket = screen.socket.display().to_string();
        let session = ["-S", &socket, "-f", "/dev/null", "new-session", "-d"];
        let window = ["-s", "top", "-x", &columns, "-y", &rows];
        let shell = ["sh", "-c", ON_A_TERMINAL];
        // The server of tmux passes its own variables on.
        let tmux = [&session[..], &window, &shell].concat();
        let begun = self.through("tmux", &tmux, words).status();
        assert!(begun.unwrap().success());
        screen
    }

    /// Waits until a holder or waiter of a name is there, and returns its ticket.
    pub fn ticket(&self, name: &str, holds: bool) -> String {
        let mark = format!("\"holds\":{holds}");
        let line = until("a ticket", || {
            let line = self.prints(&["inspect", "--json", name]);
            let place = line.lines().find(|place| place.contains(&mark));
            place.map(str::to_owned)
        });
        let (_, rest) = line.split_once("\"ticket\":").unwrap();
        rest.split(',').next().unwrap().to_owned()
    }

    /// Waits until a file has a text, and returns the text.
    pub fn written(&self, file: &str) -> String {
        until(file, || {
            Some(self.read(file)).filter(|text| text.ends_with('\n'))
        })
    }
}

/// Waits until something has become true.
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            began.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Checks a report of `doctor`: everything works, and so many lines are warnings. Not all stores can
/// give a held lock away.
pub fn is_good(report: &str, warnings: usize) {
    const CANNOT: &str = "skipped gives a held lock to another client: this store cannot";
    let warns = report.lines().filter(|line| line.starts_with("warn "));
    assert_eq!(warns.count(), warnings, "{report}");
    let works = |line: &&str| line.starts_with("ok ") || *line == CANNOT;
    assert_eq!(report.lines().filter(works).count(), 11, "{report}");
    assert_eq!(report.lines().count(), 11 + warnings, "{report}");
}

/// Whether a process runs. A process that has ended and was not reaped does not.
pub fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.trim()));
    stat.is_ok_and(|stat| !stat.contains(") Z "))
}

/// Runs the tool, and says whether it has left the terminal as it was. `cat` keeps the session open.
/// Ctrl-C is for the tool only.
const ON_A_TERMINAL: &str =
    r#"trap : INT; was=$(stty -g); "$0" "$@"; [ "$was" = "$(stty -g)" ] && echo restored; cat"#;

/// A terminal in tmux. It ends with the test.
pub struct Screen {
    socket: PathBuf,
}

impl Screen {
    fn tmux(&self, words: &[&str]) -> Command {
        let mut tmux = Command::new("tmux");
        tmux.arg("-S").arg(&self.socket).args(["-f", "/dev/null"]);
        tmux.args(words);
        tmux
    }

    /// Presses keys, by their names in tmux.
    pub fn press(&self, keys: &[&str]) {
        let pressed = self.tmux(&["send-keys", "-t", "top"]).args(keys).status();
        assert!(pressed.unwrap().success());
    }

    pub fn resize(&self, columns: u32) {
        let columns = columns.to_string();
        let words = ["resize-window", "-t", "top", "-x", &columns];
        assert!(self.tmux(&words).status().unwrap().success());
    }

    /// What is on the screen.
    pub fn text(&self) -> String {
        let text = self.tmux(&["capture-pane", "-p", "-t", "top"]).output();
        String::from_utf8(text.unwrap().stdout).unwrap()
    }

    /// Waits until this is on the screen.
    pub fn shows(&self, part: &str) {
        let began = Instant::now();
        while !self.text().contains(part) {
            assert!(
                began.elapsed() < PATIENCE,
                "no {part:?} in\n{}",
                self.text()
            );
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits until the tool has ended, and checks that it has left the terminal as it was.
    pub fn ends(&self) {
        self.shows("restored");
        assert_eq!(self.text().trim(), "restored");
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]).output();
    }
}

pub struct Running(Child);

impl Running {
    /// Kills this process when the test ends.
    pub fn of(process: Child) -> Self {
        Self(process)
    }

    pub fn signal(&self, signal: &str) {
        let pid = self.0.id().to_string();
        let kill = Command::new("kill").args([signal, &pid]).status().unwrap();
        assert!(kill.success());
    }

    pub fn ended(&mut self) -> ExitStatus {
        until("the end of the tool", || self.0.try_wait().unwrap())
    }

    /// The exit code, and what was said on standard error.
    pub fn said(mut self) -> (i32, String) {
        let status = self.ended();
        let mut said = String::new();
        let mut stderr = self.0.stderr.take().unwrap();
        std::io::Read::read_to_string(&mut stderr, &mut said).unwrap();
        (status.code().unwrap(), said)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
