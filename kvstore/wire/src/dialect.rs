//! Dialects: the wire layouts of Mooncake's releases.

use std::fmt;

/// The layouts of one or several releases of Mooncake. A later release compares greater.
///
/// For a new release, add a variant here and `since` to each field or RPC that it added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(non_camel_case_types, reason = "the releases' own numbers, with their dots replaced")]
pub enum Dialect {
    /// Wire layouts of release 0.3.9.
    V0_3_9,
    /// Wire layouts of 0.3.10 and 0.3.10.post1.
    V0_3_10,
    /// 0.3.10.post2, which differs from 0.3.10 in the fields of a put.
    V0_3_10_post2,
    /// Wire layouts of 0.3.11 and its post-releases.
    V0_3_11,
    /// Wire layouts of 0.3.12 and its post-releases.
    V0_3_12,
    /// Wire layouts of 0.3.13 and its post-releases.
    V0_3_13,
    /// Wire layouts of 0.3.14, which can be extended without another type hash; see [`crate::pack`].
    V0_3_14,
}

impl Dialect {
    /// All supported dialects, oldest first.
    pub const ALL: [Self; 7] = [
        Self::V0_3_9,
        Self::V0_3_10,
        Self::V0_3_10_post2,
        Self::V0_3_11,
        Self::V0_3_12,
        Self::V0_3_13,
        Self::V0_3_14,
    ];
    pub const OLDEST: Self = Self::V0_3_9;
    /// The newest dialect. The types in memory have its fields.
    pub const NEWEST: Self = Self::V0_3_14;

    /// The first release with these layouts, for example `0.3.14`.
    pub fn release(self) -> &'static str {
        match self {
            Self::V0_3_9 => "0.3.9",
            Self::V0_3_10 => "0.3.10",
            Self::V0_3_10_post2 => "0.3.10.post2",
            Self::V0_3_11 => "0.3.11",
            Self::V0_3_12 => "0.3.12",
            Self::V0_3_13 => "0.3.13",
            Self::V0_3_14 => "0.3.14",
        }
    }

    /// Index of the dialect in [`Dialect::ALL`].
    pub(crate) fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.release())
    }
}

/// A set of dialects, for example those in which a message is valid.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct DialectSet(u8);

impl DialectSet {
    pub const EMPTY: Self = Self(0);

    pub fn all() -> Self {
        Dialect::ALL.into_iter().collect()
    }

    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Whether `dialect` is one of them.
    pub fn contains(self, dialect: Dialect) -> bool {
        self.0 & (1 << dialect.index()) != 0
    }

    pub(crate) fn insert(&mut self, dialect: Dialect) {
        self.0 |= 1 << dialect.index();
    }

    /// The dialects in both sets.
    #[must_use]
    pub fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub fn newest(self) -> Option<Dialect> {
        self.iter().last()
    }

    /// The dialects of the set, oldest first.
    pub fn iter(self) -> impl Iterator<Item = Dialect> {
        Dialect::ALL.into_iter().filter(move |dialect| self.contains(*dialect))
    }
}

impl FromIterator<Dialect> for DialectSet {
    fn from_iter<I: IntoIterator<Item = Dialect>>(dialects: I) -> Self {
        Self(dialects.into_iter().fold(0, |bits, dialect| bits | 1 << dialect.index()))
    }
}

impl fmt::Debug for DialectSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialects_are_in_order_and_each_has_its_index() {
        assert!(Dialect::ALL.is_sorted());
        assert!(Dialect::ALL.iter().enumerate().all(|(index, dialect)| dialect.index() == index));
        assert_eq!(
            (Dialect::ALL.first(), Dialect::ALL.last()),
            (Some(&Dialect::OLDEST), Some(&Dialect::NEWEST))
        );
    }

    #[test]
    fn intersection_narrows_a_set() {
        let old: DialectSet = [Dialect::V0_3_9, Dialect::V0_3_11].into_iter().collect();
        assert_eq!(old.newest(), Some(Dialect::V0_3_11));
        assert_eq!(DialectSet::all().intersection(old), old);
        let none = old.intersection([Dialect::V0_3_13].into_iter().collect());
        assert!(none.is_empty() && none.newest().is_none());
        assert_eq!(DialectSet::all().iter().collect::<Vec<_>>(), Dialect::ALL);
    }
}
