//! Runtime checks: a tokio runtime without timers is an error for the caller, not a panic.

use crate::error::DriverError;
use std::{panic::catch_unwind, time::Duration};
use tokio::{
    runtime::Handle,
    time::{Sleep, sleep},
};

/// The current runtime, if it has timers.
pub(crate) fn current() -> Result<Handle, DriverError> {
    let handle = Handle::try_current().map_err(|cause| {
        DriverError::misuse(
            "await locks and build clients inside a tokio runtime: there is none here",
        )
        .with_source(cause)
    })?;
    match timer(Duration::ZERO) {
        Some(_) => Ok(handle),
        None => Err(DriverError::misuse(
            "this tokio runtime has no timers: build it with `enable_time` or `enable_all`",
        )),
    }
}

/// A timer of the current runtime, if it has any. tokio reports a lack of timers only by a panic, which the
/// panic hook may print.
pub(crate) fn timer(length: Duration) -> Option<Sleep> {
    Handle::try_current().ok()?;
    catch_unwind(|| sleep(length)).ok()
}

/// Checks that the current runtime has timers and I/O. Drivers call it before they connect.
///
/// # Errors
/// `Misuse`, with what is missing.
#[cfg(feature = "net")]
pub fn check_runtime() -> Result<(), DriverError> {
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

    current()?;
    let local = [
        SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
        SocketAddr::from((Ipv6Addr::LOCALHOST, 0)),
    ];
    let socket = UdpSocket::bind(&local[..])
        .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
    // On a machine without such sockets, only the connection itself can tell.
    let Ok(socket) = socket else {
        return Ok(());
    };
    let registered = catch_unwind(|| drop(tokio::net::UdpSocket::from_std(socket)));
    registered.map_err(|_| {
        DriverError::misuse(
            "this tokio runtime has no I/O: build it with `enable_io` or `enable_all`",
        )
    })
}
