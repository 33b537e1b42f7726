//! Names of the objects of a group.

use crate::hash::{fnv1a, safe_encode};

/// Maximum length of a name: it is also a label value and part of a host name.
pub(crate) const MAX_NAME: usize = 63;

/// Names of a role's objects. Existing objects keep their names, so callers may set them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleNames {
    /// Name of the workload, and of the role's scaling adapter.
    pub workload: String,
    /// Name of the headless Service.
    pub service: String,
}

impl RoleNames {
    /// Names of a role without existing objects.
    #[must_use]
    pub fn new(group: &str, role: &str) -> Self {
        Self {
            workload: truncate_with_hash(&format!("{group}-{role}")),
            service: truncate_with_hash(&format!("s-{group}-{role}")),
        }
    }
}

/// The name, truncated with a hash of the whole if it is too long, so that names stay distinct.
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
    fn long_names_are_truncated_to_distinct_names() {
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
