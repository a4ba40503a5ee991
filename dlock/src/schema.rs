//! What a store must have before it can keep locks.

use crate::connect::{no_driver, scheme};
use dlock_core::Error;
use std::borrow::Cow;

/// What the administrator of a URL's store has to prepare, as text for its own tools: tables, rights. It is not connected to.
///
/// # Errors
/// `Misuse` for an unknown scheme, `Unsupported` when its feature is off.
///
/// # Examples
/// ```
/// # #[cfg(feature = "memory")]
/// assert!(dlock::schema("memory:orders")?.contains("nothing"));
/// # Ok::<(), dlock::Error>(())
/// ```
pub fn schema(url: &str) -> Result<Cow<'static, str>, Error> {
    let scheme = scheme(url)?;
    match scheme.as_str() {
        // The URL names the table.
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => {
            let config: dlock_mysql::MysqlConfig =
                crate::connect::without_settings(url)?.parse()?;
            Ok(Cow::Owned(dlock_mysql::MysqlConfig::schema_of(
                config.table(),
            )))
        }
        _ => fixed(&scheme).map(Cow::Borrowed),
    }
}

/// What is the same for every URL of a scheme.
fn fixed(scheme: &str) -> Result<&'static str, Error> {
    match scheme {
        #[cfg(feature = "memory")]
        "memory" => Ok("-- nothing to prepare: the locks live inside the process\n"),
        #[cfg(feature = "redis")]
        "redis" | "redis+unix" | "rediss" => Ok(dlock_redis::RedisConfig::RIGHTS),
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            Ok("-- nothing to prepare: the file and its table are made by whoever comes first\n")
        }
        #[cfg(feature = "mongo")]
        "mongodb" | "mongodb+srv" => Ok(dlock_mongo::MongoConfig::RIGHTS),
        #[cfg(feature = "zk")]
        "zk" | "zk+tls" => Ok(dlock_zk::ZkConfig::RIGHTS),
        _ => Err(no_driver(scheme)),
    }
}
