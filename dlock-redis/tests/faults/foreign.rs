//! Tests with foreign keys: those of Redisson, and of clients that lock in another way.

use crate::bed::{SECOND, Testbed};
use dlock_core::{
    Broken, Effect, ErrorKind, Fingerprint, RetryClass,
    driver::{Acquired, DistributedLock, Released},
};
use redis::AsyncCommands;

#[tokio::test(flavor = "multi_thread")]
async fn a_redisson_holder_excludes_and_is_excluded() {
    let t = Testbed::start().await;
    let mut raw = t.raw().await;
    let theirs = "6f0ad3ce-5df0-4b9a-a26e-3b1d2b3e6b0f:77";
    let () = raw.hset("dlock:{a}", theirs, 2).await.unwrap();
    let () = raw.pexpire("dlock:{a}", 5_000).await.unwrap();
    let by = t.held(&t.acquire("a", SECOND)).await.by.unwrap();
    assert_eq!(by.owner, Fingerprint::of(theirs.as_bytes()));
    assert!(by.token.is_none() && by.rest.unwrap() > SECOND * 4);
    let shown = t.inspect("a").await;
    assert_eq!((shown.holders.len(), shown.holds, shown.age), (1, 2, None));
    assert!(matches!(
        t.breaks("a", Some(1)).await,
        Broken::Changed { token: None }
    ));
    assert!(matches!(
        t.release(&t.acquire("a", SECOND)).await,
        Released::NotHeld { by: Some(_) }
    ));
    let () = raw.persist("dlock:{a}").await.unwrap();
    assert_eq!(
        t.held(&t.acquire("a", SECOND)).await.poll_in,
        Some(SECOND * 2),
        "without an end"
    );
    assert!(matches!(
        t.breaks("a", None).await,
        Broken::Freed { token: None }
    ));
    // What Redisson checks: the key exists and has no field of its own; the lease ends with the key.
    let ours = t.acquire("a", SECOND * 5);
    t.granted(&ours).await;
    let owner = format!("{}:0", ours.owner.expose());
    let count: String = raw.hget("dlock:{a}", owner).await.unwrap();
    assert_eq!(count, "1");
    let fields: Vec<String> = raw.hkeys("dlock:{a}").await.unwrap();
    assert_eq!(
        fields
            .iter()
            .filter(|field| !field.starts_with('~'))
            .count(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn something_else_under_the_key_is_a_clear_error() {
    let t = Testbed::start().await;
    let () = t.raw().await.set("dlock:{a}", "token").await.unwrap();
    let req = t.acquire("a", SECOND);
    let errors = [
        t.driver.acquire(&req).await.map(drop).unwrap_err(),
        t.driver
            .release(&t.release_of(&req))
            .await
            .map(drop)
            .unwrap_err(),
        t.driver.inspect(&req.name).await.map(drop).unwrap_err(),
        t.driver
            .break_lock(&req.name, None)
            .await
            .map(drop)
            .unwrap_err(),
    ];
    for error in errors {
        assert_eq!(
            (error.kind(), error.retry(), error.effect()),
            (ErrorKind::Misuse, RetryClass::Never, Effect::None)
        );
        assert!(error.to_string().contains("SET NX"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_failing_command_among_many_fails_alone() {
    let t = Testbed::start().await;
    let keys = ["dlock:{wrong-0}", "dlock:{wrong-7}"];
    for key in keys {
        let _: () = t.raw().await.set(key, "text").await.unwrap();
    }
    // Many requests share a pipeline; the scripts are flushed, so each request has to load them again.
    let _: () = redis::cmd("SCRIPT")
        .arg("FLUSH")
        .query_async(&mut t.raw().await)
        .await
        .unwrap();
    let names = (0..64).map(|n| {
        if n % 7 == 0 {
            format!("wrong-{n}")
        } else {
            format!("right-{n}")
        }
    });
    let asked: Vec<_> = names.map(|name| t.acquire(&name, SECOND * 30)).collect();
    let answers =
        futures_util::future::join_all(asked.iter().map(|ask| t.driver.acquire(ask))).await;
    for (ask, answer) in asked.iter().zip(answers) {
        let wrong = ["wrong-0", "wrong-7"].contains(&ask.name.as_str());
        match answer {
            Err(error) if wrong => assert_eq!(error.effect(), Effect::None, "{error}"),
            Ok(Acquired::Granted(_)) if !wrong => {}
            other => panic!("{}: {other:?}", ask.name),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_or_break_beside_a_foreign_key_says_what_it_did() {
    let t = Testbed::start().await;
    for (name, foreign) in [("a", "dlock:{a}:line"), ("b", "dlock:{b}:ends")] {
        let held = |stands: u64| {
            let (t, req) = (&t, t.acquire(name, SECOND * 30));
            async move {
                let _: u64 = t.raw().await.del(foreign).await.unwrap();
                t.granted(&req).await;
                // A ticket has to be in the queue, or the script never reads the deadlines.
                t.held(&t.in_line(name, SECOND * 30, stands)).await;
                let _: () = t.raw().await.set_ex(foreign, "x", 60).await.unwrap();
                req
            }
        };
        let key = format!("dlock:{{{name}}}");
        let req = held(t.draw()).await;
        assert!(matches!(t.release(&req).await, Released::Freed), "{name}");
        assert!(!t.exists(&key).await);
        assert!(matches!(
            t.release(&req).await,
            Released::NotHeld { by: None }
        ));
        let req = held(t.draw()).await;
        let mut keeping = t.release_of(&req);
        keeping.min_hold = Some(SECOND * 30);
        let released = t.driver.release(&keeping).await.unwrap();
        assert!(matches!(released, Released::MinHold { .. }), "{released:?}");
        let _: u64 = t.raw().await.del(&key).await.unwrap();
        let req = held(t.draw()).await;
        let broken = t.driver.break_lock(&req.name, None).await.unwrap();
        assert!(
            matches!(broken, Broken::Freed { token: Some(_) }),
            "{broken:?}"
        );
        assert!(!t.exists(&key).await);
    }
}
