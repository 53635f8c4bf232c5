//! The key template: splits `"order:{order.id}:{region}"` into a format string and arguments for
//! `format!`. `format!` itself checks that the names exist, that they can be displayed, and the
//! format specs.

use proc_macro2::{Group, Span, TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::parse::Parser;
use syn::{Error, Expr, Ident, LitStr, parse_quote};

use crate::mistakes::Mistakes;

pub(crate) struct Template {
    /// The text as the user wrote it.
    pub(crate) literal: LitStr,
    pieces: Vec<Piece>,
}

enum Piece {
    /// Text as in the template, with doubled braces.
    Text(String),
    /// A name that `format!` can capture itself, with its format spec.
    Name {
        name: Ident,
        spec: String,
    },
    Expr {
        expr: Expr,
        spec: String,
    },
}

/// A call `format!(format, arguments…)` that builds the key.
pub(crate) struct Format {
    /// The user's own literal, if `format!` accepts it. If a name in it is unknown, the compiler
    /// then points into the user's literal.
    pub(crate) format: LitStr,
    /// The arguments for the `{}` in `format`, in order.
    pub(crate) arguments: Vec<Argument>,
}

pub(crate) struct Argument {
    pub(crate) expr: Expr,
    /// Formatted with `Display`, not with `Debug` and not as a number in another base.
    pub(crate) is_displayed: bool,
}

impl Template {
    /// Continues after a mistake. The returned template is useful only if there was no mistake. If
    /// arguments follow the template, a `{}` is not reported, because another message already says
    /// what to write there.
    pub(crate) fn parse(
        literal: LitStr,
        has_arguments_behind: bool,
        mistakes: &mut Mistakes,
    ) -> Template {
        /// The same limit as in `lockcore`, which checks the name when the lock is asked for.
        const LONGEST: usize = 4096;
        let mut pieces = Vec::new();
        let mut length = 0;
        let mut text_piece = |pieces: &mut Vec<Piece>, text: &str, bytes| {
            pieces.push(Piece::Text(text.to_owned()));
            length += bytes;
        };
        let mut mistake = |message| mistakes.push(Error::new_spanned(&literal, message));

        let text = literal.value();
        let mut rest = text.as_str();
        while let Some(brace) = rest.find(['{', '}']) {
            text_piece(&mut pieces, &rest[..brace], brace);
            rest = &rest[brace..];
            if let Some(escape) = ["{{", "}}"].into_iter().find(|it| rest.starts_with(it)) {
                text_piece(&mut pieces, escape, 1);
                rest = &rest[escape.len()..];
                continue;
            }
            let Some(inside) = rest.strip_prefix('{') else {
                mistake(
                    "`}` without `{` in the key; a brace in the name is written `}}`".to_owned(),
                );
                rest = &rest[1..];
                continue;
            };
            let end = inside.find(['{', '}']).unwrap_or(inside.len());
            let placeholder = &inside[..end];
            let Some(behind) = inside[end..].strip_prefix('}') else {
                mistake(format!(
                    "unclosed `{{{placeholder}` in the key: write `{{{placeholder}}}`; \
                     a brace in the name is written `{{{{`"
                ));
                rest = &inside[end..];
                continue;
            };
            let (expr, spec) = split_spec(placeholder);
            if expr.trim().is_empty() {
                if has_arguments_behind {
                    rest = behind;
                    continue;
                }
                mistake(format!(
                    "`{{{placeholder}}}` in the key names nothing: write an argument, as in `{{id}}` \
                     or `{{order.id}}`"
                ));
            } else if let Some(name) = plain_name(expr, &literal) {
                let spec = spec.to_owned();
                pieces.push(Piece::Name { name, spec });
            } else if let Some(expr) = parse_argument(expr, &literal) {
                let spec = spec.to_owned();
                pieces.push(Piece::Expr { expr, spec });
            } else {
                mistake(format!(
                    "`{{{placeholder}}}` in the key: between the braces stands an argument, a field \
                     or a method call, as in `{{order.id}}`; for more write `key = format!(…)`"
                ));
            }
            rest = behind;
        }
        text_piece(&mut pieces, rest, rest.len());
        if text.is_empty() {
            mistake(
                "an empty key names no lock: write a text, as in `key = \"order:{id}\"`".to_owned(),
            );
        } else if length > LONGEST {
            mistake(format!(
                "the text of this key has {length} bytes, and a key has {LONGEST} at most: shorten it"
            ));
        }
        Template { literal, pieces }
    }

    /// Reports an argument in the form of other libraries, `#order.id` or `{{order.id}}`. It would
    /// be text, so all calls would have one lock.
    pub(crate) fn check_placeholders(&self, arguments: &[Ident]) -> syn::Result<()> {
        let mut text = String::new();
        for piece in &self.pieces {
            match piece {
                Piece::Text(part) => text += part,
                Piece::Name { .. } | Piece::Expr { .. } => text.push('{'),
            }
        }
        for sign in ["#", "{{"] {
            for rest in text.split(sign).skip(1) {
                let is_part = |char: char| char.is_alphanumeric() || ['_', '.'].contains(&char);
                let path = &rest[..rest.find(|char| !is_part(char)).unwrap_or(rest.len())];
                let path = path.trim_end_matches('.');
                let name = path.split('.').next().unwrap_or_default();
                let is_whole = sign == "#" || rest[path.len()..].starts_with("}}");
                // In `ticket#id={id}` the name is a text beside the placeholder.
                let is_used = sign == "#" && self.uses(name);
                if is_whole && !is_used && arguments.iter().any(|it| it.unraw() == name) {
                    let end = if sign == "#" { "" } else { "}}" };
                    let message = format!(
                        "`{sign}{path}{end}` is text, so every call has the same lock: write `{{{path}}}`; if it is meant \
                         as text, write `key = String::from(…)`"
                    );
                    return Err(Error::new_spanned(&self.literal, message));
                }
            }
        }
        Ok(())
    }

    /// Whether a placeholder is this argument.
    fn uses(&self, argument: &str) -> bool {
        let is_it =
            |piece: &Piece| matches!(piece, Piece::Name { name, .. } if name.unraw() == argument);
        self.pieces.iter().any(is_it)
    }

    /// Returns the parts that build the key. The names of arguments become arguments of `format!`,
    /// so that our message appears for an argument that cannot be part of a key. Other names stay
    /// in the literal: if one is unknown, the compiler points at it.
    pub(crate) fn format(&self, names_of_arguments: &[Ident]) -> Format {
        let mut format = String::new();
        let mut arguments = Vec::new();
        let mut argument = |format: &mut String, expr, spec: &str| {
            *format += &format!("{{{spec}}}");
            let is_displayed = !spec
                .trim_end()
                .ends_with(['?', 'x', 'X', 'o', 'b', 'e', 'E', 'p']);
            arguments.push(Argument { expr, is_displayed });
        };
        for piece in &self.pieces {
            match piece {
                Piece::Text(text) => format += text,
                Piece::Name { name, spec } if names_of_arguments.contains(name) => {
                    argument(&mut format, parse_quote!(#name), spec);
                }
                Piece::Name { name, spec } => format += &format!("{{{}{spec}}}", name.unraw()),
                Piece::Expr { expr, spec } => argument(&mut format, expr.clone(), spec),
            }
        }
        let format = match arguments.is_empty() {
            true => self.literal.clone(),
            false => LitStr::new(&format, self.literal.span()),
        };
        Format { format, arguments }
    }
}

/// Splits `id:05` into `id` and `:05`. The format spec begins at the first `:` that is not inside
/// brackets and not part of a `::`.
fn split_spec(placeholder: &str) -> (&str, &str) {
    let mut depth = 0_i32;
    let mut chars = placeholder.char_indices().peekable();
    while let Some((at, char)) = chars.next() {
        match char {
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            ':' if chars.next_if(|(_, next)| *next == ':').is_some() => {}
            ':' if depth == 0 => return placeholder.split_at(at),
            _ => {}
        }
    }
    (placeholder, "")
}

/// A name that `format!` can capture itself; `type` means `r#type`. `format!` could also capture
/// `self`, but `self` may have been renamed, see
/// [`Function::as_in_the_body`](crate::function::Function::as_in_the_body).
fn plain_name(expr: &str, literal: &LitStr) -> Option<Ident> {
    let name = Ident::parse_any.parse_str(expr).ok()?;
    let is_plain = name != "self" && name != "_";
    is_plain.then(|| as_a_name(&name.unraw(), literal.span()))
}

/// Parses an argument. The tokens get the literal's span, so that the compiler reports errors at
/// the literal.
fn parse_argument(expr: &str, literal: &LitStr) -> Option<Expr> {
    let tokens: TokenStream = LitStr::new(expr, literal.span()).parse().ok()?;
    match syn::parse2(with_names_of_keywords(tokens, true)).ok()? {
        expr @ (Expr::Path(_)
        | Expr::Field(_)
        | Expr::MethodCall(_)
        | Expr::Call(_)
        | Expr::Index(_)) => Some(expr),
        _ => None,
    }
}

/// Turns `order.type` into `order.r#type`, and `type.id` into `r#type.id`, as `format!` does with
/// `{type}`.
fn with_names_of_keywords(tokens: TokenStream, mut is_name: bool) -> TokenStream {
    let with_names = tokens.into_iter().map(|token| {
        let token = match token {
            TokenTree::Ident(name) if is_name => as_a_name(&name, name.span()).into(),
            TokenTree::Group(group) => {
                // An argument such as the `true` in `f(true)` is not a name.
                let stream = with_names_of_keywords(group.stream(), false);
                let mut inside = Group::new(group.delimiter(), stream);
                inside.set_span(group.span());
                inside.into()
            }
            other => other,
        };
        is_name = matches!(&token, TokenTree::Punct(it) if it.as_char() == '.');
        token
    });
    with_names.collect()
}

fn as_a_name(name: &Ident, span: Span) -> Ident {
    let text = name.to_string();
    let is_keyword = syn::parse_str::<Ident>(&text).is_err();
    // These words have no raw form, and `.await` is not a field.
    let is_more = ["self", "Self", "super", "crate", "_", "await"].contains(&text.as_str());
    match is_keyword && !is_more {
        true => Ident::new_raw(&text, span),
        false => {
            let mut name = name.clone();
            name.set_span(span);
            name
        }
    }
}

#[cfg(test)]
mod tests {
    use proc_macro2::Span;
    use quote::ToTokens;

    use super::*;

    fn parse(text: &str) -> (Template, Vec<String>) {
        let mut mistakes = Mistakes::default();
        let text = LitStr::new(text, Span::call_site());
        let template = Template::parse(text, false, &mut mistakes);
        (template, mistakes.messages())
    }

    /// Checks the format string and the arguments that `format!` gets in a function with the
    /// arguments `id` and `type`.
    #[track_caller]
    fn assert_parts(text: &str, format: &str, arguments: &[&str]) {
        let (template, mistakes) = parse(text);
        assert_eq!(mistakes, [""; 0], "{text}");
        let site = Span::call_site();
        let actual = template.format(&[Ident::new("id", site), Ident::new_raw("type", site)]);
        let expr = |it: &Argument| it.expr.to_token_stream().to_string().replace(' ', "");
        assert_eq!(actual.format.value(), format, "{text}");
        let actual: Vec<_> = actual.arguments.iter().map(expr).collect();
        assert_eq!(actual, arguments, "{text}");
    }

    #[track_caller]
    fn assert_mistakes(text: &str, expected: &[&str]) {
        let (_, mistakes) = parse(text);
        assert_eq!(mistakes.len(), expected.len(), "{text}: {mistakes:?}");
        for (mistake, expected) in mistakes.iter().zip(expected) {
            assert!(mistake.contains(expected), "{text}: {mistake}");
        }
    }

    #[test]
    fn a_name_that_is_no_argument_is_left_to_format() {
        for text in [
            "nightly",
            "order:{PREFIX}",
            "{a}:{b:05}:{c:?}:{match}",
            "{{{a}}}",
        ] {
            assert_parts(text, text, &[]);
        }
    }

    #[test]
    fn an_argument_name_becomes_an_argument_of_format() {
        assert_parts("order:{id}", "order:{}", &["id"]);
        assert_parts("{{{id}}}:{id:05}:{A}", "{{{}}}:{:05}:{A}", &["id", "id"]);
        assert_parts("{type}:{r#type}", "{}:{}", &["r#type", "r#type"]);
    }

    #[test]
    fn a_keyword_needs_no_raw_prefix() {
        assert_parts("{o.type}", "{}", &["o.r#type"]);
        assert_parts("{o.type.id:?}", "{:?}", &["o.r#type.id"]);
        assert_parts("{type.match()}", "{}", &["r#type.r#match()"]);
        assert_parts("{o.r#type}", "{}", &["o.r#type"]);
        assert_parts("{o.is(true)}", "{}", &["o.is(true)"]);
        assert_parts("{Self::of(self.type)}", "{}", &["Self::of(self.r#type)"]);
    }

    #[test]
    fn only_specs_of_display_count_as_displayed() {
        let is_displayed = |text: &str| {
            let template = parse(text).0;
            template
                .format(&[])
                .arguments
                .iter()
                .all(|it| it.is_displayed)
        };
        for text in ["{o.id}", "{o.id:05}", "{o.id:>width$}", "{o.id:x<8}"] {
            assert!(is_displayed(text), "{text}");
        }
        for text in [
            "{o.id:?}",
            "{o.id:#?}",
            "{o.id:08x}",
            "{o.id:e}",
            "{o.id:x }",
        ] {
            assert!(!is_displayed(text), "{text}");
        }
    }

    #[test]
    fn an_empty_key_and_one_that_is_too_long_are_mistakes() {
        assert_mistakes("", &["an empty key"]);
        let long = "ü".repeat(2048);
        assert_mistakes(&format!("{long}{{id}}"), &[]);
        assert_mistakes(&format!("{long}{{{{{{id}}"), &["has 4097 bytes"]);
    }

    #[test]
    fn fields_calls_and_paths_become_arguments() {
        assert_parts("order:{order.id}", "order:{}", &["order.id"]);
        assert_parts("{pair.0}-{pair.1.0}", "{}-{}", &["pair.0", "pair.1.0"]);
        assert_parts("cart:{self.user_id()}", "cart:{}", &["self.user_id()"]);
        assert_parts("cart:{self:?}", "cart:{:?}", &["self"]);
        assert_parts("{Self::NAME}:{ids[0]}", "{}:{}", &["Self::NAME", "ids[0]"]);
        assert_parts("{id.get::<u8>()}", "{}", &["id.get::<u8>()"]);
        assert_parts("{user(order)}", "{}", &["user(order)"]);
    }

    #[test]
    fn plain_names_and_escapes_stay_beside_arguments() {
        assert_parts("{{{a}}}:{o.id}:{b:>4}", "{{{a}}}:{}:{b:>4}", &["o.id"]);
        assert_parts("zürich:{o.id}ß", "zürich:{}ß", &["o.id"]);
    }

    #[test]
    fn a_format_spec_stays_with_its_argument() {
        assert_parts("{order.id:05}", "{:05}", &["order.id"]);
        assert_parts("{Kind::A:?}", "{:?}", &["Kind::A"]);
        assert_parts(
            "{map.at(\"a:b\"):>width$}",
            "{:>width$}",
            &["map.at(\"a:b\")"],
        );
    }

    #[test]
    fn braces_without_a_partner_are_mistakes() {
        assert_mistakes("order:{id", &["unclosed `{id`"]);
        assert_mistakes("order:{", &["unclosed `{`"]);
        assert_mistakes("order:id}", &["`}` without `{`"]);
        assert_mistakes("{{id}", &["`}` without `{`"]);
    }

    #[test]
    fn an_empty_placeholder_is_a_mistake() {
        assert_mistakes("order:{}", &["`{}` in the key names nothing"]);
        assert_mistakes("order:{ }", &["names nothing"]);
        assert_mistakes("order:{:05}", &["`{:05}` in the key names nothing"]);
    }

    #[test]
    fn other_expressions_in_a_placeholder_are_mistakes() {
        for text in [
            "{0}",
            "{a + b}",
            "{order.}",
            "{-id}",
            "{id.await}",
            "{\"x\"}",
            "{a b}",
        ] {
            assert_mistakes(text, &["for more write `key = format!(…)`"]);
        }
    }

    #[test]
    fn a_placeholder_of_another_library_is_a_mistake_if_it_names_an_argument() {
        let order = [Ident::new("order", Span::call_site())];
        for (text, placeholder) in [
            ("#order.id", "`#order.id`"),
            ("orders:#order", "`#order`"),
            ("#order.id:{id}", "write `{order.id}`"),
            ("order:{{order.id}}", "`{{order.id}}`"),
            ("{{order}}:{id}", "write `{order}`"),
        ] {
            let mistake = parse(text).0.check_placeholders(&order);
            let mistake = mistake.expect_err(text).to_string();
            assert!(mistake.contains(placeholder), "{text}: {mistake}");
        }
        for text in [
            "#orders",
            "a#",
            "{{{order}}}",
            "{{order",
            "{{a}}",
            "order",
            "#{order}",
        ] {
            assert!(parse(text).0.check_placeholders(&order).is_ok(), "{text}");
        }
    }

    #[test]
    fn all_mistakes_of_a_template_are_reported() {
        assert_mistakes(
            "{a{}b}{1}{c",
            &[
                "unclosed `{a`",
                "names nothing",
                "`}` w",
                "`{1}`",
                "unclosed `{c`",
            ],
        );
    }

    #[test]
    fn the_literal_is_kept_for_the_label() {
        assert_eq!(
            parse("order:{order.id}").0.literal.value(),
            "order:{order.id}"
        );
    }
}
