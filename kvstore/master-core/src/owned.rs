//! Conversion of state changes to owned (`'static`) ones.

use std::borrow::Cow;

use crate::change::{DiskCopyState, DrainJobState, ObjectState, StateChange, TaskState, TransferState};

fn owned(text: Cow<'_, str>) -> Cow<'static, str> {
    Cow::Owned(text.into_owned())
}

impl ObjectState<'_> {
    /// Converts all borrowed text to owned text.
    pub fn into_owned(self) -> ObjectState<'static> {
        ObjectState {
            tenant: owned(self.tenant),
            key: owned(self.key),
            locations: Cow::Owned(self.locations.into_owned()),
            disk_copy: self.disk_copy.map(|copy| DiskCopyState { endpoint: owned(copy.endpoint), ..copy }),
            group: self.group.map(owned),
            ..self
        }
    }
}

impl TransferState<'_> {
    /// Converts all borrowed text to owned text.
    pub fn into_owned(self) -> TransferState<'static> {
        let [tenant, key] = [self.tenant, self.key].map(owned);
        TransferState { tenant, key, locations: Cow::Owned(self.locations.into_owned()), ..self }
    }
}

impl TaskState<'_> {
    /// Converts all borrowed text to owned text.
    pub fn into_owned(self) -> TaskState<'static> {
        let [payload, message] = [self.payload, self.message].map(owned);
        TaskState { payload, message, ..self }
    }
}

impl DrainJobState<'_> {
    /// Converts all borrowed text to owned text.
    pub fn into_owned(self) -> DrainJobState<'static> {
        let [segments, targets] = [self.segments, self.targets].map(|names| Cow::Owned(names.into_owned()));
        DrainJobState { segments, targets, message: owned(self.message), ..self }
    }
}

impl StateChange<'_> {
    /// Converts all borrowed text to owned text.
    pub fn into_owned(self) -> StateChange<'static> {
        match self {
            Self::SegmentMounted { segment, client, at_ms } => {
                let segment = segment.map_text(|text| owned(text.clone()));
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
            Self::Removed { tenant, key, group, tiers, cause } => {
                let [tenant, key] = [tenant, key].map(owned);
                StateChange::Removed { tenant, key, group: group.map(owned), tiers, cause }
            }
            Self::RangeQuarantined { segment, offset, size, until_ms } => {
                StateChange::RangeQuarantined { segment, offset, size, until_ms }
            }
            Self::RangeReleased { segment, offset } => StateChange::RangeReleased { segment, offset },
            Self::TenantQuota { tenant, requested } => {
                StateChange::TenantQuota { tenant: owned(tenant), requested }
            }
            Self::ReturnTimes { counts } => StateChange::ReturnTimes { counts: counts.into_owned().into() },
            Self::TransferStarted(state) => StateChange::TransferStarted(state.into_owned()),
            Self::TransferEnded { tenant, key } => {
                StateChange::TransferEnded { tenant: owned(tenant), key: owned(key) }
            }
            Self::Task(state) => StateChange::Task(state.into_owned()),
            Self::DrainJob(state) => StateChange::DrainJob(state.into_owned()),
            Self::DrainMoveStarted { job, task, tenant, key, size } => {
                StateChange::DrainMoveStarted { job, task, tenant: owned(tenant), key: owned(key), size }
            }
            Self::DrainMoveEnded { job, task, tenant, key, attempts } => {
                StateChange::DrainMoveEnded { job, task, tenant: owned(tenant), key: owned(key), attempts }
            }
        }
    }
}
