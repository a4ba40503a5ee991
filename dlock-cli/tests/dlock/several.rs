//! `exec --also`: a command under several locks.

use crate::bed::{
    DLOCK, Desk, Running, dlock, is_alive, is_free, is_held, name, ran, start, until,
};
use std::{collections::BTreeMap, fs};

fn names<const N: usize>(test: &str) -> [String; N] {
    [(); N].map(|()| name(test))
}

/// A command under all of these locks, which runs until the file `go` is there: when it has begun.
fn holding(desk: &Desk, locks: &[&str], options: &[&str]) -> (Running, String) {
    let text = format!(
        "echo $$ $DLOCK_NAME $DLOCK_TOKEN $DLOCK_TOKENS >'{}'; while [ ! -e '{}' ]; do sleep 0.01; done",
        desk.text("told"),
        desk.text("go")
    );
    let also = locks[1..].iter().flat_map(|lock| ["--also", lock]);
    let mut args = vec!["exec"];
    args.extend(options);
    args.extend(also.chain([locks[0], "-c", &text]));
    let running = start(dlock(&args));
    (running, desk.line("told"))
}

#[test]
fn a_command_runs_under_all_its_locks_and_is_told_the_token_of_each() {
    let ([b, c, a], desk) = (names("all"), Desk::new());
    // Given twice, a name counts once.
    let (running, told) = holding(&desk, &[&b, &c, &a, &b], &[]);
    let words: Vec<_> = told.split(' ').collect();
    assert_eq!(words[1], b);
    let tokens: BTreeMap<_, _> = words[3..]
        .iter()
        .map(|entry| entry.split_once('=').unwrap())
        .collect();
    assert_eq!((words.len(), tokens[b.as_str()]), (6, words[2]));
    for lock in [&a, &b, &c] {
        let seen = ran(&["--json", "inspect", lock]).expect(0).json();
        assert_eq!(seen["token"], tokens[lock.as_str()], "{seen}");
        ran(&["exec", "-n", lock, "--", "true"]).expect(1);
    }
    fs::write(desk.path("go"), "").unwrap();
    running.wait().expect(0);
    for lock in [&a, &b, &c] {
        is_free(lock);
    }
}

#[test]
fn when_one_is_held_none_is_left_held_and_the_message_names_it() {
    let ([a, b, c], desk) = (names("none"), Desk::new());
    let (holder, _) = holding(&desk, &[&b], &[]);
    let wanted = ["--also", &b, "--also", &c, &a, "--", "true"];
    for wait in [&["-n"][..], &["-w", "2"]] {
        let out = ran(&[&["exec"], wait, &wanted].concat()).expect(1);
        assert!(out.stderr.contains(&format!("{b:?}")), "{out:?}");
        let json = ran(&[&["--json", "exec"], wait, &wanted].concat()).expect(1);
        let error: serde_json::Value = serde_json::from_str(&json.stderr).unwrap();
        assert_eq!(error["error"]["name"], b.as_str(), "{error}");
        assert!(!is_held(&a) && !is_held(&c));
    }
    let waiter = start(dlock(&[&["exec"], &wanted[..]].concat()));
    until("the waiter to hold the first", || is_held(&a));
    fs::write(desk.path("go"), "").unwrap();
    holder.wait().expect(0);
    waiter.wait().expect(0);
}

/// Each needs two of three files, in an order of its own.
#[test]
fn sets_in_any_order_never_wait_in_a_circle_and_exclude_each_other() {
    let (locks, desk) = (names::<3>("circle"), Desk::new());
    for lock in &locks {
        fs::write(desk.path(lock), "0").unwrap();
    }
    let adds = |lock: &str| {
        let file = desk.text(lock);
        format!("n=$(cat '{file}'); sleep 0.01; echo $((n + 1)) >'{file}';")
    };
    let mut all = Vec::new();
    for turn in 0..12 {
        let [one, other] = [turn % 3, (turn + 1 + turn / 6) % 3].map(|at| &locks[at]);
        let text = adds(one) + &adds(other);
        let args = ["exec", "--also", other, one, "-c", &text];
        all.push(start(dlock(&args)));
    }
    for one in all {
        one.wait().expect(0);
    }
    for lock in &locks {
        assert_eq!(desk.line(lock), "8");
        is_free(lock);
    }
}

#[test]
fn the_loss_of_one_ends_the_command_and_frees_the_others() {
    let ([a, b], desk) = (names("loss"), Desk::new());
    let (running, told) = holding(&desk, &[&a, &b], &["--lease", "3s"]);
    ran(&["break", "--force", &b]).expect(0);
    let out = running.wait().expect(75);
    assert!(
        out.stderr.contains(&format!("the lock {b:?} is lost")),
        "{out:?}"
    );
    assert!(!is_alive(told.split(' ').next().unwrap()));
    is_free(&a);
}

#[test]
fn a_dlock_inside_enters_the_locks_of_the_one_around_it() {
    let [a, b, c] = names("inside");
    let inner = format!(
        "'{DLOCK}' exec -n --also '{b}' '{a}' -- echo same && '{DLOCK}' exec -n '{b}' -- echo one \
         && '{DLOCK}' exec -n --also '{a}' '{c}' -- echo more"
    );
    let args = ["exec", "--pass-url", "--also", &b, &a, "-c", &inner];
    assert_eq!(ran(&args).expect(0).stdout, "same\none\nmore\n");
    // Without the passes it would wait for itself.
    let inner = format!(
        "'{DLOCK}' exec -n '{b}' -- true; echo $?; '{DLOCK}' exec -n '{a}' -- true; echo $?"
    );
    let args = [
        "-q",
        "exec",
        "--pass-url",
        "--no-pass",
        "--also",
        &b,
        &a,
        "-c",
        &inner,
    ];
    assert_eq!(ran(&args).expect(0).stdout, "1\n1\n");
    for lock in [&a, &b, &c] {
        is_free(lock);
    }
}

#[test]
fn what_cannot_be_held_together_is_refused() {
    let lock = name("refused");
    let many: Vec<_> = (0..64).map(|number| format!("{lock}-{number}")).collect();
    let mut args = vec!["exec"];
    args.extend(many.iter().flat_map(|other| ["--also", other]));
    args.extend([lock.as_str(), "--", "true"]);
    let out = ran(&args).expect(64);
    assert!(out.stderr.contains("at most 64 locks"), "{out:?}");
    let args = [
        "exec",
        "--min-hold",
        "1s",
        "--also",
        &many[0],
        &lock,
        "--",
        "true",
    ];
    let out = ran(&args).expect(64);
    assert!(out.stderr.contains("cannot be used with"), "{out:?}");
    is_free(&lock);
}
