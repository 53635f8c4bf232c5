//! The template of a key: parses `"order:{path.id}:{header.x-tenant}"`, and makes sure that two
//! requests have the same name only if all their values agree.
//!
//! Between two placeholders there is a delimiter, a character of ASCII punctuation. In the values,
//! every delimiter of the template, and `%`, is percent-encoded. So a value ends at the first
//! delimiter after its beginning. Percent-encoding is reversible. So there is only one way to read
//! the values back from a name.

use std::fmt;

use crate::header;
use crate::source::{Source, Type};

/// The pieces of a name, in order.
#[derive(Clone)]
pub(crate) struct Template {
    pub(crate) pieces: Vec<Piece>,
    /// The characters that are escaped in values. Empty if there is only one value.
    pub(crate) delimiters: String,
}

#[derive(Clone)]
pub(crate) enum Piece {
    Text(String),
    Value(Source, Option<Type>),
}

impl Template {
    /// A template of one value, which is used as it is.
    pub(crate) fn of(source: Source) -> Self {
        Self {
            pieces: vec![Piece::Value(source, None)],
            delimiters: String::new(),
        }
    }

    /// # Errors
    ///
    /// A message for the author of the text, which says what is wrong.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let pieces = pieces(text)?;
        if pieces.is_empty() {
            return Err("it is empty".to_owned());
        }
        let delimiters = delimiters(&pieces)?;
        Ok(Self { pieces, delimiters })
    }

    /// Parses the values of `placeholder` as a type.
    ///
    /// # Errors
    ///
    /// A message for the author of the placeholder, which says what is wrong.
    pub(crate) fn read_as(&mut self, placeholder: &str, wanted: Type) -> Result<(), String> {
        let wanted_source = source(placeholder)?.to_string();
        let mut found = false;
        for piece in &mut self.pieces {
            if let Piece::Value(source, read_as) = piece
                && source.to_string() == wanted_source
            {
                *read_as = Some(wanted);
                found = true;
            }
        }
        match found {
            true => Ok(()),
            false => Err(format!("`{{{placeholder}}}` does not occur in it")),
        }
    }
}

impl Template {
    /// The text of the template, with its placeholders and without their types. `None` if a value
    /// has no placeholder, because a function makes it.
    pub(crate) fn label(&self) -> Option<String> {
        let pieces = self.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => Some(text.clone()),
            Piece::Value(source, _) => Some(format!("{{{}}}", source.placeholder()?)),
        });
        pieces.collect()
    }
}

fn pieces(text: &str) -> Result<Vec<Piece>, String> {
    let mut pieces = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some(brace) = rest.find(['{', '}']) {
        literal.push_str(&rest[..brace]);
        rest = &rest[brace..];
        if let Some(escape) = ["{{", "}}"].into_iter().find(|it| rest.starts_with(it)) {
            literal.push_str(&escape[1..]);
            rest = &rest[escape.len()..];
            continue;
        }
        let Some(inside) = rest.strip_prefix('{') else {
            return Err("`}` without `{`; a brace in the name is written `}}`".to_owned());
        };
        let Some((placeholder, behind)) = inside.split_once('}') else {
            return Err(format!(
                "unclosed `{{{inside}`; a brace in the name is written `{{{{`"
            ));
        };
        if !literal.is_empty() {
            pieces.push(Piece::Text(std::mem::take(&mut literal)));
        }
        let (placeholder, read_as) = match placeholder.split_once(':') {
            Some((placeholder, name)) => (placeholder, Some(integer(name)?)),
            None => (placeholder, None),
        };
        if read_as.is_some() && matches!(placeholder, "grpc_method" | "matched_path") {
            return Err(format!("`{{{placeholder}}}` is no number and has no type"));
        }
        pieces.push(Piece::Value(source(placeholder)?, read_as));
        rest = behind;
    }
    literal.push_str(rest);
    if !literal.is_empty() {
        pieces.push(Piece::Text(literal));
    }
    Ok(pieces)
}

fn source(placeholder: &str) -> Result<Source, String> {
    let (of, name) = match placeholder.split_once('.') {
        Some((of, name)) if !name.is_empty() => (of, Some(name)),
        _ => (placeholder, None),
    };
    match (of, name) {
        ("header", Some(name)) => header::named(name).map(Source::Header),
        ("metadata", Some(name)) => header::metadata(name).map(Source::Metadata),
        ("query", Some(name)) => Ok(Source::Query(name.into())),
        ("grpc_method", None) => Ok(Source::GrpcMethod),
        #[cfg(feature = "axum")]
        ("path", Some(name)) => Ok(Source::Path(name.into())),
        #[cfg(feature = "axum")]
        ("matched_path", None) => Ok(Source::MatchedPath),
        #[cfg(not(feature = "axum"))]
        ("path", Some(_)) | ("matched_path", None) => Err(format!(
            "`{{{placeholder}}}` needs the feature `axum` of lockcore-tower"
        )),
        _ => Err(format!(
            "`{{{placeholder}}}` is none of `{{path.NAME}}`, `{{matched_path}}`, `{{header.NAME}}`, \
             `{{query.NAME}}`, `{{metadata.NAME}}` and `{{grpc_method}}`"
        )),
    }
}

/// The types that have a name in templates.
fn integer(name: &str) -> Result<Type, String> {
    Ok(match name {
        "u8" => Type::of::<u8>(),
        "u16" => Type::of::<u16>(),
        "u32" => Type::of::<u32>(),
        "u64" => Type::of::<u64>(),
        "u128" => Type::of::<u128>(),
        "usize" => Type::of::<usize>(),
        "i8" => Type::of::<i8>(),
        "i16" => Type::of::<i16>(),
        "i32" => Type::of::<i32>(),
        "i64" => Type::of::<i64>(),
        "i128" => Type::of::<i128>(),
        "isize" => Type::of::<isize>(),
        _ => {
            return Err(format!(
                "`:{name}` is not the name of an integer type, as `:u64`; for another type write \
                 the placeholder without it, and say the type with Key::read_as; a name with `:` in it \
                 has no placeholder, take it in Key::query or Key::from_fn"
            ));
        }
    })
}

fn delimiters(pieces: &[Piece]) -> Result<String, String> {
    let mut delimiters = String::new();
    for three in pieces.windows(3) {
        if let [Piece::Value(..), Piece::Text(between), Piece::Value(..)] = three {
            let before = delimiters.len();
            delimiters.extend(between.chars().filter(|char| is_delimiter(*char)));
            if delimiters.len() == before {
                return Err(format!(
                    "values with \"{between}\" between them cannot be told apart: write punctuation, as `:`"
                ));
            }
        }
    }
    let touch = |two: &[Piece]| matches!(two, [Piece::Value(..), Piece::Value(..)]);
    match pieces.windows(2).any(touch) {
        true => Err(
            "values with nothing between them cannot be told apart: write punctuation, as `:`"
                .to_owned(),
        ),
        false => Ok(delimiters),
    }
}

/// Delimiters are punctuation except `%`, because `%` begins an escape. No delimiter occurs inside
/// of an escape.
fn is_delimiter(char: char) -> bool {
    char.is_ascii_punctuation() && char != '%'
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text),
            Self::Value(source, None) => write!(f, "{{{source}}}"),
            Self::Value(source, Some(read_as)) => write!(f, "{{{source} as {read_as}}}"),
        }
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`")?;
        for piece in &self.pieces {
            fmt::Display::fmt(piece, f)?;
        }
        f.write_str("`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn assert_mistake(text: &str, expected: &str) {
        let mistake = Template::parse(text).expect_err(text);
        assert!(mistake.contains(expected), "{text}: {mistake}");
    }

    #[test]
    fn a_template_is_text_and_values_in_order() {
        let template = Template::parse("a{{b}}:{header.X-Tenant}:{query.from.to}?").unwrap();

        assert_eq!(
            format!("{template:?}"),
            "`a{b}:{header \"x-tenant\"}:{query parameter \"from.to\"}?`"
        );
    }

    #[test]
    fn a_mistake_in_a_template_says_how_to_fix_it() {
        assert_mistake("", "empty");
        assert_mistake("a:{query.id", "unclosed `{query.id`");
        assert_mistake("a:id}", "`}` without `{`");
        for placeholder in [
            "{}",
            "{id}",
            "{query}",
            "{query.}",
            "{grpc_method.x}",
            "{Header.x}",
        ] {
            assert_mistake(placeholder, "is none of `{path.NAME}`");
        }
        assert_mistake("{header.a b}", "not the name of a header");
        assert_mistake("{metadata.id-bin}", "from_fn");
        assert_mistake("{query.a}{query.b}", "nothing between");
        assert_mistake("{grpc_method:u64}", "is no number");
        assert_mistake("{query.a:b}", "Key::query");
        for letters in ["and", "%", "ä", " "] {
            assert_mistake(&format!("{{query.a}}{letters}{{query.b}}"), "told apart");
        }
    }

    #[cfg(not(feature = "axum"))]
    #[test]
    fn a_placeholder_that_needs_axum_says_so() {
        assert_mistake("{path.id}", "feature `axum`");
        assert_mistake("{matched_path}", "feature `axum`");
    }
}
