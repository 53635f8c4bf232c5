//! The live page in a browser. What a request sees without one is tested beside the layer.

use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::response::Html;
use axum::routing::get;
use libtest_mimic::Trial;
use lockcore::testing::Store;
use lockcore::{Guard, Locks};
use lockcore_tower::Dashboard;
use serde_json::Value;
use tests::browser::Browser;
use tests::fact::{fact, fact_if_allowed};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// The time for what only a busy machine delays.
const SOON: Duration = Duration::from_secs(60);

const WIDE: u32 = 1_000;
const NARROW: u32 = 380;

pub(crate) fn facts() -> Vec<Trial> {
    vec![
        trial(
            "a_change_is_shown_without_loading_the_page_again",
            a_change_is_shown_without_loading_the_page_again,
        ),
        trial(
            "a_holder_is_asked_after_a_confirmation",
            a_holder_is_asked_after_a_confirmation,
        ),
        trial(
            "a_form_of_another_site_is_refused",
            a_form_of_another_site_is_refused,
        ),
        trial(
            "a_page_whose_server_is_gone_says_so",
            a_page_whose_server_is_gone_says_so,
        ),
        trial(
            "a_page_whose_store_does_not_answer_says_how_old_it_is",
            a_page_whose_store_does_not_answer_says_how_old_it_is,
        ),
        trial(
            "a_selection_stays_until_it_is_given_up",
            a_selection_stays_until_it_is_given_up,
        ),
        trial(
            "a_narrow_and_a_dark_page_can_be_read",
            a_narrow_and_a_dark_page_can_be_read,
        ),
    ]
}

fn trial<T: Future<Output = ()> + 'static>(name: &str, body: fn() -> T) -> Trial {
    let name = format!("page::{name}");
    let body = move || tokio::runtime::Runtime::new().unwrap().block_on(body());
    // Not every system has the packages.
    match std::env::var("LOCKCORE_NO_BROWSER") {
        Ok(_) => fact_if_allowed(name, Err("no browser".to_owned()), body),
        Err(_) => fact(name, Browser::available(), body),
    }
}

/// A server with the page, and one holder.
struct Shop {
    address: SocketAddr,
    server: JoinHandle<()>,
    locks: Locks,
    guard: Guard,
}

impl Shop {
    async fn open() -> Self {
        Self::of(Locks::connect("memory:").unwrap()).await
    }

    async fn of(locks: Locks) -> Self {
        let guard = locks.mutex("order:1").acquire().await.unwrap();
        let page = Dashboard::new(locks.clone()).actions(true).into_router();
        let (address, server) = serve(Router::new().nest("/locks", page)).await;
        Self {
            address,
            server,
            locks,
            guard,
        }
    }

    /// Shows the line of the lock.
    async fn shown_in(&self, browser: &Browser) {
        let url = format!("http://{}/locks?name=order:1", self.address);
        browser.open(&url).await;
        until_it_shows(browser, "holds").await;
    }

    async fn ticket(&self) -> u64 {
        self.locks.inspect("order:1").await.unwrap()[0].ticket
    }
}

async fn serve(app: Router) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (address, server)
}

/// Waits until an element that can be seen has this text.
async fn until_it_shows(browser: &Browser, text: &str) {
    let seen = format!("//body//*[not(@hidden) and contains(text(), '{text}')]");
    let seen = format!("document.evaluate(`{seen}`, document).iterateNext() !== null");
    let shows = format!(
        "return new Promise(done => {{ \
             const look = () => {seen} && done(true); \
             const changes = {{ attributes: true, childList: true, subtree: true }}; \
             new MutationObserver(look).observe(document, changes); \
             look(); \
         }})"
    );
    let shown = async {
        // A failure: the page was replaced by another one meanwhile.
        while browser.run(&shows).await.is_err() {}
    };
    if tokio::time::timeout(SOON, shown).await.is_err() {
        let page = browser.run("return document.body.innerText").await;
        panic!("no {text:?} in {page:?}");
    }
}

async fn click(browser: &Browser, text: &str) {
    let button =
        format!("[...document.querySelectorAll('button')].find(it => it.innerText === '{text}')");
    script(browser, &format!("{button}.click()")).await;
}

async fn script(browser: &Browser, script: &str) -> Value {
    browser.run(script).await.unwrap()
}

async fn a_change_is_shown_without_loading_the_page_again() {
    let browser = &Browser::start(WIDE, false).await;
    let shop = Shop::open().await;
    shop.shown_in(browser).await;
    script(browser, "window.loadedOnce = true").await;

    shop.guard.release().await.unwrap();

    until_it_shows(browser, "Free.").await;
    let once = script(browser, "return window.loadedOnce").await;
    assert_eq!(once, true);
}

async fn a_holder_is_asked_after_a_confirmation() {
    let browser = &Browser::start(WIDE, false).await;
    let shop = Shop::open().await;
    shop.shown_in(browser).await;

    // The link may be replaced by a change at any time, so its address is opened.
    let asks = "return [...document.links].find(link => link.text === 'ask for it').href";
    let asks = script(browser, asks).await;
    browser.open(asks.as_str().unwrap()).await;
    let why = "document.querySelector('input[name=why]').value = 'deploy'";
    script(browser, why).await;
    let line = shop.locks.inspect("order:1").await.unwrap();
    assert!(line[0].asked_back.is_none(), "not asked yet");
    click(browser, "Ask for the lock").await;

    let asked = tokio::time::timeout(SOON, shop.guard.revoked()).await;
    assert_eq!(asked.unwrap().why, "deploy");
    until_it_shows(browser, ": deploy").await;
}

/// The other site has the cookie of the page in the same browser, and guesses the rest of the form.
async fn a_form_of_another_site_is_refused() {
    let browser = &Browser::start(WIDE, false).await;
    let shop = Shop::open().await;
    let ticket = shop.ticket().await;
    let page = format!("http://{}/locks", shop.address);
    let asks = format!("{page}?name=order:1&ticket={ticket}&action=release");
    browser.open(&asks).await;
    let token = "return document.querySelector('input[name=token]').value";
    let token = script(browser, token).await;
    let token = token.as_str().unwrap();
    let form = format!(
        "<form method=post action='{page}'><input name=token value='{token}'>\
         <input name=name value='order:1'><input name=ticket value='{ticket}'>\
         <input name=action value=release><button>Win</button></form>"
    );
    let other = Router::new().route("/", get(move || async move { Html(form) }));
    let (other, _server) = serve(other).await;

    browser.open(&format!("http://{other}/")).await;
    click(browser, "Win").await;

    until_it_shows(browser, "the form is of another site").await;
    shop.guard.ensure(Duration::ZERO).await.unwrap();
}

async fn a_page_whose_server_is_gone_says_so() {
    let browser = &Browser::start(WIDE, false).await;
    let shop = Shop::open().await;
    shop.shown_in(browser).await;

    // Its connections end too.
    shop.server.abort();

    until_it_shows(browser, "Not live").await;
}

async fn a_page_whose_store_does_not_answer_says_how_old_it_is() {
    let browser = &Browser::start(WIDE, false).await;
    let store = Store::new();
    // A look fails only after this time.
    let builder = Locks::builder().op_timeout(10 * SOON);
    let shop = Shop::of(store.client_with(builder).unwrap()).await;
    shop.shown_in(browser).await;

    store.freeze();

    until_it_shows(browser, "the store was not read in time. The table is").await;
    store.thaw();
    let live = "return new Promise(done => { \
                    const look = () => stale.hidden && done(true); \
                    new MutationObserver(look).observe(stale, { attributes: true }); \
                    look(); \
                })";
    let live = tokio::time::timeout(SOON, script(browser, live)).await;
    assert_eq!(live.unwrap(), true);
}

async fn a_selection_stays_until_it_is_given_up() {
    let browser = &Browser::start(WIDE, false).await;
    let shop = Shop::open().await;
    shop.shown_in(browser).await;
    let select = "getSelection().selectAllChildren(document.querySelector('#live td'))";
    script(browser, select).await;
    // The page has listened before, so it has seen each message first.
    let told = "window.told = new Promise(done => stream.addEventListener('message', \
                event => event.data.includes('Free.') && done()))";
    script(browser, told).await;

    shop.guard.release().await.unwrap();

    let told = "return told.then(() => getSelection().toString())";
    assert_eq!(script(browser, told).await, "holds");
    script(browser, "getSelection().empty()").await;
    until_it_shows(browser, "Free.").await;
}

async fn a_narrow_and_a_dark_page_can_be_read() {
    let shop = Shop::open().await;
    let mut grounds = Vec::new();
    for (width, dark) in [(WIDE, false), (NARROW, false), (NARROW, true)] {
        let browser = &Browser::start(width, dark).await;
        shop.shown_in(browser).await;
        let look = "const root = document.documentElement; \
                    return [root.scrollWidth - root.clientWidth, innerWidth, \
                    getComputedStyle(root).backgroundColor, getComputedStyle(root).color, \
                    matchMedia('(prefers-color-scheme: dark)').matches]";
        let look = script(browser, look).await;
        assert_eq!(look[0], 0, "nothing is outside of the screen: {look}");
        assert_eq!(look[1], width, "{look}");
        assert_eq!(look[4], dark, "{look}");
        grounds.push(look[3].clone());
    }
    assert_eq!(grounds[0], grounds[1]);
    assert_ne!(grounds[1], grounds[2], "the text is light on a dark ground");
}
