//! Table settings: the table of a SQL server that keeps the locks, and how it is used.

use crate::{driver::Result, error::DriverError};
use std::{fmt, ops::RangeInclusive, str::FromStr};

/// A table's name, optionally with its schema (MySQL: its database): `table` or `schema.table`, each of 1 to
/// 63 letters, digits, `_` or `$`.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::TableName;
///
/// assert!("ops.locks".parse::<TableName>().is_ok());
/// assert!("no spaces".parse::<TableName>().is_err());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TableName {
    schema: Option<String>,
    name: String,
}

impl TableName {
    /// The schema, if one is named.
    #[must_use]
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }

    /// The name alone.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same table in that schema, which may have any name. So no setting of a session redirects a statement.
    #[must_use]
    pub fn within(&self, schema: impl Into<String>) -> Self {
        Self {
            schema: Some(schema.into()),
            name: self.name.clone(),
        }
    }

    /// The form for statements.
    #[must_use]
    pub fn quoted(&self, quote: char) -> String {
        let twice = format!("{quote}{quote}");
        let quoted = |part: &str| format!("{quote}{}{quote}", part.replace(quote, &twice));
        let schema = self.schema.as_deref().map(|schema| quoted(schema) + ".");
        schema.unwrap_or_default() + &quoted(&self.name)
    }
}

/// `dlock_locks`, without a schema.
impl Default for TableName {
    fn default() -> Self {
        Self {
            schema: None,
            name: "dlock_locks".to_owned(),
        }
    }
}

impl FromStr for TableName {
    type Err = DriverError;

    fn from_str(text: &str) -> Result<Self> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        let legal = |part: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$');
            (1..=63).contains(&part.len()) && part.chars().all(fits)
        };
        if legal(name) && schema.is_none_or(legal) {
            return Ok(Self {
                schema: schema.map(str::to_owned),
                name: name.to_owned(),
            });
        }
        Err(DriverError::misuse(format!(
            "the table {text:?} must be `table` or `schema.table`, each of 1 to 63 letters, digits, _ or $"
        )))
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(schema) = &self.schema {
            write!(f, "{schema}.")?;
        }
        f.write_str(&self.name)
    }
}

/// The settings of every driver over a table of a SQL server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableSettings {
    /// Where the locks are. URL: `dlock.table`.
    pub name: TableName,
    /// Whether the driver makes a missing table. URL: `dlock.create`.
    pub create: bool,
    /// How many connections requests may use at the same time; renewals use more of their own. URL:
    /// `dlock.connections`.
    pub connections: u32,
}

impl TableSettings {
    /// How many connections there may be.
    pub const CONNECTIONS: RangeInclusive<u32> = 1..=64;

    /// Changes what a key of a URL names.
    ///
    /// # Errors
    /// `Misuse` for a value that cannot be, and for any other key.
    ///
    /// # Examples
    /// ```
    /// use dlock_core::driver::kit::TableSettings;
    ///
    /// let mut settings = TableSettings { name: "dlock".parse()?, create: true, connections: 8 };
    /// settings.set("dlock.connections", "16")?;
    /// assert_eq!(settings.connections, 16);
    /// assert!(settings.set("dlock.connections", "0").is_err());
    /// # Ok::<(), dlock_core::driver::DriverError>(())
    /// ```
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let wrong =
            |wanted: &str| DriverError::misuse(format!("{key} must be {wanted}, not {value:?}"));
        match key {
            "dlock.table" => self.name = value.parse()?,
            "dlock.create" => self.create = value.parse().map_err(|_| wrong("true or false"))?,
            "dlock.connections" => match value.parse() {
                Ok(most) if Self::CONNECTIONS.contains(&most) => self.connections = most,
                _ => return Err(wrong("1 to 64")),
            },
            _ => return Err(wrong("left out")),
        }
        Ok(())
    }
}

impl Default for TableSettings {
    fn default() -> Self {
        Self {
            name: TableName::default(),
            create: true,
            connections: 16,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{TableName, TableSettings};
    use crate::error::ErrorKind;

    #[test]
    fn a_name_is_quoted_as_the_server_wants_it_and_no_other_text_gets_in() {
        let table: TableName = "ops.my_locks".parse().unwrap();
        assert_eq!(table.quoted('`'), "`ops`.`my_locks`");
        assert_eq!(table.to_string(), "ops.my_locks");
        assert_eq!((table.schema(), table.name()), (Some("ops"), "my_locks"));
        let odd = TableName::default().within("a\"b");
        assert_eq!(odd.quoted('"'), "\"a\"\"b\".\"dlock_locks\"");
        assert_eq!(TableName::default().quoted('"'), "\"dlock_locks\"");
        let long = "x".repeat(64);
        for text in [
            "", ".", "a.", ".a", "a b", "a;b", "a`b", "a.b.c", "ä", &long,
        ] {
            text.parse::<TableName>().unwrap_err();
        }
    }

    #[test]
    fn settings_are_read_and_what_cannot_work_is_refused_with_what_can() {
        let mut settings = TableSettings::default();
        for (key, value) in [
            ("dlock.table", "x.y"),
            ("dlock.create", "false"),
            ("dlock.connections", "3"),
        ] {
            settings.set(key, value).unwrap();
        }
        let read = (
            settings.name.to_string(),
            settings.create,
            settings.connections,
        );
        assert_eq!(read, ("x.y".to_owned(), false, 3));
        for (key, value, advice) in [
            ("dlock.table", "a b", "letters, digits"),
            ("dlock.create", "yes", "true or false"),
            ("dlock.connections", "0", "1 to 64"),
            ("dlock.connections", "65", "1 to 64"),
            ("dlock.wake", "x", "left out"),
        ] {
            let error = settings.set(key, value).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misuse);
            assert!(error.to_string().contains(advice), "{error}");
        }
    }
}
