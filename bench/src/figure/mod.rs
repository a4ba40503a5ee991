//! The figures, in the order they are printed.

mod cycle;
#[cfg(feature = "etcd")]
mod etcd;
#[cfg(feature = "sqlite")]
mod exec;
mod memory_cycle;
mod memory_handoff;
mod memory_waiters;
#[cfg(feature = "mongo")]
mod mongo;
#[cfg(feature = "mysql")]
mod mysql;
#[cfg(feature = "peers")]
mod peer;
#[cfg(feature = "postgres")]
mod postgres;
#[cfg(feature = "sqlite")]
mod processes;
#[cfg(feature = "redis")]
mod quorum;
#[cfg(feature = "redis")]
mod redis;
#[cfg(feature = "redis")]
mod redis_cycle;
#[cfg(feature = "redis")]
mod redis_handoff;
#[cfg(feature = "redis")]
mod redis_recovery;
#[cfg(feature = "redis")]
mod redis_renewals;
#[cfg(feature = "redis")]
mod redis_throughput;
#[cfg(feature = "redis")]
mod redis_waiters;
mod renewals;
mod ring;
#[cfg(any(
    feature = "redis",
    feature = "sqlite",
    feature = "mysql",
    feature = "postgres",
    feature = "mongo",
    feature = "zk",
    feature = "etcd"
))]
mod share;
#[cfg(feature = "sqlite")]
mod sqlite;
#[cfg(feature = "sqlite")]
mod sqlite_cycle;
#[cfg(feature = "sqlite")]
mod sqlite_handoff;
#[cfg(feature = "zk")]
mod zk;

#[cfg(feature = "peers")]
pub(crate) use peer::Rslock;

use crate::{Result, measure::Plan, report::Table};
use dlock_conformance::testbed::worker::Job;
use std::{future::Future, pin::Pin, time::Duration};

/// A figure to measure.
pub(crate) struct Figure {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// How long it measures by default.
    pub(crate) seconds: Duration,
    pub(crate) run: fn(Plan) -> Running,
}

pub(crate) type Running = Pin<Box<dyn Future<Output = Result<Table>> + Send>>;

pub(crate) fn all() -> Vec<Figure> {
    vec![
        figure("memory-cycle", 8, |plan| Box::pin(memory_cycle::run(plan))),
        figure("memory-handoff", 15, |plan| {
            Box::pin(memory_handoff::run(plan))
        }),
        figure("memory-waiters", 80, |plan| {
            Box::pin(memory_waiters::run(plan))
        }),
        #[cfg(feature = "sqlite")]
        figure("sqlite-cycle", 20, |plan| Box::pin(sqlite_cycle::run(plan))),
        #[cfg(feature = "sqlite")]
        figure("sqlite-handoff", 60, |plan| {
            Box::pin(sqlite_handoff::run(plan))
        }),
        #[cfg(feature = "sqlite")]
        figure("cli-exec", 15, |plan| Box::pin(exec::run(plan))),
        #[cfg(feature = "redis")]
        figure("redis-cycle", 30, |plan| Box::pin(redis_cycle::run(plan))),
        #[cfg(feature = "redis")]
        figure("redis-cycle-one-core", 30, |plan| {
            Box::pin(redis_cycle::run_on_one_core(plan))
        }),
        #[cfg(feature = "redis")]
        figure("redis-throughput", 30, |plan| {
            Box::pin(redis_throughput::run(plan))
        }),
        #[cfg(feature = "redis")]
        figure("redis-recovery", 30, |plan| {
            Box::pin(redis_recovery::run(plan))
        }),
        #[cfg(feature = "redis")]
        figure("redis-handoff", 60, |plan| {
            Box::pin(redis_handoff::run(plan))
        }),
        #[cfg(feature = "redis")]
        figure("redis-renewals", 20, |plan| {
            Box::pin(redis_renewals::run(plan))
        }),
        #[cfg(feature = "redis")]
        figure("redis-waiters", 10, |plan| {
            Box::pin(redis_waiters::run(plan))
        }),
        #[cfg(feature = "redis")]
        figure("quorum-cycle", 30, |plan| Box::pin(quorum::cycle(plan))),
        #[cfg(feature = "mysql")]
        figure("mysql-cycle", 20, |plan| Box::pin(mysql::cycle(plan))),
        #[cfg(feature = "mysql")]
        figure("mysql-throughput-16", 20, |plan| {
            Box::pin(mysql::throughput(plan, 16))
        }),
        #[cfg(feature = "mysql")]
        figure("mysql-throughput", 20, |plan| {
            Box::pin(mysql::throughput(plan, 128))
        }),
        #[cfg(feature = "mysql")]
        figure("mysql-handoff", 90, |plan| Box::pin(mysql::handoff(plan))),
        #[cfg(feature = "mysql")]
        figure("mysql-renewals", 20, |plan| Box::pin(mysql::renewals(plan))),
        #[cfg(feature = "postgres")]
        figure("postgres-cycle", 20, |plan| Box::pin(postgres::cycle(plan))),
        #[cfg(feature = "postgres")]
        figure("postgres-throughput", 20, |plan| {
            Box::pin(postgres::throughput(plan))
        }),
        #[cfg(feature = "postgres")]
        figure("postgres-handoff", 120, |plan| {
            Box::pin(postgres::handoff(plan))
        }),
        #[cfg(feature = "postgres")]
        figure("postgres-renewals", 20, |plan| {
            Box::pin(postgres::renewals(plan))
        }),
        #[cfg(feature = "mongo")]
        figure("mongo-cycle", 30, |plan| Box::pin(mongo::cycle(plan))),
        #[cfg(feature = "mongo")]
        figure("mongo-throughput", 30, |plan| {
            Box::pin(mongo::throughput(plan))
        }),
        #[cfg(feature = "mongo")]
        figure("mongo-handoff", 90, |plan| Box::pin(mongo::handoff(plan))),
        #[cfg(feature = "mongo")]
        figure("mongo-renewals", 30, |plan| Box::pin(mongo::renewals(plan))),
        #[cfg(feature = "zk")]
        figure("zk-cycle", 20, |plan| Box::pin(zk::cycle(plan))),
        #[cfg(feature = "zk")]
        figure("zk-throughput", 30, |plan| Box::pin(zk::throughput(plan))),
        #[cfg(feature = "zk")]
        figure("zk-handoff", 60, |plan| Box::pin(zk::handoff(plan))),
        #[cfg(feature = "etcd")]
        figure("etcd-cycle", 20, |plan| Box::pin(etcd::cycle(plan))),
        #[cfg(feature = "etcd")]
        figure("etcd-throughput", 30, |plan| {
            Box::pin(etcd::throughput(plan))
        }),
        #[cfg(feature = "etcd")]
        figure("etcd-handoff", 60, |plan| Box::pin(etcd::handoff(plan))),
        #[cfg(feature = "etcd")]
        figure("etcd-renewals", 20, |plan| Box::pin(etcd::renewals(plan))),
        #[cfg(feature = "redis")]
        figure("redis-share", 30, |plan| Box::pin(redis::share(plan))),
        #[cfg(feature = "sqlite")]
        figure("sqlite-share", 30, |plan| Box::pin(sqlite::share(plan))),
        #[cfg(feature = "mysql")]
        figure("mysql-share", 30, |plan| Box::pin(mysql::share(plan))),
        #[cfg(feature = "postgres")]
        figure("postgres-share", 30, |plan| Box::pin(postgres::share(plan))),
        #[cfg(feature = "mongo")]
        figure("mongo-share", 30, |plan| Box::pin(mongo::share(plan))),
        #[cfg(feature = "zk")]
        figure("zk-share", 30, |plan| Box::pin(zk::share(plan))),
        #[cfg(feature = "etcd")]
        figure("etcd-share", 30, |plan| Box::pin(etcd::share(plan))),
    ]
}

/// The choice on the command line: one figure, or all of them.
pub(crate) fn names() -> Vec<&'static str> {
    let figures = all().into_iter().map(|figure| figure.name);
    std::iter::once(ALL).chain(figures).collect()
}

/// The entry point of a process that a figure starts.
#[cfg_attr(
    not(any(feature = "sqlite", feature = "redis")),
    allow(clippy::unused_async, reason = "no other store has jobs")
)]
pub(crate) async fn job(job: &Job) -> Result {
    #[cfg(feature = "sqlite")]
    if job.name == processes::JOB {
        return processes::job(job).await;
    }
    #[cfg(feature = "redis")]
    if [redis_recovery::HOLD, redis_recovery::WAIT].contains(&job.name.as_str()) {
        return redis_recovery::job(job).await;
    }
    #[cfg(feature = "compare")]
    if job.name == crate::compare::JOB {
        return crate::compare::job(job).await;
    }
    let name = &job.name;
    Err(format!("a process was started for {name:?}, which is no job of this build").into())
}

fn figure(name: &'static str, seconds: u64, run: fn(Plan) -> Running) -> Figure {
    let seconds = Duration::from_secs(seconds);
    Figure { name, seconds, run }
}

pub(crate) const ALL: &str = "all";
