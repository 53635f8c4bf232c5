//! The checked attribute: what it asks for, with everything that can be known while compiling known.

use std::time::Duration;

use proc_macro2::Span;
use syn::{Error, Expr, Ident, Lit, Path};

use crate::args::Args;
use crate::mistakes::Mistakes;
use crate::template::Template;

pub(crate) struct Model {
    pub(crate) key: Key,
    pub(crate) side: Side,
    pub(crate) patience: Patience,
    pub(crate) ttl: Option<Length>,
    /// `None` stands for the process-wide default.
    pub(crate) locks: Option<Expr>,
    pub(crate) held: Option<Ident>,
    pub(crate) lockcore: Path,
}

pub(crate) enum Key {
    Template(Template),
    Expr(Expr),
}

/// Which side of the read/write lock; the write side is the mutex.
pub(crate) enum Side {
    Exclusive,
    Shared,
}

/// How long to stand in line.
pub(crate) enum Patience {
    /// As long as the client is set to.
    Default,
    Try,
    For(Length),
    Forever,
}

pub(crate) enum Length {
    Known(Duration),
    Expr(Expr),
}

impl Model {
    /// `None` only with a mistake.
    pub(crate) fn check(args: &Args, mistakes: &mut Mistakes) -> Option<Model> {
        if !args.names("key") {
            mistakes.push(Error::new(
                Span::call_site(),
                "which lock? write `key = \"…\"`, a template over the arguments such as `\"order:{id}\"`",
            ));
        }
        if let (Some(try_only), true) = (&args.try_only, args.names("wait")) {
            mistakes.push(Error::new_spanned(
                try_only,
                "`try` does not wait: leave out `try` or `wait`",
            ));
        }
        let key = args.key.as_ref().and_then(|key| Key::check(key, mistakes));
        let patience = match &args.wait {
            Some(wait) => mistakes.keep(Patience::check(wait)),
            None if args.try_only.is_some() => Some(Patience::Try),
            None => Some(Patience::Default),
        };
        let ttl = mistakes.keep(args.ttl.as_ref().map(check_ttl).transpose());
        Some(Model {
            key: key?,
            side: match &args.shared {
                Some(_) => Side::Shared,
                None => Side::Exclusive,
            },
            patience: patience?,
            ttl: ttl?,
            locks: args.locks.clone(),
            held: args.held.clone(),
            lockcore: args.lockcore(),
        })
    }
}

impl Key {
    fn check(key: &Expr, mistakes: &mut Mistakes) -> Option<Key> {
        match literal(key) {
            Some(Lit::Str(template)) => {
                Some(Key::Template(Template::parse(template.clone(), mistakes)))
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

impl Patience {
    fn check(wait: &Expr) -> syn::Result<Patience> {
        match literal(wait) {
            Some(Lit::Str(text)) if text.value() == "forever" => return Ok(Patience::Forever),
            _ => {}
        }
        let message = "a wait of zero is over before the lock is asked for; \
                       `try` asks once and does not wait";
        Length::check("wait", wait, message).map(Patience::For)
    }
}

fn check_ttl(ttl: &Expr) -> syn::Result<Length> {
    Length::check(
        "ttl",
        ttl,
        "a lease with a ttl of zero ends before it begins",
    )
}

impl Length {
    fn check(option: &str, length: &Expr, when_zero: &str) -> syn::Result<Length> {
        let text = match literal(length) {
            Some(Lit::Str(text)) => text,
            Some(other) => {
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

/// The literal that the expression is. A `macro_rules!` wraps one that it was given as `$key:expr`.
fn literal(expr: &Expr) -> Option<&Lit> {
    match expr {
        Expr::Lit(expr) => Some(&expr.lit),
        Expr::Group(group) => literal(&group.expr),
        _ => None,
    }
}
