//! What a page wants to see, and what the store has.

use lockcore::inspect::{NameInUse, TicketInfo};
use lockcore::{Error, Locks};

use super::form::Action;

/// How many names are shown.
pub(super) const MOST_NAMES: usize = 500;

/// How many names the store is asked for at once.
const PAGE: u32 = 1_000;

/// The query of a page.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Wanted {
    /// The beginning of the names to show.
    pub(super) begin: String,
    /// A part of the names to show.
    pub(super) part: String,
    /// The name whose line is shown.
    pub(super) name: Option<String>,
    /// The action to confirm, and the ticket that it is about.
    pub(super) ask: Option<(Action, u64)>,
}

impl Wanted {
    pub(super) fn of(query: &str) -> Self {
        let mut wanted = Self::default();
        let mut action = None;
        let mut ticket = None;
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match &*name {
                "begin" => wanted.begin = value.into_owned(),
                "part" => wanted.part = value.into_owned(),
                "name" => wanted.name = Some(value.into_owned()),
                "action" => action = Action::of(&value),
                "ticket" => ticket = value.parse().ok(),
                _ => {}
            }
        }
        wanted.ask = action.zip(ticket).filter(|_| wanted.name.is_some());
        wanted
    }

    /// Whether the page is about names that begin with this only.
    pub(super) fn is_below(&self, prefix: &str) -> bool {
        let name = self.name.as_ref();
        name.is_none_or(|name| name.starts_with(prefix))
    }
}

/// What the store has.
#[derive(Debug)]
pub(super) enum Look {
    /// The names with the most waiters come first.
    Names {
        names: Vec<NameInUse>,
        /// There are more names.
        more: bool,
    },
    Line(Vec<TicketInfo>),
    Failed(Error),
}

pub(super) async fn look(locks: &Locks, prefix: &str, wanted: &Wanted) -> Look {
    let looked = match &wanted.name {
        Some(name) => locks.inspect(name).await.map(Look::Line),
        None => names(locks, &format!("{prefix}{}", wanted.begin), &wanted.part).await,
    };
    looked.unwrap_or_else(Look::Failed)
}

async fn names(locks: &Locks, begin: &str, part: &str) -> Result<Look, Error> {
    let mut pages = locks.list(begin).with_summaries().page_size(PAGE);
    let mut names = Vec::new();
    let mut more = false;
    while let Some(page) = pages.next().await? {
        names.extend(page.into_iter().filter(|used| used.name.contains(part)));
        names.sort();
        names.dedup_by(|one, other| one.name == other.name && one.is_whole == other.is_whole);
        let waiters = |used: &NameInUse| used.summary.as_ref().map_or(0, |summary| summary.waiters);
        names.sort_by_key(|used| std::cmp::Reverse(waiters(used)));
        more |= names.len() > MOST_NAMES;
        names.truncate(MOST_NAMES);
    }
    Ok(Look::Names { names, more })
}
