//! Mutual exclusion where it counts: a file that nothing but the lock protects.

use crate::bed::{DLOCK, Desk, Running, beside, dlock, name, start};
use std::fs;

#[test]
fn sixteen_processes_increment_a_file_and_lose_nothing() {
    count(16, 25);
}

#[test]
#[ignore = "a soak: 12,800 runs; the command is in the README"]
fn sixty_four_processes_increment_a_file_and_lose_nothing() {
    count(64, 200);
}

fn count(processes: usize, each: usize) {
    let (desk, lock) = (Desk::new(), name("counter"));
    fs::write(desk.path("n"), "0\n").unwrap();
    let script = format!(
        "i=0; while [ $i -lt {each} ]; do \
           '{DLOCK}' exec '{lock}' -- sh -c 'read n <\"$0\"; echo $((n + 1)) >\"$0\"' '{}' || exit; i=$((i + 1)); \
         done",
        desk.text("n")
    );
    let environment = dlock(&[]);
    let running: Vec<Running> = (0..processes)
        .map(|_| {
            let mut command = beside(&environment, "sh");
            command.args(["-c", &script]);
            start(command)
        })
        .collect();
    for one in running {
        one.patiently().expect(0);
    }
    assert_eq!(desk.line("n"), (processes * each).to_string());
}
