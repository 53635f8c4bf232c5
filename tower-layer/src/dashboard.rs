//! A live page for operators: which names are in use, who holds them, and who waits.
//!
//! `page` makes the HTML, `look` reads the store, and `looks` lets open pages share what was read. Everything is at one path, so that every link
//! is a query and works wherever the router is nested, also behind a proxy that rewrites paths.

mod form;
mod happened;
mod look;
mod looks;
mod page;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures_util::stream;
use http::header::{
    ACCEPT, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, LOCATION, SET_COOKIE, VARY,
};
use http::{HeaderMap, HeaderValue, StatusCode};
use lockcore::{Error, ErrorKind, Locks};
use tokio::time::Instant;

use form::{Action, Form, Refused};
use happened::{Happened, Latest};
use look::{Look, Wanted};
use looks::{LONGEST_STREAM, Looks};
use page::Page;

/// How much time a holder has that is asked for its lock.
const WITHIN: Duration = Duration::from_secs(30);
/// After this time the browser opens another stream. A server that stops then takes no new ones.
const AGAIN: Duration = Duration::from_secs(1);
/// An error that comes within this time is shown to the operator who asks a holder for its lock.
const AT_ONCE: Duration = Duration::from_secs(1);
/// The largest form.
const MOST_BYTES: usize = 64 * 1024;

/// A live page that shows which names are in use, the line of each name in order, who holds it and
/// who waits, since when, and who was asked for it.
///
/// Nest its [router](Self::into_router) **behind your own authentication**: the names of locks and
/// the machines that hold them are not for everybody. The page is HTML from the server. Its table is
/// replaced at each change, by server-sent events. Without JavaScript it is loaded again every five
/// seconds. It loads nothing from other sites.
///
/// With [`actions`](Self::actions), an operator can ask a holder for its lock, and take a lock away.
/// Each is confirmed on a page of its own. A form of another site is refused.
///
/// A page that somebody looks at costs the store one request for each [look](Self::every) at a line. A
/// look at the names costs as many as a [list with summaries](lockcore::inspect::NamesInUse::with_summaries)
/// of all names that begin as the page says: on Redis at least one for each 1,000 keys of the database.
/// Open pages that show the same share their looks. If looks take long, they are less frequent, so that all
/// pages together use at most a fifth of the time of one connection. A page that has to wait for long says
/// that it is not live. A page in a hidden tab asks for nothing. At most 500 names, those with the most
/// waiters, and 500 tickets of a line, are shown.
///
/// Below the table are the latest [events](Locks::events) of this process since the router was made:
/// lost locks, and outages of the store. Because the page listens to them, the client connects again
/// after an outage even if nobody uses it.
///
/// ```no_run
/// use axum::Router;
/// use lockcore::Locks;
/// use lockcore_tower::Dashboard;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let locks = Locks::from_env()?;
/// let app: Router = Router::new().nest("/locks", Dashboard::new(locks).into_router());
/// // Put your authentication around it, with `.layer(…)`.
/// let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
/// axum::serve(listener, app).await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
#[must_use = "it does nothing until its router is used"]
pub struct Dashboard {
    locks: Locks,
    prefix: String,
    every: Duration,
    actions: bool,
}

impl Dashboard {
    /// A page that shows the names in the [namespace](lockcore::Builder::namespace) of these locks,
    /// and changes nothing.
    pub fn new(locks: Locks) -> Self {
        Self {
            locks,
            prefix: String::new(),
            every: Duration::from_secs(1),
            actions: false,
        }
    }

    /// Shows only the names that begin with this, and acts on no other. By default all names.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The shortest time between two looks at the store, at least 100 ms. The default is a second.
    pub fn every(mut self, pause: Duration) -> Self {
        self.every = pause.max(Duration::from_millis(100));
        self
    }

    /// Lets everybody who can open the page ask holders for their locks, and take locks away. Off by
    /// default.
    pub fn actions(mut self, yes: bool) -> Self {
        self.actions = yes;
        self
    }

    /// The page, at the path `/` of this router.
    pub fn into_router<S>(self) -> Router<S>
    where
        S: Clone + Send + Sync + 'static,
    {
        Router::new()
            .route("/", get(show).post(act))
            .with_state(Arc::new(Served {
                latest: Latest::of(&self.locks),
                looks: Looks::new(self.every),
                dashboard: self,
            }))
    }

    async fn look(&self, wanted: &Wanted) -> Look {
        look::look(&self.locks, &self.prefix, wanted).await
    }

    fn page<'a>(
        &'a self,
        wanted: &'a Wanted,
        look: &'a Look,
        happened: &'a [Happened],
    ) -> Page<'a> {
        Page {
            prefix: &self.prefix,
            actions: self.actions,
            wanted,
            look,
            happened,
        }
    }
}

/// What the requests share.
#[derive(Debug)]
struct Served {
    dashboard: Dashboard,
    latest: Latest,
    looks: Looks,
}

async fn show(State(served): State<Arc<Served>>, request: Request) -> Response {
    let dashboard = &served.dashboard;
    let wanted = Wanted::of(request.uri().query().unwrap_or_default());
    if !wanted.is_below(&dashboard.prefix) {
        return refused(StatusCode::NOT_FOUND, "this page does not show this name");
    }
    if wants_events(request.headers()) {
        return events(served, wanted).into_response();
    }
    let look = Arc::new(dashboard.look(&wanted).await);
    // So its stream does not begin with an older one.
    served.looks.note(wanted.clone(), Arc::clone(&look));
    let nonce = form::draw();
    let token = match wanted.ask {
        Some(_) if !dashboard.actions => return read_only(),
        Some(_) => Some(form::token(request.headers()).unwrap_or_else(form::draw)),
        None => None,
    };
    let status = match &*look {
        Look::Failed(_) => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::OK,
    };
    let happened = served.latest.events();
    let page = dashboard.page(&wanted, &look, &happened);
    let html = page::whole(page, &nonce, token.as_deref());
    let mut response = (status, html.into_string()).into_response();
    let headers = response.headers_mut();
    let html = HeaderValue::from_static("text/html; charset=utf-8");
    headers.insert(CONTENT_TYPE, html);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(VARY, HeaderValue::from_static("accept"));
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; \
         connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    );
    let cookie = token.map(|token| form::cookie(&token));
    for (header, value) in [
        (CONTENT_SECURITY_POLICY, Some(policy)),
        (SET_COOKIE, cookie),
    ] {
        if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
            headers.insert(header, value);
        }
    }
    response
}

fn wants_events(headers: &HeaderMap) -> bool {
    let accept = headers.get(ACCEPT).and_then(|accept| accept.to_str().ok());
    accept.is_some_and(|accept| accept.contains("text/event-stream"))
}

/// The table of the page, at each change. The browser drops the stream when the page is left.
fn events(served: Arc<Served>, wanted: Wanted) -> Response {
    let open = Open {
        served,
        wanted,
        ends: Instant::now() + LONGEST_STREAM,
        pause: Duration::ZERO,
        shown: None,
    };
    let changes = stream::unfold(open, async |mut open: Open| {
        let event = open.next().await?;
        Some((Ok::<_, Infallible>(event.retry(AGAIN)), open))
    });
    let mut response = Sse::new(changes).into_response();
    // nginx would keep the events until it has many.
    let headers = response.headers_mut();
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A stream that is open.
struct Open {
    served: Arc<Served>,
    wanted: Wanted,
    ends: Instant,
    /// The time until the next look.
    pause: Duration,
    /// The latest table.
    shown: Option<String>,
}

impl Open {
    /// Waits until the table has changed. `None` at the end of the stream.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::time::sleep(self.pause).await;
            if self.shown.is_some() && Instant::now() >= self.ends {
                return None;
            }
            let (served, wanted) = (Arc::clone(&self.served), self.wanted.clone());
            let look = async move { served.dashboard.look(&wanted).await };
            let Served {
                dashboard,
                latest,
                looks,
            } = &*self.served;
            let Some(seen) = looks.next(&self.wanted, self.ends, look).await else {
                self.ends = Instant::now();
                // The page would show its old table as live. An event without data is no event.
                let late = || Event::default().event("late").data("late");
                return self.shown.replace(String::new()).is_none().then(late);
            };
            self.pause = dashboard.every.saturating_sub(seen.at.elapsed());
            let happened = latest.events();
            let page = dashboard.page(&self.wanted, &seen.look, &happened);
            let now = page::table(page).into_string();
            if self.shown.as_ref() != Some(&now) {
                self.shown = Some(now.clone());
                return Some(Event::default().data(now));
            }
        }
    }
}

async fn act(State(served): State<Arc<Served>>, request: Request) -> Response {
    let dashboard = &served.dashboard;
    if !dashboard.actions {
        return read_only();
    }
    let (parts, body) = request.into_parts();
    let form = match read(&parts.headers, body).await {
        Ok(form) => form,
        Err(Refused(why)) => return refused(StatusCode::FORBIDDEN, why),
    };
    if !form.name.starts_with(&dashboard.prefix) {
        return refused(StatusCode::FORBIDDEN, "this page does not show this name");
    }
    let Form {
        name,
        ticket,
        action,
        why,
    } = form;
    let back = page::link(&[("name", &name)]);
    let locks = dashboard.locks.clone();
    let done = match action {
        Action::Revoke => ask(locks, name, ticket, why).await,
        Action::Release => locks.force_release(&name, ticket).await.map(|_| ()),
    };
    if let Err(error) = done {
        let status = match error.kind() {
            ErrorKind::Config => StatusCode::BAD_REQUEST,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        return refused(status, &error.to_string());
    }
    match HeaderValue::try_from(back) {
        Ok(back) => (StatusCode::SEE_OTHER, [(LOCATION, back)]).into_response(),
        Err(_) => StatusCode::NO_CONTENT.into_response(),
    }
}

/// Asks a holder for its lock. The holder may take its time: the page shows that it was asked. If
/// this future is dropped, the holder is asked all the same.
async fn ask(locks: Locks, name: String, ticket: u64, why: String) -> Result<(), Error> {
    let asked = tokio::spawn(async move {
        let asked = locks.revoke(&name, ticket, WITHIN, &why).await;
        if let Err(error) = &asked {
            tracing::warn!(%error, "a holder was asked for its lock, and has it still");
        }
        asked.map(|_| ())
    });
    match tokio::time::timeout(AT_ONCE, asked).await {
        Ok(Ok(asked)) => asked,
        // It goes on, or the runtime stops.
        Err(_) | Ok(Err(_)) => Ok(()),
    }
}

async fn read(headers: &HeaderMap, body: Body) -> Result<Form, Refused> {
    let body = axum::body::to_bytes(body, MOST_BYTES).await;
    Form::read(headers, &body.map_err(|_| Refused("the form is too long"))?)
}

fn read_only() -> Response {
    refused(StatusCode::FORBIDDEN, "this page changes nothing")
}

fn refused(status: StatusCode, why: &str) -> Response {
    (status, format!("{why}\n")).into_response()
}
