//! From a URL to a store: the registry of schemes.

use std::sync::Arc;

use url::Url;

use crate::backend::{self, Backend};
use crate::error::Error;

type Open = fn(&Url) -> Result<Arc<dyn Backend>, Error>;

/// A scheme that some build knows.
struct Scheme {
    name: &'static str,
    feature: &'static str,
    /// `None` when this build lacks the feature.
    open: Option<Open>,
}

const SCHEMES: &[Scheme] = &[
    Scheme {
        name: "memory",
        feature: "",
        open: Some(backend::memory::open),
    },
    Scheme {
        name: "redis",
        feature: "redis",
        #[cfg(feature = "redis")]
        open: Some(backend::redis::open),
        #[cfg(not(feature = "redis"))]
        open: None,
    },
];

/// The store that a URL names. Nothing is connected.
pub(crate) fn open(url: &str) -> Result<Arc<dyn Backend>, Error> {
    // The URL itself is not repeated in messages: it may carry a password (P10).
    let url = Url::parse(url).map_err(|error| {
        Error::config(format!(
            "LOCK_URL is not a URL ({error}); {}",
            what_this_build_knows()
        ))
    })?;
    let Some(scheme) = SCHEMES.iter().find(|scheme| scheme.name == url.scheme()) else {
        return Err(Error::config(format!(
            "unknown scheme \"{}\"; {}",
            url.scheme(),
            what_this_build_knows()
        )));
    };
    match scheme.open {
        Some(open) => open(&url),
        None => Err(Error::config(format!(
            "\"{}\" is not in this build; enable the feature \"{}\" of lockcore ({})",
            scheme.name,
            scheme.feature,
            what_this_build_knows()
        ))),
    }
}

/// "this build knows memory, redis".
pub(crate) fn what_this_build_knows() -> String {
    let known: Vec<_> = SCHEMES
        .iter()
        .filter(|scheme| scheme.open.is_some())
        .map(|scheme| scheme.name)
        .collect();
    format!("this build knows {}", known.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(url: &str) -> String {
        open(url).expect_err("should be refused").to_string()
    }

    #[test]
    fn an_unknown_scheme_lists_the_known_ones() {
        let message = message("rediss+x://localhost");
        assert!(
            message.contains("unknown scheme \"rediss+x\"; this build knows memory"),
            "{message}"
        );
    }

    #[cfg(not(feature = "redis"))]
    #[test]
    fn a_scheme_of_a_missing_feature_names_the_feature() {
        assert!(message("redis://localhost").contains("enable the feature \"redis\""));
    }

    #[test]
    fn an_encrypted_scheme_never_falls_back_to_plain_text() {
        assert!(message("rediss://localhost").contains("unknown scheme \"rediss\""));
    }

    #[test]
    fn no_message_repeats_a_password() {
        for url in [
            "redos://u:hunter2@host",
            "//u:hunter2@host",
            "redis://u:hunter2@host:notaport",
            #[cfg(feature = "redis")]
            "redis://u:hunter2@host/zero",
            #[cfg(feature = "redis")]
            "redis://u:hunter2@host/0?protocol=resp2",
        ] {
            assert!(!message(url).contains("hunter2"), "{url}");
        }
    }
}
