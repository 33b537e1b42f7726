//! Who may lead.

use std::collections::BTreeSet;
use std::fmt;

/// The most masters of one cluster.
pub const MAX_MEMBERS: usize = 64;
/// The longest address in bytes.
pub const MAX_ADDRESS: usize = 256;

/// One life of a master's state. A master that begins with an empty state is another member than it was before, so nobody takes
/// what it lost for kept.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HaMember {
    /// Where it serves RPCs when it leads. Two running masters never have the same.
    pub address: String,
    /// Tells its lives apart.
    pub incarnation: u64,
}

impl HaMember {
    /// A member whose state begins now.
    pub fn new(address: impl Into<String>) -> Self {
        Self::with_incarnation(address, fastrand::u64(..))
    }

    /// A member whose state is there again.
    pub fn with_incarnation(address: impl Into<String>, incarnation: u64) -> Self {
        Self { address: address.into(), incarnation }
    }
}

impl fmt::Display for HaMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x} {}", self.incarnation, self.address)
    }
}

/// Members that have every change which a caller was told of.
pub type InSyncSet = BTreeSet<HaMember>;

/// An in-sync set as text: one member a line, its incarnation in hexadecimal digits before its address.
pub fn write_in_sync(members: &InSyncSet) -> String {
    members.iter().map(|member| format!("{member}\n")).collect()
}

/// Reads what [`write_in_sync`] wrote. Nothing if it is something else.
pub fn read_in_sync(text: &str) -> Option<InSyncSet> {
    let member = |line: &str| {
        let (incarnation, address) = line.split_once(' ')?;
        let incarnation = u64::from_str_radix(incarnation, 16).ok()?;
        let is_address =
            address.len() <= MAX_ADDRESS && !address.contains(|c: char| c.is_whitespace() || c.is_control());
        is_address.then(|| HaMember { address: address.to_owned(), incarnation })
    };
    let members: InSyncSet = text.lines().take(MAX_MEMBERS + 1).map(member).collect::<Option<_>>()?;
    (members.len() <= MAX_MEMBERS).then_some(members)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_set_is_read_as_written(members in proptest::collection::btree_set(("[a-z0-9.:-]{1,40}", any::<u64>()), 0..9)) {
            let members: InSyncSet =
                members.into_iter().map(|(address, incarnation)| HaMember { address, incarnation }).collect();
            prop_assert_eq!(read_in_sync(&write_in_sync(&members)), Some(members));
        }

        #[test]
        fn anything_is_refused_or_read(text: String) {
            let _ = read_in_sync(&text);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(read_in_sync("host:1"), None);
        assert_eq!(read_in_sync("xyz host:1"), None);
        assert_eq!(read_in_sync("1 host:1\r\r\n"), None, "it would be another address when written again");
        assert_eq!(read_in_sync(""), Some(InSyncSet::new()));
        let many: String = (0..=MAX_MEMBERS).map(|at| format!("{at:x} host:1\n")).collect();
        assert_eq!(read_in_sync(&many), None);
    }
}
