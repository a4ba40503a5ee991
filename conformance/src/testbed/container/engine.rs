//! Container engine client for blocking code.

use crate::{failure::with_causes, testbed::server::ServerError};
use std::{
    collections::HashMap,
    error::Error,
    fs,
    path::Path,
    process,
    sync::{
        LazyLock, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::Duration,
};
use testcontainers::{
    bollard::{
        Docker,
        errors::Error as EngineError,
        query_parameters::{
            KillContainerOptionsBuilder, ListContainersOptionsBuilder,
            RemoveContainerOptionsBuilder,
        },
    },
    core::client::docker_client_instance,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::{sleep, timeout},
};

/// The label on every container of the testbed; its value is the [`owner`].
pub(super) const LABEL: &str = "dlock.testbed";

/// The process that a container belongs to. Unlike a plain pid, this names a process of this machine
/// since its present boot, as seen from inside or outside of a container.
pub(super) fn owner() -> String {
    format!("{}/{}", *NAMESPACE, process::id())
}

static NAMESPACE: LazyLock<String> = LazyLock::new(|| {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let pids = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    format!("{}/{}", boot.trim(), pids.display())
});

/// A name that no other container has.
pub(super) fn fresh_name(image: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (pid, next) = (process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    format!("dlock-{image}-{pid}-{next}-{:04x}", fastrand::u16(..))
}

/// Runs a future to its end on the runtime that all containers share. A test's own runtime would end
/// with the test, and code inside one runtime must not block on another.
pub(super) fn run<T: Send + 'static>(job: impl Future<Output = T> + Send + 'static) -> T {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| {
        let mut builder = Builder::new_multi_thread();
        let builder = builder.worker_threads(1).thread_name("containers");
        let runtime = builder.enable_all().build();
        runtime.expect("a process can start one more thread")
    });
    let (answer, result) = mpsc::channel();
    runtime.spawn(async move { drop(answer.send(job.await)) });
    result.recv().expect("BUG: a job of the engine panicked")
}

/// Whether an engine answers. On the first success, the containers of killed tests are removed.
pub(in crate::testbed) fn check() -> Result<(), ServerError> {
    static SWEPT: OnceLock<()> = OnceLock::new();
    let answer = run(async {
        let docker = docker_client_instance()
            .await
            .map_err(|e| with_causes(&e))?;
        match timeout(ANSWER_LIMIT, docker.ping()).await {
            Ok(Ok(_)) => Ok(docker),
            Ok(Err(error)) => Err(with_causes(&error)),
            Err(_) => Err(format!("it did not answer within {ANSWER_LIMIT:?}")),
        }
    });
    let docker = answer.map_err(|reason| ServerError::NoEngine { reason })?;
    SWEPT.get_or_init(|| drop(run(sweep(docker))));
    Ok(())
}

/// Removes the containers of processes that have ended.
async fn sweep(docker: Docker) -> Result<(), EngineError> {
    let filters = HashMap::from([("label", vec![LABEL])]);
    let ours = ListContainersOptionsBuilder::new()
        .all(true)
        .filters(&filters)
        .build();
    for container in docker.list_containers(Some(ours)).await? {
        let owner = container.labels.and_then(|mut labels| labels.remove(LABEL));
        if let (Some(id), Some(owner)) = (container.id, owner)
            && is_orphan(&owner)
        {
            // Another test may be removing it at the same moment.
            drop(forget(&docker, &id).await);
        }
    }
    Ok(())
}

/// Processes of another machine or namespace are unknown, so their containers are left alone.
fn is_orphan(owner: &str) -> bool {
    let (namespace, pid) = owner.rsplit_once('/').unwrap_or_default();
    namespace == *NAMESPACE && !Path::new("/proc").join(pid).exists()
}

/// Removes a container that may not exist.
pub(super) fn remove(name: String) {
    run(async move {
        if let Ok(docker) = docker_client_instance().await {
            drop(forget(&docker, &name).await);
        }
    });
}

async fn forget(docker: &Docker, name: &str) -> Result<(), EngineError> {
    let with_data = RemoveContainerOptionsBuilder::new().force(true).v(true);
    docker.remove_container(name, Some(with_data.build())).await
}

/// Sends SIGKILL, suspended or not: a paused container is thawed with the signal pending, so it
/// executes nothing more. Returns when it has ended; a container that had ended before is no error.
pub(super) async fn kill(id: &str) -> Result<(), EngineError> {
    let docker = docker_client_instance().await.map_err(other)?;
    let signal = KillContainerOptionsBuilder::new().signal("SIGKILL").build();
    match docker.kill_container(id, Some(signal)).await {
        Err(EngineError::DockerResponseServerError {
            status_code: NOT_RUNNING,
            ..
        }) => {}
        done => done?,
    }
    loop {
        let state = docker.inspect_container(id, None).await?.state;
        if !state.and_then(|state| state.running).unwrap_or_default() {
            return Ok(());
        }
        sleep(END_INTERVAL).await;
    }
}

fn other(error: impl Error + Send + Sync + 'static) -> EngineError {
    std::io::Error::other(error).into()
}

const NOT_RUNNING: u16 = 409;
const ANSWER_LIMIT: Duration = Duration::from_secs(5);
const END_INTERVAL: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_containers_of_dead_processes_of_this_machine_are_orphans() {
        let dead = u32::MAX; // no pid is that high
        assert!(!is_orphan(&owner()));
        assert!(is_orphan(&format!("{}/{dead}", *NAMESPACE)));
        assert!(!is_orphan(&format!("another/machine/{dead}")));
        assert!(!is_orphan(""));
    }
}
