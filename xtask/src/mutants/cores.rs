//! Wrong cores: one mistake each, as a replacement in the source of `dlock-core`.

use super::{Core, Edit};

pub(super) const CORES: &[Core] = &[
    Core {
        name: "a_deadline_that_counts_from_the_reply",
        edits: &[Edit {
            file: "engine/mod.rs",
            right: "(sent + start.valid_for.min(length)",
            wrong: "(now + start.valid_for.min(length)",
        }],
        breaks: &["loss"],
    },
    Core {
        name: "one_failed_renewal_is_a_loss",
        edits: &[Edit {
            file: "engine/watchdog/mod.rs",
            right: "                let Some(first) = hold.doubt() else {\n",
            wrong: "                engine.lose(&hold, LossReason::Deadline);\n                let Some(first) = hold.doubt() else {\n",
        }],
        breaks: &["renew", "loss", "indeterminate", "cancel"],
    },
    Core {
        name: "a_guard_that_waits_for_the_watchdog",
        edits: &[Edit {
            file: "engine/mod.rs",
            right: "        self.watch(&hold, sent, end);\n",
            wrong: "        self.watch(&hold, sent, end);\n        hold.renewed(Instant::FAR);\n",
        }],
        breaks: &["renew", "loss", "indeterminate", "shutdown"],
    },
    Core {
        name: "a_watchdog_that_renews_what_was_released",
        edits: &[Edit {
            file: "engine/release.rs",
            right: "        engine.stop_renewing(hold);\n",
            wrong: "",
        }],
        breaks: &["renew"],
    },
    Core {
        name: "a_repeat_with_another_hold",
        edits: &[Edit {
            file: "engine/acquire/attempt.rs",
            right: "        let give_up = (sent + self.attempt_limit()).min(end);\n",
            wrong: "        if self.indeterminate_until.is_some() {\n            self.who.hold = self.engine.random.hold().unwrap_or(self.who.hold);\n        }\n        \
                    let give_up = (sent + self.attempt_limit()).min(end);\n",
        }],
        breaks: &["indeterminate", "cancel", "late"],
    },
    Core {
        name: "a_cleanup_that_does_nothing",
        edits: &[Edit {
            file: "engine/cleanup.rs",
            right: "            let end = slot.engine.run_job(job, under_way).await;\n",
            wrong: "            drop((job, under_way)); let end = CleanupEnd::Left;\n",
        }],
        breaks: &[
            "cancel",
            "indeterminate",
            "keep",
            "late",
            "reentry",
            "share",
            "shutdown",
            "wait",
        ],
    },
    Core {
        name: "a_cleanup_that_believes_the_first_answer",
        edits: &[Edit {
            file: "engine/cleanup.rs",
            right: "        while let Some(until) = job.indeterminate_until.filter(|until| *until < over) {",
            wrong: "        while let Some(until) = job.indeterminate_until.filter(|_| false) {",
        }],
        breaks: &["late"],
    },
    Core {
        name: "a_guard_that_does_not_look_at_its_presence",
        edits: &[
            Edit {
                file: "engine/hold.rs",
                right: "presence.map_or(own, |presence| own.min(presence.hold.own_deadline()))",
                wrong: "presence.map_or(own, |_| own)",
            },
            Edit {
                file: "engine/hold.rs",
                right: "                if let Some(GuardState::Lost(_)) = presence {\n",
                wrong: "                if let (Some(GuardState::Lost(_)), true) = (presence, false) {\n",
            },
        ],
        breaks: &["presence"],
    },
    Core {
        name: "a_break_of_whatever_incarnation",
        edits: &[Edit {
            file: "engine/presence.rs",
            right: ".break_lock(&broken, Some(token))",
            wrong: ".break_lock(&broken, Some(token).filter(|_| false))",
        }],
        breaks: &["presence"],
    },
    Core {
        name: "a_break_without_a_proof",
        edits: &[Edit {
            file: "engine/presence.rs",
            right: "Ok(Acquired::Gone) | Err(_) => None,",
            wrong: "_ => driver.break_lock(&broken, Some(token)).await.ok().map(|_| Duration::ZERO),",
        }],
        breaks: &["presence"],
    },
    Core {
        name: "a_waiter_that_does_not_look_at_the_presence",
        edits: &[Edit {
            file: "driver/response.rs",
            right: "by.token.zip(by.info.presence())",
            wrong: "by.token.zip(by.info.presence().filter(|_| false))",
        }],
        breaks: &["presence"],
    },
    Core {
        name: "a_fixed_lease_that_ends_with_its_client",
        edits: &[Edit {
            file: "engine/presence.rs",
            right: "        lease.is_renewed() && ",
            wrong: "        ",
        }],
        breaks: &["presence"],
    },
    Core {
        name: "a_queue_that_is_a_stack",
        edits: &[Edit {
            file: "engine/lock_table.rs",
            right: "        let seat = Seat(self.seats);\n",
            wrong: "        let seat = Seat(-self.seats);\n",
        }],
        breaks: &["wait"],
    },
    Core {
        name: "a_ticket_that_stays_in_the_queue",
        edits: &[
            Edit {
                file: "engine/acquire/wait_loop.rs",
                right: "        if engine.caps.wake == Wake::Poll {\n            unwanted.clear();",
                wrong: "        if engine.caps.wake != engine.caps.wake || name == name {\n            unwanted.clear();",
            },
            Edit {
                file: "engine/cleanup.rs",
                right: "        if self.caps.wake != Wake::Poll {",
                wrong: "        if self.caps.wake != self.caps.wake {",
            },
        ],
        breaks: &["cancel", "indeterminate", "late", "share", "wait"],
    },
    Core {
        name: "a_client_that_hears_no_wake_ups",
        edits: &[Edit {
            file: "engine/mod.rs",
            right: "        let wanted = self.table().wake_up(&wake_up, now);\n",
            wrong: "        if now > Instant::ORIGIN {\n            return;\n        }\n        let wanted = self.table().wake_up(&wake_up, now);\n",
        }],
        breaks: &["crash", "share", "wait"],
    },
    Core {
        name: "an_owner_that_waits_for_itself",
        edits: &[
            Edit {
                file: "engine/acquire/mod.rs",
                right: "        if let Some(owner) = options.owner {\n",
                wrong: "        if let Some(owner) = options.owner.filter(|_| false) {\n",
            },
            Edit {
                file: "engine/acquire/mod.rs",
                right: "        if let Some(outer) = scope::entered(&self.store, &options.name) {\n",
                wrong: "        if let Some(outer) = scope::entered(\"\", &options.name) {\n",
            },
        ],
        breaks: &[
            "reentry",
            "share",
            "fencing",
            "loss",
            "indeterminate",
            "keep",
            "error",
        ],
    },
    Core {
        name: "a_release_that_found_nothing_is_a_success",
        edits: &[Edit {
            file: "engine/release.rs",
            right: "            Released::NotHeld { .. } if found => {\n",
            wrong: "            Released::NotHeld { .. } if found || !found => {\n",
        }],
        breaks: &["loss", "shutdown"],
    },
    Core {
        name: "a_shutdown_that_releases_what_is_held",
        edits: &[Edit {
            file: "shutdown.rs",
            right: "engine.take_away(hold, force)",
            wrong: "engine.take_away(hold, force || !force)",
        }],
        breaks: &["shutdown"],
    },
    Core {
        name: "contention_that_is_an_error",
        edits: &[Edit {
            file: "engine/acquire/mod.rs",
            right: "                None => return Ok(Tried::Refused(Some(held))),\n",
            wrong: "                None => return Err(Error::new(ErrorKind::Unavailable, \"held\")),\n",
        }],
        breaks: &["error", "mutex", "share", "wait"],
    },
    Core {
        name: "an_error_that_shows_the_owner",
        edits: &[Edit {
            file: "engine/acquire/mod.rs",
            right: "        acquired.map_err(|error| error.at(engine.caps.backend, &options.name))\n",
            wrong: "        acquired.map_err(|error| {\n            Error::new(error.kind(), format!(\"{error} {}\", identity.owner.expose()))\n                \
                    .with_retry(error.retry())\n                .with_effect(error.effect())\n        })\n",
        }],
        breaks: &["error", "mutex"],
    },
    Core {
        name: "a_watchdog_that_never_renews",
        edits: &[Edit {
            file: "engine/watchdog/mod.rs",
            right: "                engine.calls.handle.spawn(renewing);\n",
            wrong: "                drop(renewing);\n",
        }],
        breaks: &["renew", "loss", "indeterminate", "late", "shutdown"],
    },
    Core {
        name: "a_fixed_lease_that_is_believed",
        edits: &[Edit {
            file: "engine/watchdog/machine.rs",
            right: "        if self.is_complete() {\n            return sent + every;",
            wrong: "        if self.is_complete() {\n            return self.deadline;",
        }],
        breaks: &["loss"],
    },
    Core {
        name: "one_owner_for_the_whole_process",
        edits: &[Edit {
            file: "engine/acquire/mod.rs",
            right: "            Mode::Exclusive => self.random.owner_and_hold()?,\n",
            wrong: "            Mode::Exclusive => (Owner::from_seed(\"one\"), self.random.hold()?),\n",
        }],
        breaks: &[
            "mutex",
            "reentry",
            "renew",
            "loss",
            "indeterminate",
            "cancel",
            "wait",
            "crash",
            "error",
            "shutdown",
        ],
    },
    Core {
        name: "a_lease_longer_than_asked_for",
        edits: &[Edit {
            file: "engine/acquire/attempt.rs",
            right: "            lease: self.lease(),\n",
            wrong: "            lease: Lease::renewed(self.lease().length() * 10),\n",
        }],
        breaks: &[
            "crash", "late", "loss", "mutex", "reentry", "shutdown", "wait",
        ],
    },
    Core {
        name: "a_waiter_that_polls_all_the_time",
        edits: &[Edit {
            file: "engine/acquire/wait_loop.rs",
            right: "now + pause.max(SHORTEST);",
            wrong: "now + pause.min(SHORTEST);",
        }],
        breaks: &["wait"],
    },
    Core {
        name: "a_release_that_ends_the_minimum_hold",
        edits: &[Edit {
            file: "engine/release.rs",
            right: "            .filter(|rest| !rest.is_zero())\n",
            wrong: "            .filter(|_| false)\n",
        }],
        breaks: &["keep"],
    },
    Core {
        name: "a_maximum_hold_that_never_ends",
        edits: &[Edit {
            file: "engine/mod.rs",
            right: "        let end = start.terms.end().map(|end| first + end);\n",
            wrong: "        let end = start.terms.end().filter(|_| false).map(|end| first + end);\n",
        }],
        breaks: &["loss"],
    },
    Core {
        name: "a_detached_hold_that_is_renewed",
        edits: &[Edit {
            file: "detached.rs",
            right: "        self.engine.stop_renewing(&self.hold);\n",
            wrong: "",
        }],
        breaks: &["renew"],
    },
    Core {
        name: "a_watchdog_deaf_to_late_answers",
        edits: &[Edit {
            file: "engine/watchdog/mod.rs",
            right: "renewing.call.late_answer().await;",
            wrong: "renewing.call.answer().await;",
        }],
        breaks: &["renew"],
    },
    Core {
        name: "a_guard_beside_its_owners_next_one",
        edits: &[
            Edit {
                file: "engine/mod.rs",
                right: "                if other.token > hold.token {\n",
                wrong: "                if other.token > hold.token && other.id == hold.id {\n",
            },
            Edit {
                file: "engine/mod.rs",
                right: "                if other.token < hold.token {\n",
                wrong: "                if other.token < hold.token && other.id == hold.id {\n",
            },
        ],
        breaks: &["loss"],
    },
    Core {
        name: "a_lost_hold_that_a_copy_revives",
        edits: &[Edit {
            file: "engine/release.rs",
            right: "            copy.is_some_and(|until| until + lease > now)\n",
            wrong: "            copy.is_some_and(|until| until + lease > now && now < Instant::ORIGIN)\n",
        }],
        breaks: &["late"],
    },
    Core {
        name: "a_loss_that_wakes_no_waiter",
        edits: &[Edit {
            file: "engine/mod.rs",
            right: "        self.wake(&hold.name);\n",
            wrong: "",
        }],
        breaks: &["wait"],
    },
    Core {
        name: "an_owner_that_asks_past_the_queue_once",
        edits: &[Edit {
            file: "engine/acquire/wait_loop.rs",
            right: "                true if now >= self.ask_at => past,\n                true => Step::Sleep(self.ask_at),\n",
            wrong: "                true => Step::Sleep(Instant::FAR),\n",
        }],
        breaks: &["reentry"],
    },
    Core {
        name: "a_second_waiter_that_queues_late",
        edits: &[Edit {
            file: "engine/acquire/wait_loop.rs",
            right: "        let others = queue.len() > 1 &&",
            wrong: "        let others = queue.len() > usize::MAX - 1 &&",
        }],
        breaks: &["wait"],
    },
    Core {
        name: "a_failure_limit_for_each_waiter",
        edits: &[Edit {
            file: "engine/acquire/wait_loop.rs",
            right: "            self.retry.inherit(*entry.queue.failing.get_or_insert(now));\n",
            wrong: "            entry.queue.failing.get_or_insert(now);\n",
        }],
        breaks: &["error"],
    },
];
