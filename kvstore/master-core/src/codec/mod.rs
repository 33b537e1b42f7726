//! Binary encoding of state changes: a version byte, a kind byte, then the fields in order.
//!
//! Numbers are LEB128 (seven bits per byte, lowest first); ids are 16 bytes, little-endian; text is preceded by its length;
//! an optional field is preceded by a presence byte. A state change ends after its last field, so state changes can be
//! concatenated.

mod read;
mod tasks;
mod write;

use crate::change::{RemoveCause, StoreCause, UnmountCause};

pub use read::decode;
pub(crate) use read::{RecordSubject, subject};
pub use write::encode;

/// The version that is written, and the only one that is accepted.
const VERSION: u8 = 2;
/// Maximum number of network devices of a segment.
pub(crate) const MAX_HCA_NAMES: u64 = 256;
/// Maximum number of replicas of an object in one state change.
const MAX_LOCATIONS: u64 = 1024;

/// Why bytes cannot be decoded as a state change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateChangeDecodeError {
    /// The bytes end early; with more bytes they may be valid.
    #[error("truncated state change")]
    Truncated,
    /// Written by another release, or not a state change.
    #[error("unsupported version {0} of the state change encoding")]
    Version(u8),
    /// A field has an invalid value.
    #[error("state change with an invalid {0}")]
    Value(&'static str),
}

/// The kind byte of each state change.
mod kind {
    pub(super) const MOUNTED: u8 = 1;
    pub(super) const SEGMENT_STATUS: u8 = 2;
    pub(super) const UNMOUNTED: u8 = 3;
    pub(super) const CLIENT_SILENT: u8 = 4;
    pub(super) const CLIENT_RECOVERED: u8 = 5;
    pub(super) const CLIENT_EXPIRED: u8 = 6;
    pub(super) const STARTED: u8 = 7;
    pub(super) const STORED: u8 = 8;
    pub(super) const REMOVED: u8 = 9;
    pub(super) const QUARANTINED: u8 = 10;
    pub(super) const RELEASED: u8 = 11;
    pub(super) const QUOTA: u8 = 12;
    pub(super) const DISK_MOUNTED: u8 = 13;
    pub(super) const DISK_UNMOUNTED: u8 = 14;
    pub(super) const RETURN_TIMES: u8 = 15;
    /// As `MOUNTED`, with the segment's locality.
    pub(super) const MOUNTED_WITH_LOCALITY: u8 = 16;
    pub(super) const TRANSFER_STARTED: u8 = 32;
    pub(super) const TRANSFER_ENDED: u8 = 33;
    pub(super) const TASK: u8 = 34;
    pub(super) const DRAIN_JOB: u8 = 35;
    pub(super) const DRAIN_MOVE_STARTED: u8 = 36;
    pub(super) const DRAIN_MOVE_ENDED: u8 = 37;
}

const STORE_CAUSES: [StoreCause; 7] = [
    StoreCause::Written,
    StoreCause::Replicas,
    StoreCause::Snapshot,
    StoreCause::Offloaded,
    StoreCause::DiskCopyLost,
    StoreCause::MemoryEvicted,
    StoreCause::Promoted,
];
const REMOVE_CAUSES: [RemoveCause; 7] = [
    RemoveCause::Removed,
    RemoveCause::Cleared,
    RemoveCause::Evicted,
    RemoveCause::Revoked,
    RemoveCause::PutTimedOut,
    RemoveCause::Replaced,
    RemoveCause::SegmentLost,
];
const UNMOUNT_CAUSES: [UnmountCause; 3] =
    [UnmountCause::Unmounted, UnmountCause::ClientExpired, UnmountCause::MemoryLost];

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use mooncake_wire::admin::JobStatus;
    use mooncake_wire::types::{Segment, SegmentLocality, SegmentStatus, TaskStatus, TaskType, Uuid};
    use proptest::prelude::*;

    use super::*;
    use crate::change::{
        DiskCopyState, DrainJobState, DynamicReplicationLease, ObjectState, ReplicaLocation, StateChange,
        StorageTiers, TaskState, TransferState,
    };

    fn id() -> impl Strategy<Value = Uuid> {
        any::<(u64, u64)>().prop_map(|(first, second)| Uuid { first, second })
    }

    fn text() -> impl Strategy<Value = Cow<'static, str>> {
        any::<String>().prop_map(Cow::Owned)
    }

    fn object() -> impl Strategy<Value = ObjectState<'static>> {
        let location = (any::<u64>(), id(), any::<u64>());
        let locations = proptest::collection::vec(location, 0..4);
        let pins = (any::<bool>(), any::<Option<u64>>(), proptest::option::of(text()));
        let on_disk = (any::<[u64; 2]>(), id(), text()).prop_map(|([replica, size], client, endpoint)| {
            DiskCopyState { replica, client, size, endpoint }
        });
        let copies = (locations, proptest::option::of(on_disk));
        (text(), text(), any::<[u64; 2]>(), id(), copies, any::<Option<u64>>(), pins).prop_map(
            |(
                tenant,
                key,
                [size, since_ms],
                client,
                (locations, on_disk),
                checksum,
                (hard_pin, soft_pin_until_ms, group),
            )| {
                let location = |(replica, segment, offset)| ReplicaLocation { replica, segment, offset };
                ObjectState {
                    tenant,
                    key,
                    size,
                    client,
                    locations: locations.into_iter().map(location).collect(),
                    disk_copy: on_disk,
                    checksum,
                    hard_pin,
                    soft_pin_until_ms,
                    group,
                    since_ms,
                }
            },
        )
    }

    fn task_change() -> impl Strategy<Value = StateChange<'static>> {
        let location = (any::<u64>(), id(), any::<u64>())
            .prop_map(|(replica, segment, offset)| ReplicaLocation { replica, segment, offset });
        let locations = proptest::collection::vec(location, 0..4);
        let plan = (id(), any::<u64>()).prop_map(|(id, epoch)| DynamicReplicationLease { id, epoch });
        let plan = proptest::option::of(plan);
        let names = || proptest::collection::vec(any::<String>(), 0..4);
        prop_oneof![
            ([text(), text()], id(), any::<([u64; 2], bool)>(), plan, locations).prop_map(
                |([tenant, key], client, ([source, since_ms], is_move), lease, locations)| {
                    let locations = Cow::Owned(locations);
                    let state =
                        TransferState { tenant, key, client, source, is_move, since_ms, lease, locations };
                    StateChange::TransferStarted(state)
                }
            ),
            [text(), text()].prop_map(|[tenant, key]| StateChange::TransferEnded { tenant, key }),
            ([id(), id()], any::<[i32; 2]>(), [text(), text()], any::<[u64; 2]>()).prop_map(
                |([id, client], [task_type, status], [payload, message], [created_at_ms, updated_at_ms])| {
                    let (task_type, status) = (TaskType(task_type), TaskStatus(status));
                    StateChange::Task(TaskState {
                        id,
                        task_type,
                        status,
                        payload,
                        client,
                        created_at_ms,
                        updated_at_ms,
                        message,
                    })
                }
            ),
            (id(), [names(), names()], any::<i32>(), any::<[u64; 7]>(), text()).prop_map(
                |(id, [segments, targets], status, numbers, message)| {
                    let [concurrency, created_at_ms, updated_at_ms, succeeded, failed, blocked, moved_bytes] =
                        numbers;
                    StateChange::DrainJob(DrainJobState {
                        id,
                        segments: segments.into(),
                        targets: targets.into(),
                        concurrency,
                        status: JobStatus(status),
                        created_at_ms,
                        updated_at_ms,
                        succeeded,
                        failed,
                        blocked,
                        moved_bytes,
                        message,
                    })
                }
            ),
            ([id(), id()], [text(), text()], any::<u64>()).prop_map(|([job, task], [tenant, key], size)| {
                StateChange::DrainMoveStarted { job, task, tenant, key, size }
            }),
            ([id(), id()], [text(), text()], any::<u32>()).prop_map(
                |([job, task], [tenant, key], attempts)| {
                    StateChange::DrainMoveEnded { job, task, tenant, key, attempts }
                }
            ),
        ]
    }

    fn state_change() -> impl Strategy<Value = StateChange<'static>> {
        let locality = (any::<i32>(), proptest::collection::vec(text(), 0..4))
            .prop_map(|(numa_node, hca_names)| SegmentLocality { numa_node, hca_names });
        let locality = proptest::option::of(locality);
        let mounted = (id(), [text(), text(), text(), text()], any::<[u64; 3]>(), id(), locality).prop_map(
            |(id, [name, te_endpoint, protocol, host_id], [base, size, at_ms], client, locality)| {
                let segment = Segment { id, name, base, size, te_endpoint, protocol, host_id, locality };
                StateChange::SegmentMounted { segment, client, at_ms }
            },
        );
        prop_oneof![
            mounted,
            (id(), any::<i32>(), any::<Option<u64>>()).prop_map(|(segment, status, until_ms)| {
                StateChange::SegmentStatus { segment, status: SegmentStatus(status), until_ms }
            }),
            (id(), 0..UNMOUNT_CAUSES.len()).prop_map(|(segment, index)| StateChange::SegmentUnmounted {
                segment,
                cause: UNMOUNT_CAUSES[index]
            }),
            (id(), any::<u64>()).prop_map(|(client, at_ms)| StateChange::ClientSilent { client, at_ms }),
            (id(), any::<u64>()).prop_map(|(client, at_ms)| StateChange::ClientRecovered { client, at_ms }),
            id().prop_map(|client| StateChange::ClientExpired { client }),
            id().prop_map(|client| StateChange::DiskMounted { client }),
            id().prop_map(|client| StateChange::DiskUnmounted { client }),
            object().prop_map(StateChange::ObjectStarted),
            (object(), 0..STORE_CAUSES.len())
                .prop_map(|(object, index)| StateChange::ObjectStored { object, cause: STORE_CAUSES[index] }),
            (text(), text(), proptest::option::of(text()), any::<[bool; 2]>(), 0..REMOVE_CAUSES.len())
                .prop_map(|(tenant, key, group, [memory, disk], index)| StateChange::Removed {
                    tenant,
                    key,
                    group,
                    tiers: StorageTiers { memory, disk },
                    cause: REMOVE_CAUSES[index]
                }),
            (id(), any::<[u64; 3]>()).prop_map(|(segment, [offset, size, until_ms])| {
                StateChange::RangeQuarantined { segment, offset, size, until_ms }
            }),
            (id(), any::<u64>()).prop_map(|(segment, offset)| StateChange::RangeReleased { segment, offset }),
            (text(), any::<Option<u64>>())
                .prop_map(|(tenant, requested)| StateChange::TenantQuota { tenant, requested }),
            any::<Vec<u8>>().prop_map(|counts| StateChange::ReturnTimes { counts: counts.into() }),
            task_change(),
        ]
    }

    proptest! {
        #[test]
        fn encoded_changes_decode_and_prefixes_are_truncated(change in state_change(), rest: Vec<u8>) {
            let mut bytes = Vec::new();
            encode(&change, &mut bytes);
            for length in 0..bytes.len() {
                prop_assert_eq!(decode(&bytes[..length]), Err(StateChangeDecodeError::Truncated));
            }
            bytes.extend(&rest);
            prop_assert_eq!(decode(&bytes), Ok((change, &rest[..])));
        }

        #[test]
        fn decoding_arbitrary_bytes_never_panics(mut bytes: Vec<u8>, kind in 0..40_u8) {
            let _ = decode(&bytes);
            bytes.splice(0..0, [VERSION, kind]);
            let _ = decode(&bytes);
        }
    }

    #[test]
    fn unknown_versions_and_kinds_are_rejected() {
        assert_eq!(decode(&[1, 6]), Err(StateChangeDecodeError::Version(1)));
        assert_eq!(decode(&[VERSION, 99]), Err(StateChangeDecodeError::Value("kind")));
    }
}
