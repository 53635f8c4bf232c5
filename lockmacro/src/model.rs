//! The options after they have been checked. Values that can be computed at compile time are
//! computed here.

use std::time::Duration;

use proc_macro2::Span;
use syn::{Error, Expr, ExprLit, Ident, Lit, LitInt, Path};

use crate::args::{Args, Given, OnLost, OnRevoke};
use crate::mistakes::Mistakes;
use crate::template::Template;

pub(crate) struct Model {
    pub(crate) keys: Keys,
    pub(crate) side: Side,
    pub(crate) patience: Patience,
    pub(crate) ttl: Option<Length>,
    pub(crate) min_hold: Option<Length>,
    pub(crate) max_hold: Option<Length>,
    pub(crate) linger: Option<Length>,
    pub(crate) reentrant: Option<Given>,
    pub(crate) through_outages: Option<Given>,
    pub(crate) on_busy: Option<OnBusy>,
    pub(crate) on_error: Option<Expr>,
    pub(crate) on_lost: Option<OnLost>,
    pub(crate) on_revoke: Option<OnRevoke>,
    pub(crate) when: Option<Given>,
    /// `None` means the process-wide default client.
    pub(crate) locks: Option<Given>,
    pub(crate) held: Option<Ident>,
    /// `None` means `::lockcore`.
    pub(crate) crate_path: Option<Path>,
}

pub(crate) enum Keys {
    One(Key),
    /// Several locks, each written out in a list.
    List(Vec<Key>),
    /// Several locks, from one expression.
    Expr(Expr),
}

pub(crate) enum Key {
    Template(Template),
    Expr(Expr),
}

/// Which side of a read/write lock (a mutex is the write side), or how many permits of a semaphore.
pub(crate) enum Side {
    Exclusive,
    Shared,
    Permits { permits: Box<Given>, of: Box<Given> },
}

/// How long to wait for the lock.
pub(crate) enum Patience {
    /// As long as the client's setting says.
    Default,
    Try,
    For(Length),
    Forever,
}

pub(crate) enum Length {
    Known(Duration),
    Expr(Given),
}

/// The value that a call returns when another holds the lock.
pub(crate) enum OnBusy {
    /// The word `skip`.
    Skip(Span),
    Expr(Expr),
}

impl Model {
    /// Returns `None` only after it has reported a mistake.
    pub(crate) fn check(args: &Args, mistakes: &mut Mistakes) -> Option<Model> {
        let keys = Keys::check(args, mistakes);
        let side = Side::check(args, mistakes);
        let patience = Patience::check(args, mistakes);
        let ttl = check_ttl(args.ttl.as_ref(), mistakes);
        let on_busy = args.on_busy.as_ref().map(OnBusy::check).transpose();
        let on_busy = mistakes.keep(on_busy);
        let (min_hold, max_hold) = check_holds(args, mistakes)?;
        let linger = check_linger(args.linger.as_ref(), mistakes);
        Some(Model {
            keys: keys?,
            side: side?,
            patience: patience?,
            ttl: ttl?,
            min_hold,
            max_hold,
            linger: linger?,
            reentrant: args.reentrant.clone(),
            through_outages: args.through_outages.clone(),
            on_busy: on_busy?,
            on_error: args.on_error.as_ref().map(|given| given.value.clone()),
            on_lost: args.on_lost,
            on_revoke: args.on_revoke,
            when: args.when.clone(),
            locks: args.locks.clone(),
            held: args.held.clone(),
            crate_path: args.crate_path.clone(),
        })
    }
}

impl Keys {
    fn check(args: &Args, mistakes: &mut Mistakes) -> Option<Keys> {
        match (args.name("key"), args.name("keys")) {
            (None, None) if !args.means("key") && !args.means("keys") => mistakes.push(Error::new(
                Span::call_site(),
                "which lock? write `key = \"…\"`, a template over the arguments such as `\"order:{id}\"`",
            )),
            (Some(_), Some(keys)) => mistakes.push(Error::new_spanned(
                keys,
                "`key` is one lock, `keys` are several: leave out one of them",
            )),
            _ => {}
        }
        let key = args.key.as_ref();
        if let Some(list) = key.map(|key| &key.value).filter(|key| is_list(key)) {
            let message = "`key` is one lock: write `keys = [\"…\", \"…\"]` for several";
            mistakes.push(Error::new_spanned(list, message));
            return None;
        }
        let key = key.and_then(|key| Key::check(&key.value, args, mistakes).map(Keys::One));
        let Some(keys) = &args.keys else {
            return key;
        };
        match without_groups(&keys.value) {
            Expr::Array(list) if list.elems.is_empty() => {
                let message =
                    "which locks? write `keys = [\"…\", \"…\"]`, templates over the arguments";
                mistakes.push(Error::new_spanned(list, message));
                None
            }
            Expr::Array(list) => {
                let keys: Vec<_> = list
                    .elems
                    .iter()
                    .map(|it| Key::check(it, args, mistakes))
                    .collect();
                keys.into_iter().collect::<Option<_>>().map(Keys::List)
            }
            Expr::Lit(literal) => {
                let message =
                    "`keys` are several: write `keys = [\"…\", \"…\"]`, or `key = \"…\"` for one";
                mistakes.push(Error::new_spanned(literal, message));
                None
            }
            other => Some(Keys::Expr(other.clone())),
        }
    }
}

impl Key {
    fn check(key: &Expr, args: &Args, mistakes: &mut Mistakes) -> Option<Key> {
        match literal(key) {
            Some(Lit::Str(template)) => {
                let template = Template::parse(template.clone(), args.has_arguments, mistakes);
                Some(Key::Template(template))
            }
            Some(other) => {
                let message = "a key is text: write `key = \"…\"` or an expression";
                mistakes.push(Error::new_spanned(other, message));
                None
            }
            None => Some(Key::Expr(key.clone())),
        }
    }
}

impl Side {
    fn check(args: &Args, mistakes: &mut Mistakes) -> Option<Side> {
        let (permits, of) = (args.name("permits"), args.name("of"));
        if let (Some(shared), Some(_)) = (&args.shared, permits.or(of)) {
            mistakes.push(Error::new_spanned(
                shared,
                "`shared` is a side of a read/write lock, `permits` are of a semaphore: leave out one of them",
            ));
        }
        match (permits, of) {
            (Some(permits), None) if !args.means("of") => mistakes.push(Error::new_spanned(
                permits,
                "permits of how many? write `permits = 1, of = 5`",
            )),
            (None, Some(of)) if !args.means("permits") => mistakes.push(Error::new_spanned(
                of,
                "how many permits does a call take? write `permits = 1, of = 5`",
            )),
            _ => {}
        }
        let known = (
            known_number(args.permits.as_ref(), mistakes),
            known_number(args.of.as_ref(), mistakes),
        );
        if let (Some((permits, written)), Some((of, _))) = known
            && permits > of
        {
            mistakes.push(Error::new_spanned(
                written,
                format!("{permits} permits of {of} are never free: ask for {of} at most"),
            ));
        }
        match (&args.permits, &args.of) {
            (Some(permits), Some(of)) => Some(Side::Permits {
                permits: Box::new(permits.clone()),
                of: Box::new(of.clone()),
            }),
            // If only one of `permits` and `of` is given, a mistake has been reported above.
            _ if args.shared.is_some() => Some(Side::Shared),
            _ => Some(Side::Exclusive),
        }
    }
}

/// The value, if it is a literal. The value of any other expression is checked at run time, when
/// the lock is asked for.
fn known_number<'a>(
    number: Option<&'a Given>,
    mistakes: &mut Mistakes,
) -> Option<(u32, &'a LitInt)> {
    // The value of `lockcore::semaphore::Semaphore::MAX_PERMITS`, because this crate cannot depend
    // on `lockcore`.
    const MOST: u32 = (1 << 30) - 1;
    let literal = match literal(&number?.value)? {
        Lit::Int(literal) => literal,
        other => {
            let message = "permits are counted: write a number, as in `permits = 1, of = 5`";
            mistakes.push(Error::new_spanned(other, message));
            return None;
        }
    };
    match literal.base10_parse() {
        Ok(number @ 1..=MOST) => Some((number, literal)),
        _ => {
            let message = format!("a number of permits is 1 to {MOST}");
            mistakes.push(Error::new_spanned(literal, message));
            None
        }
    }
}

impl Patience {
    fn check(args: &Args, mistakes: &mut Mistakes) -> Option<Patience> {
        if let (Some(try_only), Some(_)) = (&args.try_only, args.name("wait")) {
            mistakes.push(Error::new_spanned(
                try_only,
                "`try` does not wait: leave out `try` or `wait`",
            ));
        }
        let Some(wait) = &args.wait else {
            return Some(match args.try_only {
                Some(_) => Patience::Try,
                None => Patience::Default,
            });
        };
        match without_groups(&wait.value) {
            Expr::Lit(ExprLit {
                lit: Lit::Str(text),
                ..
            }) if text.value() == "forever" => {
                return Some(Patience::Forever);
            }
            Expr::Path(word) if word.path.is_ident("forever") => {
                let message = "`forever` stands in quotes: write `wait = \"forever\"`";
                mistakes.push(Error::new_spanned(word, message));
                return None;
            }
            _ => {}
        }
        let length = Length::check(wait, "a wait of zero does not wait: write `try`");
        mistakes.keep(length).map(Patience::For)
    }
}

fn check_ttl(ttl: Option<&Given>, mistakes: &mut Mistakes) -> Option<Option<Length>> {
    /// The same limit as in `lockcore`, which checks it when the lock is asked for.
    const SHORTEST: Duration = Duration::from_millis(50);
    /// The limit of Redis, which is the lowest among the stores that several machines can share. An
    /// expression is not checked here, because other stores accept longer leases.
    const LONGEST: Duration = Duration::from_secs(12 * 60 * 60);
    let Some(ttl) = ttl else {
        return Some(None);
    };
    let length = Length::check(
        ttl,
        "a lease with a ttl of zero ends before it begins: \"10s\" is usual",
    );
    let length = mistakes.keep(length)?;
    if let Length::Known(known) = length
        && known < SHORTEST
    {
        mistakes.push(Error::new_spanned(
            &ttl.value,
            "a lease this short is over when the store's answer arrives: a ttl is \"50ms\" or more",
        ));
        return None;
    }
    if let Length::Known(known) = length
        && known > LONGEST
    {
        mistakes.push(Error::new_spanned(
            &ttl.value,
            "a ttl is \"12h\" at most, because Redis refuses more; \"10s\" is usual, also for longer work: the lease is \
             renewed while the body runs; for a store that takes more, write an expression: \
             `ttl = Duration::from_secs(24 * 3600)`",
        ));
        return None;
    }
    Some(Some(length))
}

/// Checks `min_hold` and `max_hold`.
fn check_holds(args: &Args, mistakes: &mut Mistakes) -> Option<(Option<Length>, Option<Length>)> {
    let mut check = |given: &Option<Given>, when_zero| {
        let length = given.as_ref().map(|given| Length::check(given, when_zero));
        mistakes.keep(length.transpose())
    };
    let min_hold = check(
        &args.min_hold,
        "a min_hold of zero changes nothing: leave it out",
    );
    let max_hold = check(
        &args.max_hold,
        "a lock with a max_hold of zero is lost before the body begins: leave it out for no limit",
    );
    let (min_hold, max_hold) = (min_hold?, max_hold?);
    if let (Some(Length::Known(min)), Some(Length::Known(max))) = (&min_hold, &max_hold)
        && min > max
    {
        mistakes.push(Error::new_spanned(
            args.name("min_hold"),
            "`min_hold` is longer than `max_hold`: the lock would be lost before it may be released; make `max_hold` longer",
        ));
    }
    Some((min_hold, max_hold))
}

fn check_linger(linger: Option<&Given>, mistakes: &mut Mistakes) -> Option<Option<Length>> {
    /// The same limit as in `lockcore`, which checks it when the lock is asked for.
    const LONGEST: Duration = Duration::from_secs(1);
    let Some(linger) = linger else {
        return Some(None);
    };
    let length = Length::check(
        linger,
        "a linger of zero releases the lock at once, as without it: leave it out; to override the client's setting, \
         write `linger = Duration::ZERO`",
    );
    let length = mistakes.keep(length)?;
    if let Length::Known(known) = length
        && known > LONGEST
    {
        mistakes.push(Error::new_spanned(
            &linger.value,
            "a linger is \"1s\" at most, and \"20ms\" is usual: if the process is killed in this time, the lock stays \
             taken for the rest of its ttl",
        ));
        return None;
    }
    Some(Some(length))
}

impl Length {
    fn check(length: &Given, when_zero: &str) -> syn::Result<Length> {
        let text = match literal(&length.value) {
            Some(Lit::Str(text)) => text,
            Some(other) => {
                let option = &length.name;
                let message = format!("a duration is text with a unit: write `{option} = \"2s\"`");
                return Err(Error::new_spanned(other, message));
            }
            None => return Ok(Length::Expr(length.clone())),
        };
        match humantime::parse_duration(&text.value()) {
            Ok(Duration::ZERO) => Err(Error::new_spanned(text, when_zero)),
            Ok(length) => Ok(Length::Known(length)),
            Err(error) => {
                let message = format!(
                    "{text:?} is no duration: {error}; write it like \"2s\", \"500ms\" or \"1m 30s\"",
                    text = text.value(),
                );
                Err(Error::new_spanned(text, message))
            }
        }
    }
}

impl OnBusy {
    fn check(given: &Given) -> syn::Result<OnBusy> {
        match &given.value {
            Expr::Path(word) if word.path.is_ident("skip") => {
                Ok(OnBusy::Skip(word.path.segments[0].ident.span()))
            }
            Expr::Lit(ExprLit {
                lit: Lit::Str(text),
                ..
            }) if text.value() == "skip" => {
                let message = "`skip` stands without quotes: write `on_busy = skip`";
                Err(Error::new_spanned(text, message))
            }
            expr => Ok(OnBusy::Expr(expr.clone())),
        }
    }
}

/// Whether the expression is a list: `[…]`, `&[…]` or `vec![…]`.
fn is_list(expr: &Expr) -> bool {
    match without_groups(expr) {
        Expr::Array(_) => true,
        Expr::Reference(list) => is_list(&list.expr),
        Expr::Macro(list) => list.mac.path.is_ident("vec"),
        _ => false,
    }
}

/// The literal, if the expression is one.
fn literal(expr: &Expr) -> Option<&Lit> {
    match without_groups(expr) {
        Expr::Lit(expr) => Some(&expr.lit),
        _ => None,
    }
}

/// Removes parentheses, and the invisible group that a `macro_rules!` puts around `$key:expr`.
pub(crate) fn without_groups(expr: &Expr) -> &Expr {
    match expr {
        Expr::Group(group) => without_groups(&group.expr),
        Expr::Paren(paren) => without_groups(&paren.expr),
        _ => expr,
    }
}
