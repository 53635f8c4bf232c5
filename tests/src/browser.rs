//! A browser that the test owns: Chromium without a window, and the program that drives it.
//!
//! The browser is started here and not by its driver, so that both end with the test, also if the
//! test is killed. The driver takes [WebDriver](https://www.w3.org/TR/webdriver2/) commands, of which
//! three are needed.

use std::fs;
use std::process::Command;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper::{Method, Request};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};

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
    client: Client<HttpConnector, Full<Bytes>>,
    /// The URL of the session.
    session: String,
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
        let address = address().unwrap();

        let mut browser = Self {
            _driver: driver,
            _browser: browser,
            client: Client::builder(TokioExecutor::new()).build_http(),
            session: address,
        };
        let options = json!({ "debuggerAddress": format!("127.0.0.1:{port}") });
        let wanted = json!({ "alwaysMatch": { "goog:chromeOptions": options } });
        let wanted = json!({ "capabilities": wanted });
        let session = browser.command("/session", wanted).await.unwrap();
        let id = session["sessionId"].as_str().unwrap();
        browser.session = format!("{}/session/{id}", browser.session);
        browser
    }

    /// Opens a page, and waits until it is loaded.
    pub async fn open(&self, url: &str) {
        let opened = self.command("/url", json!({ "url": url })).await;
        opened.unwrap();
    }

    /// Runs the body of a function in the page, and waits for what it returns. It fails also if the
    /// page is left meanwhile.
    pub async fn run(&self, script: &str) -> Result<Value, String> {
        let script = json!({ "script": script, "args": [] });
        self.command("/execute/sync", script).await
    }

    async fn command(&self, path: &str, body: Value) -> Result<Value, String> {
        let request = Request::builder()
            .method(Method::POST)
            .uri(format!("{}{path}", self.session))
            .body(Full::from(body.to_string()))
            .unwrap();
        let response = self.client.request(request).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        let mut answer: Value = serde_json::from_slice(&body).unwrap();
        match answer["value"]["error"].is_string() {
            true => Err(answer["value"].to_string()),
            false => Ok(answer["value"].take()),
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
