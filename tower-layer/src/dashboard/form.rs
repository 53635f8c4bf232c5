//! Forms, and how a form of another site is refused: the page that asks for a confirmation sets a
//! cookie and puts the same token into its form. Another site can send a form with the cookie, but
//! cannot read the cookie, so it does not know the token. The cookie is not sent with requests of
//! other sites at all by browsers that know `SameSite`, and `Sec-Fetch-Site` says where a request
//! comes from in browsers of our day. Without TLS they do not send it, and another host of the same
//! domain can set the cookie: so then the `Origin` must be this host. The token is in no memory of the
//! server, so another replica may get the form.

use http::HeaderMap;
use http::header::{COOKIE, HOST, ORIGIN};

const NAME: &str = "lockcore-form";
const DIGITS: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Action {
    Revoke,
    Release,
}

impl Action {
    pub(super) fn of(text: &str) -> Option<Self> {
        [Self::Revoke, Self::Release]
            .into_iter()
            .find(|action| action.text() == text)
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Revoke => "revoke",
            Self::Release => "release",
        }
    }
}

/// Why a form was refused.
#[derive(Debug)]
pub(super) struct Refused(pub(super) &'static str);

#[derive(Debug)]
pub(super) struct Form {
    pub(super) name: String,
    pub(super) ticket: u64,
    pub(super) action: Action,
    pub(super) why: String,
}

impl Form {
    pub(super) fn read(headers: &HeaderMap, body: &[u8]) -> Result<Self, Refused> {
        if !is_from_here(headers) {
            return Err(Refused(
                "the form is of another site (or a proxy changes the Host header: let it pass)",
            ));
        }
        let field = |wanted: &str| {
            let mut fields = form_urlencoded::parse(body);
            let found = fields.find(|(name, _)| name == wanted);
            found.map(|(_, value)| value.into_owned())
        };
        let cookie = token(headers);
        if cookie.is_none() || cookie != field("token") {
            return Err(Refused(
                "the form is not of this page; go back, load the page, and try again",
            ));
        }
        let form = || {
            Some(Self {
                name: field("name")?,
                ticket: field("ticket")?.parse().ok()?,
                action: Action::of(&field("action")?)?,
                why: field("why").unwrap_or_default(),
            })
        };
        form().ok_or(Refused("the form is incomplete"))
    }
}

/// Whether the browser says that the form is of this site. Without `Sec-Fetch-Site` and `Origin` it
/// says nothing, and the token decides.
fn is_from_here(headers: &HeaderMap) -> bool {
    if let Some(from) = headers.get("sec-fetch-site") {
        return from == "same-origin";
    }
    let Some(origin) = headers.get(ORIGIN) else {
        return true;
    };
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let origin = origin.to_str().ok();
    let origin = origin.and_then(|origin| origin.split_once("://"));
    origin.is_some_and(|(_, origin)| Some(origin) == host)
}

/// The token in the cookie of a request.
pub(super) fn token(headers: &HeaderMap) -> Option<String> {
    let cookies = headers.get_all(COOKIE).iter();
    let cookies = cookies.filter_map(|cookies| cookies.to_str().ok());
    let mut each = cookies.flat_map(|cookies| cookies.split(';'));
    let token = each.find_map(|cookie| cookie.trim().strip_prefix(NAME)?.strip_prefix('='))?;
    let is_ours = token.len() == DIGITS && token.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_ours.then(|| token.to_owned())
}

pub(super) fn cookie(token: &str) -> String {
    format!("{NAME}={token}; HttpOnly; SameSite=Strict")
}

/// 128 random bits. If the system has none, the text is empty, and no form is accepted.
pub(super) fn draw() -> String {
    let mut bytes = [0; DIGITS / 2];
    match getrandom::fill(&mut bytes) {
        Ok(()) => bytes.iter().map(|byte| format!("{byte:02x}")).collect(),
        Err(_) => String::new(),
    }
}
