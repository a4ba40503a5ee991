//! Gathers commands that are asked at the same time: one write, one wake-up of the connection's task, one batch of answers.
//!
//! While few commands are under way each goes at once. While there are many, they wait for the runtime's next turn and go
//! together. Each has its own answer: an error of one is not the others', and whoever stops waiting disturbs nobody.

use redis::{Cmd, Pipeline, RedisError, RedisResult, Value, aio::MultiplexedConnection};
use std::{
    io,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
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
    pub(crate) async fn ask(&self, cmd: Cmd) -> RedisResult<Value> {
        let others = self.under_way.fetch_add(1, Ordering::Relaxed);
        let _turn = Turn(&self.under_way);
        let answer = if (FEW..MOST).contains(&others) {
            self.enter(cmd).await.unwrap_or_else(|_| Err(cut()))
        } else {
            self.native.clone().send_packed_command(&cmd).await
        };
        answer?.extract_error()
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

/// Sends what waits, again and again until nothing does.
async fn carry(mut native: MultiplexedConnection, waiting: Arc<Mutex<Waiting>>) {
    loop {
        // Whoever was woken together with the one who began asks in this turn.
        tokio::task::yield_now().await;
        let load = {
            let mut waiting = lock(&waiting);
            if waiting.commands.is_empty() {
                waiting.carriers -= 1;
                return;
            }
            std::mem::take(&mut waiting.commands)
        };
        let mut commands = Pipeline::with_capacity(load.len());
        let mut answers = Vec::with_capacity(load.len());
        // What nobody waits for any more is not sent.
        for (cmd, answer) in load.into_iter().filter(|(_, answer)| !answer.is_closed()) {
            commands.add_command(cmd);
            answers.push(answer);
        }
        if answers.is_empty() {
            continue;
        }
        let values = tokio::select! {
            biased;
            values = native.send_packed_commands(&commands, 0, commands.len()) => values,
            () = deserted(&mut answers) => continue,
        };
        match values {
            Ok(values) => {
                for (answer, value) in answers.into_iter().zip(values) {
                    drop(answer.send(Ok(value)));
                }
            }
            Err(error) => {
                for answer in answers {
                    drop(answer.send(Err(error.clone())));
                }
            }
        }
    }
}

/// Resolves when nobody waits any more: what keeps waiting for a deaf server keeps its connection.
async fn deserted(answers: &mut [Answer]) {
    for answer in answers {
        answer.closed().await;
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
/// Writes under way at a time. With one, server and client wait for each other; with many, each carries little.
const CARRIERS: usize = 2;
/// The most that wait: some 300 bytes each. Who comes then waits where the native client keeps its own.
const MOST: usize = 1_024;
