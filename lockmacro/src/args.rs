//! Reads the options between the parentheses of the attribute. This module knows which options
//! exist and how each is written. `model` checks how they fit together.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use quote::ToTokens;
use syn::ext::IdentExt;
use syn::parse::{ParseStream, Parser};
use syn::token::Paren;
use syn::{BinOp, Error, Expr, ExprLit, Ident, Lit, LitStr, Path, Token};

use crate::mistakes::Mistakes;

/// Every option, with the example that error messages show. A new option needs a line here, a line
/// in `parse_option` and a field in [`Args`].
const OPTIONS: [(&str, &str); 21] = [
    ("key", "key = \"order:{order.id}\""),
    (
        "keys",
        "keys = [\"account:{from.id}\", \"account:{to.id}\"]",
    ),
    ("wait", "wait = \"2s\""),
    ("try", "try"),
    ("through_outages", "through_outages = true"),
    ("ttl", "ttl = \"10s\""),
    ("shared", "shared"),
    ("permits", "permits = 1, of = 5"),
    ("of", "permits = 1, of = 5"),
    ("on_busy", "on_busy = skip"),
    ("on_error", "on_error = Err(error.into())"),
    ("on_lost", "on_lost = signal"),
    ("on_revoke", "on_revoke = cancel"),
    ("min_hold", "min_hold = \"500ms\""),
    ("max_hold", "max_hold = \"1m\""),
    ("linger", "linger = \"20ms\""),
    ("reentrant", "reentrant = false"),
    ("when", "when = self.is_shared()"),
    ("locks", "locks = self.locks"),
    ("held", "held = lock"),
    ("crate", "crate = path::to::lockcore"),
];

/// Names that other libraries use for our options. They are not accepted, because each option has
/// only one name. The error message suggests the option.
const OTHER_NAMES: [(&str, &str); 23] = [
    ("acquire_timeout", "wait"),
    ("capacity", "of"),
    ("client", "locks"),
    ("expiry", "ttl"),
    ("fallback", "on_busy"),
    ("guard", "held"),
    ("if", "when"),
    ("lease", "ttl"),
    ("lease_time", "ttl"),
    ("limit", "of"),
    ("lock_at_least_for", "min_hold"),
    ("max_wait", "wait"),
    ("name", "key"),
    ("no_wait", "try"),
    ("nowait", "try"),
    ("read", "shared"),
    ("read_only", "shared"),
    ("resource", "key"),
    ("semaphore", "permits"),
    ("timeout", "wait"),
    ("try_lock", "try"),
    ("wait_time", "wait"),
    ("wait_timeout", "wait"),
];

/// Words of other libraries that match none of our options, or more than one, with the advice that
/// the error message gives.
const ADVICE: [(&str, &str); 9] = [
    (
        "exclusive",
        "leave it out: a lock is exclusive unless the function is `shared`",
    ),
    (
        "lock_at_most_for",
        "`ttl = \"10s\"` is how long the others wait for a process that died, and `max_hold = \"1m\"` how long the \
         work may take",
    ),
    ("backoff", NO_RETRY),
    ("retries", NO_RETRY),
    ("retry", NO_RETRY),
    ("retry_delay", NO_RETRY),
    ("retry_interval", NO_RETRY),
    (
        "url",
        "set the variable `LOCK_URL`, or make a client with `Locks::connect` and write `locks = self.locks`",
    ),
    (
        "write",
        "leave it out: a function takes the write side of its lock unless it is `shared`",
    ),
];

const NO_RETRY: &str =
    "leave it out: a call waits in line for its lock, and `wait = \"2s\"` says for how long";

/// The options as the user wrote them.
#[derive(Default)]
pub(crate) struct Args {
    pub(crate) key: Option<Given>,
    pub(crate) keys: Option<Given>,
    pub(crate) wait: Option<Given>,
    pub(crate) try_only: Option<Ident>,
    pub(crate) through_outages: Option<Given>,
    pub(crate) ttl: Option<Given>,
    pub(crate) shared: Option<Ident>,
    pub(crate) permits: Option<Given>,
    pub(crate) of: Option<Given>,
    pub(crate) on_busy: Option<Given>,
    pub(crate) on_error: Option<Given>,
    pub(crate) on_lost: Option<OnLost>,
    pub(crate) on_revoke: Option<OnRevoke>,
    pub(crate) min_hold: Option<Given>,
    pub(crate) max_hold: Option<Given>,
    pub(crate) linger: Option<Given>,
    pub(crate) reentrant: Option<Given>,
    pub(crate) when: Option<Given>,
    pub(crate) locks: Option<Given>,
    pub(crate) held: Option<Ident>,
    pub(crate) crate_path: Option<Path>,
    /// The options read so far, including those whose value could not be parsed.
    names: Vec<Ident>,
    /// The options that the unknown words probably stand for.
    meant: Vec<&'static str>,
    /// Whether arguments follow the template of a key, as they do in `format!`.
    pub(crate) has_arguments: bool,
}

/// `name = value`. If the value has the wrong type, the compiler points at the name and says which
/// type it expects.
#[derive(Clone)]
pub(crate) struct Given {
    pub(crate) name: Ident,
    pub(crate) value: Expr,
}

#[derive(Clone, Copy)]
pub(crate) enum OnLost {
    Cancel,
    Signal,
}

#[derive(Clone, Copy)]
pub(crate) enum OnRevoke {
    Cancel,
    Finish,
}

impl Args {
    /// Reads as much as possible: after a mistake, it continues after the next comma.
    pub(crate) fn parse(tokens: TokenStream, mistakes: &mut Mistakes) -> Args {
        let mut args = Args::default();
        let read_all = |input: ParseStream| {
            while !input.is_empty() {
                if let Err(mistake) = args.parse_option(input) {
                    mistakes.push(mistake);
                    up_to_comma(input)?;
                }
                input.parse::<Option<Token![,]>>()?;
            }
            Ok(())
        };
        let read = read_all.parse2(tokens);
        mistakes.keep(read);
        args
    }

    /// The name of the option where the user wrote it, even if its value could not be parsed.
    pub(crate) fn name(&self, option: &str) -> Option<&Ident> {
        self.names.iter().find(|name| *name == option)
    }

    /// Whether the user gave this option, under its own name or under another one. If so, no
    /// message says that it is missing.
    pub(crate) fn means(&self, option: &str) -> bool {
        self.name(option).is_some() || self.meant.contains(&option)
    }

    fn parse_option(&mut self, input: ParseStream) -> syn::Result<()> {
        if input.peek(LitStr) {
            return self.parse_nameless_key(input);
        }
        if let Some((option, mistake)) = option_with_dashes(input) {
            self.meant.push(option);
            return Err(mistake);
        }
        if let Some(argument) = self.argument_of_the_template(input) {
            self.has_arguments = true;
            return Err(argument);
        }
        let name = input.call(Ident::parse_any)?;
        let again = self.name(&name.to_string()).is_some();
        self.names.push(name.clone());
        match name.to_string().as_str() {
            "key" => self.key = Some(given(&name, input)?),
            "keys" => self.keys = Some(given(&name, input)?),
            "wait" => self.wait = Some(given(&name, input)?),
            "try" => self.try_only = Some(flag(&name, input)?),
            "through_outages" => self.through_outages = Some(given(&name, input)?),
            "ttl" => self.ttl = Some(given(&name, input)?),
            "shared" => self.shared = Some(flag(&name, input)?),
            "permits" => self.permits = Some(given(&name, input)?),
            "of" => self.of = Some(given(&name, input)?),
            "on_busy" => self.on_busy = Some(given(&name, input)?),
            "on_error" => self.on_error = Some(given(&name, input)?),
            "on_lost" => self.on_lost = Some(value(&name, input, on_lost)?),
            "on_revoke" => self.on_revoke = Some(value(&name, input, on_revoke)?),
            "min_hold" => self.min_hold = Some(given(&name, input)?),
            "max_hold" => self.max_hold = Some(given(&name, input)?),
            "linger" => self.linger = Some(given(&name, input)?),
            "reentrant" => self.reentrant = Some(given(&name, input)?),
            "when" => self.when = Some(given(&name, input)?),
            "locks" => self.locks = Some(given(&name, input)?),
            "held" => self.held = Some(value(&name, input, variable)?),
            "crate" => self.crate_path = Some(value(&name, input, crate_path)?),
            unknown => {
                self.meant.extend(meant(&in_snake_case(unknown)));
                return Err(Error::new_spanned(&name, unknown_option(unknown)));
            }
        }
        if again {
            return Err(Error::new_spanned(
                &name,
                format!("`{name}` is given twice"),
            ));
        }
        if !input.is_empty() && !input.peek(Token![,]) {
            return Err(input.error("expected `,` before the next option"));
        }
        Ok(())
    }

    /// `key = "order:{}", order.id`: the mistake when an argument of a template stands in the place
    /// of an option.
    fn argument_of_the_template(&self, input: ParseStream) -> Option<Error> {
        let Some(Expr::Lit(ExprLit {
            lit: Lit::Str(template),
            ..
        })) = self.key.as_ref().map(|key| &key.value)
        else {
            return None;
        };
        let ahead = input.fork();
        let name = ahead.call(Ident::parse_any).ok();
        let is_option = name.is_some_and(|name| {
            let has_hole = || {
                ["{}", "{:"]
                    .iter()
                    .any(|hole| template.value().contains(hole))
            };
            // `timeout: "2s"` and `timeout("2s")` look like options; `Order::ID` and `text(id)` do
            // not.
            let is_call_of_a_word = || {
                let word = in_snake_case(&name.to_string());
                ahead.peek(Paren)
                    && (meant(&word).is_some() || ADVICE.iter().any(|(name, _)| *name == word))
            };
            example(&name.to_string()).is_some()
                || ahead.peek(Token![=]) && !ahead.peek(Token![==])
                || ahead.peek(Token![:]) && !ahead.peek(Token![::])
                || is_call_of_a_word()
                || at_end(&ahead) && !has_hole()
        });
        if is_option || input.peek(Token![,]) {
            return None;
        }
        let argument = up_to_comma(&input.fork()).ok()?;
        let message = format!(
            "a template takes no arguments after it: write `{{{}}}` inside of its quotes",
            without_spaces(&argument).trim_start_matches(['&', '*'])
        );
        Some(Error::new_spanned(argument, message))
    }

    /// `#[distributed_lock("order:{id}")]`: reports that the name is missing, and still uses the
    /// text as the key, so that mistakes inside the text are reported too.
    fn parse_nameless_key(&mut self, input: ParseStream) -> syn::Result<()> {
        let literal: LitStr = input.parse()?;
        let mistake = Error::new_spanned(&literal, "a key needs its name: write `key = \"…\"`");
        let name = Ident::new("key", literal.span());
        self.names.push(name.clone());
        self.key = Some(Given {
            name,
            value: Expr::Lit(ExprLit {
                attrs: Vec::new(),
                lit: Lit::Str(literal),
            }),
        });
        Err(mistake)
    }
}

/// `on-busy = skip`: an option whose words are separated by dashes. Returns the option too.
fn option_with_dashes(input: ParseStream) -> Option<(&'static str, Error)> {
    let ahead = input.fork();
    let mut words = vec![ahead.call(Ident::parse_any).ok()?];
    while ahead.parse::<Token![-]>().is_ok() {
        words.push(ahead.call(Ident::parse_any).ok()?);
    }
    let is_option = words.len() > 1 && ahead.peek(Token![=]);
    let word = words.iter().map(ToString::to_string).collect::<Vec<_>>();
    let option = meant(&word.join("_")).filter(|_| is_option)?;
    let written = example(option).unwrap_or_default();
    let message = format!(
        "unknown option `{}`; did you mean `{written}`?",
        word.join("-")
    );
    let tokens = words.iter().map(ToTokens::to_token_stream);
    Some((
        option,
        Error::new_spanned(tokens.collect::<TokenStream>(), message),
    ))
}

/// The tokens before the next comma.
fn up_to_comma(input: ParseStream) -> syn::Result<TokenStream> {
    let mut tokens = TokenStream::new();
    while !at_end(input) {
        tokens.extend([input.parse::<TokenTree>()?]);
    }
    Ok(tokens)
}

/// The tokens as text without spaces. This is probably the text of a user who forgot the quotes.
fn without_spaces(tokens: &TokenStream) -> String {
    tokens.to_string().replace(' ', "")
}

/// `name = value`.
fn value<T>(
    name: &Ident,
    input: ParseStream,
    parse: impl FnOnce(ParseStream) -> syn::Result<T>,
) -> syn::Result<T> {
    let equals: Option<Token![=]> = input.parse()?;
    if equals.is_none() || at_end(input) {
        let written = example(&name.to_string()).unwrap_or_default();
        let message = format!("`{name}` needs a value: write `{written}`");
        return Err(Error::new_spanned(name, message));
    }
    parse(input)
}

/// `name = expression`.
fn given(name: &Ident, input: ParseStream) -> syn::Result<Given> {
    let expression = |input: ParseStream| {
        let written = up_to_comma(&input.fork())?;
        let value = input.parse::<Expr>();
        if name == "key" && is_bare_template(&written, value.as_ref().ok(), at_end(input)) {
            let template = without_spaces(&written);
            let message = format!("a template stands in quotes: write `key = \"{template}\"`");
            return Err(Error::new_spanned(written, message));
        }
        value.map_err(|error| {
            let message = format!("the value of `{name}` is no valid expression: {error}");
            Error::new_spanned(written, message)
        })
    };
    Ok(Given {
        name: name.clone(),
        value: value(name, input, expression)?,
    })
}

/// Whether this is a template without its quotes: `order:{id}`, `order-{id}` or `order_{id}`. It
/// has braces, but is no expression that gives a text.
fn is_bare_template(written: &TokenStream, value: Option<&Expr>, is_whole: bool) -> bool {
    let has_braces = written
        .clone()
        .into_iter()
        .any(|token| matches!(token, TokenTree::Group(it) if it.delimiter() == Delimiter::Brace));
    let is_text = match value {
        Some(Expr::Binary(it)) => matches!(it.op, BinOp::Add(_)),
        // `Order { id }` is an expression, `order_{id}` is a template without quotes.
        Some(Expr::Struct(it)) => {
            let name = it.path.segments.last();
            name.is_none_or(|name| !name.ident.to_string().starts_with(char::is_lowercase))
        }
        Some(_) => is_whole,
        None => false,
    };
    has_braces && !is_text
}

/// `name` alone.
fn flag(name: &Ident, input: ParseStream) -> syn::Result<Ident> {
    if input.peek(Token![=]) {
        let message = format!("`{name}` takes no value: write `{name}` alone, or leave it out");
        return Err(Error::new_spanned(name, message));
    }
    Ok(name.clone())
}

fn variable(input: ParseStream) -> syn::Result<Ident> {
    let span = input.span();
    match input.parse() {
        Ok(variable) if at_end(input) => Ok(variable),
        _ => Err(Error::new(
            span,
            "`held` takes the name of a new variable: write `held = lock`",
        )),
    }
}

fn on_lost(input: ParseStream) -> syn::Result<OnLost> {
    let span = input.span();
    match input.parse::<Ident>() {
        Ok(word) if word == "cancel" && at_end(input) => Ok(OnLost::Cancel),
        Ok(word) if word == "signal" && at_end(input) => Ok(OnLost::Signal),
        _ => Err(Error::new(
            span,
            "write `on_lost = cancel`, which stops the body when the lock is lost, or `on_lost = signal`, which lets it go \
             on",
        )),
    }
}

fn on_revoke(input: ParseStream) -> syn::Result<OnRevoke> {
    let span = input.span();
    match input.parse::<Ident>() {
        Ok(word) if word == "cancel" && at_end(input) => Ok(OnRevoke::Cancel),
        Ok(word) if word == "finish" && at_end(input) => Ok(OnRevoke::Finish),
        _ => Err(Error::new(
            span,
            "write `on_revoke = cancel`, which stops the body as soon as somebody asks for the lock, or `on_revoke = \
             finish`, which lets it go on for the time that it is given",
        )),
    }
}

fn crate_path(input: ParseStream) -> syn::Result<Path> {
    let span = input.span();
    match Path::parse_mod_style(input) {
        Ok(path) if at_end(input) => match path.get_ident() {
            Some(name) if ["std", "core", "alloc"].iter().any(|it| name == it) => {
                Err(Error::new_spanned(
                    &path,
                    format!(
                        "`{name}` is not `lockcore`: write `crate = path::to::lockcore`, or leave it out"
                    ),
                ))
            }
            _ => Ok(path),
        },
        _ => Err(Error::new(
            span,
            "`crate` takes a path: write `crate = path::to::lockcore`",
        )),
    }
}

fn at_end(input: ParseStream) -> bool {
    input.is_empty() || input.peek(Token![,])
}

fn unknown_option(unknown: &str) -> String {
    let word = in_snake_case(unknown);
    if let Some((_, advice)) = ADVICE.iter().find(|(name, _)| *name == word) {
        return format!("unknown option `{unknown}`: {advice}");
    }
    match meant(&word).and_then(example) {
        Some(written) => format!("unknown option `{unknown}`; did you mean `{written}`?"),
        None => {
            let known = OPTIONS.map(|(option, _)| format!("`{option}`")).join(", ");
            format!("unknown option `{unknown}`; the options are {known}")
        }
    }
}

/// Turns `waitTime` into `wait_time`.
fn in_snake_case(word: &str) -> String {
    let mut snake = String::new();
    for char in word.chars() {
        if char.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(char.to_lowercase());
    }
    snake
}

/// The option that an unknown word probably stands for.
fn meant(unknown: &str) -> Option<&'static str> {
    if let Some((_, option)) = OTHER_NAMES.iter().find(|(name, _)| *name == unknown) {
        return Some(option);
    }
    let nearest = OPTIONS
        .iter()
        .map(|(option, _)| (strsim::damerau_levenshtein(unknown, option), *option))
        .min_by_key(|(edits, _)| *edits);
    // Two letters may differ, and fewer than half of the word. With more, any short word would
    // match `key` or `try`.
    let (_, option) = nearest.filter(|(edits, _)| *edits <= 2 && *edits * 2 < unknown.len())?;
    Some(option)
}

/// The example of an option.
fn example(option: &str) -> Option<&'static str> {
    let (_, written) = OPTIONS.iter().find(|(name, _)| *name == option)?;
    Some(written)
}

#[cfg(test)]
mod tests {
    use quote::quote;

    use super::*;

    fn mistakes_in(tokens: TokenStream) -> (Args, Vec<String>) {
        let mut mistakes = Mistakes::default();
        let args = Args::parse(tokens, &mut mistakes);
        (args, mistakes.messages())
    }

    #[test]
    fn every_option_is_read() {
        let (args, mistakes) = mistakes_in(quote! {
            key = "order:{id}", keys = ["a"], wait = Duration::from_secs(2), ttl = "5s", try, shared,
            through_outages = true,
            permits = 1, of = n, on_busy = skip, on_error = { log(error) }, on_lost = cancel,
            on_revoke = finish, min_hold = "1s", max_hold = "2s", linger = "20ms", reentrant = false, when = a < b,
            locks = self.locks::<A, B>()?, held = lock, crate = app::lockcore,
        });

        assert_eq!(mistakes, [""; 0]);
        assert_eq!(args.names.len(), OPTIONS.len());
        for (option, _) in OPTIONS {
            assert!(args.name(option).is_some(), "{option}");
        }
    }

    #[test]
    fn reading_continues_after_each_mistake() {
        let (args, mistakes) =
            mistakes_in(quote!(kye = "a", held = "lock", try = true, ttl, wait = "2s"));

        assert_eq!(mistakes.len(), 4, "{mistakes:?}");
        assert!(args.wait.is_some());
        assert!(args.name("held").is_some() && args.held.is_none());
    }

    #[test]
    fn text_that_is_no_option_is_skipped() {
        let (args, mistakes) = mistakes_in(quote!(, 7, key = "a", (b, c)));

        assert_eq!(mistakes.len(), 3, "{mistakes:?}");
        assert!(args.key.is_some());
    }

    #[test]
    fn a_missing_comma_is_reported() {
        for options in [quote!(key = "a" wait = "2s"), quote!(try key = "a")] {
            let (_, mistakes) = mistakes_in(options);

            assert_eq!(mistakes, ["expected `,` before the next option"]);
        }
    }

    #[test]
    fn an_unknown_word_gets_the_nearest_option_or_the_whole_list() {
        assert!(unknown_option("colour").ends_with("`locks`, `held`, `crate`"));
        assert!(unknown_option("kye").ends_with("did you mean `key = \"order:{order.id}\"`?"));
        assert!(unknown_option("lock").contains("did you mean `locks = "));
        assert!(unknown_option("onbusy").contains("did you mean `on_busy = "));
        for word in ["a", "ur", "sql"] {
            assert!(unknown_option(word).contains("the options are"), "{word}");
        }
    }

    #[test]
    fn a_name_from_another_library_gets_our_name() {
        assert!(unknown_option("timeout").ends_with("did you mean `wait = \"2s\"`?"));
        assert!(unknown_option("waitTime").ends_with("did you mean `wait = \"2s\"`?"));
        assert!(unknown_option("write").contains("the write side"));
        for (name, option) in OTHER_NAMES {
            assert!(example(option).is_some(), "{option}");
            assert!(example(name).is_none(), "{name} is an option");
        }
    }
}
