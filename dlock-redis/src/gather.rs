//! Gathers commands that are asked at the same time: one write, one wake-up of the connection's task, one batch of answers.
//!
//! While few commands are under way each goes at once. While there are many, they wait for the runtime's next turn and go
//! together, those that are alike in one script. Each has its own answer: an error of one is not the others', and whoever
//! stops waiting disturbs nobody.

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

/// What stands between a connection and those who ask through it.
pub(crate) struct Gather {
    native: MultiplexedConnection,
    runtime: Handle,
    under_way: AtomicUsize,
    waiting: Arc<Mutex<Waiting>>,
}

#[derive(Default)]
struct Waiting {
    commands: Vec<(Cmd, Answer)>,
    /// Tasks that carry what waits to the server.
    carriers: usize,
    /// The scripts of several were loaded over this connection.
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

    /// Asks the server; an error that it answers is an error.
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
        // The first who waits brings a carrier, if there may be another one; with none at all nobody would come.
        if waiting.carriers < CARRIERS && (waiting.commands.len() == 1 || waiting.carriers == 0) {
            waiting.carriers += 1;
            let carry = carry(self.native.clone(), Arc::clone(&self.waiting));
            self.runtime.spawn(carry);
        }
        receiver
    }
}

/// What the server is asked.
pub(crate) struct Request {
    cmd: Cmd,
    /// What its script pushes to others should leave the server before its answer.
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

/// The server writes first to whom it had something to say last, which is whoever asked, unless it had something to say to him
/// before: so `TIME` goes ahead, in the same write. An answer is a write that costs more than a command, and wakes up a client
/// that has nothing to do beside one that has.
async fn answered_last(mut native: MultiplexedConnection, cmd: Cmd) -> RedisResult<Value> {
    let mut both = Pipeline::with_capacity(2);
    both.cmd("TIME").add_command(cmd);
    let answers = native.send_packed_commands(&both, 1, 1).await?;
    answers.into_iter().next().ok_or_else(cut)
}

/// A request under way: the answer.
pub(crate) struct Asked<'a> {
    way: Way,
    _turn: Turn<'a>,
}

enum Way {
    /// The native client's future is a kilobyte, which those who go together need not carry about.
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

/// Sends what waits, again and again until nothing does.
async fn carry(mut native: MultiplexedConnection, waiting: Arc<Mutex<Waiting>>) {
    loop {
        // Whoever was woken together with the one who began asks in this turn.
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

/// Commands that go in one write.
#[derive(Default)]
struct Load {
    commands: Pipeline,
    /// Who asked each.
    askers: Vec<Askers>,
}

enum Askers {
    One(Answer),
    /// The answer has a part for each, or is the same for all.
    Several(&'static Several, Vec<(Cmd, Answer)>),
    Nobody,
}

/// What the server would not do for several names at once, and did not do for any.
#[derive(Default)]
struct Refused {
    commands: Vec<(Cmd, Answer)>,
    unknown: Vec<&'static Several>,
}

impl Load {
    /// Requests that are alike go in one script: the server's time goes into beginning a script, reading the clock and
    /// looking at keys, which it then does once for all of them.
    fn folded(load: Vec<(Cmd, Answer)>, loaded: bool) -> Self {
        let mut folded = Self::default();
        for several in SEVERAL.iter().filter(|_| !loaded) {
            folded.add(several.all.load(), Askers::Nobody);
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

    /// Each alone, after what the server does not know is told to it again: it was flushed.
    fn one_by_one(refused: Refused) -> Self {
        let mut load = Self::default();
        for several in refused.unknown {
            load.add(several.all.load(), Askers::Nobody);
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

    /// Sends it and tells all who asked.
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

/// What nobody waits for any more is not sent.
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
            // The same for all.
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
            (Self::Nobody, _) => {}
        }
    }

    fn all(self) -> Vec<Answer> {
        match self {
            Self::One(answer) => vec![answer],
            Self::Several(_, group) => group.into_iter().map(|(_, answer)| answer).collect(),
            Self::Nobody => Vec::new(),
        }
    }
}

/// A script that takes the step of another one for several names, each by itself.
struct Several {
    one: &'static LazyLock<Lua>,
    all: &'static LazyLock<Lua>,
    /// A request that has so many, and no more, can be one of several.
    keys: usize,
    /// How each of the arguments is said for all.
    arguments: &'static [Said],
    /// How many of the arguments may be missing at the end, which is the same as empty.
    missing: usize,
}

/// How an argument is said for all: in one word, since words are what a request costs most.
#[derive(Clone, Copy)]
enum Said {
    /// All say the same.
    Once,
    /// A number, of which the least counts.
    Least,
    /// One after the other, all of one length.
    Joined,
    /// A line each.
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

    /// Whether what both say can be said in one.
    fn alike(&self, one: &Cmd, other: &Cmd) -> bool {
        let both = words(one).zip(words(other)).skip(self.keys);
        both.zip(self.arguments)
            .all(|((one, other), said)| match said {
                Said::Once => one == other,
                Said::Joined => one.len() == other.len(),
                Said::Least | Said::Lines => true,
            })
    }

    /// Asks for all of them: the first key of each, then the second of each, and so on, then each argument for all.
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
                    column.for_each(drop); // the same
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

/// Acquires without a next ticket or a join, and releases that keep nothing shut.
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

/// Resolves when nobody waits any more: what keeps waiting for a deaf server keeps its connection.
async fn deserted(askers: &mut [Askers]) {
    for askers in askers {
        match askers {
            Askers::One(answer) => answer.closed().await,
            Askers::Several(_, group) => {
                for (_, answer) in group {
                    answer.closed().await;
                }
            }
            Askers::Nobody => {}
        }
    }
}

fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The connection's task is gone and nobody knows what it did.
fn cut() -> RedisError {
    io::Error::from(io::ErrorKind::BrokenPipe).into()
}

/// A command under way.
struct Turn<'a>(&'a AtomicUsize);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// So many commands go at once, each alone: a write of its own is sooner there than one that waits for company.
const FEW: usize = 4;
/// Writes under way at a time. With few, whoever asks waits for one of them to come back, and server and client for each other; more
/// than these gain nothing, and each carries little.
const CARRIERS: usize = 8;
/// Names of one script: the server does nothing else for some 0.2 ms, less than a script of renewals takes it, or for 1 ms where
/// the dead stand in every line (`SHARE` in the scripts of several). More names gain little.
const MOST_FOLDED: usize = 32;
/// Kinds of requests in one load that do not go together: a client has few leases.
const MOST_GROUPS: usize = 8;
/// What the server says before it runs anything of a script: it does not know it, or one of its keys is not this user's or
/// not this node's, or one of them is late, which is not the others' fault. Each is asked again alone, as if nothing had been.
const NOT_RUN: [&str; 4] = [NOT_KNOWN, "NOPERM", "CROSSSLOT", "LATE"];
const NOT_KNOWN: &str = "NOSCRIPT";
/// The most that wait: some 300 bytes each. Who comes then waits where the native client keeps its own.
const MOST: usize = 1_024;
