//! A browser that the test owns: Chromium without a window, and the program that drives it.
//!
//! The browser is started here and not by its driver, so that both end with the test, also if the
//! test is killed.

use std::fs;
use std::process::Command;
use std::time::Duration;

use fantoccini::{Client, ClientBuilder};
use serde_json::json;

use crate::daemon::{self, Daemon};

/// Debian's program in the path is a script, which would leave the browser behind.
const PROGRAM: &str = "/usr/lib/chromium/chromium-headless-shell";
const DRIVER: &str = "chromedriver";

/// The time for a start. A start takes a second, or some on two saturated cores.
const START: Duration = Duration::from_secs(60);

/// A running browser. It ends when this value is dropped.
#[derive(Debug)]
pub struct Browser {
    /// The driver is killed first.
    _driver: Daemon,
    _browser: Daemon,
    pub client: Client,
}

impl Browser {
    /// `Err` says what to install.
    pub fn available() -> Result<(), String> {
        let install = "apt-get install chromium-headless-shell chromium-driver";
        daemon::can_run(PROGRAM, "--version", install)?;
        daemon::can_run(DRIVER, "--version", install)
    }

    /// A browser of this width. With `dark`, it tells pages that the user likes dark colours.
    pub async fn start(width: u32, dark: bool) -> Self {
        let browser = Daemon::new("the browser", "browser-");
        let mut command = Command::new(PROGRAM);
        // The browser cannot have its sandbox as root. It sees pages of the test only.
        command.args(["--headless", "--no-sandbox", "--remote-debugging-port=0"]);
        command.arg(format!("--window-size={width},900"));
        command.arg(format!("--user-data-dir={}", browser.folder().display()));
        // 0 is dark, and 1 is light.
        let scheme = u8::from(!dark);
        command.arg(format!("--blink-settings=preferredColorScheme={scheme}"));
        command.arg("about:blank");
        // The browser writes its port there, and then the path of the socket.
        let file = browser.folder().join("DevToolsActivePort");
        let port = || {
            let text = fs::read_to_string(&file).ok()?;
            let (port, _path) = text.split_once('\n').filter(|(_, path)| !path.is_empty())?;
            Some(port.to_owned())
        };
        started(browser.serve(&mut command, START, || port().is_some()));
        let port = port().unwrap();

        let driver = Daemon::new("the driver of the browser", "driver-");
        let address = || {
            let log = driver.log_from(0);
            let (_, rest) = log.split_once("started successfully on port ")?;
            let (port, _) = rest.split_once('.')?;
            Some(format!("http://127.0.0.1:{port}"))
        };
        let mut command = Command::new(DRIVER);
        started(driver.serve(command.arg("--port=0"), START, || address().is_some()));

        let options = json!({ "debuggerAddress": format!("127.0.0.1:{port}") });
        let options = [("goog:chromeOptions".to_owned(), options)];
        let mut builder =
            ClientBuilder::new(hyper_util::client::legacy::connect::HttpConnector::new());
        let builder = builder.capabilities(options.into_iter().collect());
        let client = builder.connect(&address().unwrap()).await.unwrap();
        Self {
            _driver: driver,
            _browser: browser,
            client,
        }
    }
}

fn started(outcome: Result<(), daemon::NotStarted>) {
    match outcome {
        Ok(()) => {}
        Err(daemon::NotStarted::Failed(why)) => panic!("{why}"),
        Err(daemon::NotStarted::PortTaken) => unreachable!("both choose a free port"),
    }
}
