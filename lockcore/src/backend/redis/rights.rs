//! The rights of the user at the server. The client checks them when it connects, because a script
//! that is denied a command half-way has already written something.

use redis::aio::MultiplexedConnection;
use redis::{RedisError, RedisResult};

use super::errors::failed;
use super::layout;
use crate::backend::Fault;
use crate::name::Namespace;

const CHECK: &str = include_str!("scripts/rights.lua");

/// The commands that the user may not run, as far as the server can tell. `None` if there are none.
pub(super) async fn missing(
    mut connection: MultiplexedConnection,
    namespace: &Namespace,
    channel: &str,
) -> RedisResult<Option<String>> {
    let mut question = redis::cmd("EVAL");
    question.arg(CHECK).arg(0);
    question.arg(layout::some_key(namespace)).arg(channel);
    let missing: Vec<String> = match question.query_async(&mut connection).await {
        Err(error) if !matters(&error) => {
            tracing::debug!(%error, "the user's rights stay unchecked");
            return Ok(None);
        }
        answer => answer?,
    };
    let is_missing = !missing.is_empty();
    Ok(is_missing.then(|| missing.join(", ").to_lowercase()))
}

/// Whether the error means that the server cannot be used. A server that is full or busy, or that
/// does not know the question, may be usable.
fn matters(error: &RedisError) -> bool {
    let error = failed(error.clone());
    error.fault() == Fault::Config || error.is_broken()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_rights_check_asks_about_exactly_the_commands_that_the_scripts_call() {
        let (mut called, mut calls) = (BTreeSet::new(), 0);
        for script in layout::scripts() {
            // Every call must name its command: it must not be in a variable, and not in
            // `pcall(redis.call, …)`.
            calls += script.source.matches("redis.call").count();
            calls += script.source.matches("redis.pcall").count();
            let source = script.source.replace("redis.pcall('", "redis.call('");
            let named = source.split("redis.call('").skip(1);
            let named = named.filter_map(|rest| rest.split('\'').next().map(str::to_owned));
            called.extend(named.inspect(|_| calls -= 1));
        }
        let asked = CHECK.split("{ '").skip(1);
        let asked: BTreeSet<_> = asked
            .filter_map(|rest| rest.split('\'').next().map(str::to_owned))
            .collect();

        assert_eq!(calls, 0, "a call without the name of its command");
        // Locks do not need this right. Without it the server refuses only the listing of names.
        assert!(called.remove("SCAN"));
        // In a cluster the client itself sends these.
        called.extend(["ASKING", "SSUBSCRIBE", "SUNSUBSCRIBE"].map(str::to_owned));
        assert_eq!(asked, called);
    }
}
