//! Names of the objects that run a group.

use crate::hash::{fnv1a, safe_encode};

/// Longest name: it is a label's value and part of a host name as well.
pub(crate) const MAX_NAME: usize = 63;

/// Names of a role's objects. Those that exist keep theirs, so whoever observes the cluster may set them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleNames {
    /// The workload, and the role's adapter for autoscalers.
    pub workload: String,
    /// The headless Service.
    pub service: String,
}

impl RoleNames {
    /// Names of a role that has no objects yet.
    #[must_use]
    pub fn new(group: &str, role: &str) -> Self {
        Self {
            workload: truncate_with_hash(&format!("{group}-{role}")),
            service: truncate_with_hash(&format!("s-{group}-{role}")),
        }
    }
}

/// The name, or its beginning with a hash of the whole, so that two long names stay two.
pub(crate) fn truncate_with_hash(name: &str) -> String {
    truncate_with_hash_to(name, MAX_NAME)
}

pub(crate) fn truncate_with_hash_to(name: &str, length: usize) -> String {
    if name.len() <= length {
        return name.to_owned();
    }
    let hash = safe_encode(fnv1a(name.bytes()));
    let mut end = length.saturating_sub(hash.len() + 1);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}-{hash}", name[..end].trim_end_matches(['-', '.']))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_apart() {
        assert_eq!(RoleNames::new("g", "r").workload, "g-r");
        let long = "g".repeat(70);
        let (a, b) = (RoleNames::new(&long, "a"), RoleNames::new(&long, "b"));
        assert_ne!(a.workload, b.workload);
        assert_ne!(a.service, b.service);
        assert!(a.workload.len() <= MAX_NAME && a.service.len() <= MAX_NAME);
        assert!(truncate_with_hash(&"-".repeat(80)).len() <= MAX_NAME);
        assert!(truncate_with_hash(&"ä".repeat(80)).len() <= MAX_NAME);
    }
}
