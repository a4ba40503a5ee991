//! Schema: what an administrator must prepare before a store can keep locks.

use crate::connect::{no_driver, scheme};
use dlock_core::Error;
use std::borrow::Cow;

/// What the administrator of a URL's store has to prepare, as text for the store's own tools: tables and
/// rights.
///
/// The function does not connect to the store.
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
            Ok(Cow::Owned(config.schema()))
        }
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => {
            let config: dlock_postgres::PostgresConfig =
                crate::connect::without_settings(url)?.parse()?;
            Ok(Cow::Owned(config.schema()))
        }
        #[cfg(feature = "quorum")]
        crate::majority::SCHEME => {
            let mut each: Vec<_> = Vec::new();
            for store in crate::majority::words(url).1 {
                let text = schema(store)?;
                if !each.contains(&text) {
                    each.push(text);
                }
            }
            Ok(Cow::Owned(each.join("\n")))
        }
        _ => fixed(&scheme).map(Cow::Borrowed),
    }
}

/// The schema of a scheme whose text does not depend on the URL.
fn fixed(scheme: &str) -> Result<&'static str, Error> {
    match scheme {
        #[cfg(feature = "memory")]
        "memory" => Ok("-- nothing to prepare: the locks live inside the process\n"),
        #[cfg(feature = "redis")]
        "redis" | "redis+unix" | "redis+sentinel" | "rediss" | "rediss+sentinel" => {
            Ok(dlock_redis::RedisConfig::RIGHTS)
        }
        #[cfg(feature = "redis")]
        "redis+cluster" | "rediss+cluster" => Ok(dlock_redis::RedisConfig::RIGHTS_IN_CLUSTER),
        #[cfg(feature = "sqlite")]
        "sqlite" => {
            Ok("-- nothing to prepare: the first client makes the file, and its table in it\n")
        }
        #[cfg(feature = "mongo")]
        "mongodb" | "mongodb+srv" => Ok(dlock_mongo::MongoConfig::RIGHTS),
        #[cfg(feature = "etcd")]
        "etcd" | "etcd+tls" => Ok(dlock_etcd::EtcdConfig::RIGHTS),
        #[cfg(feature = "zk")]
        "zk" | "zk+tls" => Ok(dlock_zk::ZkConfig::RIGHTS),
        _ => Err(no_driver(scheme)),
    }
}
