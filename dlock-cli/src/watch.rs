//! `dlock watch`: the table of `dlock list`, again and again. In a terminal it stays in its place.

use crate::{
    args::Watch,
    exit::Exit,
    output::{Output, object, span},
    table,
};
use dlock::{Client, Error, Snapshot};
use futures_util::{StreamExt, TryStreamExt};
use nix::sys::termios::{LocalFlags, SetArg, Termios, tcgetattr, tcsetattr};
use std::{
    env,
    fmt::Write as _,
    io::{self, IsTerminal, Read, Write},
    sync::Arc,
    thread,
    time::SystemTime,
};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::Notify,
    time::sleep,
};

pub(crate) async fn run(client: &Client, args: &Watch, output: &Output) -> Exit {
    let can_draw = env::var_os("TERM").is_none_or(|term| term != "dumb");
    let in_terminal = io::stdin().is_terminal() && io::stdout().is_terminal() && can_draw;
    if output.is_json() || !in_terminal {
        return print(client, args, output).await;
    }
    match Screen::open() {
        Ok(mut screen) => show(client, args, &mut screen).await,
        Err(error) => {
            output.say(&format!("the terminal cannot be used: {error}"));
            Exit::OUTPUT
        }
    }
}

/// The locks in the order of their names.
async fn locks(client: &Client, prefix: &str) -> Result<Vec<Snapshot>, Error> {
    let listed = client.admin().list(prefix).take(MOST);
    let mut locks: Vec<_> = listed.try_collect().await?;
    locks.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(locks)
}

/// The most locks that are shown: more are for `dlock list`.
const MOST: usize = 1000;

/// One table after the other, for files and pipes.
async fn print(client: &Client, args: &Watch, output: &Output) -> Exit {
    loop {
        let locks = match locks(client, &args.prefix).await {
            Ok(locks) => locks,
            Err(error) => return output.fail(&error, Exit::of(&error, Exit::HELD)),
        };
        let now = humantime::format_rfc3339_seconds(SystemTime::now());
        let written = match output.is_json() {
            true => locks.iter().try_for_each(|lock| {
                output.result(&object(lock, client.capabilities().backend), "")
            }),
            false => {
                let mut lines = vec![format!("{now} {}", summary(&locks)), table::header()];
                lines.extend(locks.iter().map(table::row));
                writeln!(io::stdout(), "{}\n", lines.join("\n"))
            }
        };
        if written.is_err() {
            return Exit::OUTPUT;
        }
        sleep(args.every).await;
    }
}

/// How many locks there are, and how many wait for them where the store knows.
fn summary(locks: &[Snapshot]) -> String {
    let plural = if locks.len() == 1 { "" } else { "s" };
    let most = if locks.len() == MOST {
        "the first "
    } else {
        ""
    };
    let waiting: Option<u64> = locks.iter().map(|lock| lock.waiters.map(u64::from)).sum();
    let waiting = waiting.map(|waiting| format!(", {waiting} waiting"));
    let waiting = waiting.unwrap_or_default();
    format!("{most}{} lock{plural}{waiting}", locks.len())
}

/// A table that stays in its place.
async fn show(client: &Client, args: &Watch, screen: &mut Screen) -> Exit {
    let signals = (
        signal(SignalKind::terminate()),
        signal(SignalKind::hangup()),
        signal(SignalKind::window_change()),
    );
    let (Ok(mut terminate), Ok(mut hang_up), Ok(mut resized)) = signals else {
        return Exit::UNREACHABLE;
    };
    let backend = client.capabilities().backend;
    let title = format!(
        "dlock watch {backend}, every {}, q ends it",
        span(args.every)
    );
    let mut table = vec![title, "asking the store".to_owned()];
    loop {
        if screen.draw(&table).is_err() {
            return Exit::OUTPUT;
        }
        let next = async {
            if table.len() > 2 {
                sleep(args.every).await;
            }
            lines(locks(client, &args.prefix).await)
        };
        tokio::select! {
            () = screen.quit.notified() => return Exit::DONE,
            _ = terminate.recv() => return Exit::signal(SignalKind::terminate().as_raw_value()),
            _ = hang_up.recv() => return Exit::signal(SignalKind::hangup().as_raw_value()),
            _ = resized.recv() => {}
            found = next => {
                table.truncate(1);
                table.extend(found);
            }
        }
    }
}

/// What stands below the title. A store that fails may answer the next time.
fn lines(found: Result<Vec<Snapshot>, Error>) -> Vec<String> {
    match found {
        Ok(locks) => {
            let rows = locks.iter().map(table::row);
            [summary(&locks), table::header()]
                .into_iter()
                .chain(rows)
                .collect()
        }
        Err(error) => vec![error.to_string(), table::header()],
    }
}

/// The terminal, without its own line editing, until this is dropped.
struct Screen {
    /// Told of q, of Ctrl-C and of the end of the terminal.
    quit: Arc<Notify>,
    before: Termios,
}

impl Screen {
    fn open() -> io::Result<Self> {
        let before = tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.local_flags
            .remove(LocalFlags::ICANON | LocalFlags::ECHO | LocalFlags::ISIG);
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw)?;
        let quit = Arc::new(Notify::new());
        let screen = Self {
            quit: Arc::clone(&quit),
            before,
        };
        put(ENTER)?;
        // A read cannot be cancelled; the thread ends with the process.
        thread::Builder::new()
            .name("keys".to_owned())
            .spawn(move || wait_for_quit(&quit))?;
        Ok(screen)
    }

    /// Draws the lines, as many and as much of each as there is room for.
    fn draw(&self, lines: &[String]) -> io::Result<()> {
        let size = rustix::termios::tcgetwinsize(io::stdout())?;
        let (columns, rows) = (usize::from(size.ws_col), usize::from(size.ws_row));
        put(&frame(lines, columns.max(20), rows.max(5)))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        drop(put(LEAVE)); // the terminal may be gone
        let _ = tcsetattr(io::stdin(), SetArg::TCSANOW, &self.before);
    }
}

/// Reads keys until one of them quits, or the terminal is gone.
fn wait_for_quit(quit: &Notify) {
    let mut keys = [0; 32];
    while let Ok(read @ 1..) = io::stdin().read(&mut keys)
        && !keys[..read].iter().any(|key| QUIT.contains(key))
    {}
    quit.notify_one();
}

/// q, Q and Ctrl-C.
const QUIT: [u8; 3] = [b'q', b'Q', 3];

/// To the terminal's other screen, without a cursor and without wrapping, because some characters are two columns
/// wide; and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

fn put(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// The text that draws the lines over what was there.
fn frame(lines: &[String], columns: usize, rows: usize) -> String {
    let cut = |line: &str| table::cut(line, columns);
    let hidden = lines.len().saturating_sub(rows);
    let shown = match hidden {
        0 => lines,
        _ => &lines[..rows - 1],
    };
    let mut drawn: Vec<_> = shown.iter().map(|line| cut(line)).collect();
    if hidden > 0 {
        drawn.push(cut(&format!("and {} more", hidden + 1)));
    }
    let mut text = "\x1b[H".to_owned();
    for (at, line) in drawn.iter().enumerate() {
        let end = if at == 0 { "" } else { "\r\n" };
        // `write!` into a string cannot fail.
        let _ = write!(text, "{end}{line}\x1b[K");
    }
    text.push_str("\x1b[J");
    text
}

#[cfg(test)]
mod tests {
    use super::frame;

    #[test]
    fn a_frame_has_the_lines_that_fit_and_how_many_do_not() {
        let lines: Vec<_> = (1..=5).map(|n| format!("line {n}")).collect();
        let shown = frame(&lines, 6, 5);
        assert_eq!(shown.matches("\x1b[K").count(), 5);
        assert!(shown.contains("line 5\x1b[K\x1b[J"), "{shown:?}");
        let shown = frame(&lines, 10, 4);
        assert!(
            shown.contains("line 3") && !shown.contains("line 4"),
            "{shown:?}"
        );
        assert!(shown.ends_with("and 2 more\x1b[K\x1b[J"), "{shown:?}");
        assert!(
            frame(&lines, 4, 5).contains("lin…\x1b[K"),
            "cut to the width"
        );
    }
}
