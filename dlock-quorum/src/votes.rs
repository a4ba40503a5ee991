//! Votes: what the answers of single stores come to.

use dlock_core::{FencingToken, driver::Grant};

/// The value that so many of the values reach.
pub(crate) fn reached<T: Ord + Copy>(values: impl IntoIterator<Item = T>, by: usize) -> Option<T> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_unstable_by(|one, other| other.cmp(one));
    values.get(by.checked_sub(1)?).copied()
}

/// The token of the grants of several stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// A quorum has it.
    Confirmed(FencingToken),
    /// The stores with a smaller one have to be raised to it.
    Raise(FencingToken),
}

/// The greatest token counts once a quorum has no smaller one, because every later quorum then meets it. A re-entry
/// repeats the token of its incarnation, whatever a store has that was repaired.
pub(crate) fn token<'a>(
    granted: impl Iterator<Item = &'a Grant> + Clone,
    quorum: usize,
) -> Option<Token> {
    let tokens = granted.map(|grant| grant.token);
    let greatest = tokens.clone().max()?;
    let have = |wanted| tokens.clone().filter(|token| *token == wanted).count();
    let agreed = tokens.clone().filter(|token| have(*token) >= quorum).max();
    Some(match agreed {
        Some(token) => Token::Confirmed(token),
        None => Token::Raise(greatest),
    })
}

#[cfg(test)]
mod tests {
    use super::{Token, reached, token};
    use dlock_core::{FencingToken, driver::Grant};
    use std::{num::NonZeroU32, time::Duration};

    #[test]
    fn a_value_is_reached_by_as_many_as_asked_for() {
        assert_eq!(reached([3, 1, 2], 2), Some(2));
        assert_eq!(reached([3, 1, 2], 3), Some(1));
        assert_eq!(reached([3], 2), None);
        assert_eq!(reached([3], 0), None);
    }

    #[test]
    fn a_token_is_confirmed_by_a_quorum_and_raised_otherwise() {
        let grants = |tokens: &[u64]| -> Vec<Grant> {
            let grant =
                |token: &u64| Grant::new(FencingToken(*token), NonZeroU32::MIN, Duration::ZERO);
            tokens.iter().map(grant).collect()
        };
        for (tokens, wanted) in [
            (&[5, 5][..], Token::Confirmed(FencingToken(5))),
            (&[5, 7], Token::Raise(FencingToken(7))),
            (&[5, 5, 7], Token::Confirmed(FencingToken(5))),
            (&[5, 6, 7], Token::Raise(FencingToken(7))),
        ] {
            assert_eq!(token(grants(tokens).iter(), 2), Some(wanted), "{tokens:?}");
        }
        assert_eq!(token(grants(&[]).iter(), 2), None);
    }
}
