//! TLS: which servers are trusted, and what can go wrong.

use crate::error;
use dlock_core::{
    ErrorKind,
    driver::{DriverError, Result},
};
use std::path::Path;
use zookeeper_client::{Error as Native, TlsOptions};

/// Trusts the authority of a PEM file, and no other. Encrypts with the provider that the application chose.
pub(crate) async fn options(ca: Option<&Path>) -> Result<TlsOptions> {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        let message = "zk+tls:// needs a rustls crypto provider, which the application chooses: install one before connecting, \
                       as rustls::crypto::ring::default_provider().install_default() does";
        return Err(DriverError::misuse(message));
    }
    let Some(path) = ca else {
        let message = "zk+tls:// needs the servers' authority: set dlock.ca to a PEM file";
        return Err(DriverError::misuse(message));
    };
    let file = format!("dlock.ca ({})", path.display());
    let unread = |cause| DriverError::misuse(format!("{file} cannot be read")).with_source(cause);
    let pem = tokio::fs::read(path).await.map_err(unread)?;
    let no_pem = |cause| {
        DriverError::misuse(format!("{file} has no usable PEM certificate")).with_source(cause)
    };
    let options = TlsOptions::new();
    let trusted = options.with_pem_ca(&String::from_utf8_lossy(&pem));
    trusted.map_err(no_pem)
}

/// [`error::unreached`] over TLS. The crate does not report why a handshake failed.
pub(crate) fn unreached(cause: Native) -> DriverError {
    let message = "none of the servers could be reached over TLS, or they have no quorum, or their certificates are \
                   not for these host names, or not from the authority in dlock.ca";
    match error::unreached(cause) {
        error if error.kind() == ErrorKind::Unavailable => {
            DriverError::unavailable(message).with_source(error)
        }
        error => error,
    }
}

/// Whether a certificate can be issued for this host. Otherwise the native client panics at its first
/// connection.
pub(crate) fn may_have_certificate(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.rsplit_once(':').map_or(host, |(name, _)| name),
    };
    rustls::pki_types::ServerName::try_from(name).is_ok()
}
