//! Session settings: the variables that the statements rely on, how they are set, and how they are read back.

use crate::error;
use dlock_core::driver::Result;
use std::collections::HashMap;

/// The server's family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flavour {
    Mariadb,
    Mysql,
}

impl Flavour {
    /// Parses a version such as `10.11.19-MariaDB-…`, optionally prefixed by `5.5.5-`, or `8.0.36`.
    pub(crate) fn of(version: &str) -> Result<Self> {
        let is_mariadb = version.to_ascii_lowercase().contains("mariadb");
        let number = version
            .strip_prefix("5.5.5-")
            .filter(|_| is_mariadb)
            .unwrap_or(version);
        let mut parts = number
            .split(|c: char| !c.is_ascii_digit())
            .map(|part| part.parse::<u32>().unwrap_or(0));
        let found = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        let (flavour, name, least) = if is_mariadb {
            (Self::Mariadb, "MariaDB", (10, 6))
        } else {
            (Self::Mysql, "MySQL", (8, 0))
        };
        if found >= least {
            return Ok(flavour);
        }
        Err(error::unsupported(format!(
            "the server is {name} {version:?}: dlock needs MariaDB 10.6 or MySQL 8.0, or newer"
        )))
    }

    /// The session settings that the statements rely on.
    fn settings(self) -> impl Iterator<Item = &'static Setting> {
        let own = match self {
            Self::Mariadb => &MARIADB,
            Self::Mysql => &MYSQL,
        };
        COMMON.iter().chain(own)
    }

    /// SQL that ends any open transaction and then sets the session. The `ROLLBACK` also ends what `SET
    /// TRANSACTION` set for the next transaction.
    pub(crate) fn set(self) -> String {
        let all: Vec<String> = self
            .settings()
            .map(|(name, value, _)| format!("{name} = {value}"))
            .collect();
        format!(
            "ROLLBACK AND NO CHAIN NO RELEASE; SET SESSION timestamp = DEFAULT, {}",
            all.join(", ")
        )
    }

    /// SQL that reads the settings back. A missing variable gives no row; one without a session value shows
    /// the server's.
    pub(crate) fn show(self) -> String {
        let all: Vec<String> = self
            .settings()
            .map(|(name, ..)| *name)
            .chain(SERVERS)
            .map(|name| format!("'{name}'"))
            .collect();
        format!(
            "SHOW SESSION VARIABLES WHERE Variable_name IN ({})",
            all.join(", ")
        )
    }

    /// The first setting that differs from what was set, in words.
    pub(crate) fn unfit(self, variables: &HashMap<String, String>) -> Option<String> {
        self.settings().find_map(|(name, _, wanted)| {
            let shown = variables.get(*name).map_or("not there", String::as_str);
            (shown != *wanted).then(|| format!("{name} is {shown}, not {wanted}"))
        })
    }
}

/// Server variables that tell whether the server can keep a lock.
const SERVERS: [&str; 9] = [
    "read_only",
    "super_read_only",
    "innodb_read_only",
    "innodb_flush_log_at_trx_commit",
    "innodb_flush_method",
    "innodb_doublewrite",
    "sync_binlog",
    "log_bin",
    "wsrep_on",
];

/// A session setting: its name, the value it is set to, and how the server then shows it.
type Setting = (&'static str, &'static str, &'static str);

/// Why each setting is there:
///
/// - A wait for a row lock ends after 1 s, one for a table or global lock after 1 s, and the whole statement
///   after 1 s. The three bound how late an acquire can be.
/// - The SQL mode is ours, because other modes change what `''`, `||` or an assignment mean.
/// - An idle session ends after two minutes; the client closes it after one.
/// - Rows left out of an answer (`sql_select_limit`) would read as locks that do not exist.
/// - Each statement is a transaction of its own, and may write.
/// - Digits in a text of two bytes per character (`ucs2`) would not equal those that are compared.
const COMMON: [Setting; 12] = [
    ("sql_mode", "'STRICT_TRANS_TABLES'", "STRICT_TRANS_TABLES"),
    ("time_zone", "'+00:00'", "+00:00"),
    ("autocommit", "1", "ON"),
    ("innodb_lock_wait_timeout", "1", "1"),
    ("lock_wait_timeout", "1", "1"),
    ("wait_timeout", "120", "120"),
    (
        "sql_select_limit",
        "18446744073709551615",
        "18446744073709551615",
    ),
    ("sql_safe_updates", "0", "OFF"),
    ("sql_big_selects", "1", "ON"),
    ("character_set_client", "utf8mb4", "utf8mb4"),
    ("character_set_results", "utf8mb4", "utf8mb4"),
    (
        "collation_connection",
        "utf8mb4_general_ci",
        "utf8mb4_general_ci",
    ),
];

const MARIADB: [Setting; 3] = [
    ("tx_isolation", "'REPEATABLE-READ'", "REPEATABLE-READ"),
    ("tx_read_only", "0", "OFF"),
    ("max_statement_time", "1", "1.000000"),
];

/// The last setting ends only reading statements. A write that runs on is ended by `KILL QUERY` from another
/// connection.
const MYSQL: [Setting; 3] = [
    (
        "transaction_isolation",
        "'REPEATABLE-READ'",
        "REPEATABLE-READ",
    ),
    ("transaction_read_only", "0", "OFF"),
    ("max_execution_time", "1000", "1000"),
];

#[cfg(test)]
mod tests {
    use super::Flavour;
    use dlock_core::ErrorKind;
    use std::collections::HashMap;

    #[test]
    fn servers_are_told_apart_and_old_ones_refused() {
        for (version, wanted) in [
            ("10.11.19-MariaDB-0+deb12u1", Some(Flavour::Mariadb)),
            ("5.5.5-10.6.1-MariaDB", Some(Flavour::Mariadb)),
            ("12.0.2-MariaDB", Some(Flavour::Mariadb)),
            ("8.0.36", Some(Flavour::Mysql)),
            ("8.4.0-commercial", Some(Flavour::Mysql)),
            ("9.1.0", Some(Flavour::Mysql)),
            ("10.5.9-MariaDB", None),
            ("5.7.44-log", None),
            ("", None),
        ] {
            match (Flavour::of(version), wanted) {
                (Ok(found), Some(wanted)) => assert_eq!(found, wanted, "{version}"),
                (Err(error), None) => assert_eq!(error.kind(), ErrorKind::Unsupported),
                (found, wanted) => panic!("{version}: {found:?} instead of {wanted:?}"),
            }
        }
    }

    #[test]
    fn a_setting_that_a_session_did_not_keep_is_named() {
        for flavour in [Flavour::Mariadb, Flavour::Mysql] {
            let kept = || -> HashMap<String, String> {
                let owned =
                    |(name, _, shown): &super::Setting| ((*name).to_owned(), (*shown).to_owned());
                flavour.settings().map(owned).collect()
            };
            assert_eq!(flavour.unfit(&kept()), None);
            let mut other = kept();
            other.insert("autocommit".to_owned(), "OFF".to_owned());
            let said = flavour.unfit(&other).unwrap();
            assert_eq!(said, "autocommit is OFF, not ON");
            let mut absent = kept();
            absent.remove("lock_wait_timeout");
            assert!(flavour.unfit(&absent).unwrap().contains("not there"));
        }
    }
}
