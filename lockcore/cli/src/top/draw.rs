//! Draws the live view. Without colours: what stands out is bold or reversed, on every terminal.

use std::ops::Range;

use lockcore::inspect::{NameInUse, Summary, TicketInfo, visible};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Row, Table, TableState};

use super::view::{Page, View};
use crate::{ls, show};

/// A column: its head, its width, and the narrowest screen that has it.
struct Column {
    head: &'static str,
    width: Constraint,
    from: u16,
}

const fn column(head: &'static str, width: Constraint, from: u16) -> Column {
    Column { head, width, from }
}

const NAMES: [Column; 6] = [
    column("NAME", Constraint::Fill(2), 0),
    column("HOLDERS", Constraint::Length(7), 50),
    column("WAITERS", Constraint::Length(7), 0),
    column("SINCE", Constraint::Length(9), 60),
    column("LONGEST WAIT", Constraint::Length(12), 0),
    column("HELD BY", Constraint::Fill(3), 80),
];

const LINE: [Column; 7] = [
    column("", Constraint::Length(5), 0),
    column("TICKET", Constraint::Length(17), 0),
    column("TOKEN", Constraint::Length(19), 100),
    column("PERMITS", Constraint::Length(8), 60),
    column("SINCE", Constraint::Length(9), 0),
    column("LEASE ENDS IN", Constraint::Length(13), 80),
    column("OWNER", Constraint::Fill(1), 50),
];

/// Draws what the view knows. The state of the table keeps which rows are on the screen.
pub(super) fn draw(frame: &mut Frame<'_>, view: &View, state: &mut TableState) {
    let [head, body, foot] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    // The head of the table has a row too.
    let height = usize::from(body.height.saturating_sub(1));
    let cursor = view.cursor();
    let (columns, rows): (&[Column], Vec<Vec<String>>) = match &view.page {
        Page::Names { .. } => {
            let names = view.names();
            let seen = window(state, cursor, height, names.len());
            let rows = names[seen].iter().map(|used| name_row(used).into());
            (&NAMES, rows.collect())
        }
        Page::Line { .. } => {
            let line = view.line();
            let seen = window(state, cursor, height, line.len());
            let rows = line[seen].iter().map(|place| line_row(place).into());
            (&LINE, rows.collect())
        }
    };
    let width = frame.area().width;
    let fit: Vec<usize> = (0..columns.len())
        .filter(|at| columns[*at].from <= width)
        .collect();
    let heads = fit.iter().map(|at| columns[*at].head);
    let cells = |row: &Vec<String>| Row::new(fit.iter().map(|at| row[*at].clone()));
    let table = Table::new(
        rows.iter().map(cells),
        fit.iter().map(|at| columns[*at].width),
    )
    .header(Row::new(heads).style(Modifier::BOLD))
    .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
    .column_spacing(2);
    // The table has no other rows than those of the window.
    let cursor = cursor - state.offset();
    let mut in_window = TableState::new().with_selected(cursor);
    frame.render_widget(Line::from(title(view)), head);
    frame.render_stateful_widget(table, body, &mut in_window);
    frame.render_widget(Line::from(bottom(view)), foot);
}

/// The rows that fit on the screen, with the row of the cursor. The window moves only if it must.
fn window(state: &mut TableState, cursor: usize, height: usize, rows: usize) -> Range<usize> {
    let last = rows.saturating_sub(height);
    let least = (cursor + 1).saturating_sub(height).min(cursor);
    let first = state.offset().min(last).clamp(least, cursor);
    *state.offset_mut() = first;
    first..rows.min(first + height)
}

fn name_row(used: &NameInUse) -> [String; 6] {
    let Some(summary) = &used.summary else {
        let unknown = ["?", "?", "", "", ls::TOO_LONG].map(Into::into);
        let [holders, waiters, since, longest_wait, held_by] = unknown;
        return [
            ls::shown(used),
            holders,
            waiters,
            since,
            longest_wait,
            held_by,
        ];
    };
    let span = |time: Option<_>| time.map_or_else(String::new, show::span);
    [
        ls::shown(used),
        summary.holders.to_string(),
        summary.waiters.to_string(),
        span(summary.since),
        span(summary.longest_wait),
        ls::held_by(summary),
    ]
}

fn line_row(place: &TicketInfo) -> [String; 7] {
    let asked = if place.asked_back.is_some() {
        ", asked for it"
    } else {
        ""
    };
    [
        if place.granted { "holds" } else { "waits" }.into(),
        place.ticket.to_string(),
        show::token(place).unwrap_or_default(),
        show::permits(place),
        place.age.map_or_else(String::new, show::span),
        show::span(place.remaining),
        format!("{}{asked}", show::owner_of(place)),
    ]
}

fn title(view: &View) -> String {
    let names = view.names().len();
    match &view.page {
        Page::Names { typing } => {
            let of = match view.prefix.as_str() {
                "" => String::new(),
                prefix => format!(" of {}", visible(prefix)),
            };
            let filter = match (view.filter.as_str(), typing) {
                ("", false) => String::new(),
                (text, _) => format!(", with \"{}\"", visible(text)),
            };
            format!("{names} names{of}{filter}, by {}", view.sort.text())
        }
        Page::Line { name, .. } => {
            let name = visible(name);
            let Some(line) = view.seen_line() else {
                return format!("{name}: looking");
            };
            let Summary {
                holders, waiters, ..
            } = Summary::of(line);
            match holders + waiters {
                0 => format!("{name}: free"),
                _ => format!("{name}: {holders} hold, {waiters} wait"),
            }
        }
    }
}

/// A question, what is wrong, what has happened, or which keys there are.
fn bottom(view: &View) -> String {
    let keys = match &view.page {
        Page::Line {
            ask: Some(ticket), ..
        } => {
            let place = view.line().iter().find(|place| place.ticket == *ticket);
            let owner = place.map_or_else(|| format!("ticket {ticket}"), show::owner_of);
            // An owner that is too long for the screen is cut at its end.
            return format!("y/n: 30s to finish for {owner}?");
        }
        Page::Names { typing: true } => "type a part of a name; enter keeps it, esc clears it",
        Page::Names { typing: false } => "enter line  / filter  s sort  q quit",
        Page::Line { .. } => "esc back  r ask the holder  q quit",
    };
    view.message().unwrap_or(keys).to_owned()
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::KeyCode;

    use super::*;
    use crate::top::view::tests::{enter, press, shop};

    fn screen(view: &View, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 7)).unwrap();
        let mut state = TableState::new();
        terminal
            .draw(|frame| draw(frame, view, &mut state))
            .unwrap();
        let lines = terminal.backend().buffer().content.chunks(width.into());
        let text = |line: &[ratatui::buffer::Cell]| -> String {
            let text: String = line.iter().map(ratatui::buffer::Cell::symbol).collect();
            format!("{}\n", text.trim_end())
        };
        lines.map(text).collect()
    }

    #[test]
    fn a_wide_screen_shows_who_holds_and_a_narrow_one_the_waits() {
        let view = shop();
        assert_eq!(
            screen(&view, 80),
            "\
3 names, by waiters
NAME            HOLDERS  WAITERS  SINCE      LONGEST WAIT  HELD BY
order:2         1        2        3s         2s            shop-1/4711/1
stock           1        1        4s         30s           shop-1/4711/1
order:1         1        0        1m 10s                   shop-1/4711/1

enter line  / filter  s sort  q quit
"
        );
        assert_eq!(
            screen(&view, 40),
            "\
3 names, by waiters
NAME               WAITERS  LONGEST WAIT
order:2            2        2s
stock              1        30s
order:1            0

enter line  / filter  s sort  q quit
"
        );
    }

    #[test]
    fn the_window_has_the_row_of_the_cursor_and_moves_only_if_it_must() {
        let mut state = TableState::new();
        let mut window = |cursor, rows| window(&mut state, cursor, 4, rows);

        assert_eq!(window(0, 1_000), 0..4);
        assert_eq!(window(3, 1_000), 0..4);
        assert_eq!(window(4, 1_000), 1..5);
        assert_eq!(window(999, 1_000), 996..1_000);
        assert_eq!(window(998, 1_000), 996..1_000);
        assert_eq!(window(5, 10), 5..9);
        assert_eq!(window(0, 2), 0..2, "rows are gone");
        assert_eq!(window(0, 0), 0..0);
        assert_eq!(
            super::window(&mut TableState::new(), 3, 0, 5).len(),
            0,
            "no room"
        );
    }

    #[test]
    fn a_line_is_shown_in_order_and_a_question_before_a_holder_is_asked() {
        let mut view = shop();
        press(&mut view, &[KeyCode::Enter]);
        assert_eq!(title(&view), "order:2: looking");
        enter(&mut view);
        press(&mut view, &[KeyCode::Char('r')]);
        assert_eq!(
            screen(&view, 60),
            "\
order:2: 1 hold, 2 wait
       TICKET             PERMITS   SINCE      OWNER
holds  6                  all       3s         shop-1/4711/1
waits  7                  all       2s         shop-1/4711/1
waits  8                  all       1s         shop-1/4711/1

y/n: 30s to finish for shop-1/4711/1?
"
        );
        assert!(
            screen(&view, 100).contains(
                "\
       TICKET             TOKEN                PERMITS   SINCE      LEASE ENDS IN  OWNER
holds  6                  6144                 all       3s         9s             shop-1/4711/1
"
            ),
            "{}",
            screen(&view, 100)
        );
    }
}
