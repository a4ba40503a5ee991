//! Scope of the suite in each home.

use crate::{case::Case, clause::Clause};
use std::{env, ffi::OsStr};

/// What runs in a fixture that is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The clauses that show that the driver and that server understand each other.
    Short,
    /// Every clause.
    Whole,
}

impl Scope {
    /// The scope that the environment asks for.
    pub(crate) fn from_env() -> Result<Self, String> {
        env::var_os(VARIABLE).map_or(Ok(Self::Short), |value| Self::of(&value))
    }

    fn of(value: &OsStr) -> Result<Self, String> {
        match value.to_str() {
            Some("") => Ok(Self::Short),
            Some("all") => Ok(Self::Whole),
            _ => Err(format!("{VARIABLE}: {value:?} is neither `all` nor empty")),
        }
    }

    /// Whether a case is in this scope.
    pub(crate) fn has(self, is_short: bool, case: &Case) -> bool {
        !is_short || self == Self::Whole || SHORT.contains(&case.clause)
    }
}

const VARIABLE: &str = "DLOCK_TEST_CONTAINER";
const SHORT: [Clause; 4] = [Clause::Mutex, Clause::Owner, Clause::Loss, Clause::Crash];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::cases;

    #[test]
    fn short_fixtures_try_four_clauses_unless_all_are_asked_for() {
        let tried = |scope: Scope, is_short| {
            let all = cases();
            let wanted = all.iter().filter(|case| scope.has(is_short, case)).count();
            (wanted, all.len())
        };
        let (wanted, all) = tried(Scope::Short, true);
        assert!(0 < wanted && wanted < all, "{wanted} of {all}");
        assert_eq!(tried(Scope::Short, false), (all, all));
        assert_eq!(tried(Scope::Whole, true), (all, all));
    }

    #[test]
    fn a_value_that_means_nothing_is_refused() {
        assert_eq!(Scope::of("all".as_ref()), Ok(Scope::Whole));
        assert_eq!(Scope::of("".as_ref()), Ok(Scope::Short));
        assert!(Scope::of("some".as_ref()).is_err());
    }
}
