//! What the live view knows, and what keys do to it.

use lockcore::inspect::{NameInUse, TicketInfo, visible};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::ls;

/// How far a page key moves.
const PAGE: usize = 10;

/// What the loop has to do for a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Do {
    Quit,
    Revoke { name: String, ticket: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Waiters,
    LongestWait,
    Holders,
    Since,
    Name,
}

impl Sort {
    fn next(self) -> Self {
        match self {
            Self::Waiters => Self::LongestWait,
            Self::LongestWait => Self::Holders,
            Self::Holders => Self::Since,
            Self::Since => Self::Name,
            Self::Name => Self::Waiters,
        }
    }

    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Waiters => "waiters",
            Self::LongestWait => "longest wait",
            Self::Holders => "holders",
            Self::Since => "since",
            Self::Name => "name",
        }
    }
}

/// What is on the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Page {
    /// All names. While the person types, the keys change the filter.
    Names { typing: bool },
    /// The line of one name. If the person has to confirm that a ticket is asked for, that ticket.
    Line { name: String, ask: Option<u64> },
}

#[derive(Debug)]
pub(super) struct View {
    pub(super) prefix: String,
    pub(super) filter: String,
    pub(super) sort: Sort,
    pub(super) page: Page,
    used: Vec<NameInUse>,
    /// The line that the page is about, when a look has seen it.
    line: Option<Vec<TicketInfo>>,
    /// The name that the cursor is on, and whether it is whole, and the ticket. The cursor stays there
    /// when the order changes.
    name: Option<(String, bool)>,
    ticket: Option<u64>,
    /// What became of the last request of the person.
    told: Option<String>,
    /// Why the last look at the store has failed.
    failure: Option<String>,
}

impl View {
    pub(super) fn new(prefix: String) -> Self {
        Self {
            prefix,
            filter: String::new(),
            sort: Sort::Waiters,
            page: Page::Names { typing: false },
            used: Vec::new(),
            line: None,
            name: None,
            ticket: None,
            told: None,
            failure: None,
        }
    }

    /// What the next look at the store is about: one name, or all.
    pub(super) fn wanted(&self) -> Option<&str> {
        match &self.page {
            Page::Names { .. } => None,
            Page::Line { name, .. } => Some(name),
        }
    }

    pub(super) fn looked(&mut self, used: Vec<NameInUse>) {
        self.failure = None;
        self.used = used;
        self.order();
    }

    /// The line of one name, as the last look at the store has seen it.
    pub(super) fn looked_at(&mut self, name: &str, line: Vec<TicketInfo>) {
        self.failure = None;
        if self.wanted() == Some(name) {
            self.line = Some(line);
        }
    }

    /// The last look at the store has failed. What was seen before stays on the screen.
    pub(super) fn failed(&mut self, text: &str) {
        self.failure = Some(visible(text));
    }

    pub(super) fn told(&mut self, text: String) {
        self.told = Some(text);
    }

    /// What is wrong, or what has happened.
    pub(super) fn message(&self) -> Option<&str> {
        self.failure.as_deref().or(self.told.as_deref())
    }

    /// The names that pass the filter, in order.
    pub(super) fn names(&self) -> Vec<&NameInUse> {
        let passes = |used: &&NameInUse| used.name.contains(&self.filter);
        self.used.iter().filter(passes).collect()
    }

    /// The line that the page is about. `None` if no look has seen it yet.
    pub(super) fn seen_line(&self) -> Option<&[TicketInfo]> {
        self.line.as_deref()
    }

    /// The places of this line. There are none if the name is free.
    pub(super) fn line(&self) -> &[TicketInfo] {
        self.seen_line().unwrap_or_default()
    }

    /// The place of the cursor in the list of names, or in the line.
    pub(super) fn cursor(&self) -> usize {
        let place = match &self.page {
            Page::Names { .. } => {
                let is_it = |used: &&NameInUse| {
                    let (name, is_whole) = self.name.as_ref()?;
                    Some(used.name == *name && used.is_whole == *is_whole)
                };
                self.names()
                    .iter()
                    .position(|used| is_it(used) == Some(true))
            }
            Page::Line { .. } => {
                let is_it = |place: &TicketInfo| Some(place.ticket) == self.ticket;
                self.line().iter().position(is_it)
            }
        };
        place.unwrap_or(0)
    }

    fn order(&mut self) {
        let sort = self.sort;
        let size = |used: &NameInUse| match (sort, &used.summary) {
            (Sort::Waiters, Some(line)) => (line.waiters, None),
            (Sort::LongestWait, Some(line)) => (0, line.longest_wait),
            (Sort::Holders, Some(line)) => (line.holders, None),
            (Sort::Since, Some(line)) => (0, line.since),
            (Sort::Name, _) | (_, None) => (0, None),
        };
        // The largest first.
        (self.used).sort_by(|one, other| (size(other), &one.name).cmp(&(size(one), &other.name)));
    }

    /// Moves the cursor to this place, or to the last one.
    fn move_to(&mut self, place: usize) {
        match &self.page {
            Page::Names { .. } => {
                let names = self.names();
                let at = names.get(place).or(names.last());
                self.name = at.map(|used| (used.name.clone(), used.is_whole));
            }
            Page::Line { .. } => {
                let line = self.line();
                let at = line.get(place).or(line.last());
                self.ticket = at.map(|place| place.ticket);
            }
        }
    }

    /// What to do for a key, if the loop has to do something.
    pub(super) fn press(&mut self, key: KeyEvent) -> Option<Do> {
        // In a raw terminal, Ctrl-C is no signal.
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Some(Do::Quit);
        }
        if key
            .modifiers
            .intersects(KeyModifiers::CONTROL | KeyModifiers::ALT)
        {
            return None;
        }
        self.told = None;
        match self.page.clone() {
            Page::Names { typing: true } => self.type_filter(key.code),
            Page::Line {
                name,
                ask: Some(ticket),
            } => {
                self.page = Page::Line {
                    name: name.clone(),
                    ask: None,
                };
                return (key.code == KeyCode::Char('y')).then_some(Do::Revoke { name, ticket });
            }
            page => match key.code {
                KeyCode::Char('q') => return Some(Do::Quit),
                KeyCode::Up | KeyCode::Char('k') => self.move_to(self.cursor().saturating_sub(1)),
                KeyCode::Down | KeyCode::Char('j') => self.move_to(self.cursor() + 1),
                KeyCode::PageUp => self.move_to(self.cursor().saturating_sub(PAGE)),
                KeyCode::PageDown => self.move_to(self.cursor() + PAGE),
                KeyCode::Home => self.move_to(0),
                KeyCode::End => self.move_to(usize::MAX),
                code => match page {
                    Page::Names { .. } => self.press_in_names(code),
                    Page::Line { name, .. } => self.press_in_line(name, code),
                },
            },
        }
        None
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(c) => self.filter.push(c),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Esc => {
                self.filter.clear();
                self.page = Page::Names { typing: false };
            }
            KeyCode::Enter => self.page = Page::Names { typing: false },
            _ => {}
        }
    }

    fn press_in_names(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char('/') => self.page = Page::Names { typing: true },
            KeyCode::Char('s') => {
                self.sort = self.sort.next();
                self.order();
            }
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Enter => {
                let names = self.names();
                let Some(&used) = names.get(self.cursor()) else {
                    return;
                };
                if !used.is_whole {
                    // What the list has is the beginning of this name, or another name.
                    return self.told(ls::TOO_LONG.into());
                }
                let name = used.name.clone();
                self.name = Some((name.clone(), true));
                (self.ticket, self.line) = (None, None);
                self.page = Page::Line { name, ask: None };
            }
            _ => {}
        }
    }

    fn press_in_line(&mut self, name: String, code: KeyCode) {
        match code {
            KeyCode::Esc | KeyCode::Backspace => self.page = Page::Names { typing: false },
            KeyCode::Char('r') => match self.line().get(self.cursor()) {
                Some(place) if place.granted => {
                    let ask = Some(place.ticket);
                    self.page = Page::Line { name, ask };
                }
                _ => self.told("only a holder can be asked".into()),
            },
            _ => {}
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use lockcore::inspect::Summary;
    use ratatui::crossterm::event::KeyCode;

    use super::*;

    fn place(ticket: u64, granted: bool, age: u64) -> TicketInfo {
        let all = 1 << 30;
        let lease = Duration::from_secs(9);
        TicketInfo::new(ticket, granted, all, all, lease, "shop-1/4711/1".into())
            .with_age(Duration::from_secs(age))
    }

    const ORDER_2: [(u64, bool, u64); 3] = [(6, true, 3), (7, false, 2), (8, false, 1)];

    fn line(line: &[(u64, bool, u64)]) -> Vec<TicketInfo> {
        let places = line.iter();
        let places = places.map(|(ticket, granted, age)| place(*ticket, *granted, *age));
        places.collect()
    }

    fn used(name: &str, places: &[(u64, bool, u64)]) -> NameInUse {
        NameInUse::new(name.into()).with_summary(Summary::of(&line(places)))
    }

    /// Opens the line of the first name, which is `order:2`.
    pub(in crate::top) fn enter(view: &mut View) {
        press(view, &[KeyCode::Enter]);
        view.looked_at("order:2", line(&ORDER_2));
    }

    pub(in crate::top) fn shop() -> View {
        let mut view = View::new(String::new());
        view.looked(vec![
            used("order:1", &[(5, true, 70)]),
            used("order:2", &ORDER_2),
            used("stock", &[(9, true, 4), (10, false, 30)]),
        ]);
        view
    }

    pub(in crate::top) fn press(view: &mut View, keys: &[KeyCode]) -> Option<Do> {
        let pressed = keys.iter().map(|key| view.press(KeyEvent::from(*key)));
        pressed.last().flatten()
    }

    fn shown(view: &View) -> Vec<&str> {
        let names = view.names().into_iter();
        names.map(|used| used.name.as_str()).collect()
    }

    #[test]
    fn names_are_sorted_and_filtered() {
        let mut view = shop();
        assert_eq!(shown(&view), ["order:2", "stock", "order:1"]);
        press(&mut view, &[KeyCode::Char('s')]);
        assert_eq!(shown(&view), ["stock", "order:2", "order:1"]);
        press(&mut view, &[KeyCode::Char('s')]);
        let before = view.used.clone();
        view.used.push(used("pool", &[(1, true, 1), (2, true, 1)]));
        view.order();
        assert_eq!(shown(&view), ["pool", "order:1", "order:2", "stock"]);
        view.looked(before);
        press(&mut view, &[KeyCode::Char('s')]);
        assert_eq!(shown(&view), ["order:1", "stock", "order:2"]);
        press(&mut view, &[KeyCode::Char('s')]);
        assert_eq!(shown(&view), ["order:1", "order:2", "stock"]);

        press(
            &mut view,
            &[KeyCode::Char('/'), KeyCode::Char('q'), KeyCode::Char('k')],
        );
        assert!(
            shown(&view).is_empty(),
            "a key that is typed does nothing else"
        );
        press(
            &mut view,
            &[KeyCode::Backspace, KeyCode::Backspace, KeyCode::Char('k')],
        );
        assert_eq!(shown(&view), ["stock"]);
        press(&mut view, &[KeyCode::Esc]);
        assert_eq!(shown(&view).len(), 3);
    }

    #[test]
    fn the_cursor_stays_on_its_name() {
        let mut view = shop();
        press(&mut view, &[KeyCode::Down]);
        assert_eq!(view.cursor(), 1);

        view.looked(vec![
            used("order:1", &[(5, true, 70)]),
            used("stock", &[(9, true, 4), (10, false, 30)]),
        ]);
        assert_eq!(view.cursor(), 0);

        view.looked(Vec::new());
        assert_eq!(
            press(&mut view, &[KeyCode::Down, KeyCode::End, KeyCode::Enter]),
            None
        );
        assert_eq!(view.page, Page::Names { typing: false });
    }

    #[test]
    fn a_name_of_which_only_the_beginning_is_known_is_not_looked_at() {
        let mut cut = used("order:1", &[]);
        (cut.is_whole, cut.summary) = (false, None);
        let mut view = View::new(String::new());
        view.looked(vec![cut, used("order:1", &[(5, true, 70)])]);

        let open = |view: &mut View| {
            press(view, &[KeyCode::Enter]);
            view.wanted().map(str::to_owned)
        };
        let places: Vec<_> = view.names().iter().map(|used| used.is_whole).collect();
        assert_eq!(places, [false, true]);

        assert_eq!(open(&mut view), None);
        assert_eq!(view.message(), Some(ls::TOO_LONG));
        press(&mut view, &[KeyCode::Down]);
        assert_eq!(view.cursor(), 1);
        assert_eq!(open(&mut view).as_deref(), Some("order:1"));
    }

    #[test]
    fn a_holder_is_asked_for_its_lock_only_after_a_question() {
        let mut view = shop();
        enter(&mut view);
        press(&mut view, &[KeyCode::Char('r')]);
        assert_eq!(press(&mut view, &[KeyCode::Char('n')]), None);
        let revoke = Do::Revoke {
            name: "order:2".into(),
            ticket: 6,
        };
        assert_eq!(
            press(&mut view, &[KeyCode::Char('r'), KeyCode::Char('y')]),
            Some(revoke)
        );
        assert_eq!(press(&mut view, &[KeyCode::Char('y')]), None, "asked once");

        press(&mut view, &[KeyCode::Down, KeyCode::Char('r')]);
        assert_eq!(view.message(), Some("only a holder can be asked"));
        assert_eq!(press(&mut view, &[KeyCode::Char('y')]), None);
    }

    #[test]
    fn a_key_with_control_or_alt_does_nothing_but_ctrl_c_quits() {
        let mut view = shop();
        enter(&mut view);
        press(&mut view, &[KeyCode::Char('r')]);

        let alt_y = KeyEvent::new(KeyCode::Char('y'), KeyModifiers::ALT);
        assert_eq!(view.press(alt_y), None);

        let line = Page::Line {
            name: "order:2".into(),
            ask: Some(6),
        };
        assert_eq!(view.page, line, "the question stands");
        let ctrl_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(view.press(ctrl_c), Some(Do::Quit));
    }

    #[test]
    fn the_line_of_one_name_is_looked_at_alone() {
        let mut view = shop();
        assert_eq!(view.wanted(), None);
        press(&mut view, &[KeyCode::Enter]);
        assert_eq!(view.wanted(), Some("order:2"));

        view.looked_at("order:1", vec![place(5, true, 70)]);
        assert_eq!(
            view.seen_line(),
            None,
            "a look at another name has come late"
        );
        view.looked_at("order:2", vec![place(7, true, 2)]);

        assert_eq!(view.line().len(), 1);
        assert_eq!(view.names().len(), 3);
    }

    #[test]
    fn a_failure_stays_until_the_store_answers() {
        let mut view = shop();
        view.failed("no answer");
        view.told("asked".into());
        press(&mut view, &[KeyCode::Down]);
        assert_eq!(view.message(), Some("no answer"));
        assert_eq!(shown(&view).len(), 3);

        view.looked(Vec::new());
        assert_eq!(view.message(), None);
    }
}
