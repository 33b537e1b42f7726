//! Client ids as published by the admin API.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;

use mooncake_wire::types::Uuid;

/// Hash key, random for each process.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The published id of a client: stable while this process runs, and not usable in calls. The protocol takes a client's own id as proof
/// of its identity: any reader of the admin API could unmount its segments.
pub(super) fn published(client: Uuid) -> Uuid {
    let half = |number: u8| KEY.hash_one((client.first, client.second, number));
    Uuid { first: half(0), second: half(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_ids_are_stable_unique_and_not_the_client_ids() {
        let ids = [(1, 2), (2, 1), (1, 3)].map(|(first, second)| Uuid { first, second });
        for (number, id) in ids.into_iter().enumerate() {
            assert_eq!(published(id), published(id));
            assert_ne!(published(id), id);
            assert!(ids.into_iter().skip(number + 1).all(|other| published(other) != published(id)));
        }
    }
}
