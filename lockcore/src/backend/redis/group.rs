//! A group: the verbs that wait together until replicas, or the disk, have their writes. It has a
//! connection of its own for them. Which verbs these are, and why, is explained in `durable`.
//!
//! The verbs that are sent together, and the `WAIT` behind them, are one *turn*.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use humantime::format_duration;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot, watch};

use super::dial::{Driver, Server, settings};
use super::durability::Durability;
use super::errors::{GUIDE, failed};
use super::layout;
use super::task::Task;
use super::turn::{Patience, Turn};
use crate::backend::{Fault, StoreError};
use crate::clock::Clock;

/// The verbs of one client connection that wait for durability, and the task that sends them.
#[derive(Debug)]
pub(super) struct Group {
    verbs: mpsc::UnboundedSender<Verb>,
    turn: Arc<Turn>,
    op_timeout: Duration,
    pub(super) durability: Durability,
    /// A key for the [check](Group::check). No name has this key.
    key: String,
    task: Task,
}

/// A verb that waits for its turn.
#[derive(Debug)]
struct Verb {
    command: Cmd,
    patience: Patience,
    /// If the caller has dropped the receiver, the verb is not sent.
    sent: oneshot::Sender<Sent>,
}

/// A verb that was sent.
#[derive(Debug)]
struct Sent {
    reply: oneshot::Receiver<RedisResult<Value>>,
    verdict: Verdict,
}

/// Whether the writes of a turn count. `None` until the `WAIT` is answered.
#[derive(Clone, Debug)]
pub(super) struct Verdict(watch::Receiver<Option<Result<(), StoreError>>>);

/// A connection for a group that was just opened.
pub(super) struct Opened {
    connection: MultiplexedConnection,
    driver: Driver,
    durability: Durability,
}

impl Opened {
    /// Connects. Checks that the server can do what the URL asks for, and that the user has the
    /// right to the command.
    pub(super) async fn of(server: &Server, durability: Durability) -> Result<Self, StoreError> {
        let (mut connection, driver) = server.connect(settings()).await?;
        let tried: RedisResult<Value> = durability.attempt().query_async(&mut connection).await;
        tried.map_err(|error| cannot_wait(server, durability, error))?;
        Ok(Self {
            connection,
            driver,
            durability,
        })
    }

    /// Starts the task that sends verbs. If one of the two connections ends, this task ends the
    /// other. `main` is the driver of the main connection.
    ///
    /// `channel` is the channel of wake-ups that the main connection listens to. A message that is
    /// sent here must be received there. Otherwise the two connections have reached two servers:
    /// the address may have moved in between. `key` is for the [check](Group::check).
    pub(super) async fn beside(
        self,
        server: &Server,
        main: &Driver,
        channel: &str,
        key: String,
        op_timeout: Duration,
    ) -> Result<Group, StoreError> {
        let Self {
            mut connection,
            driver,
            durability,
        } = self;
        let heard: RedisResult<u64> = message_to(channel).query_async(&mut connection).await;
        if heard.map_err(|error| server.failed(error))? == 0 {
            return Err(server.because(
                Fault::Retry,
                "two connections to this address have reached two servers; name an address that always leads to the master",
            ));
        }
        let (verbs, asked) = mpsc::unbounded_channel();
        let turn = Arc::new(Turn::within(op_timeout));
        let (main_ended, end_main) = (main.ended(), main.end());
        let of_task = Arc::clone(&turn);
        let task = Task::spawn(&Handle::current(), async move {
            tokio::select! {
                () = serve(connection, durability, &of_task, asked) => {}
                () = driver.ended() => {}
                () = main_ended => {}
            }
            end_main.abort();
        });
        Ok(Group {
            verbs,
            turn,
            op_timeout,
            durability,
            key,
            task,
        })
    }
}

fn message_to(channel: &str) -> Cmd {
    // The id in this message is empty, and no ticket has an empty id. So a client that receives the
    // message does nothing.
    redis::cmd("PUBLISH").arg(channel).arg("").take()
}

/// Why the server does not do what the URL asks of it.
fn cannot_wait(server: &Server, durability: Durability, error: RedisError) -> StoreError {
    let (text, command) = (error.to_string(), durability.command_name());
    if error.code() == Some("NOPERM") {
        return server.mistake(format_args!("the user may not run {command}{GUIDE}"));
    }
    if text.contains("unknown command") {
        return server.mistake(match command {
            "waitaof" => {
                "the server has no WAITAOF, which durability=fsync needs: update it to Redis 7.2 or later, or to Valkey; or \
                 set appendfsync always there, and write durability=replicas:N or leave it out"
            }
            _ => "the server has no WAIT, which durability=replicas:N needs; use Redis 6 or later, or Valkey, or leave \
                the option out",
        });
    }
    if is_without_log(&text) {
        return server.mistake(WITHOUT_LOG);
    }
    if text.contains("replica instance") {
        return server.because(Fault::Retry, "it is a replica; connect to its master");
    }
    server.failed(error)
}

fn is_without_log(text: &str) -> bool {
    text.contains("appendonly is disabled")
}

const WITHOUT_LOG: &str = "the server does not write a log, which durability=fsync needs: set appendonly yes there, and \
    appendfsync always";

/// Sends the verbs of the channel, one turn after the other, until the connection is broken.
///
/// If this future is dropped, the verbs without an answer fail, as they do when the connection
/// breaks.
async fn serve(
    mut connection: MultiplexedConnection,
    durability: Durability,
    turn: &Turn,
    mut asked: mpsc::UnboundedReceiver<Verb>,
) {
    let mut verbs = Vec::new();
    // A turn takes all verbs that are in the channel. The core limits how many requests are in
    // flight.
    while asked.recv_many(&mut verbs, usize::MAX).await > 0 {
        let now = Clock::BOOT.now();
        let (tell, verdict) = watch::channel(None);
        let verdict = Verdict(verdict);
        let mut commands = Pipeline::with_capacity(verbs.len());
        let mut replies = Vec::with_capacity(verbs.len());
        // The server waits as long as the most patient verb allows. A verb with less time gives up
        // by itself: see `Group::ask` and `Group::counts`.
        let mut within = Duration::ZERO;
        for verb in verbs.drain(..) {
            let (reply, replied) = oneshot::channel();
            let sent = Sent {
                reply: replied,
                verdict: verdict.clone(),
            };
            // If the caller has given up, this verb is not sent.
            if verb.sent.send(sent).is_ok() {
                within = within.max(verb.patience.at_the_server(now));
                commands.add_command(verb.command);
                replies.push(reply);
            }
        }
        if replies.is_empty() {
            continue;
        }
        let under_way = turn.begin(now);
        let mut waits = connection.clone();
        let replied = async {
            let answers = connection.req_packed_commands(&commands, 0, replies.len());
            tell_all(replies, answers.await);
        };
        let wait = durability.wait(within);
        // `join` polls `replied` first, so the verbs are sent before the `WAIT`. The connection's
        // queue has room for both, because nothing else is sent on this connection.
        let ((), waited) = join(replied, wait.query_async(&mut waits)).await;
        drop(under_way);
        let outcome = outcome(durability, within, waited);
        let is_broken = outcome.as_ref().is_err_and(StoreError::is_broken);
        let _ = tell.send(Some(outcome)); // all callers may have given up
        if is_broken {
            return;
        }
    }
}

/// Sends each verb its own reply. If the caller of one verb has gone, the other verbs get their
/// replies all the same.
fn tell_all(replies: Vec<oneshot::Sender<RedisResult<Value>>>, answers: RedisResult<Vec<Value>>) {
    let mut answers = answers.map(Vec::into_iter);
    for reply in replies {
        let answer = match &mut answers {
            Ok(answers) => answers
                .next()
                .map_or_else(|| Err(lost()), Value::extract_error),
            Err(error) => Err(error.clone()),
        };
        let _ = reply.send(answer);
    }
}

/// What the answer to the `WAIT` means for the verbs of its turn.
fn outcome(
    durability: Durability,
    within: Duration,
    waited: RedisResult<Value>,
) -> Result<(), StoreError> {
    let error = match waited {
        Ok(answer) => {
            let shortfall = durability.shortfall(answer).map_err(|error| {
                StoreError::halfway(Fault::Unknown, format!("Redis: unreadable reply: {error}"))
            })?;
            return shortfall.map_or(Ok(()), |shortfall| {
                Err(does_not_count(durability, &shortfall, within))
            });
        }
        Err(error) => error,
    };
    if is_without_log(&error.to_string()) {
        return Err(StoreError::halfway(
            Fault::Config,
            format!("Redis: {WITHOUT_LOG}"),
        ));
    }
    let failed = failed(error);
    Err(match failed.fault() {
        Fault::Config => StoreError::halfway(Fault::Config, failed.to_string()),
        // For example, the script of another client runs for long. The connection can be used
        // further.
        Fault::Retry if !failed.is_broken() => {
            StoreError::halfway(Fault::Retry, failed.to_string())
        }
        // For example, the server has become a replica in the meantime.
        _ => StoreError::broken(failed.to_string()),
    })
}

fn does_not_count(durability: Durability, shortfall: &str, within: Duration) -> StoreError {
    let within = Duration::from_millis(within.as_millis() as u64); // far less than 2⁶⁴
    let (within, advice) = (format_duration(within), durability.advice());
    StoreError::halfway(
        Fault::Refused,
        format!(
            "Redis: {shortfall} within {within}, so it does not count (durability={durability}); {advice}"
        ),
    )
}

/// The error of a request whose connection has ended.
fn lost() -> RedisError {
    io::Error::new(io::ErrorKind::BrokenPipe, "the connection has ended").into()
}

impl Group {
    /// The time of a verb whose caller waits for `budget`. It is never more than the time of one
    /// operation.
    pub(super) fn patience(&self, budget: Duration) -> Patience {
        Patience::of(budget.min(self.op_timeout))
    }

    /// Sends a verb when its turn comes. Returns the reply, and the verdict on its write, which
    /// comes later. An error means that the verb was not sent.
    ///
    /// If this future is dropped before the turn, the verb is not sent. If it is dropped later, the
    /// server may have carried it out.
    pub(super) async fn ask(
        &self,
        command: Cmd,
        patience: Patience,
    ) -> Result<(RedisResult<Value>, Verdict), StoreError> {
        if self.turn.is_stuck(Clock::BOOT.now()) {
            self.task.end().abort();
        }
        let ended = || StoreError::replace(Fault::Retry, failed(lost()).to_string());
        let (sent, mut is_sent) = oneshot::channel();
        let verb = Verb {
            command,
            patience,
            sent,
        };
        self.verbs.send(verb).map_err(|_| ended())?;
        let sent = match patience.limits(&mut is_sent).await {
            Some(sent) => sent.map_err(|_| ended())?,
            None => {
                is_sent.close();
                // `serve` may have sent the verb just before the close.
                is_sent.try_recv().map_err(|_| self.had_no_turn())?
            }
        };
        let reply = sent.reply.await.unwrap_or_else(|_| Err(lost()));
        Ok((reply, sent.verdict))
    }

    fn had_no_turn(&self) -> StoreError {
        let (durability, advice) = (self.durability, self.durability.advice());
        let text = format!(
            "Redis: earlier requests still wait until their writes count (durability={durability}), and there was no time \
             left for this one; {advice}"
        );
        StoreError::new(Fault::Retry, text)
    }

    /// Waits for the verdict, as long as the verb has time.
    pub(super) async fn counts(
        &self,
        verdict: Verdict,
        patience: Patience,
    ) -> Result<(), StoreError> {
        let Verdict(mut verdict) = verdict;
        let settled = patience.limits(verdict.wait_for(Option::is_some)).await;
        match settled {
            Some(Ok(outcome)) => outcome.clone().unwrap_or_else(|| Err(failed(lost()))),
            Some(Err(_)) => Err(failed(lost())),
            None => {
                let durability = self.durability;
                let missing = durability.missing();
                Err(does_not_count(durability, missing, patience.for_all()))
            }
        }
    }

    /// Checks that a write counts now: that it reaches the replicas, and is written to the log.
    pub(super) async fn check(&self) -> Result<(), StoreError> {
        let mut probe = redis::cmd("EVAL");
        probe.arg(&layout::PROBE.source).arg(1);
        probe.arg(&self.key);
        let patience = self.patience(self.op_timeout);
        let (reply, verdict) = self.ask(probe, patience).await?;
        reply.map_err(failed)?;
        let counts = self.counts(verdict, patience).await;
        counts.map_err(|error| match error.is_broken() {
            true => error,
            false => StoreError::new(error.fault(), error.to_string()),
        })
    }
}
