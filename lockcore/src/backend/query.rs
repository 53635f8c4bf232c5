//! The options of a URL, `?name=value&name=value`, for every store that has any.

use url::Url;

use super::hosts::decoded;
use super::meant::nearest;

/// The options of a URL, each with its value. Both are percent-decoded, and a plus stays a plus: a
/// password may contain one. A name that is not in `known` is an error, and so is a name that is
/// given twice.
///
/// The errors do not repeat the URL, because it may contain a password.
pub(super) fn options<'a>(url: &Url, known: &[&'a str]) -> Result<Vec<(&'a str, String)>, String> {
    let mut options: Vec<(&str, String)> = Vec::new();
    let given = url.query().unwrap_or_default().split('&');
    for option in given.filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let (name, value) = (decoded(name)?, decoded(value)?);
        let Some(known) = known.iter().find(|known| **known == name) else {
            let meant = nearest(&name, known.iter().copied());
            let meant = meant.map(|meant| format!(", did you mean {meant}?"));
            return Err(format!(
                "nothing but {} may be set{}",
                listed(known),
                meant.unwrap_or_default()
            ));
        };
        if options.iter().any(|(given, _)| given == known) {
            return Err(format!("{known} is set twice"));
        }
        options.push((known, value));
    }
    Ok(options)
}

fn listed(names: &[&str]) -> String {
    match names {
        [others @ .., last] if !others.is_empty() => format!("{} and {last}", others.join(", ")),
        _ => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(query: &str) -> Result<Vec<(&'static str, String)>, String> {
        let url = Url::parse(&format!("x://h/?{query}")).unwrap();
        options(&url, &["user", "password", "ttl"])
    }

    #[test]
    fn names_and_values_are_decoded_and_a_plus_stays() {
        let options = of("&user=a%26b+c&%74tl=1%30s&password").unwrap();
        let expected = [("user", "a&b+c"), ("ttl", "10s"), ("password", "")];
        assert_eq!(options, expected.map(|(name, value)| (name, value.into())));
    }

    #[test]
    fn what_is_unknown_or_given_twice_or_not_text_is_refused() {
        for (query, reason) in [
            ("host=x", "nothing but user, password and ttl may be set"),
            ("pasword=secret", "did you mean password?"),
            ("ttl=1s&user=x&ttl=1s", "ttl is set twice"),
            ("ttl=1s&%74tl=2s", "ttl is set twice"),
            ("password=%FF", "not UTF-8"),
        ] {
            let error = of(query).expect_err(query);
            assert!(error.contains(reason), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    /// Otherwise one of the two values would win, and nobody would know which.
    #[test]
    fn every_store_refuses_an_option_that_is_given_twice() {
        for url in [
            "redis://h?durability=replicas:1&durability=replicas:1",
            "redis+sentinel://h/s?durability=fsync&durability=replicas:1",
            "redis+sentinel://h/s?sentinel_password=a&sentinel_password=b",
            "zookeeper://h?session_timeout=5s&session_timeout=6s",
            "postgres://u@h/d?durability=on&durability=on",
        ] {
            let scheme = url.split(':').next().unwrap_or_default();
            let error = match crate::backend::open(url) {
                Err(error) => error.to_string(),
                Ok(store) => panic!("{store:?}"),
            };
            let is_built = !error.contains("is not in this build");
            assert!(
                !is_built || error.contains("is set twice"),
                "{scheme}: {error}"
            );
        }
    }
}
