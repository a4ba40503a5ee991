//! Votes: what the answers of single stores come to.

/// The value that so many of the values reach.
pub(crate) fn reached<T: Ord>(values: impl IntoIterator<Item = T>, by: usize) -> Option<T> {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_unstable_by(|one, other| other.cmp(one));
    values.into_iter().nth(by.checked_sub(1)?)
}

/// The value that most have, the greatest of several, and how many have it.
pub(crate) fn most<T: Ord + Copy>(values: &[T]) -> Option<(T, usize)> {
    let count = |wanted| values.iter().filter(|value| **value == wanted).count();
    let counted = values.iter().map(|value| (count(*value), *value));
    counted.max().map(|(count, value)| (value, count))
}

#[cfg(test)]
mod tests {
    use super::{most, reached};

    #[test]
    fn a_value_is_reached_by_as_many_as_asked_for() {
        assert_eq!(reached([3, 1, 2], 2), Some(2));
        assert_eq!(reached([3, 1, 2], 3), Some(1));
        assert_eq!(reached([3], 2), None);
        assert_eq!(reached([3], 0), None);
    }

    #[test]
    fn the_value_of_most_wins_and_the_greatest_among_equals() {
        for (values, wanted) in [
            (&[][..], None),
            (&[1, 1, 2], Some((1, 2))),
            (&[1, 3, 2], Some((3, 1))),
        ] {
            assert_eq!(most(values), wanted);
        }
    }
}
