//! Decides which requests pass a fence: finds the resource and the token, and compares the token
//! with the highest token seen.

use std::sync::Arc;

use http::request::Parts;
use lockcore::FencingToken;

use super::seen::{Pass, Seen, Shut};
use crate::header::TOKEN_HEADER;
use crate::key::Key;
use crate::refusal::{Answers, Problem};

/// The options of a fence, and the tokens that it has seen.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    pub(super) key: Key,
    pub(super) optional: bool,
    pub(super) seen: Arc<Seen>,
    pub(super) answers: Answers,
}

impl Gate {
    /// Returns `None` if there is nothing to check.
    pub(super) fn pass(&self, parts: &mut Parts) -> Result<Option<Pass>, Problem> {
        let Some(resource) = self.key.find(parts)? else {
            return Ok(None);
        };
        let Some(token) = token(parts)? else {
            return match self.optional {
                true => Ok(None),
                false => Err(Problem::no_token("is missing")),
            };
        };
        match self.seen.enter(&resource, token) {
            Ok(pass) => {
                parts.extensions.insert(token);
                Ok(Some(pass))
            }
            Err(Shut::Late) => Err(Problem::late()),
            Err(Shut::Full { room_in }) => Err(Problem::fence_full(room_in)),
        }
    }
}

fn token(parts: &Parts) -> Result<Option<FencingToken>, Problem> {
    let mut values = parts.headers.get_all(TOKEN_HEADER).iter();
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if values.next().is_some() {
        return Err(Problem::no_token("is there more than once"));
    }
    let token = value.to_str().ok().and_then(|text| text.parse().ok());
    token
        .map(Some)
        .ok_or_else(|| Problem::no_token("is not a fencing token"))
}
