//! Work that a caller waits for and does not run itself.

use tokio::{runtime::Handle, task::JoinSet};

/// Runs a future in this runtime, from now on; `None`: the runtime has ended, or the future panicked.
///
/// For what others wait for, too, such as a connection that all share: a caller may be kept without being polled, as by a
/// `select!` that went elsewhere, and its runtime may end before the client's.
///
/// # Cancel safety
/// Dropping the future drops the one that it runs.
///
/// # Examples
/// ```
/// # #[tokio::main] async fn main() {
/// use dlock_core::driver::kit::in_runtime;
/// use tokio::runtime::Handle;
///
/// let client = Handle::current(); // kept when the client is made
/// assert_eq!(in_runtime(&client, async { 1 + 1 }).await, Some(2));
/// # }
/// ```
pub fn in_runtime<T, W>(
    runtime: &Handle,
    work: W,
) -> impl Future<Output = Option<T>> + Send + use<T, W>
where
    T: Send + 'static,
    W: Future<Output = T> + Send + 'static,
{
    let mut task = JoinSet::new(); // dropped, it ends the task
    task.spawn_on(work, runtime);
    async move { task.join_next().await?.ok() }
}
