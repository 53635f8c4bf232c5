//! The key template: takes `"order:{order.id}:{region}"` apart into what `format!` understands.
//! `format!` itself checks that the names exist, that they can be displayed, and the format specs.

use syn::ext::IdentExt;
use syn::parse::Parser;
use syn::{Error, Expr, Ident, LitStr};

use crate::mistakes::Mistakes;

/// A call `format!(format, arguments…)` that builds the key.
pub(crate) struct Template {
    /// The text as the user wrote it.
    pub(crate) literal: LitStr,
    /// The user's own literal where `format!` takes it as it is, because the compiler then points
    /// into it when a name is unknown.
    pub(crate) format: LitStr,
    /// What stands for the `{}` in `format`, in order.
    pub(crate) arguments: Vec<Expr>,
}

impl Template {
    /// Goes on after a mistake; what it returns is of use only when there was none.
    pub(crate) fn parse(literal: LitStr, mistakes: &mut Mistakes) -> Template {
        let mut format = String::new();
        let mut arguments = Vec::new();
        let mut mistake = |message| mistakes.push(Error::new_spanned(&literal, message));

        let text = literal.value();
        let mut rest = text.as_str();
        while let Some(brace) = rest.find(['{', '}']) {
            format.push_str(&rest[..brace]);
            rest = &rest[brace..];
            if let Some(escape) = ["{{", "}}"].into_iter().find(|it| rest.starts_with(it)) {
                format.push_str(escape);
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
                mistake(format!(
                    "`{{{placeholder}}}` in the key names nothing: write an argument, as in `{{id}}` \
                     or `{{order.id}}`"
                ));
            } else if is_plain(expr) {
                format.push_str(&rest[..=end + 1]);
            } else if let Some(argument) = parse_argument(expr, &literal) {
                arguments.push(argument);
                format.push('{');
                format.push_str(spec);
                format.push('}');
            } else {
                mistake(format!(
                    "`{{{placeholder}}}` in the key: between the braces stands an argument, a field \
                     or a method call, as in `{{order.id}}`; for more write `key = format!(…)`"
                ));
            }
            rest = behind;
        }
        format.push_str(rest);

        let format = match arguments.is_empty() {
            true => literal.clone(),
            false => LitStr::new(&format, literal.span()),
        };
        Template {
            literal,
            format,
            arguments,
        }
    }
}

/// `id:05` → `id` and `:05`. The format spec begins at the first `:` that is neither inside
/// brackets nor half of a `::`.
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

/// Whether `format!` captures it itself; `type` means `r#type`. `self` it would capture too, but that
/// may go by another name, see [`Function::as_in_the_body`](crate::function::Function::as_in_the_body).
fn is_plain(expr: &str) -> bool {
    Ident::parse_any
        .parse_str(expr)
        .is_ok_and(|it| it != "self")
}

/// The tokens get the literal's span, so that errors in them point at it.
fn parse_argument(expr: &str, literal: &LitStr) -> Option<Expr> {
    let expr = LitStr::new(expr, literal.span()).parse().ok()?;
    match expr {
        Expr::Path(_) | Expr::Field(_) | Expr::MethodCall(_) | Expr::Call(_) | Expr::Index(_) => {
            Some(expr)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proc_macro2::Span;
    use quote::ToTokens;

    use super::*;

    fn parse(text: &str) -> (Template, Vec<String>) {
        let mut mistakes = Mistakes::default();
        let template = Template::parse(LitStr::new(text, Span::call_site()), &mut mistakes);
        (template, mistakes.messages())
    }

    /// What `format!` gets: its literal's text and the arguments' tokens.
    fn parts(text: &str) -> (String, Vec<String>) {
        let (template, mistakes) = parse(text);
        assert_eq!(mistakes, [""; 0], "{text}");
        let arguments = template.arguments.iter();
        let arguments = arguments.map(|it| it.to_token_stream().to_string().replace(' ', ""));
        (template.format.value(), arguments.collect())
    }

    #[track_caller]
    fn assert_parts(text: &str, format: &str, arguments: &[&str]) {
        let (actual_format, actual_arguments) = parts(text);
        assert_eq!(actual_format, format, "{text}");
        assert_eq!(actual_arguments, arguments, "{text}");
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
    fn a_template_of_plain_names_is_left_to_format() {
        for text in [
            "",
            "nightly",
            "order:{id}",
            "{a}:{b:05}:{c:?}:{type}",
            "{{{id}}}",
        ] {
            assert_parts(text, text, &[]);
        }
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
    fn a_placeholder_names_something() {
        assert_mistakes("order:{}", &["`{}` in the key names nothing"]);
        assert_mistakes("order:{ }", &["names nothing"]);
        assert_mistakes("order:{:05}", &["`{:05}` in the key names nothing"]);
    }

    #[test]
    fn a_placeholder_holds_no_other_expression() {
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
    fn all_mistakes_of_a_template_are_told() {
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
