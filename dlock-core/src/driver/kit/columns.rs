//! Columns: a record as SQL stores keep it, one column per field.

use super::record::{DamagedRecord, Record};
use crate::driver::HolderInfo;

/// The columns of a row. A column that cannot be read as its type has a value that dlock never writes: a
/// negative number, no text.
///
/// # Examples
/// ```
/// use dlock_core::driver::kit::Columns;
///
/// let free = Columns {
///     owner: Some(""),
///     token: 7,
///     holds: Some(""),
///     expires: 0,
///     keep_until: 0,
///     began: 0,
///     waiters: 0,
///     note: Some(""),
///     version: 8,
/// };
/// assert_eq!(free.record().map(|record| record.token), Ok(7));
/// assert!(Columns { token: -7, ..free }.record().is_err());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    /// [`Record::owner`]; empty: none.
    pub owner: Option<&'a str>,
    /// [`Record::token`].
    pub token: i64,
    /// [`Record::holds`].
    pub holds: Option<&'a str>,
    /// [`Record::unavailable_until`].
    pub expires: i64,
    /// [`Record::min_hold_until`].
    pub keep_until: i64,
    /// [`Record::began`].
    pub began: i64,
    /// [`Record::waiters_until`].
    pub waiters: i64,
    /// [`Record::holder_info`].
    pub note: Option<&'a str>,
    /// [`Record::version`].
    pub version: i64,
}

impl Columns<'_> {
    /// The record.
    ///
    /// # Errors
    /// With the first column that dlock did not write so.
    pub fn record(&self) -> Result<Record, DamagedRecord> {
        let token = u64::try_from(self.token);
        self.read().map_err(|column| {
            let damaged = DamagedRecord::new(column);
            damaged.with_token(token.unwrap_or(0))
        })
    }

    fn read(&self) -> Result<Record, &'static str> {
        let number = |column, value: i64| u64::try_from(value).map_err(|_| column);
        Ok(Record {
            token: number("token", self.token)?,
            owner: match self.owner.ok_or("owner")? {
                "" => None,
                owner => Some(owner.parse().map_err(|_| "owner")?),
            },
            holds: match self.holds.ok_or("holds")?.parse() {
                Ok(holds) => holds,
                Err(_) => return Err("holds"),
            },
            unavailable_until: number("expires", self.expires)?,
            min_hold_until: number("keep_until", self.keep_until)?,
            began: number("began", self.began)?,
            waiters_until: number("waiters", self.waiters)?,
            holder_info: HolderInfo::parse(self.note.ok_or("note")?),
            // One more than the greatest does not fit.
            version: match self.version {
                i64::MAX => return Err("version"),
                version => number("version", version)?,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::Columns;
    use crate::owner::{HoldId, Owner};

    #[test]
    fn a_row_is_a_record_unless_a_column_has_what_dlock_never_writes() {
        let (owner, holds) = (
            Owner::from_seed("us").expose().to_string(),
            "000000000000000a00000000000f4240",
        );
        let row = Columns {
            owner: Some(&owner),
            token: 7,
            holds: Some(holds),
            expires: 1_000_000,
            keep_until: 2,
            began: 3,
            waiters: 4,
            note: Some(""),
            version: 5,
        };
        let record = row.record().unwrap();
        assert_eq!(record.owner, Some(Owner::from_seed("us")));
        assert_eq!(record.holds.end_of(HoldId::from_bits(10)), Some(1_000_000));
        let numbers = [
            record.token,
            record.unavailable_until,
            record.min_hold_until,
            record.began,
            record.waiters_until,
            record.version,
        ];
        assert_eq!(numbers, [7, 1_000_000, 2, 3, 4, 5]);
        let free = Columns {
            owner: Some(""),
            holds: Some(""),
            ..row
        };
        assert_eq!(free.record().unwrap().owner, None);

        for (field, damaged) in [
            ("owner", Columns { owner: None, ..row }),
            (
                "owner",
                Columns {
                    owner: Some("x"),
                    ..row
                },
            ),
            (
                "holds",
                Columns {
                    holds: Some("x"),
                    ..row
                },
            ),
            ("holds", Columns { holds: None, ..row }),
            ("expires", Columns { expires: -1, ..row }),
            (
                "keep_until",
                Columns {
                    keep_until: -1,
                    ..row
                },
            ),
            ("began", Columns { began: -1, ..row }),
            ("waiters", Columns { waiters: -1, ..row }),
            ("note", Columns { note: None, ..row }),
            ("version", Columns { version: -1, ..row }),
            (
                "version",
                Columns {
                    version: i64::MAX,
                    ..row
                },
            ),
        ] {
            let damaged = damaged.record().unwrap_err();
            assert_eq!((damaged.field, damaged.token), (field, 7));
        }
        let damaged = Columns { token: -1, ..row }.record().unwrap_err();
        assert_eq!((damaged.field, damaged.token), ("token", 0));
    }
}
