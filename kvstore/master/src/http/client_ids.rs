//! Client ids as the admin API publishes them.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::LazyLock;

use mooncake_wire::types::Uuid;

/// Each process has its own key.
static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);

/// The published id of a client: the same for the same client while this process runs, and of no use in a call. With a client's own id,
/// which the protocol takes for a proof of who calls, anybody could unmount its segments.
pub(super) fn published(client: Uuid) -> Uuid {
    let half = |number: u8| KEY.hash_one((client.first, client.second, number));
    Uuid { first: half(0), second: half(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_is_recognised_and_its_id_is_not_published() {
        let ids = [(1, 2), (2, 1), (1, 3)].map(|(first, second)| Uuid { first, second });
        for (number, id) in ids.into_iter().enumerate() {
            assert_eq!(published(id), published(id));
            assert_ne!(published(id), id);
            assert!(ids.into_iter().skip(number + 1).all(|other| published(other) != published(id)));
        }
    }
}
