//! The owner of a ticket, as the store shows it to people.

use std::sync::Arc;

use crate::error::Error;

/// The client that owns a ticket, and the text that its application has set.
#[derive(Clone, Debug)]
pub(crate) struct Owner {
    /// The machine, the process, and the client within the process: `host/pid/client`.
    pub(crate) client: String,
    /// The text of `client`. If the application has set a text, a space and this text follow.
    pub(crate) whole: Arc<str>,
}

/// The longest text in bytes. With this limit a line of ten thousand tickets fits into one answer
/// of ZooKeeper, which has at most a megabyte.
const LONGEST_TEXT: usize = 64;

impl Owner {
    pub(crate) fn of_this_process(text: &OwnerText) -> Self {
        let uname = rustix::system::uname();
        // The client's part ends at the first space, so it must not contain one.
        let odd = |c: char| c.is_whitespace() || c.is_control();
        let host = uname.nodename().to_string_lossy().replace(odd, "-");
        let (process, client) = (std::process::id(), fastrand::u16(..));
        let client = format!("{host}/{process}/{client:04x}");
        let whole = "".into();
        Self { client, whole }.with(text)
    }

    /// The same client with another text.
    pub(crate) fn with(&self, text: &OwnerText) -> Self {
        let (client, text) = (self.client.clone(), &text.0);
        let whole = match text.is_empty() {
            true => client.as_str().into(),
            false => format!("{client} {text}").into(),
        };
        Self { client, whole }
    }
}

/// The text that an application has set.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnerText(String);

impl OwnerText {
    pub(crate) fn new(text: String) -> Result<Self, Error> {
        check_line("owner", &text)?;
        Ok(Self(text))
    }
}

/// Checks a text of one line that people read. `what` names it in the error.
pub(crate) fn check_line(what: &str, text: &str) -> Result<(), Error> {
    // This includes the two Unicode characters that some programs show as a line break.
    let bad = |c: char| c.is_control() || matches!(c, '\u{2028}' | '\u{2029}');
    let has = match text.chars().find(|c| bad(*c)) {
        Some(c) => format!("it has {c:?}"),
        None if text.len() > LONGEST_TEXT => format!("it has {} bytes", text.len()),
        None => return Ok(()),
    };
    // A text that is much too long would fill the log.
    let shown: String = text.chars().take(LONGEST_TEXT).collect();
    let more = if shown.len() < text.len() { "…" } else { "" };
    Err(Error::config(format!(
        "the {what} {shown:?}{more} is not usable: it takes up to {LONGEST_TEXT} bytes without control characters and line \
         breaks, and {has}"
    )))
}
