//! Lua scripts: each step of a lock, executed by the server as one script.
//! A script is atomic, so no step of a lock needs a transaction or a lock of its own.
//!
//! The server runs nothing else during a script. Its clock is the only one that counts. All keys are
//! declared and share one hash tag, so a script runs on the cluster node that has the name's slot.
//!
//! | key | what |
//! |---|---|
//! | `dlock:{E}` | the record, a hash: `<owner uuid>:0` → number of holds, `~h:<hold>` → `END NOTE`, `~t` token, `~s` the µs it began where the token does not tell, `~k` the ms until which a minimum hold keeps the lock unavailable, `~e` of a shared lock `MS OWNER END`: its owner, a time before which none of its holds ends, and the end of one of them that ends late; or only `~r` → the ticket it is reserved for, which is empty once that ticket has it |
//! | `dlock:{E}:token` | the token given last, for 28 to 56 hours |
//! | `dlock:{E}:line` | the queue, a sorted set: ticket → its place, the µs at which it first entered |
//! | `dlock:{E}:ends` | a hash: ticket → `DEADLINE ACCEPT`, the ms after which its entry counts as dead and the ms that its turn lasts, and behind them of a sharer its owner, and `+` if it was told to try now; `~f` is left free for a turn of Redisson's waiters |
//!
//! The record lives until the latest end of its living holds, until `~k` when no owner is left, or for
//! the accept lease of `~r`. END is a hold's end in ms. `=` instead means that the hold ends with the
//! record, and is written for a sole hold. A hash without `~t` and with a field that does not begin with
//! `~` is a foreign (Redisson) holder.
//!
//! A ticket is `<channel of its client>:<number>`, so it names the channel on which its client listens.
//! The server remembers nothing of a ticket that is served, dead or past its deadline. The client
//! remembers the place, and its next poll restores it.
//!
//! Numbers: milliseconds are exact in Lua, and `..` shows 14 digits of them, enough until the year 5138.
//! Tokens and places have 16 digits. They are concatenated from the text that `TIME` answers, formatted
//! by `%.0f` where they are computed, and answered as text. A stored value that is no number that Lua
//! can count on from is *damaged* (see `sound.lua`): the script does nothing with it and says so in its
//! answer. A break repairs it. The queue heals by itself: its keys live for seconds, and a ticket
//! without a waiting client is removed.
//!
//! A code path that the server has not run for milliseconds is many times slower, and a hand-off follows
//! milliseconds of idling. Converting a number to text is the most expensive part of it: as much as two
//! commands. So the commands of a hand-off get text and ask for no place in the queue. That is why
//! `ZPOPMIN` does not remove the head.
//!
//! A script for several requests executes each as if it had been sent alone, in some order. It saves the
//! server's time: most of that goes into arguments and commands, and an argument costs a third of a command.
//! So an argument that all requests share is sent once. Owners, holds and tickets are one argument each,
//! which the script cuts up; keys are declared one by one. A few commands handle the common case for all. The
//! rest is left to the step that a single request takes.

use crate::commands;
use redis::Cmd;
use std::sync::LazyLock;

/// A script and the hash under which the server caches it.
pub(crate) struct Lua {
    text: String,
    pub(crate) hash: String,
}

impl Lua {
    fn new(name: &str) -> Self {
        let mut text = String::new();
        compose(name, &mut text);
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    pub(crate) fn load(&self) -> Cmd {
        commands::words(&["SCRIPT", "LOAD", &self.text])
    }
}

/// Appends a file's text. A line `--@name` stands for the file of that name. Comments are left out, because
/// the server walks through all its scripts again and again.
fn compose(name: &str, text: &mut String) {
    let file = FILES.iter().find(|(it, _)| *it == name);
    for line in file.map_or("", |(_, file)| file).lines() {
        match line.strip_prefix("--@") {
            Some(part) => compose(part, text),
            None if line.starts_with("--") => {}
            None => text.extend([line, "\n"]),
        }
    }
}

/// The scripts that a fresh connection loads: all but those for several requests, which the first batch
/// loads. A large script that perhaps never runs would cost every request.
pub(crate) fn all() -> [&'static Lua; 6] {
    [&ACQUIRE, &RELEASE, &LEAVE, &RENEW, &BREAK, &INSPECT]
}

pub(crate) static ACQUIRE: LazyLock<Lua> = LazyLock::new(|| Lua::new("acquire"));
pub(crate) static ACQUIRES: LazyLock<Lua> = LazyLock::new(|| Lua::new("acquires"));
pub(crate) static RELEASE: LazyLock<Lua> = LazyLock::new(|| Lua::new("release"));
pub(crate) static RELEASES: LazyLock<Lua> = LazyLock::new(|| Lua::new("releases"));
pub(crate) static LEAVE: LazyLock<Lua> = LazyLock::new(|| Lua::new("leave"));
pub(crate) static RENEW: LazyLock<Lua> = LazyLock::new(|| Lua::new("renew"));
pub(crate) static BREAK: LazyLock<Lua> = LazyLock::new(|| Lua::new("break"));
pub(crate) static INSPECT: LazyLock<Lua> = LazyLock::new(|| Lua::new("inspect"));

const FILES: [(&str, &str); 18] = [
    ("acquire", include_str!("lua/acquire.lua")),
    ("acquire_step", include_str!("lua/acquire_step.lua")),
    ("acquires", include_str!("lua/acquires.lua")),
    ("admit", include_str!("lua/admit.lua")),
    ("break", include_str!("lua/break.lua")),
    ("each", include_str!("lua/each.lua")),
    ("first", include_str!("lua/first.lua")),
    ("inspect", include_str!("lua/inspect.lua")),
    ("leave", include_str!("lua/leave.lua")),
    ("release", include_str!("lua/release.lua")),
    ("release_step", include_str!("lua/release_step.lua")),
    ("releases", include_str!("lua/releases.lua")),
    ("renew", include_str!("lua/renew.lua")),
    ("serve", include_str!("lua/serve.lua")),
    ("sound", include_str!("lua/sound.lua")),
    ("stand", include_str!("lua/stand.lua")),
    ("tell", include_str!("lua/tell.lua")),
    ("time", include_str!("lua/time.lua")),
];

#[cfg(test)]
mod tests {
    use super::{FILES, compose};

    #[test]
    fn a_script_has_the_code_of_its_parts_and_no_comment() {
        for (name, file) in FILES {
            for part in file.lines().filter_map(|line| line.strip_prefix("--@")) {
                assert!(FILES.iter().any(|(it, _)| *it == part), "{name}: {part}");
            }
            let mut text = String::new();
            compose(name, &mut text);
            assert!(!text.is_empty() && !text.contains("--"), "{name}: {text}");
        }
    }
}
