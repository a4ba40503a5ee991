//! Request batcher: merges concurrent requests into one write.
//! It saves round trips, wake-ups of the connection's task, and scripts on the server.
//!
//! While few commands are in flight, each is sent at once. While many are, commands wait for the
//! runtime's next turn and are sent together, and similar ones share one script. Each command has its
//! own answer: an error of one does not affect the others, and a caller that stops waiting disturbs none
//! of them.

use crate::scripts::{self, Lua};
use redis::{
    Arg, Cmd, ErrorKind, Pipeline, RedisError, RedisResult, RedisWrite, Value,
    aio::MultiplexedConnection,
};
use std::{
    io::{self, Write},
    pin::Pin,
    sync::{
        Arc, LazyLock, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
};
use tokio::{runtime::Handle, sync::oneshot};

/// The batcher between a connection and its callers.
pub(crate) struct Gather {
    native: MultiplexedConnection,
    runtime: Handle,
    under_way: AtomicUsize,
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    commands: Vec<(Cmd, Answer)>,
    /// Tasks that send the waiting commands to the server.
    carriers: usize,
    /// The scripts for several requests were loaded over this connection.
    loaded: bool,
}

type Answer = oneshot::Sender<RedisResult<Value>>;

impl Gather {
    pub(crate) fn new(native: MultiplexedConnection, runtime: Handle) -> Self {
        Self {
            native,
            runtime,
            under_way: AtomicUsize::new(0),
            waiting: Arc::default(),
        }
    }

    /// Sends a request. An error that the server answers becomes an `Err`.
    pub(crate) fn ask(&self, Request { cmd, last }: Request) -> Asked<'_> {
        let others = self.under_way.fetch_add(1, Ordering::Relaxed);
        let mut native = self.native.clone();
        let way = if (FEW..MOST).contains(&others) {
            Way::Together(self.enter(cmd))
        } else if last {
            Way::Alone(Box::pin(answered_last(native, cmd)))
        } else {
            Way::Alone(Box::pin(
                async move { native.send_packed_command(&cmd).await },
            ))
        };
        Asked {
            way,
            _turn: Turn(&self.under_way),
        }
    }

    fn enter(&self, cmd: Cmd) -> oneshot::Receiver<RedisResult<Value>> {
        let (answer, receiver) = oneshot::channel();
        let mut waiting = lock(&self.waiting);
        waiting.commands.push((cmd, answer));
        // The first waiting command starts a carrier, if the limit allows another one. With no carrier
        // at all, nothing would be sent.
        if waiting.carriers < CARRIERS && (waiting.commands.len() == 1 || waiting.carriers == 0) {
            waiting.carriers += 1;
            let carry = carry(self.native.clone(), Arc::clone(&self.waiting));
            self.runtime.spawn(carry);
        }
        receiver
    }
}

/// A request to the server.
pub(crate) struct Request {
    cmd: Cmd,
    /// The notifications of its script should leave the server before its answer.
    last: bool,
}

impl Request {
    pub(crate) fn new(cmd: Cmd, last: bool) -> Self {
        Self { cmd, last }
    }
}

impl From<Cmd> for Request {
    fn from(cmd: Cmd) -> Self {
        Self::new(cmd, false)
    }
}

/// The server writes first to the client for which it had output last. That is the requester, unless the
/// server already had output for it. So `TIME` is sent ahead, in the same write. The answer then leaves
/// after the notifications: its write costs more than a command, and it wakes up a client that has
/// nothing to do beside a client that has.
async fn answered_last(mut native: MultiplexedConnection, cmd: Cmd) -> RedisResult<Value> {
    let mut both = Pipeline::with_capacity(2);
    both.cmd("TIME").add_command(cmd);
    let answers = native.send_packed_commands(&both, 1, 1).await?;
    answers.into_iter().next().ok_or_else(cut)
}

/// A request in flight; resolves to the answer.
pub(crate) struct Asked<'a> {
    way: Way,
    _turn: Turn<'a>,
}

enum Way {
    /// Boxed: the native client's future is a kilobyte, which batched requests need not carry.
    Alone(Pin<Box<dyn Future<Output = RedisResult<Value>> + Send>>),
    Together(oneshot::Receiver<RedisResult<Value>>),
}

impl Future for Asked<'_> {
    type Output = RedisResult<Value>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = match &mut self.way {
            Way::Alone(alone) => ready!(alone.as_mut().poll(cx)),
            Way::Together(receiver) => {
                ready!(Pin::new(receiver).poll(cx)).unwrap_or_else(|_| Err(cut()))
            }
        };
        Poll::Ready(answer.and_then(Value::extract_error))
    }
}

/// Sends the waiting commands until none are left.
async fn carry(mut native: MultiplexedConnection, waiting: Arc<Mutex<Waiting>>) {
    loop {
        // Tasks that were woken together with the first one send their requests in this turn of the
        // runtime.
        tokio::task::yield_now().await;
        let (load, loaded) = {
            let mut waiting = lock(&waiting);
            if waiting.commands.is_empty() {
                waiting.carriers -= 1;
                return;
            }
            let loaded = std::mem::replace(&mut waiting.loaded, true);
            (std::mem::take(&mut waiting.commands), loaded)
        };
        let refused = Load::folded(load, loaded).send(&mut native).await;
        if !refused.commands.is_empty() {
            Load::one_by_one(refused).send(&mut native).await;
        }
    }
}

/// The commands of one write.
#[derive(Default)]
struct Load {
    commands: Pipeline,
    /// The callers of each command.
    askers: Vec<Askers>,
}

enum Askers {
    One(Answer),
    /// The answer has one part for each caller, or is the same for all.
    Several(&'static Several, Vec<(Cmd, Answer)>),
    None,
}

/// Requests that the server refused as one script, before it did anything.
#[derive(Default)]
struct Refused {
    commands: Vec<(Cmd, Answer)>,
    unknown: Vec<&'static Several>,
}

impl Load {
    /// Similar requests share one script. The server spends most of its time on starting a script,
    /// reading the clock and looking up keys, which it then does once for all of them.
    fn folded(load: Vec<(Cmd, Answer)>, loaded: bool) -> Self {
        let mut folded = Self::default();
        for several in SEVERAL.iter().filter(|_| !loaded) {
            folded.add(several.all.load(), Askers::None);
        }
        let mut groups: Vec<(&'static Several, Vec<(Cmd, Answer)>)> = Vec::new();
        for (cmd, answer) in still_asked(load) {
            let Some(several) = SEVERAL.iter().find(|several| several.takes(&cmd)) else {
                folded.add(cmd, Askers::One(answer));
                continue;
            };
            let alike = groups
                .iter()
                .position(|(of, group)| std::ptr::eq(*of, several) && of.alike(&group[0].0, &cmd));
            match alike {
                Some(at) => {
                    groups[at].1.push((cmd, answer));
                    if groups[at].1.len() == MOST_FOLDED {
                        folded.add_several(several, groups.swap_remove(at).1);
                    }
                }
                None if groups.len() < MOST_GROUPS => groups.push((several, vec![(cmd, answer)])),
                None => folded.add(cmd, Askers::One(answer)),
            }
        }
        for (several, group) in groups {
            folded.add_several(several, group);
        }
        folded
    }

    /// Sends each request alone, after the scripts that the server does not know are loaded again: they
    /// were flushed.
    fn one_by_one(refused: Refused) -> Self {
        let mut load = Self::default();
        for several in refused.unknown {
            load.add(several.all.load(), Askers::None);
        }
        for (cmd, answer) in still_asked(refused.commands) {
            load.add(cmd, Askers::One(answer));
        }
        load
    }

    fn add(&mut self, cmd: Cmd, askers: Askers) {
        self.commands.add_command(cmd);
        self.askers.push(askers);
    }

    fn add_several(&mut self, several: &'static Several, mut group: Vec<(Cmd, Answer)>) {
        if group.len() > 1 {
            self.add(several.call(&group), Askers::Several(several, group));
        } else if let Some((cmd, answer)) = group.pop() {
            self.add(cmd, Askers::One(answer));
        }
    }

    /// Sends the commands and answers all callers.
    async fn send(mut self, native: &mut MultiplexedConnection) -> Refused {
        let mut refused = Refused::default();
        if self.commands.is_empty() {
            return refused;
        }
        let values = tokio::select! {
            biased;
            values = native.send_packed_commands(&self.commands, 0, self.commands.len()) => values,
            () = deserted(&mut self.askers) => return refused,
        };
        match values {
            Ok(values) => {
                for (askers, value) in self.askers.into_iter().zip(values) {
                    askers.tell(value, &mut refused);
                }
            }
            Err(error) => {
                for answer in self.askers.into_iter().flat_map(Askers::all) {
                    drop(answer.send(Err(error.clone())));
                }
            }
        }
        refused
    }
}

/// Requests without a caller are not sent.
fn still_asked(load: Vec<(Cmd, Answer)>) -> impl Iterator<Item = (Cmd, Answer)> {
    load.into_iter().filter(|(_, answer)| !answer.is_closed())
}

impl Askers {
    fn tell(self, value: Value, refused: &mut Refused) {
        match (self, value) {
            (Self::One(answer), value) => drop(answer.send(Ok(value))),
            (Self::Several(several, group), Value::ServerError(error))
                if NOT_RUN.contains(&error.code()) =>
            {
                if error.code() == NOT_KNOWN {
                    refused.unknown.push(several);
                }
                refused.commands.extend(group);
            }
            (Self::Several(_, group), Value::Array(values)) if values.len() == group.len() => {
                for ((_, answer), value) in group.into_iter().zip(values) {
                    drop(answer.send(Ok(value)));
                }
            }
            // One answer for all.
            (Self::Several(_, group), value @ (Value::BulkString(_) | Value::Int(_))) => {
                for (_, answer) in group {
                    drop(answer.send(Ok(value.clone())));
                }
            }
            (Self::Several(_, group), value) => {
                let error = value.extract_error().err().unwrap_or_else(|| {
                    RedisError::from((ErrorKind::UnexpectedReturnType, "not an answer for each"))
                });
                for (_, answer) in group {
                    drop(answer.send(Err(error.clone())));
                }
            }
            (Self::None, _) => {}
        }
    }

    fn all(self) -> Vec<Answer> {
        match self {
            Self::One(answer) => vec![answer],
            Self::Several(_, group) => group.into_iter().map(|(_, answer)| answer).collect(),
            Self::None => Vec::new(),
        }
    }
}

/// A script that does the work of another one for several names, each judged alone.
struct Several {
    one: &'static LazyLock<Lua>,
    all: &'static LazyLock<Lua>,
    /// A request can join a batch only if it has exactly so many keys.
    keys: usize,
    /// How each argument is merged.
    arguments: &'static [Said],
    /// How many arguments may be missing at the end, which is the same as empty.
    missing: usize,
}

/// How an argument of several requests becomes one argument, because arguments are the largest cost of a
/// request.
#[derive(Clone, Copy)]
enum Said {
    /// The same for all requests.
    Once,
    /// A number; the least one counts.
    Least,
    /// Concatenated; all have one length.
    Joined,
    /// One line for each request.
    Lines,
}

impl Several {
    fn takes(&self, cmd: &Cmd) -> bool {
        let mut words = cmd.args_iter();
        let most = 3 + self.keys + self.arguments.len();
        (most - self.missing..=most).contains(&words.len())
            && matches!(words.next(), Some(Arg::Simple(b"EVALSHA")))
            && matches!(words.next(), Some(Arg::Simple(hash)) if hash == self.one.hash.as_bytes())
    }

    /// Whether two requests can be merged.
    fn alike(&self, one: &Cmd, other: &Cmd) -> bool {
        let both = words(one).zip(words(other)).skip(self.keys);
        both.zip(self.arguments)
            .all(|((one, other), said)| match said {
                Said::Once => one == other,
                Said::Joined => one.len() == other.len(),
                Said::Least | Said::Lines => true,
            })
    }

    /// Merges the requests: the first key of each, then the second of each, and so on, then each
    /// argument for all.
    fn call(&self, group: &[(Cmd, Answer)]) -> Cmd {
        let count = group.len();
        let mut call = (self.all).call(count * self.keys, count * self.arguments.len());
        let mut each: Vec<_> = group.iter().map(|(cmd, _)| words(cmd)).collect();
        for _ in 0..self.keys {
            for words in &mut each {
                call.arg(words.next().unwrap_or_default());
            }
        }
        for said in self.arguments {
            let mut column = each
                .iter_mut()
                .map(|words| words.next().unwrap_or_default());
            match said {
                Said::Once => {
                    call.arg(column.next().unwrap_or_default());
                    column.for_each(drop); // all are equal
                }
                Said::Least => {
                    let least = column.min_by_key(|word| (word.len(), *word));
                    call.arg(least.unwrap_or_default());
                }
                Said::Joined => write_joined(&mut call, column, b""),
                Said::Lines => write_joined(&mut call, column, b"\n"),
            }
        }
        call
    }
}

fn write_joined<'a>(call: &mut Cmd, column: impl Iterator<Item = &'a [u8]>, between: &[u8]) {
    let mut arg = call.writer_for_next_arg();
    for (at, word) in column.enumerate() {
        // Writing to memory cannot fail.
        if at > 0 {
            drop(arg.write_all(between));
        }
        drop(arg.write_all(word));
    }
}

/// The keys and arguments of a script's call.
fn words(cmd: &Cmd) -> impl Iterator<Item = &[u8]> {
    cmd.args_iter().skip(3).map(|word| match word {
        Arg::Simple(word) => word,
        _ => b"",
    })
}

/// Acquires without a next ticket or a join, and releases without a minimum hold.
static SEVERAL: [Several; 2] = [
    Several {
        one: &scripts::ACQUIRE,
        all: &scripts::ACQUIRES,
        keys: 4,
        // Owner, hold, lease, not-after, note, ticket.
        arguments: &[
            Said::Joined,
            Said::Joined,
            Said::Once,
            Said::Least,
            Said::Once,
            Said::Lines,
        ],
        missing: 1,
    },
    Several {
        one: &scripts::RELEASE,
        all: &scripts::RELEASES,
        keys: 3,
        // Owner and hold.
        arguments: &[Said::Joined, Said::Joined],
        missing: 0,
    },
];

/// Resolves when all callers are gone. A write that waits for a silent server would keep its connection
/// open.
async fn deserted(askers: &mut [Askers]) {
    for askers in askers {
        match askers {
            Askers::One(answer) => answer.closed().await,
            Askers::Several(_, group) => {
                for (_, answer) in group {
                    answer.closed().await;
                }
            }
            Askers::None => {}
        }
    }
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connection's task is gone; the effect of the request is unknown.
fn cut() -> RedisError {
    io::Error::from(io::ErrorKind::BrokenPipe).into()
}

/// A command in flight.
struct Turn<'a>(&'a AtomicUsize);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Up to so many commands are sent at once, each alone: a write of its own arrives sooner than a batch.
const FEW: usize = 4;
/// Writes in flight at a time. With few, requests wait for one of them to return, and the server and the
/// client wait for each other. More than these gain nothing, and each carries little.
const CARRIERS: usize = 8;
/// Names in one script. The server does nothing else for some 0.2 ms, less than for a script of
/// renewals, or for 1 ms where every queue is full of dead tickets (see `SHARE` in the scripts of
/// several). More names gain little.
const MOST_FOLDED: usize = 32;
/// Groups of requests in one batch that cannot be merged with each other: a client has few different
/// leases.
const MOST_GROUPS: usize = 8;
/// Errors that the server reports before a script does anything: it does not know the script; a key is
/// not allowed for this user or not on this node; or one request is late, which is no fault of the
/// others. Each request is then repeated alone.
const NOT_RUN: [&str; 4] = [NOT_KNOWN, "NOPERM", "CROSSSLOT", "LATE"];
const NOT_KNOWN: &str = "NOSCRIPT";
/// The most commands that wait, some 300 bytes each. Further commands go alone and wait in the native
/// client's own queue.
const MOST: usize = 1_024;
