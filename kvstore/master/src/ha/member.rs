//! Members of a cluster of masters.

use std::collections::BTreeSet;
use std::fmt;

/// Maximum number of masters in a cluster.
pub const MAX_MEMBERS: usize = 64;
/// Maximum length of an address in bytes.
pub const MAX_ADDRESS: usize = 256;

/// One incarnation of a master's state. A master that starts with an empty state is a new member: the in-sync set then does not count
/// it as a holder of records that it has lost.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HaMember {
    /// RPC address while it is the leader. Unique among running masters.
    pub address: String,
    /// Random number that distinguishes incarnations of the same address.
    pub incarnation: u64,
}

impl HaMember {
    /// A member with a new, empty state.
    pub fn new(address: impl Into<String>) -> Self {
        Self::with_incarnation(address, fastrand::u64(..))
    }

    /// A member whose state was restored.
    pub fn with_incarnation(address: impl Into<String>, incarnation: u64) -> Self {
        Self { address: address.into(), incarnation }
    }
}

impl fmt::Display for HaMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x} {}", self.incarnation, self.address)
    }
}

/// Members that have every change that was confirmed to a client.
pub type InSyncSet = BTreeSet<HaMember>;

/// Encodes an in-sync set as text: one member per line, the incarnation in hexadecimal before the address.
pub fn write_in_sync(members: &InSyncSet) -> String {
    members.iter().map(|member| format!("{member}\n")).collect()
}

/// Parses the output of [`write_in_sync`]. `None` if it is invalid.
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
        fn in_sync_sets_round_trip(members in proptest::collection::btree_set(("[a-z0-9.:-]{1,40}", any::<u64>()), 0..9)) {
            let members: InSyncSet =
                members.into_iter().map(|(address, incarnation)| HaMember { address, incarnation }).collect();
            prop_assert_eq!(read_in_sync(&write_in_sync(&members)), Some(members));
        }

        #[test]
        fn arbitrary_text_does_not_panic(text: String) {
            let _ = read_in_sync(&text);
        }
    }

    #[test]
    fn invalid_in_sync_sets_are_rejected() {
        assert_eq!(read_in_sync("host:1"), None);
        assert_eq!(read_in_sync("xyz host:1"), None);
        assert_eq!(read_in_sync("1 host:1\r\r\n"), None, "the address would not round-trip");
        assert_eq!(read_in_sync(""), Some(InSyncSet::new()));
        let many: String = (0..=MAX_MEMBERS).map(|index| format!("{index:x} host:1\n")).collect();
        assert_eq!(read_in_sync(&many), None);
    }
}
