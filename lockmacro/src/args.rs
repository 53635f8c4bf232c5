//! Reads the options between the parentheses of the attribute. Which options there are and how each
//! is written is decided here; what they mean together is in `model`.

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::parse::{Parse, ParseStream, Parser};
use syn::{Error, Expr, ExprLit, Ident, Lit, LitStr, Path, Token, parse_quote};

use crate::mistakes::Mistakes;

/// Every option, as the messages show it. A new one needs a line here, one in `parse_option` and a
/// field in [`Args`].
const OPTIONS: [(&str, &str); 8] = [
    ("key", "key = \"order:{order.id}\""),
    ("wait", "wait = \"2s\""),
    ("ttl", "ttl = \"10s\""),
    ("try", "try"),
    ("shared", "shared"),
    ("locks", "locks = self.locks"),
    ("held", "held = lock"),
    ("crate", "crate = path::to::lockcore"),
];

/// The options as the user wrote them.
#[derive(Default)]
pub(crate) struct Args {
    pub(crate) key: Option<Expr>,
    pub(crate) wait: Option<Expr>,
    pub(crate) ttl: Option<Expr>,
    pub(crate) try_only: Option<Ident>,
    pub(crate) shared: Option<Ident>,
    pub(crate) locks: Option<Expr>,
    pub(crate) held: Option<Ident>,
    pub(crate) crate_path: Option<Path>,
    /// The options met so far, also those whose value could not be read.
    names: Vec<Ident>,
}

impl Args {
    /// Reads all that can be read: after a mistake it goes on behind the next comma.
    pub(crate) fn parse(tokens: TokenStream, mistakes: &mut Mistakes) -> Args {
        let mut args = Args::default();
        let read_all = |input: ParseStream| {
            while !input.is_empty() {
                if let Err(mistake) = args.parse_option(input) {
                    mistakes.push(mistake);
                    skip_to_comma(input)?;
                }
                input.parse::<Option<Token![,]>>()?;
            }
            Ok(())
        };
        let read = read_all.parse2(tokens);
        mistakes.keep(read);
        args
    }

    /// Whether the option is there, its value readable or not.
    pub(crate) fn names(&self, option: &str) -> bool {
        self.names.iter().any(|name| name == option)
    }

    /// The path to the crate that the expansion uses.
    pub(crate) fn lockcore(&self) -> Path {
        match &self.crate_path {
            Some(path) => path.clone(),
            None => parse_quote!(::lockcore),
        }
    }

    fn parse_option(&mut self, input: ParseStream) -> syn::Result<()> {
        if input.peek(LitStr) {
            return self.parse_nameless_key(input);
        }
        let name = input.call(Ident::parse_any)?;
        let again = self.names(&name.to_string());
        self.names.push(name.clone());
        match name.to_string().as_str() {
            "key" => self.key = Some(value(&name, input, Parse::parse)?),
            "wait" => self.wait = Some(value(&name, input, Parse::parse)?),
            "ttl" => self.ttl = Some(value(&name, input, Parse::parse)?),
            "try" => self.try_only = Some(flag(&name, input)?),
            "shared" => self.shared = Some(flag(&name, input)?),
            "locks" => self.locks = Some(value(&name, input, Parse::parse)?),
            "held" => self.held = Some(value(&name, input, variable)?),
            "crate" => self.crate_path = Some(value(&name, input, crate_path)?),
            unknown => return Err(Error::new_spanned(&name, unknown_option(unknown))),
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

    /// `#[distributed_lock("order:{id}")]`: says what is missing, and takes the text as the key all
    /// the same, so that what is wrong inside it is told too.
    fn parse_nameless_key(&mut self, input: ParseStream) -> syn::Result<()> {
        let literal: LitStr = input.parse()?;
        let mistake = Error::new_spanned(&literal, "a key needs its name: write `key = \"…\"`");
        self.names.push(Ident::new("key", literal.span()));
        self.key = Some(Expr::Lit(ExprLit {
            attrs: Vec::new(),
            lit: Lit::Str(literal),
        }));
        Err(mistake)
    }
}

/// `name = value`.
fn value<T>(
    name: &Ident,
    input: ParseStream,
    parse: fn(ParseStream) -> syn::Result<T>,
) -> syn::Result<T> {
    let equals: Option<Token![=]> = input.parse()?;
    if equals.is_none() || at_end(input) {
        let written = OPTIONS.iter().find(|(option, _)| name == option);
        let written = written.map_or("", |(_, example)| example);
        let message = format!("`{name}` needs a value: write `{written}`");
        return Err(Error::new_spanned(name, message));
    }
    parse(input)
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

fn crate_path(input: ParseStream) -> syn::Result<Path> {
    let span = input.span();
    match Path::parse_mod_style(input) {
        Ok(path) if at_end(input) => Ok(path),
        _ => Err(Error::new(
            span,
            "`crate` takes a path: write `crate = path::to::lockcore`",
        )),
    }
}

fn at_end(input: ParseStream) -> bool {
    input.is_empty() || input.peek(Token![,])
}

fn skip_to_comma(input: ParseStream) -> syn::Result<()> {
    while !at_end(input) {
        input.parse::<TokenTree>()?;
    }
    Ok(())
}

fn unknown_option(unknown: &str) -> String {
    let nearest = OPTIONS
        .iter()
        .map(|(option, example)| (strsim::damerau_levenshtein(unknown, option), example))
        .min();
    match nearest {
        // Two letters: more would turn any short word into `key` or `ttl`.
        Some((edits, example)) if edits <= 2 && edits < unknown.len() => {
            format!("unknown option `{unknown}`; did you mean `{example}`?")
        }
        _ => {
            let known = OPTIONS.map(|(option, _)| format!("`{option}`")).join(", ");
            format!("unknown option `{unknown}`; there are {known}")
        }
    }
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
            key = "order:{id}", wait = Duration::from_secs(2), ttl = "5s", try, shared,
            locks = self.locks::<A, B>()?, held = lock, crate = app::lockcore,
        });

        assert_eq!(mistakes, [""; 0]);
        assert!(args.key.is_some() && args.wait.is_some() && args.ttl.is_some());
        assert!(args.try_only.is_some() && args.shared.is_some() && args.locks.is_some());
        assert!(args.held.is_some() && args.crate_path.is_some());
    }

    #[test]
    fn reading_goes_on_after_each_mistake() {
        let (args, mistakes) =
            mistakes_in(quote!(kye = "a", held = "lock", try = true, ttl, wait = "2s"));

        assert_eq!(mistakes.len(), 4, "{mistakes:?}");
        assert!(args.wait.is_some());
        assert!(args.names("held") && args.held.is_none());
    }

    #[test]
    fn what_is_no_option_at_all_is_passed_over() {
        let (args, mistakes) = mistakes_in(quote!(, 7, key = "a", (b, c)));

        assert_eq!(mistakes.len(), 3, "{mistakes:?}");
        assert!(args.key.is_some());
    }

    #[test]
    fn a_missing_comma_is_told() {
        for options in [quote!(key = "a" wait = "2s"), quote!(try key = "a")] {
            let (_, mistakes) = mistakes_in(options);

            assert_eq!(mistakes, ["expected `,` before the next option"]);
        }
    }

    #[test]
    fn a_word_that_resembles_no_option_gets_the_whole_list() {
        assert!(unknown_option("timeout").ends_with("`locks`, `held`, `crate`"));
        assert!(unknown_option("kye").ends_with("did you mean `key = \"order:{order.id}\"`?"));
        assert!(unknown_option("lock").contains("did you mean `locks = "));
        assert!(unknown_option("a").contains("there are"));
    }
}
