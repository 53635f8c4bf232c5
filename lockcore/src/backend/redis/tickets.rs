//! The verbs: one script each.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use redis::{Cmd, RedisWrite, Value};

use super::connection::RedisConnection;
use super::errors::{GUIDE, failed, is_stopped};
use super::layout::{self, Script};
use super::rights;
use crate::backend::{
    Departure, Enqueued, Fault, Listing, NameInUse, Page, Released, Renewed, StoreError, Summary,
    TicketInfo,
};
use crate::name::{Name, Namespace};
use crate::queue;
use crate::request::{Id, Request};

/// How long a mark stays. A release leaves a mark if it arrives before the enqueue of its ticket. A
/// minute is far longer than a request can stay in a socket's buffer before the server reads it or
/// the connection is reset.
pub(super) const MARK: Duration = Duration::from_secs(60);

/// Takes a ticket. If the URL asks for durability, the ticket counts when its write is acknowledged.
pub(super) async fn enqueue(
    mut connection: RedisConnection,
    request: Arc<Request>,
) -> Result<Enqueued, StoreError> {
    let namespace = request.name.namespace();
    let channel = Arc::clone(&connection.channel);
    let write = |call: &mut Cmd| {
        let Request { id, ttl, .. } = *request;
        let (ttl, seen) = (ttl.as_millis(), request.highest_seen);
        let (permits, capacity) = (request.permits, request.capacity);
        call.write_arg_fmt(layout::key(&request.name));
        let mark = if request.lingers { '~' } else { ':' };
        let owner = &request.owner;
        call.write_arg_fmt(format_args!(
            "+{ttl:012}{id}:{permits:010}:{capacity:010}{mark}{channel}:{owner}"
        ));
        call.write_arg_fmt(format_args!("{seen:016}"));
        if !request.wait {
            call.write_arg_fmt(0);
        }
    };
    let reply = run(&mut connection, &layout::ENQUEUE, namespace, 1, write).await?;
    let has_waited = &connection.driver.has_waited;
    let reply = match reply {
        ticket @ Value::BulkString(_) => {
            has_waited.store(false, Ordering::Relaxed);
            let ticket = redis::from_redis_value(ticket).map_err(unreadable)?;
            connection.counts().await?;
            return Ok(Enqueued::Granted {
                ticket,
                valid_for: request.ttl,
            });
        }
        reply => numbers(reply)?,
    };
    match reply[..] {
        [1, ticket, ttl, recheck] => {
            has_waited.store(true, Ordering::Relaxed);
            connection.counts().await?;
            Ok(Enqueued::Waiting {
                ticket: ticket.unsigned_abs(),
                valid_for: duration(ttl),
                recheck_in: known(recheck),
                ahead: None,
            })
        }
        [2, retry] => Ok(Enqueued::Busy {
            retry_in: known(retry),
        }),
        [3, capacity] => Ok(Enqueued::CapacityMismatch {
            in_use: u32::try_from(capacity).unwrap_or(u32::MAX),
        }),
        [4] => Ok(Enqueued::Gone),
        [5] => Err(StoreError::new(
            Fault::Refused,
            "ticket numbers are exhausted for this name; choose another name or LOCK_NAMESPACE",
        )),
        _ => Err(unexpected(&reply)),
    }
}

/// Renews tickets. If the URL asks for durability, and the renewal does not count in time, its
/// outcome is unknown.
pub(super) async fn renew(
    connection: RedisConnection,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<Renewed>, StoreError> {
    let told = renew_told(connection, tickets).await?;
    Ok(told.into_iter().map(|(renewed, _)| renewed).collect())
}

/// Like [`renew`]. Also returns the number of each ticket that holds, if the client has chosen this
/// number: in the enqueue, or later with [`raise`].
pub(super) async fn renew_told(
    mut connection: RedisConnection,
    tickets: Vec<Arc<Request>>,
) -> Result<Vec<(Renewed, Option<u64>)>, StoreError> {
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
    let answers = reply.chunks(3).map(|answer| {
        let told = match *answer {
            [0, _, number] => u64::try_from(number).ok(),
            _ => None,
        };
        renewed(answer).map(|renewed| (renewed, told))
    });
    let answers: Option<Vec<_>> = answers.collect();
    let answers = answers.ok_or_else(|| unexpected(&reply))?;
    let is_there = |answer: &Renewed| answer.holds() || matches!(answer, Renewed::Waiting { .. });
    if !answers.iter().any(|(answer, _)| is_there(answer)) {
        return Ok(answers);
    }
    let Err(error) = connection.counts().await else {
        return Ok(answers);
    };
    // The loss of a ticket needs no acknowledgement, and the holder must learn of it now.
    let lost = tickets.iter().zip(&answers);
    let lost = lost.filter(|(_, (answer, _))| *answer == Renewed::Lost);
    let lost = lost.map(|(request, _)| request.id).collect();
    // The master has carried out the renewal, so the error must not be a refusal.
    Err(error.carried_out(Fault::Unknown).with_lost(lost))
}

/// The answer for one ticket. `None` if the reply is not one of `renew.lua`.
fn renewed(answer: &[i64]) -> Option<Renewed> {
    match *answer {
        [0, ttl, _] => Some(Renewed::Granted {
            valid_for: duration(ttl),
        }),
        [1, ttl, recheck] => Some(Renewed::Waiting {
            valid_for: duration(ttl),
            recheck_in: known(recheck),
            grace: None,
        }),
        [2, ..] => Some(Renewed::Lost),
        [3, ..] => Some(Renewed::Failed),
        [4, ttl, grace] => Some(Renewed::AskedBack {
            valid_for: duration(ttl),
            grace: duration(grace),
        }),
        _ => None,
    }
}

pub(super) async fn release(
    mut connection: RedisConnection,
    tickets: Vec<Departure>,
) -> Result<Vec<Released>, StoreError> {
    let Some(first) = tickets.first() else {
        return Ok(Vec::new());
    };
    // A client that had to wait probably has others behind it.
    connection.wakes = connection.driver.has_waited.load(Ordering::Relaxed);
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

/// Tells the server the number of the ticket that it has for this request. All numbers that the
/// server assigns later are greater. Returns `false` if the number is more than a day ahead of the
/// server's clock, or if the ticket is gone.
pub(super) async fn raise(
    mut connection: RedisConnection,
    request: Arc<Request>,
    number: u64,
) -> Result<bool, StoreError> {
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(layout::key(&request.name));
        call.write_arg_fmt(format_args!("{number:016}"));
        call.write_arg_fmt(request.id);
    };
    let namespace = request.name.namespace();
    match run(&mut connection, &layout::RAISE, namespace, 1, write).await? {
        Value::Int(1) => Ok(true),
        Value::Int(0 | 2) => Ok(false),
        reply => Err(unexpected(&reply)),
    }
}

pub(super) async fn inspect(
    connection: RedisConnection,
    name: Name,
) -> Result<Vec<TicketInfo>, StoreError> {
    let listed = listed(connection, name).await?;
    Ok(listed.into_iter().map(|listed| listed.ticket).collect())
}

/// A ticket as one server knows it.
pub(super) struct Listed {
    /// Whether the client has chosen the number: in the enqueue, or later with [`raise`].
    pub(super) is_told: bool,
    pub(super) ticket: TicketInfo,
}

/// Reads the same tickets as [`inspect`]. Also says of each ticket whether the client has chosen
/// its number.
pub(super) async fn listed(
    mut connection: RedisConnection,
    name: Name,
) -> Result<Vec<Listed>, StoreError> {
    let write = |call: &mut Cmd| call.write_arg_fmt(layout::key(&name));
    let namespace = name.namespace();
    let reply = run(&mut connection, &layout::INSPECT, namespace, 1, write).await?;
    let reply: Vec<Value> = redis::from_redis_value(reply).map_err(unreadable)?;
    let mut reply = reply.into_iter();
    let now: u64 = match reply.next() {
        Some(now) => redis::from_redis_value(now).map_err(unreadable)?,
        None => return Err(unexpected(&"nothing")),
    };
    line_of(reply, now)
}

/// Reads the part of a reply that has a line: see `scripts/tickets.lua`.
fn line_of(mut reply: impl Iterator<Item = Value>, now: u64) -> Result<Vec<Listed>, StoreError> {
    let mut number = || match reply.next() {
        Some(number) => redis::from_redis_value::<i64>(number).map_err(unreadable),
        None => Err(unexpected(&"too few")),
    };
    let (stored, holders) = (u32::try_from(number()?).ok(), number()?);
    let records: Vec<String> = reply
        .map(redis::from_redis_value)
        .collect::<Result<_, _>>()
        .map_err(unreadable)?;
    Ok(live(now, stored, holders, &records))
}

/// The tickets of these records that are alive, oldest first. The first `holders` of the records
/// are those that hold.
fn live(now: u64, stored: Option<u32>, holders: i64, records: &[String]) -> Vec<Listed> {
    let live = |record| Record::parse(record).filter(|record| record.expires > now);
    let holders = records.iter().take(usize::try_from(holders).unwrap_or(0));
    let held = holders.filter_map(|record| live(record)).count();
    let mut lives: Vec<Record<'_>> = records.iter().filter_map(|record| live(record)).collect();
    lives.sort_unstable_by_key(|record| record.number);
    let shares = lives.iter().map(|record| (record.permits, record.capacity));
    let holders = queue::granted_of(shares, stored, held);
    let place = |(at, record): (usize, Record<'_>)| {
        let ticket = TicketInfo::new(
            record.number,
            at < holders,
            record.permits,
            stored.unwrap_or(record.capacity),
            Duration::from_millis(record.expires - now),
            record.owner.to_owned(),
        )
        .with_id(record.id)
        // A ticket's number is the time of its enqueue in microseconds, unless many tickets are
        // enqueued in one microsecond.
        .with_age(Duration::from_micros(
            (now * 1000).saturating_sub(record.number),
        ));
        Listed {
            is_told: record.is_told,
            ticket,
        }
    };
    lives.into_iter().enumerate().map(place).collect()
}

/// A ticket in the form of `scripts/record.lua`, without the fields that only scripts need.
struct Record<'a> {
    id: Id,
    expires: u64,
    number: u64,
    permits: u32,
    capacity: u32,
    is_told: bool,
    owner: &'a str,
}

impl<'a> Record<'a> {
    fn parse(record: &'a str) -> Option<Self> {
        let (number, rest) = record.split_at_checked(layout::NUMBER)?;
        let (expires, rest) = rest.split_at_checked(layout::EXPIRES)?;
        let (id, rest) = rest.split_once(':')?;
        let number: u64 = number.parse().ok()?;
        let expires = match expires.strip_prefix('+') {
            Some(behind) => number / 1000 + behind.parse::<u64>().ok()?,
            None => expires.parse().ok()?,
        };
        let (permits, rest) = rest.split_once(':')?;
        let (capacity, rest) = rest.split_at_checked(layout::CAPACITY)?;
        let (permits, capacity) = (permits.parse().ok()?, capacity.parse().ok()?);
        let is_told = rest.starts_with('=');
        let (_channel, owner) = rest.strip_prefix([':', '=', '~'])?.split_once(':')?;
        Some(Self {
            id: Id::parse(id)?,
            expires,
            number,
            permits,
            capacity,
            is_told,
            owner,
        })
    }
}

/// A line is summed up in the list if it has at most this many rows: one for each of several
/// holders, and two for each waiter.
const SHORT: u32 = 64;

/// How many keys a step of `SCAN` reads at most. The server serves nobody else during a step. With a
/// thousand names in use, a step takes some milliseconds.
const MOST_KEYS: u32 = 1_000;

/// Lists a part of the names on one server, with one step of `SCAN`. The step reads ten keys for
/// each name that the page may have, but not more than [`MOST_KEYS`]. Most keys of a database belong
/// to other programs, or to names that are not in use.
pub(super) async fn list(
    mut connection: RedisConnection,
    listing: Listing,
) -> Result<Page, StoreError> {
    let Listing {
        namespace,
        prefix,
        after,
        limit,
        summaries,
    } = &listing;
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(after.as_deref().unwrap_or("0"));
        call.write_arg_fmt(layout::keys_like(namespace, prefix));
        call.write_arg_fmt(limit.saturating_mul(10).min(MOST_KEYS));
        call.write_arg_fmt(if *summaries { SHORT } else { 0 });
    };
    let reply = run(&mut connection, &layout::LIST, namespace, 0, write).await;
    let reply = reply.map_err(|error| match is_stopped(&error.to_string()) {
        // The script only reads. So a script that was stopped has changed nothing, and the error is
        // not half-way.
        true => {
            let text = format!("Redis: the user may not run scan, which lists names{GUIDE}");
            StoreError::new(Fault::Config, text)
        }
        false => error,
    })?;
    let (stands, now, names): (String, u64, Vec<Vec<Value>>) =
        redis::from_redis_value(reply).map_err(unreadable)?;
    let names = names.into_iter().filter_map(|name| used(name, now));
    let next = (stands != "0").then(|| Arc::from(stands));
    Ok(Page::new(names.collect(), next))
}

/// A name in use: its key, with its line behind it if that is short. `None` if the key is of another
/// program. Such a key need not be UTF-8.
fn used(name: Vec<Value>, now: u64) -> Option<NameInUse> {
    let mut parts = name.into_iter();
    let key: String = redis::from_redis_value(parts.next()?).ok()?;
    let used = layout::name_of(&key)?;
    // If the line cannot be read, `inspect` will tell why.
    let line: Vec<_> = match line_of(parts, now) {
        Ok(line) if !line.is_empty() => line.into_iter().map(|listed| listed.ticket).collect(),
        _ => return Some(used),
    };
    Some(used.with_summary(Summary::of(&line)))
}

pub(super) async fn ask_back(
    mut connection: RedisConnection,
    name: Name,
    id: Id,
    ask: Arc<str>,
) -> Result<bool, StoreError> {
    let write = |call: &mut Cmd| {
        call.write_arg_fmt(layout::key(&name));
        call.write_arg_fmt(id);
        call.write_arg_fmt(&ask);
    };
    let namespace = name.namespace();
    let found = run(&mut connection, &layout::ASK, namespace, 1, write).await?;
    redis::from_redis_value(found).map_err(unreadable)
}

pub(super) async fn forget(mut connection: RedisConnection, name: Name) -> Result<(), StoreError> {
    let write = |call: &mut Cmd| call.write_arg_fmt(layout::key(&name));
    let namespace = name.namespace();
    let outcome = run(&mut connection, &layout::FORGET, namespace, 1, write).await;
    outcome.map(drop)
}

/// The error for a script that was stopped half-way, if the reason is a missing right. An operator
/// may have taken the right away after the connection was made. The server's own message does not
/// always name the command.
///
/// This function reads the rights after the script was stopped, so they may have changed again.
/// What the script had done before it was stopped stays unknown.
async fn denied(connection: &RedisConnection, namespace: &Namespace) -> Option<StoreError> {
    let channel = layout::wake_channel(namespace, &connection.channel);
    let missing = rights::missing(connection.connection.clone(), namespace, &channel);
    let missing = missing.await.ok()??;
    let text = format!("Redis: the user may not run {missing} any more{GUIDE}");
    Some(StoreError::halfway(Fault::Config, text))
}

/// Called when all tickets of a batch have failed. Returns an error if a missing right may be the
/// reason. (If only some tickets have failed, the caller uses the answers for the others.)
async fn all_failed(connection: &RedisConnection, namespace: &Namespace) -> Result<(), StoreError> {
    denied(connection, namespace).await.map_or(Ok(()), Err)
}

/// Runs a script by its hash. If the server is new or has restarted, it does not know the script,
/// and this function sends the text. A server that does not know the script has not run it, so
/// nothing is done twice.
pub(super) async fn run(
    connection: &mut RedisConnection,
    script: &Script,
    namespace: &Namespace,
    keys: usize,
    write_keys_and_arguments: impl Fn(&mut Cmd),
) -> Result<Value, StoreError> {
    if let Some(watch) = &connection.watch {
        watch.listen_again();
    }
    let asking = connection.is_asking();
    let command = |verb: &str, script: &str| {
        // Enough space for a request about one ticket.
        let mut command = Cmd::with_capacity(16, 512);
        command.arg(verb).arg(script).arg(keys);
        write_keys_and_arguments(&mut command);
        if asking {
            command.arg("asking");
        }
        command
    };
    let outcome = match connection.query(command("EVALSHA", &script.sha1)).await? {
        Err(error) if error.code() == Some("NOSCRIPT") => {
            connection.query(command("EVAL", &script.source)).await?
        }
        outcome => outcome,
    };
    if let (Some(hop), Err(error)) = (&connection.hop, &outcome) {
        hop.note(error);
    }
    match outcome {
        Err(error) if is_stopped(&error.to_string()) => {
            let denied = denied(connection, namespace).await;
            Err(denied.unwrap_or_else(|| failed(error)))
        }
        outcome => outcome.map_err(failed),
    }
}

fn numbers(value: Value) -> Result<Vec<i64>, StoreError> {
    redis::from_redis_value(value).map_err(unreadable)
}

pub(super) fn unreadable(error: redis::ParsingError) -> StoreError {
    StoreError::new(Fault::Unknown, format!("Redis: unreadable reply: {error}"))
}

pub(super) fn unexpected(reply: &impl std::fmt::Debug) -> StoreError {
    StoreError::new(Fault::Unknown, format!("Redis: unexpected reply {reply:?}"))
}

fn duration(millis: i64) -> Duration {
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

/// Reads a duration in milliseconds. A negative number means "unknown".
fn known(millis: i64) -> Option<Duration> {
    u64::try_from(millis).ok().map(Duration::from_millis)
}
