//! The connection on which verbs wait together until replicas, or the disk, have their writes. Which verbs these are,
//! and why, is in `acknowledged`.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join;
use humantime::format_duration;
use redis::aio::{ConnectionLike as _, MultiplexedConnection};
use redis::{AsyncConnectionConfig, Cmd, Pipeline, RedisError, RedisResult, Value};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use super::dial::{Driver, Server};
use super::durability::Durability;
use super::errors::{GUIDE, failed};
use super::turn::{self, Turn};
use crate::backend::{Fault, StoreError};
use crate::clock::{Clock, Instant};

/// The connection of these verbs.
#[derive(Debug)]
pub(super) struct Acknowledged {
    verbs: mpsc::UnboundedSender<Verb>,
    turn: Arc<Turn>,
    pub(super) op_timeout: Duration,
    /// The channel that the other connection listens to.
    channel: String,
    task: AbortHandle,
}

impl Drop for Acknowledged {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A verb that waits for its turn.
#[derive(Debug)]
struct Verb {
    command: Cmd,
    since: Instant,
    /// How long its caller waits.
    budget: Duration,
    answer: oneshot::Sender<Answered>,
}

/// What the server has said to a verb, and what will be known of its write.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) reply: RedisResult<Value>,
    pub(super) acknowledgement: Acknowledgement,
}

/// `None` until the `WAIT` is answered.
pub(super) type Acknowledgement = watch::Receiver<Option<Result<(), StoreError>>>;

/// A connection for these verbs that was just opened.
pub(super) struct Opened {
    connection: MultiplexedConnection,
    driver: Driver,
    ended: oneshot::Receiver<()>,
    durability: Durability,
}

impl Opened {
    /// Connects, and checks that the server can do what is asked of it and that the user has the right to it.
    pub(super) async fn of(server: &Server, durability: Durability) -> Result<Self, StoreError> {
        let (open, ended) = oneshot::channel::<()>();
        let sink = move |_| {
            let _goes_with_the_connection = &open;
            Ok::<_, std::convert::Infallible>(())
        };
        let config = AsyncConnectionConfig::new()
            // As for the other connection, the core has its own deadlines.
            .set_connection_timeout(None)
            .set_response_timeout(None)
            .set_push_sender(sink);
        let (mut connection, driver) = server.connect(config).await?;
        let tried: RedisResult<Value> = durability.attempt().query_async(&mut connection).await;
        match tried {
            Ok(_) => Ok(Self {
                connection,
                driver,
                ended,
                durability,
            }),
            Err(error) => Err(cannot_wait(server, durability, error)),
        }
    }

    /// Starts to serve verbs. Both connections end when one of them does: `main` is the other, and `main_ended` tells
    /// of its end.
    ///
    /// `channel` is the one that the other connection listens to. A message there must be heard, or this connection has
    /// led to another server: the address may have moved between the two.
    pub(super) async fn beside(
        mut self,
        server: &Server,
        main: &Driver,
        main_ended: oneshot::Receiver<()>,
        channel: String,
        op_timeout: Duration,
    ) -> Result<Acknowledged, StoreError> {
        let heard: RedisResult<u64> = message_to(&channel).query_async(&mut self.connection).await;
        if heard.map_err(|error| server.failed(error))? == 0 {
            return Err(server.because(
                Fault::Retry,
                "two connections to this address have reached two servers",
            ));
        }
        let (verbs, asked) = mpsc::unbounded_channel();
        let turn = Arc::new(Turn::within(op_timeout));
        let (main, of_task) = (main.end(), Arc::clone(&turn));
        let task = tokio::spawn(async move {
            let Self {
                connection,
                driver: _ends_with_this_task,
                ended,
                durability,
            } = self;
            tokio::select! {
                () = serve(connection, durability, &of_task, asked) => {}
                _ = ended => {}
                _ = main_ended => {}
            }
            main.abort();
        });
        Ok(Acknowledged {
            verbs,
            turn,
            op_timeout,
            channel,
            task: task.abort_handle(),
        })
    }
}

fn message_to(channel: &str) -> Cmd {
    // No ticket has this id, so a client that hears it does nothing.
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
            _ => "the server has no WAIT, which durability=replicas:N needs",
        });
    }
    if is_without_log(&text) {
        return server.mistake(WITHOUT_LOG);
    }
    if text.contains("replica instance") {
        return server.because(Fault::Retry, "it is a replica");
    }
    server.failed(error)
}

fn is_without_log(text: &str) -> bool {
    text.contains("appendonly is disabled")
}

const WITHOUT_LOG: &str = "the server does not write a log, which durability=fsync needs: set appendonly yes there, and \
    appendfsync always";

/// Sends the verbs that have come, one turn after the other, until the connection is of no use any more.
///
/// If this is dropped, the verbs without an answer fail, as when the connection breaks.
async fn serve(
    mut connection: MultiplexedConnection,
    durability: Durability,
    turn: &Turn,
    mut asked: mpsc::UnboundedReceiver<Verb>,
) {
    let mut verbs = Vec::new();
    // As many as come: the core bounds how many are under way.
    while asked.recv_many(&mut verbs, usize::MAX).await > 0 {
        // Nobody waits for these any more, and they were not sent.
        verbs.retain(|verb| !verb.answer.is_closed());
        let now = Clock::BOOT.now();
        let patience = |verb: &Verb| turn::patience(verb.budget, verb.since.until(now));
        let Some(within) = verbs.iter().map(patience).min() else {
            continue;
        };
        turn.begin(now);
        let (tell, acknowledgement) = watch::channel(None);
        let mut commands = Pipeline::with_capacity(verbs.len());
        let answers: Vec<_> = verbs
            .drain(..)
            .map(|verb| {
                commands.add_command(verb.command);
                verb.answer
            })
            .collect();
        let mut waits = connection.clone();
        let replied = async {
            let replies = connection.req_packed_commands(&commands, 0, answers.len());
            tell_all(answers, replies.await, &acknowledgement);
        };
        let wait = durability.wait(within);
        // The first to be polled is the first to be sent. There is room for both, because nobody else sends anything
        // here.
        let ((), waited) = join(replied, wait.query_async(&mut waits)).await;
        turn.end();
        let outcome = acknowledged(durability, within, waited);
        let is_broken = outcome.as_ref().is_err_and(StoreError::is_broken);
        let _ = tell.send(Some(outcome)); // no verb of this turn may be left
        if is_broken {
            return;
        }
    }
}

/// Tells each verb its own reply. A verb that is gone takes no other verb with it.
fn tell_all(
    answers: Vec<oneshot::Sender<Answered>>,
    replies: RedisResult<Vec<Value>>,
    acknowledgement: &Acknowledgement,
) {
    let mut replies = replies.map(Vec::into_iter);
    for answer in answers {
        let reply = match &mut replies {
            Ok(replies) => replies
                .next()
                .map_or_else(|| Err(lost()), Value::extract_error),
            Err(error) => Err(error.clone()),
        };
        let _ = answer.send(Answered {
            reply,
            acknowledgement: acknowledgement.clone(),
        });
    }
}

/// What the answer to the `WAIT` means for the verbs in front of it.
fn acknowledged(
    durability: Durability,
    within: Duration,
    waited: RedisResult<Value>,
) -> Result<(), StoreError> {
    let error = match waited {
        Ok(answer) => {
            let shortfall = durability.shortfall(answer);
            let shortfall = shortfall.map_err(|error| {
                StoreError::new(Fault::Unknown, format!("Redis: unreadable reply: {error}"))
            })?;
            return shortfall.map_or(Ok(()), |shortfall| {
                let within = Duration::from_millis(within.as_millis() as u64); // far less than 2⁶⁴
                let (within, advice) = (format_duration(within), durability.advice());
                Err(StoreError::halfway(
                    Fault::Refused,
                    format!(
                        "Redis: {shortfall} within {within}, so it does not count (durability={durability}); {advice}"
                    ),
                ))
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
        // For example because the server has become a replica meanwhile.
        _ => StoreError::broken(failed.to_string()),
    })
}

/// The error of a request whose connection has ended.
fn lost() -> RedisError {
    io::Error::new(io::ErrorKind::BrokenPipe, "the connection has ended").into()
}

impl Acknowledged {
    /// Sends a verb when its turn comes, and returns the reply and what will be known of its write.
    pub(super) async fn send(
        &self,
        command: Cmd,
        budget: Duration,
    ) -> Result<Answered, RedisError> {
        let now = Clock::BOOT.now();
        if self.turn.is_stuck(now) {
            self.task.abort();
        }
        let (answer, answered) = oneshot::channel();
        let verb = Verb {
            command,
            since: now,
            budget,
            answer,
        };
        self.verbs.send(verb).map_err(|_| lost())?;
        answered.await.map_err(|_| lost())
    }

    /// Checks that a write is acknowledged now.
    pub(super) async fn check(&self) -> Result<(), StoreError> {
        // A message to ourselves is a write that leaves nothing: the server passes it on to its replicas.
        let message = message_to(&self.channel);
        let sent = self.send(message, self.op_timeout).await.map_err(failed)?;
        sent.reply.map_err(failed)?;
        let acknowledged = settled(sent.acknowledgement).await;
        acknowledged.map_err(|error| match error.is_broken() {
            true => error,
            false => StoreError::new(error.fault(), error.to_string()),
        })
    }
}

/// What has become of the writes of a turn.
pub(super) async fn settled(mut acknowledgement: Acknowledgement) -> Result<(), StoreError> {
    let settled = acknowledgement.wait_for(Option::is_some).await;
    let settled = settled.ok().and_then(|outcome| outcome.clone());
    settled.unwrap_or_else(|| Err(failed(lost())))
}
