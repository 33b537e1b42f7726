//! Facts that are free of what they were told with.

use std::borrow::Cow;

use mooncake_wire::types::Segment;

use crate::change::{DiskCopyState, DrainJobState, ObjectState, StateChange, TaskState, TransferState};

fn owned(text: Cow<'_, str>) -> Cow<'static, str> {
    Cow::Owned(text.into_owned())
}

impl ObjectState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> ObjectState<'static> {
        ObjectState {
            tenant: owned(self.tenant),
            key: owned(self.key),
            locations: Cow::Owned(self.locations.into_owned()),
            disk_copy: self.disk_copy.map(|it| DiskCopyState { endpoint: owned(it.endpoint), ..it }),
            group: self.group.map(owned),
            ..self
        }
    }
}

impl TransferState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> TransferState<'static> {
        let [tenant, key] = [self.tenant, self.key].map(owned);
        TransferState { tenant, key, locations: Cow::Owned(self.locations.into_owned()), ..self }
    }
}

impl TaskState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> TaskState<'static> {
        let [payload, message] = [self.payload, self.message].map(owned);
        TaskState { payload, message, ..self }
    }
}

impl DrainJobState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> DrainJobState<'static> {
        let [segments, targets] = [self.segments, self.targets].map(|it| Cow::Owned(it.into_owned()));
        DrainJobState { segments, targets, message: owned(self.message), ..self }
    }
}

impl StateChange<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> StateChange<'static> {
        match self {
            Self::SegmentMounted { segment, client, at_ms } => {
                let Segment { id, name, base, size, te_endpoint, protocol, host_id } = segment;
                let [name, te_endpoint, protocol, host_id] =
                    [name, te_endpoint, protocol, host_id].map(owned);
                let segment = Segment { id, name, base, size, te_endpoint, protocol, host_id };
                StateChange::SegmentMounted { segment, client, at_ms }
            }
            Self::SegmentStatus { segment, status, until_ms } => {
                StateChange::SegmentStatus { segment, status, until_ms }
            }
            Self::SegmentUnmounted { segment, cause } => StateChange::SegmentUnmounted { segment, cause },
            Self::ClientSilent { client, at_ms } => StateChange::ClientSilent { client, at_ms },
            Self::ClientRecovered { client, at_ms } => StateChange::ClientRecovered { client, at_ms },
            Self::DiskMounted { client } => StateChange::DiskMounted { client },
            Self::DiskUnmounted { client } => StateChange::DiskUnmounted { client },
            Self::ClientExpired { client } => StateChange::ClientExpired { client },
            Self::ObjectStarted(object) => StateChange::ObjectStarted(object.into_owned()),
            Self::ObjectStored { object, cause } => {
                StateChange::ObjectStored { object: object.into_owned(), cause }
            }
            Self::Removed { tenant, key, group, tiers: was, cause } => {
                let [tenant, key] = [tenant, key].map(owned);
                StateChange::Removed { tenant, key, group: group.map(owned), tiers: was, cause }
            }
            Self::RangeQuarantined { segment, offset, size, until_ms } => {
                StateChange::RangeQuarantined { segment, offset, size, until_ms }
            }
            Self::RangeReleased { segment, offset } => StateChange::RangeReleased { segment, offset },
            Self::TenantQuota { tenant, requested } => {
                StateChange::TenantQuota { tenant: owned(tenant), requested }
            }
            Self::TransferStarted(it) => StateChange::TransferStarted(it.into_owned()),
            Self::TransferEnded { tenant, key } => {
                StateChange::TransferEnded { tenant: owned(tenant), key: owned(key) }
            }
            Self::Task(it) => StateChange::Task(it.into_owned()),
            Self::DrainJob(it) => StateChange::DrainJob(it.into_owned()),
            Self::DrainMoveStarted { job, task, tenant, key, size } => {
                StateChange::DrainMoveStarted { job, task, tenant: owned(tenant), key: owned(key), size }
            }
            Self::DrainMoveEnded { job, task, tenant, key, attempts: tries } => StateChange::DrainMoveEnded {
                job,
                task,
                tenant: owned(tenant),
                key: owned(key),
                attempts: tries,
            },
        }
    }
}
