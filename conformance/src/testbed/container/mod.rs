//! Container: a real server of any kind, in a container of an engine on this machine.

mod engine;
mod image;

use crate::failure::with_causes;

use super::{
    managed_server::ManagedServer,
    server::{ServerError, free_port, tail},
};
use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    os::unix::process::ExitStatusExt,
    process::ExitStatus,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use testcontainers::{
    ContainerAsync, GenericImage, ImageExt, core::IntoContainerPort, runners::AsyncRunner,
};

pub(super) use engine::check as check_engine;
pub use image::Image;

/// A running container. Dropping it removes it with its data. Containers of a killed test are removed
/// by the next test that starts one.
///
/// It listens on the loopback address of this machine, on a port that stays the same after a restart.
/// So the engine must be on this machine, and no other machine can reach a server without passwords.
/// All methods block, also in async code.
#[derive(Debug)]
pub struct Container {
    image: Image,
    addr: SocketAddr,
    /// `None` only while it is dropped.
    running: Option<Arc<ContainerAsync<GenericImage>>>,
}

impl Container {
    /// Starts a container and waits until its server is ready. If another process took the port in the
    /// meantime, it tries another port. An image that the engine does not have is pulled.
    ///
    /// # Errors
    /// [`ServerError`]: [`NoEngine`](ServerError::NoEngine) when none answers, else the error of the
    /// start, with the server's log where there is one.
    pub fn start(image: Image) -> Result<Self, ServerError> {
        check_engine()?;
        let mut attempt = 1;
        let container = loop {
            match Self::launch(&image) {
                Err(Launch::PortTaken) if attempt < START_ATTEMPTS => attempt += 1,
                Err(Launch::PortTaken) => {
                    return Err(image.failed("find a port for", "all that were tried are taken"));
                }
                Err(Launch::Failed(error)) => return Err(error),
                Ok(container) => break container,
            }
        };
        container.wait_until_ready()?;
        Ok(container)
    }

    fn launch(image: &Image) -> Result<Self, Launch> {
        let failed = |words: String| Launch::Failed(image.failed("start", words));
        let port = free_port().map_err(|error| failed(error.to_string()))?;
        let inside = image.port.unwrap_or(port).tcp();
        let words = image.command.iter();
        let command = words.map(|word| word.replace("{port}", &port.to_string()));
        let name = engine::fresh_name(image.name);
        let mut request = GenericImage::new(image.name, image.tag)
            .with_cmd(command)
            .with_container_name(&name)
            .with_label(engine::LABEL, engine::owner())
            .with_mapped_port(port, inside)
            .with_host_config_modifier(|host| {
                for binding in host.port_bindings.iter_mut().flatten() {
                    for place in binding.1.iter_mut().flatten() {
                        place.host_ip = Some(Ipv4Addr::LOCALHOST.to_string());
                    }
                }
            });
        for (key, value) in image.environment.clone() {
            request = request.with_env_var(key, value);
        }
        match engine::run(request.start()) {
            Ok(container) => Ok(Self {
                image: image.clone(),
                addr: (Ipv4Addr::LOCALHOST, port).into(),
                running: Some(Arc::new(container)),
            }),
            Err(error) => {
                engine::remove(name); // created, but not started
                let words = with_causes(&error);
                if PORT_TAKEN.iter().any(|taken| words.contains(taken)) {
                    return Err(Launch::PortTaken);
                }
                if words.contains(NOT_PULLED) {
                    return Err(failed(format!("{words}; {MAKE_IT}")));
                }
                Err(failed(words))
            }
        }
    }

    /// The address where it listens.
    #[must_use]
    pub const fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The engine's id of the container.
    #[must_use]
    pub fn id(&self) -> &str {
        self.running().id()
    }

    /// The end of its output.
    #[must_use]
    pub fn log(&self) -> String {
        let printed = self.engine("read the log of", |container| async move {
            let mut printed = container.stdout_to_vec().await?;
            printed.extend(container.stderr_to_vec().await?);
            Ok::<_, testcontainers::TestcontainersError>(printed)
        });
        let printed = printed.unwrap_or_else(|error| error.to_string().into_bytes());
        tail(&printed)
    }

    fn wait_until_ready(&self) -> Result<(), ServerError> {
        let (server, limit) = (self.image.name, self.image.start_limit);
        let began = Instant::now();
        let mut polled = began;
        loop {
            if (self.image.ready)(self.addr) {
                return Ok(());
            }
            if polled.elapsed() > POLL_INTERVAL {
                polled = Instant::now();
                if let Some(code) = self.exit_code()? {
                    return Err(ServerError::Ended {
                        server,
                        status: ExitStatus::from_raw(code << 8),
                        log: self.log(),
                    });
                }
            }
            if began.elapsed() > limit {
                let log = self.log();
                return Err(ServerError::NotReady { server, limit, log });
            }
            thread::sleep(READY_INTERVAL);
        }
    }

    fn exit_code(&self) -> Result<Option<i32>, ServerError> {
        let code = self.engine("look at", |container| async move {
            Ok::<_, testcontainers::TestcontainersError>(match container.is_running().await? {
                true => None,
                false => container.exit_code().await?,
            })
        })?;
        Ok(code.map(|code| i32::try_from(code).unwrap_or(i32::MAX >> 8)))
    }

    fn running(&self) -> &Arc<ContainerAsync<GenericImage>> {
        let running = self.running.as_ref();
        running.expect("BUG: a container is there until it is dropped")
    }

    /// Runs an operation of the engine on the container.
    fn engine<T, E, F>(
        &self,
        step: &'static str,
        job: impl FnOnce(Arc<ContainerAsync<GenericImage>>) -> F,
    ) -> Result<T, ServerError>
    where
        T: Send + 'static,
        E: std::error::Error + Send + 'static,
        F: Future<Output = Result<T, E>> + Send + 'static,
    {
        let done = engine::run(job(Arc::clone(self.running())));
        done.map_err(|error| self.image.failed(step, with_causes(&error)))
    }
}

impl ManagedServer for Container {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn stop(&self) -> io::Result<()> {
        // The kernel freezes no process that waits for a disk, and the engine gives up after a moment.
        let paused = self.engine("pause", |container| async move {
            let mut outcome = container.pause().await;
            for _ in 1..PAUSES {
                match outcome {
                    Err(error) if with_causes(&error).contains("unable to freeze") => {
                        tokio::time::sleep(POLL_INTERVAL).await;
                        outcome = container.pause().await;
                    }
                    _ => break,
                }
            }
            outcome
        });
        paused.map_err(io::Error::other)
    }

    fn cont(&self) -> io::Result<()> {
        let goes_on = self.engine(
            "continue",
            |container| async move { container.unpause().await },
        );
        goes_on.map_err(io::Error::other)
    }

    fn kill(&self) -> io::Result<()> {
        let killed = self.engine("kill", |container| async move {
            engine::kill(container.id()).await
        });
        killed.map_err(io::Error::other)
    }

    fn restart(&self) -> Result<(), ServerError> {
        self.engine("kill", |container| async move {
            engine::kill(container.id()).await
        })?;
        self.engine("start", |container| async move { container.start().await })?;
        self.wait_until_ready()
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        let Some(container) = self.running.take().and_then(Arc::into_inner) else {
            return;
        };
        // An engine that is gone has taken its containers with it.
        drop(engine::run(container.rm()));
    }
}

/// The error for a container that could not be started.
enum Launch {
    PortTaken,
    Failed(ServerError),
}

impl Image {
    fn failed(&self, step: &'static str, words: impl Into<String>) -> ServerError {
        ServerError::system(self.name, step)(io::Error::other(words.into()))
    }
}

/// How often the engine is asked to freeze a container whose processes wait for the disk.
const PAUSES: usize = 20;

/// The messages of engines for a port that is taken.
const PORT_TAKEN: [&str; 2] = ["port is already allocated", "address already in use"];
/// The message of the engine's client for an image that is missing, here and in the registry.
const NOT_PULLED: &str = "failed to pull the image";
const MAKE_IT: &str = "conformance/images/build.sh makes it without a registry";
const START_ATTEMPTS: u32 = 4;
const READY_INTERVAL: Duration = Duration::from_millis(10);
/// A container that ends at once should not take the whole limit; a status request costs the engine
/// more than a question to the server.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
