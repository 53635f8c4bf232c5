//! The verbs: one script each, and what its failures mean.

use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, RedisWrite, Value};

use super::RedisConnection;
use super::layout::{self, Script};
use super::rights::{self, GUIDE};
use crate::backend::{Departure, Enqueued, Fault, Place, Released, Renewed, StoreError};
use crate::name::{Name, Namespace};
use crate::request::Request;

/// How long a mark of an early release stays: far longer than a request can sit in a socket's
/// buffer before the server reads it or the connection is reset.
const MARK: Duration = Duration::from_secs(60);

pub(super) async fn enqueue(
    mut connection: RedisConnection,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    let namespace = request.name.namespace();
    let channel = Arc::clone(&connection.channel);
    let write = |call: &mut Cmd| {
        let Request { id, ttl, .. } = *request;
        let (permits, capacity) = (request.permits, request.capacity);
        call.write_arg_fmt(layout::key(&request.name));
        let owner = &request.owner;
        call.write_arg_fmt(format_args!(
            "{id}:{permits:010}:{capacity:010}:{channel}:{owner}"
        ));
        call.write_arg_fmt(ttl.as_millis());
        call.write_arg_fmt(request.highest_seen);
        if !request.wait {
            call.write_arg_fmt(0);
        }
    };
    let reply = match run(&mut connection, &layout::ENQUEUE, namespace, 1, write).await? {
        Value::Int(ticket) => {
            return Ok(Enqueued::Granted {
                ticket: ticket.unsigned_abs(),
                valid_for: request.ttl,
            });
        }
        reply => numbers(reply)?,
    };
    match reply[..] {
        [1, ticket, ttl, recheck] => Ok(Enqueued::Waiting {
            ticket: ticket.unsigned_abs(),
            valid_for: duration(ttl),
            recheck_in: known(recheck),
        }),
        [2, retry] => Ok(Enqueued::Busy {
            retry_in: known(retry),
        }),
        [3, capacity] => Ok(Enqueued::CapacityMismatch {
            in_use: u32::try_from(capacity).unwrap_or(u32::MAX),
        }),
        [4] => Ok(Enqueued::Gone),
        [5] => Err(StoreError::new(
            Fault::Refused,
            "ticket numbers are exhausted for this name",
        )),
        _ => Err(unexpected(&reply)),
    }
}

pub(super) async fn renew(
    mut connection: RedisConnection,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    // All tickets of a client are in one namespace.
    let Some(first) = tickets.first() else {
        return Ok(Vec::new());
    };
    let namespace = first.name.namespace();
    let write = |call: &mut Cmd| {
        for request in &tickets {
            call.write_arg_fmt(layout::key(&request.name));
        }
        for request in &tickets {
            call.write_arg_fmt(request.id);
            call.write_arg_fmt(format_args!("{:010}", request.permits));
            call.write_arg_fmt(request.ttl.as_millis());
        }
    };
    let keys = tickets.len();
    let reply = numbers(run(&mut connection, &layout::RENEW, namespace, keys, write).await?)?;
    if reply.chunks(3).all(|answer| answer[0] == 3) {
        all_failed(&connection, namespace).await?;
    }
    reply
        .chunks(3)
        .map(|answer| match *answer {
            [0, ttl, _] => Ok(Renewed::Granted {
                valid_for: duration(ttl),
            }),
            [1, ttl, recheck] => Ok(Renewed::Waiting {
                valid_for: duration(ttl),
                recheck_in: known(recheck),
            }),
            [2, ..] => Ok(Renewed::Lost),
            [3, ..] => Ok(Renewed::Failed),
            _ => Err(unexpected(&reply)),
        })
        .collect()
}

pub(super) async fn release(
    mut connection: RedisConnection,
    tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    let Some(first) = tickets.first() else {
        return Ok(Vec::new());
    };
    let namespace = first.request.name.namespace();
    let write = |call: &mut Cmd| {
        for Departure { request, .. } in &tickets {
            call.write_arg_fmt(layout::key(&request.name));
        }
        for departure in &tickets {
            let id = departure.request.id;
            match departure.enqueue_may_follow {
                true => call.write_arg_fmt(format_args!("{id}{}", MARK.as_millis())),
                false => call.write_arg_fmt(id),
            }
        }
    };
    let keys = tickets.len();
    let reply = match run(&mut connection, &layout::RELEASE, namespace, keys, write).await? {
        Value::Int(found) => vec![found],
        reply => numbers(reply)?,
    };
    if reply.iter().all(|found| !matches!(found, 0 | 1)) {
        all_failed(&connection, namespace).await?;
    }
    Ok(reply
        .iter()
        .map(|found| match found {
            0 => Released::NotFound,
            1 => Released::Released,
            _ => Released::Failed,
        })
        .collect())
}

pub(super) async fn inspect(
    mut connection: RedisConnection,
    name: Name,
) -> Result<Vec<Place>, StoreError> {
    let write = |call: &mut Cmd| call.write_arg_fmt(layout::key(&name));
    let namespace = name.namespace();
    let reply = run(&mut connection, &layout::INSPECT, namespace, 1, write).await?;
    let reply: Vec<Value> = redis::from_redis_value(reply).map_err(unreadable)?;
    let mut reply = reply.into_iter();
    let now: u64 = match reply.next() {
        Some(now) => redis::from_redis_value(now).map_err(unreadable)?,
        None => return Err(unexpected(&"nothing")),
    };
    let records: Vec<String> = reply
        .map(redis::from_redis_value)
        .collect::<Result<_, _>>()
        .map_err(unreadable)?;
    let mut lives: Vec<Record<'_>> = records
        .iter()
        .filter_map(|record| Record::parse(record))
        .filter(|record| record.expires > now)
        .collect();
    lives.sort_unstable_by_key(|record| record.number);
    let mut older = 0u64;
    let place = |record: Record<'_>| {
        older += u64::from(record.permits);
        Place::new(
            record.number,
            older <= u64::from(record.capacity),
            record.permits,
            record.capacity,
            Duration::from_millis(record.expires - now),
            record.owner.to_owned(),
        )
    };
    Ok(lives.into_iter().map(place).collect())
}

/// A ticket as `scripts/record.lua` has it, without what only scripts need.
struct Record<'a> {
    expires: u64,
    number: u64,
    permits: u32,
    capacity: u32,
    owner: &'a str,
}

impl<'a> Record<'a> {
    fn parse(record: &'a str) -> Option<Self> {
        let (number, rest) = record.split_at_checked(layout::NUMBER)?;
        let (expires, rest) = rest.split_at_checked(layout::EXPIRES)?;
        let (_id, rest) = rest.split_once(':')?;
        let mut fields = rest.splitn(4, ':');
        let mut next = || fields.next();
        let (permits, capacity) = (next()?.parse().ok()?, next()?.parse().ok()?);
        let (_channel, owner) = (next()?, next()?);
        Some(Self {
            expires: expires.parse().ok()?,
            number: number.parse().ok()?,
            permits,
            capacity,
            owner,
        })
    }
}

pub(super) async fn forget(mut connection: RedisConnection, name: Name) -> Result<(), StoreError> {
    let write = |call: &mut Cmd| call.write_arg_fmt(layout::key(&name));
    let namespace = name.namespace();
    let outcome = run(&mut connection, &layout::FORGET, namespace, 1, write).await;
    outcome.map(drop)
}

/// Why a script was stopped half-way, if that is for a right that was taken away since the connection was made.
/// The server's own words do not always name the command.
///
/// The rights are read after the fact, and may have changed again: what the script had done by then stays unknown.
async fn denied(connection: &RedisConnection, namespace: &Namespace) -> Option<StoreError> {
    let channel = layout::wake_channel(namespace, &connection.channel);
    let missing = rights::missing(connection.connection.clone(), namespace, &channel);
    let missing = missing.await.ok().filter(|missing| !missing.is_empty())?;
    let missing = missing.join(", ").to_lowercase();
    let text = format!("Redis: the user may not run {missing} any more{GUIDE}");
    Some(StoreError::halfway(text))
}

/// No ticket of a batch fared well: there may be one reason for all. If only some did not, the others'
/// answers count.
async fn all_failed(connection: &RedisConnection, namespace: &Namespace) -> Result<(), StoreError> {
    denied(connection, namespace).await.map_or(Ok(()), Err)
}

/// Runs a script by its hash. A server that does not know it, because it is new or has restarted, gets
/// its text; that it does not know it is certain, so nothing is done twice.
async fn run(
    connection: &mut RedisConnection,
    script: &Script,
    namespace: &Namespace,
    keys: usize,
    write_keys_and_arguments: impl Fn(&mut Cmd),
) -> Result<Value, StoreError> {
    let command = |verb: &str, script: &str| {
        // Room for what one ticket takes.
        let mut command = Cmd::with_capacity(16, 512);
        command.arg(verb).arg(script).arg(keys);
        write_keys_and_arguments(&mut command);
        command
    };
    let by_hash = command("EVALSHA", &script.sha1);
    let outcome = match by_hash.query_async(&mut connection.connection).await {
        Err(error) if error.code() == Some("NOSCRIPT") => {
            let by_text = command("EVAL", &script.source);
            by_text.query_async(&mut connection.connection).await
        }
        outcome => outcome,
    };
    match outcome {
        Err(error) if is_stopped(&error.to_string()) => {
            let denied = denied(connection, namespace).await;
            Err(denied.unwrap_or_else(|| failed(error)))
        }
        outcome => outcome.map_err(failed),
    }
}

/// How a script reports what it was denied: Redis 6 and 7.0, and 7.2 and Valkey.
fn is_stopped(text: &str) -> bool {
    ["user executing the script", "ACL failure in script"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// What an error says about the request.
pub(super) fn failed(error: RedisError) -> StoreError {
    let text = error.to_string();
    // Redis 6 reports what stopped a command of a script as "ERR … -OOM …".
    let code = error.code().filter(|code| *code != "ERR").or_else(|| {
        let inner = ["OOM", "READONLY", "MISCONF", "NOREPLICAS"];
        inner
            .into_iter()
            .find(|code| text.contains(&format!("-{code} ")))
    });
    if error.is_io_error() || error.is_unrecoverable_error() {
        return StoreError::broken(format!("Redis: {text}"));
    }
    let fault = match (error.kind(), code) {
        (ErrorKind::AuthenticationFailed | ErrorKind::InvalidClientConfig, _) => Fault::Config,
        // Refused before anything was written; over in a moment, or on another connection.
        (_, Some("BUSY" | "LOADING" | "TRYAGAIN" | "CLUSTERDOWN" | "MASTERDOWN" | "READONLY")) => {
            Fault::Retry
        }
        // Refused before anything was written; needs an operator.
        (_, Some("OOM" | "MISCONF" | "NOREPLICAS")) => Fault::Refused,
        // These need another URL, password or access list.
        (
            _,
            Some(
                "NOAUTH" | "WRONGPASS" | "NOPERM" | "WRONGTYPE" | "MOVED" | "ASK" | "CROSSSLOT"
                | "UNFIT",
            ),
        ) => Fault::Config,
        // A reply that makes no sense, a script that failed half-way.
        _ => Fault::Unknown,
    };
    let hint = match code {
        Some("MOVED" | "ASK" | "CROSSSLOT") => {
            " (this is a Redis Cluster; redis:// is for a single server)"
        }
        Some("READONLY" | "MASTERDOWN") => " (this is a replica; connect to its master)",
        Some("OOM") => " (the server is full; raise maxmemory)",
        Some("NOPERM") => GUIDE,
        Some("WRONGTYPE") => {
            " (something else than this library writes keys of this namespace; remove the key, or choose another LOCK_NAMESPACE)"
        }
        Some("WRONGPASS") => {
            " (check user and password in the URL, where %25 stands for \"%\", %40 for \"@\", %23 for \"#\", %2F for \"/\")"
        }
        Some("NOAUTH") => " (the server asks for a password: redis://user:password@host)",
        // It may have written by then.
        _ if is_stopped(&text) => GUIDE,
        _ => "",
    };
    let text = format!("Redis: {text}{hint}");
    match code {
        // A master that has become a replica refuses every write on this connection from now on, and the
        // address may lead to the new master already.
        Some("READONLY" | "MASTERDOWN") => StoreError::replace(fault, text),
        _ => StoreError::new(fault, text),
    }
}

/// As [`failed`], while connecting: nothing has been asked yet, so nothing can be unknown.
pub(super) fn not_connected(error: RedisError) -> StoreError {
    if error.kind() == ErrorKind::RESP3NotSupported {
        return StoreError::new(
            Fault::Config,
            "Redis: the server does not speak RESP3; Redis 6 or Valkey is needed",
        );
    }
    let failed = failed(error);
    let text = failed.to_string();
    // The driver keeps the code of this one to itself.
    if text.contains("refused to switch database") {
        let denied = text.contains("permissions");
        let hint = if denied { GUIDE } else { "" };
        return StoreError::new(Fault::Config, text + hint);
    }
    let fault = match failed.fault() {
        Fault::Config => Fault::Config,
        Fault::Retry | Fault::Refused | Fault::Unknown => Fault::Retry,
    };
    StoreError::new(fault, text)
}

fn numbers(value: Value) -> Result<Vec<i64>, StoreError> {
    redis::from_redis_value(value).map_err(unreadable)
}

fn unreadable(error: redis::ParsingError) -> StoreError {
    StoreError::new(Fault::Unknown, format!("Redis: unreadable reply: {error}"))
}

fn unexpected(reply: &impl std::fmt::Debug) -> StoreError {
    StoreError::new(Fault::Unknown, format!("Redis: unexpected reply {reply:?}"))
}

fn duration(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// Negative says "unknown".
fn known(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(reply: &str) -> StoreError {
        let reply = redis::parse_redis_value(format!("-{reply} said the server\r\n").as_bytes());
        let Ok(Value::ServerError(error)) = reply else {
            panic!("{reply:?} is not an error");
        };
        failed(error.into())
    }

    /// One that a replica refuses was not carried out, and a connection to it is of no use.
    #[test]
    fn each_error_says_what_became_of_the_request_and_of_the_connection() {
        let (goes_on, replaced) = (false, true);
        let classes: [(Fault, bool, &[&str]); 5] = [
            (
                Fault::Retry,
                goes_on,
                &["BUSY", "LOADING", "TRYAGAIN", "CLUSTERDOWN"],
            ),
            // The second is how Redis 6 reports it from within a script.
            (
                Fault::Retry,
                replaced,
                &["READONLY", "ERR @user_script: 7: -READONLY", "MASTERDOWN"],
            ),
            (Fault::Refused, goes_on, &["OOM", "MISCONF", "NOREPLICAS"]),
            (
                Fault::Config,
                goes_on,
                &[
                    "NOAUTH",
                    "WRONGPASS",
                    "NOPERM",
                    "WRONGTYPE",
                    "MOVED 1 h:1",
                    "ASK 1 h:1",
                    "CROSSSLOT",
                    "UNFIT",
                ],
            ),
            (Fault::Unknown, goes_on, &["ERR", "EXECABORT", "UNKILLABLE"]),
        ];
        for (fault, is_broken, replies) in classes {
            for reply in replies {
                let error = error(reply);
                let found = (error.fault(), error.is_broken());
                assert_eq!(found, (fault, is_broken), "{reply}");
            }
        }
        let reset = failed(std::io::Error::from(std::io::ErrorKind::ConnectionReset).into());
        assert_eq!((reset.fault(), reset.is_broken()), (Fault::Unknown, true));
    }
}
