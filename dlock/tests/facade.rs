//! `connect`: schemes, features, parameters, and that no error shows a password.

use dlock::{Error, ErrorKind};

const SCHEMES: &str = "there is memory:, redis:, rediss:, redis+unix:, redis+sentinel:, rediss+sentinel:, redis+cluster:, rediss+cluster:, sqlite:, mongodb:, mongodb+srv:, mysql:, mariadb:, postgres:, postgresql:, etcd:, etcd+tls:, zk:, zk+tls:, quorum:";

async fn refused(url: &str) -> Error {
    match dlock::connect(url).await {
        Ok(_) => panic!("{url} was taken"),
        Err(error) => error,
    }
}

async fn misuse(url: &str, message: &str) {
    let error = refused(url).await;
    assert_eq!(error.kind(), ErrorKind::Misuse, "{url}");
    assert_eq!(error.to_string(), message, "{url}");
}

#[tokio::test]
async fn an_unknown_scheme_is_refused_with_the_known_ones() {
    for scheme in ["consul", "oracle", "x-1.2+y"] {
        misuse(
            &format!("{scheme}://host/"),
            &format!("no store has the scheme {scheme:?}; {SCHEMES}"),
        )
        .await;
    }
}

#[tokio::test]
async fn a_text_without_a_scheme_is_refused_and_not_shown() {
    for url in [
        "",
        "localhost",
        "//host",
        ":x",
        "1a:x",
        "the password: canary",
        "canary@host",
    ] {
        misuse(
            url,
            &format!("a store's URL begins with its scheme; {SCHEMES}"),
        )
        .await;
    }
}

#[tokio::test]
async fn a_scheme_whose_feature_is_off_names_the_feature() {
    let schemes = [
        ("memory", "memory", cfg!(feature = "memory")),
        ("redis", "redis", cfg!(feature = "redis")),
        ("redis+unix", "redis", cfg!(feature = "redis")),
        ("redis+sentinel", "redis", cfg!(feature = "redis")),
        ("rediss+sentinel", "redis-tls", cfg!(feature = "redis-tls")),
        ("redis+cluster", "redis", cfg!(feature = "redis")),
        ("rediss+cluster", "redis-tls", cfg!(feature = "redis-tls")),
        ("rediss", "redis-tls", cfg!(feature = "redis-tls")),
        ("mysql", "mysql", cfg!(feature = "mysql")),
        ("mariadb", "mysql", cfg!(feature = "mysql")),
        ("postgres", "postgres", cfg!(feature = "postgres")),
        ("postgresql", "postgres", cfg!(feature = "postgres")),
        ("etcd", "etcd", cfg!(feature = "etcd")),
        ("etcd+tls", "etcd-tls", cfg!(feature = "etcd-tls")),
        ("zk", "zk", cfg!(feature = "zk")),
        ("zk+tls", "zk-tls", cfg!(feature = "zk-tls")),
        ("sqlite", "sqlite", cfg!(feature = "sqlite")),
        ("mongodb", "mongo", cfg!(feature = "mongo")),
        ("mongodb+srv", "mongo-srv", cfg!(feature = "mongo-srv")),
    ];
    for (scheme, feature, _) in schemes.iter().filter(|(.., on)| !on) {
        for scheme in [scheme.to_string(), scheme.to_uppercase()] {
            let error = refused(&format!("{scheme}://user:canary@host/")).await;
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            let message = error.to_string();
            assert!(
                message.contains(&format!("the feature {feature:?}, which is off")),
                "{message}"
            );
            assert!(
                message.ends_with(&format!("cargo add dlock-rs --features {feature}")),
                "{message}"
            );
        }
    }
}

#[tokio::test]
async fn times_in_the_url_that_make_no_sense_say_what_is_legal() {
    let cases = [
        (
            "dlock.lease=30000",
            "dlock.lease: 30000 has no unit: write 30000s or 30000ms",
        ),
        (
            "dlock.lease",
            "dlock.lease: \"\" is no time such as 500ms, 10s or 1m30s: ",
        ),
        (
            "dlock.poll=-1s",
            "dlock.poll: \"-1s\" is no time such as 500ms, 10s or 1m30s: ",
        ),
        (
            "dlock.lease=99ms",
            "dlock.lease=99ms: the lease (99ms) must be between 100ms and 365 days",
        ),
        (
            "dlock.lease=2years",
            "dlock.lease=2years: the lease (730.5 days) must be between 100ms and 365 days",
        ),
        (
            "dlock.poll=0s",
            "dlock.poll=0s: it must be between 1ms and 60s",
        ),
        (
            "dlock.poll=61s",
            "dlock.poll=61s: it must be between 1ms and 60s",
        ),
        (
            "dlock.lease=10s&dlock.lease=10s",
            "dlock.lease is in the URL twice",
        ),
    ];
    for (query, message) in cases {
        // Before the backend is asked for, so the same whatever is built in.
        for url in [
            format!("memory:x?{query}"),
            format!("redis://u:canary@h/?a=b&{query}"),
        ] {
            let error = refused(&url).await;
            assert_eq!(error.kind(), ErrorKind::Misuse, "{url}");
            assert!(error.to_string().starts_with(message), "{url}: {error}");
        }
    }
}

#[tokio::test]
async fn our_parameters_without_their_prefix_are_refused_with_it() {
    for url in [
        "memory:x",
        "redis://u:canary@h/",
        "mysql://h/d",
        "postgres://h/d",
        "mongodb://h/",
        "etcd://h",
        "zk://h",
        "sqlite:x",
    ] {
        for (query, wanted) in [("lease=1s", "dlock.lease=1s"), ("poll=1s", "dlock.poll=1s")] {
            let error = refused(&format!("{url}?{query}")).await;
            assert_eq!(error.kind(), ErrorKind::Misuse, "{url}: {error}");
            let message = error.to_string();
            assert!(
                message.ends_with(&format!("write {wanted}")),
                "{url}: {message}"
            );
        }
    }
}

#[tokio::test]
async fn no_error_shows_a_password() {
    let urls = [
        "redis://user:canary@127.0.0.1:1/",
        "redis://user:canary@/",
        "redis://user:canary@127.0.0.1:1/not-a-number",
        "redis://user:canary@127.0.0.1:1/?dlock.lease=soon",
        "redis://user:canary@127.0.0.1:1/?dlock.leese=1s",
        "redis://user:canary@127.0.0.1:1/?dlock.prefix=a%20b",
        "redis://user:canary@127.0.0.1:99999/",
        "redis+unix://user:canary@/nowhere?pass=canary",
        "redis://:canary@127.0.0.1:1",
        "mongodb://user:canary@",
        "mongodb://user:canary@h/?dlock.leese=1s",
        "mongodb://user:canary@h/?w=1",
        "mysql://user:canary@host/",
        "postgres://user:canary@host/?dlock.leese=1s",
        "etcd://user:canary@127.0.0.1:1/x//y",
        "etcd://user:canary@127.0.0.1:1?dlock.leese=1s",
        "zk://user:canary@127.0.0.1:1/x//y",
        "zk://user:canary@127.0.0.1:1?dlock.leese=1s",
        "user:canary@host",
        "canary",
        "canary@host:6379",
        " redis://user:canary@host/",
    ];
    for url in urls {
        let error = refused(url).await;
        let mut shown = format!("{error} {error:?} {error:#?}");
        let mut source = std::error::Error::source(&error);
        while let Some(cause) = source {
            shown.push_str(&format!(" {cause} {cause:?}"));
            source = cause.source();
        }
        assert!(!shown.contains("canary"), "{url}: {shown}");
    }
}

#[cfg(feature = "memory")]
mod memory {
    use super::{misuse, refused};
    use dlock::{DEFAULT_LEASE, Error, Guard, Lease, driver::Wake};
    use std::time::Duration;

    async fn guard(url: &str) -> Result<Guard, Error> {
        dlock::connect(url).await?.lock("a")?.acquire().await
    }

    fn lasts(guard: &Guard, lease: Duration) {
        let remaining = guard.remaining();
        assert!(
            remaining <= lease && remaining > lease.mul_f64(0.9),
            "{remaining:?} of {lease:?}"
        );
    }

    #[tokio::test]
    async fn all_clients_that_name_a_store_share_it() {
        let held = guard("memory:shared").await.unwrap();
        let other = dlock::connect("memory:shared").await.unwrap();
        assert!(
            other
                .lock("a")
                .unwrap()
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        let elsewhere = dlock::connect("memory:elsewhere").await.unwrap();
        assert!(
            elsewhere
                .lock("a")
                .unwrap()
                .try_acquire()
                .await
                .unwrap()
                .is_some()
        );
        held.release().await.unwrap();
    }

    #[tokio::test]
    async fn the_lease_of_the_url_is_that_of_locks_that_name_none() {
        lasts(&guard("memory:lease-default").await.unwrap(), DEFAULT_LEASE);
        for (text, millis) in [("10s", 10_000), ("1m30s", 90_000), ("10500ms", 10_500)] {
            let lease = Duration::from_millis(millis);
            lasts(
                &guard(&format!("memory:lease-{text}?dlock.lease={text}"))
                    .await
                    .unwrap(),
                lease,
            );
        }
        let client = dlock::connect("memory:lease-own?dlock.lease=10s")
            .await
            .unwrap();
        let lock = client
            .lock("a")
            .unwrap()
            .lease(Lease::fixed(Duration::from_secs(60)));
        lasts(&lock.acquire().await.unwrap(), Duration::from_secs(60));
    }

    #[tokio::test]
    async fn what_is_set_on_the_builder_wins_over_the_url() {
        let builder = dlock::builder("memory:builder?dlock.lease=10s")
            .await
            .unwrap();
        let lease = Lease::renewed(Duration::from_secs(50));
        let client = builder.lease(lease).build().unwrap();
        let held = client.lock("a").unwrap().acquire().await.unwrap();
        lasts(&held, Duration::from_secs(50));
    }

    #[tokio::test]
    async fn the_driver_gets_its_own_parameters_and_none_of_ours() {
        let url = "memory:both?dlock.lease=10s&dlock.wake=poll&dlock.poll=5ms";
        let client = dlock::connect(url).await.unwrap();
        assert_eq!(client.capabilities().wake, Wake::Poll);
        let client = dlock::connect("memory:both?dlock.poll=5ms").await.unwrap();
        assert_eq!(client.capabilities().wake, Wake::Queue);
    }

    #[tokio::test]
    async fn an_unknown_parameter_is_refused_with_all_known_ones() {
        let message = refused("memory:x?dlock.leese=10s").await.to_string();
        for known in ["dlock.wake", "dlock.lease", "dlock.poll"] {
            assert!(message.contains(known), "{known}: {message}");
        }
        assert!(message.contains("dlock.leese"), "{message}");
    }

    #[tokio::test]
    async fn the_name_is_taken_byte_for_byte() {
        let held = guard("memory:a%20b#c").await.unwrap();
        let same = dlock::connect("memory:a%20b#c?dlock.lease=1s")
            .await
            .unwrap();
        assert!(
            same.lock("a")
                .unwrap()
                .try_acquire()
                .await
                .unwrap()
                .is_none()
        );
        held.release().await.unwrap();
        misuse("MEMORY:a", "a memory store's URL is memory:NAME").await;
    }
}

#[cfg(feature = "redis")]
mod redis {
    use super::refused;
    use dlock::{ErrorKind, RetryClass};

    #[tokio::test]
    async fn an_unknown_parameter_is_refused_with_all_known_ones() {
        let error = refused("redis://127.0.0.1:1/?dlock.leese=10s").await;
        assert_eq!(error.kind(), ErrorKind::Misuse);
        let message = error.to_string();
        for word in ["dlock.leese", "dlock.prefix", "dlock.lease", "dlock.poll"] {
            assert!(message.contains(word), "{word}: {message}");
        }
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_unavailable_and_worth_another_try() {
        for url in [
            "redis://127.0.0.1:1/?dlock.lease=10s",
            "REDIS://127.0.0.1:1",
            "redis+unix:///nowhere",
        ] {
            let error = refused(url).await;
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{url}: {error:?}");
            assert_eq!(error.retry(), RetryClass::Later, "{url}");
        }
    }
}

#[cfg(feature = "mongo")]
mod mongo {
    use super::refused;
    use dlock::{ErrorKind, RetryClass};

    #[tokio::test]
    async fn an_unknown_parameter_is_refused_with_all_known_ones() {
        let error = refused("mongodb://127.0.0.1:1/?dlock.leese=10s").await;
        assert_eq!(error.kind(), ErrorKind::Misuse);
        let message = error.to_string();
        for word in [
            "dlock.leese",
            "dlock.collection",
            "dlock.database",
            "dlock.lease",
            "dlock.poll",
        ] {
            assert!(message.contains(word), "{word}: {message}");
        }
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_is_unavailable_and_worth_another_try() {
        let url = "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200&dlock.lease=10s";
        let error = refused(url).await;
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert_eq!(error.retry(), RetryClass::Later);
    }
}

#[cfg(feature = "sqlite")]
mod sqlite {
    use super::refused;
    use dlock::ErrorKind;
    use std::time::Duration;

    #[tokio::test]
    async fn a_file_is_shared_by_all_who_name_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/locks.db");
        let url = format!("sqlite:{}?dlock.lease=10s", file.display());
        let client = dlock::connect(&url).await.unwrap();
        let held = client.lock("a").unwrap().acquire().await.unwrap();
        assert!(held.remaining() <= Duration::from_secs(10));
        let url = format!(
            "sqlite://{}/new/./locks.db?mode=rw",
            folder.path().display()
        );
        let client = dlock::connect(&url).await.unwrap();
        let lock = client.lock("a").unwrap();
        assert!(lock.try_acquire().await.unwrap().is_none());
        held.release().await.unwrap();
        assert!(lock.try_acquire().await.unwrap().is_some());
    }

    #[tokio::test]
    async fn an_unknown_parameter_is_refused_with_all_known_ones() {
        let error = refused("sqlite:/nowhere?dlock.leese=10s").await;
        assert_eq!(error.kind(), ErrorKind::Misuse);
        let message = error.to_string();
        for word in ["dlock.leese", "dlock.wake", "dlock.lease", "dlock.poll"] {
            assert!(message.contains(word), "{word}: {message}");
        }
    }
}

/// What the SQL servers share: `$at` is a URL up to the host.
#[cfg(any(feature = "mysql", feature = "postgres"))]
macro_rules! sql_server {
    ($module:ident, $at:literal, $other:literal, $table:literal) => {
        mod $module {
            use super::refused;
            use dlock::{ErrorKind, RetryClass};

            #[tokio::test]
            async fn a_server_that_is_not_there_is_unavailable_and_worth_another_try() {
                let url = concat!($at, "root@127.0.0.1:1/db?dlock.lease=10s");
                let error = refused(url).await;
                assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
                assert_eq!(error.retry(), RetryClass::Later);
            }

            #[tokio::test]
            async fn an_unknown_parameter_is_refused_with_all_known_ones() {
                let url = concat!($other, "u:canary@127.0.0.1:1/db?dlock.leese=10s");
                let error = refused(url).await;
                assert_eq!(error.kind(), ErrorKind::Misuse);
                let message = error.to_string();
                for word in ["dlock.leese", "dlock.table", "dlock.lease", "dlock.poll"] {
                    assert!(message.contains(word), "{word}: {message}");
                }
                assert!(!format!("{error:?}").contains("canary"));
            }

            #[test]
            fn the_schema_is_that_of_the_table_that_the_url_names() {
                let url = concat!($at, "me@h/db?dlock.lease=10s&dlock.table=ops.locks");
                let schema = dlock::schema(url).unwrap();
                for word in [
                    concat!("CREATE TABLE IF NOT EXISTS ", $table),
                    concat!("GRANT SELECT, INSERT, UPDATE, DELETE ON ", $table),
                ] {
                    assert!(schema.contains(word), "{schema}");
                }
            }
        }
    };
}

#[cfg(feature = "mysql")]
sql_server!(mysql, "mysql://", "mariadb://", "`ops`.`locks`");
#[cfg(feature = "postgres")]
sql_server!(
    postgres,
    "postgres://",
    "postgresql://",
    "\"ops\".\"locks\""
);

/// The facade's own part of the API: futures that may be spawned.
#[test]
fn connecting_can_be_spawned() {
    fn spawnable<T: Send>(_: &T) {}
    spawnable(&dlock::connect("memory:"));
    spawnable(&dlock::builder("memory:"));
}

/// Drivers wait with timers and speak through sockets: without them nothing is tried.
#[test]
fn connect_says_what_its_runtime_lacks() {
    let file = std::env::temp_dir().join(format!("dlock-facade-{}", std::process::id()));
    let urls = [
        ("memory", cfg!(feature = "memory"), "memory:bare".to_owned()),
        (
            "redis",
            cfg!(feature = "redis"),
            "redis://127.0.0.1:1".to_owned(),
        ),
        (
            "mysql",
            cfg!(feature = "mysql"),
            "mysql://me@127.0.0.1:1/db".to_owned(),
        ),
        (
            "postgres",
            cfg!(feature = "postgres"),
            "postgres://me@127.0.0.1:1/db".to_owned(),
        ),
        (
            "mongodb",
            cfg!(feature = "mongo"),
            "mongodb://127.0.0.1:1".to_owned(),
        ),
        (
            "etcd",
            cfg!(feature = "etcd"),
            "etcd://127.0.0.1:1".to_owned(),
        ),
        ("zk", cfg!(feature = "zk"), "zk://127.0.0.1:1".to_owned()),
        (
            "sqlite",
            cfg!(feature = "sqlite"),
            format!("sqlite:{}", file.display()),
        ),
    ];
    let runtime = || tokio::runtime::Builder::new_current_thread();
    for (scheme, _, url) in urls.iter().filter(|(_, on, _)| *on) {
        let mut lacking = vec![(runtime().build().unwrap(), "enable_time")];
        if *scheme != "memory" {
            lacking.push((runtime().enable_time().build().unwrap(), "enable_io"));
        }
        for (bare, missing) in lacking {
            let error = bare.block_on(refused(url));
            assert_eq!(error.kind(), ErrorKind::Misuse, "{url}");
            assert!(error.to_string().contains(missing), "{url}: {error}");
        }
    }
    assert!(
        !file.exists(),
        "nothing is made before the runtime is checked"
    );
}
