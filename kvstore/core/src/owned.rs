//! Facts that are free of what they were told with.

use std::borrow::Cow;

use mooncake_wire::types::Segment;

use crate::fact::{DrainState, Fact, ObjectState, OnDisk, TaskState, TransferState};

fn owned(text: Cow<'_, str>) -> Cow<'static, str> {
    Cow::Owned(text.into_owned())
}

impl ObjectState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> ObjectState<'static> {
        ObjectState {
            tenant: owned(self.tenant),
            key: owned(self.key),
            places: Cow::Owned(self.places.into_owned()),
            on_disk: self.on_disk.map(|it| OnDisk { endpoint: owned(it.endpoint), ..it }),
            group: self.group.map(owned),
            ..self
        }
    }
}

impl TransferState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> TransferState<'static> {
        let [tenant, key] = [self.tenant, self.key].map(owned);
        TransferState { tenant, key, places: Cow::Owned(self.places.into_owned()), ..self }
    }
}

impl TaskState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> TaskState<'static> {
        let [payload, message] = [self.payload, self.message].map(owned);
        TaskState { payload, message, ..self }
    }
}

impl DrainState<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> DrainState<'static> {
        let [segments, targets] = [self.segments, self.targets].map(|it| Cow::Owned(it.into_owned()));
        DrainState { segments, targets, message: owned(self.message), ..self }
    }
}

impl Fact<'_> {
    /// The same, free of what it was told with.
    pub fn into_owned(self) -> Fact<'static> {
        match self {
            Self::SegmentMounted { segment, client, at_ms } => {
                let Segment { id, name, base, size, te_endpoint, protocol, host_id } = segment;
                let [name, te_endpoint, protocol, host_id] =
                    [name, te_endpoint, protocol, host_id].map(owned);
                let segment = Segment { id, name, base, size, te_endpoint, protocol, host_id };
                Fact::SegmentMounted { segment, client, at_ms }
            }
            Self::SegmentStatus { segment, status, until_ms } => {
                Fact::SegmentStatus { segment, status, until_ms }
            }
            Self::SegmentUnmounted { segment, cause } => Fact::SegmentUnmounted { segment, cause },
            Self::ClientSilent { client, at_ms } => Fact::ClientSilent { client, at_ms },
            Self::ClientBack { client, at_ms } => Fact::ClientBack { client, at_ms },
            Self::DiskMounted { client } => Fact::DiskMounted { client },
            Self::DiskUnmounted { client } => Fact::DiskUnmounted { client },
            Self::ClientGone { client } => Fact::ClientGone { client },
            Self::Started(object) => Fact::Started(object.into_owned()),
            Self::Stored { object, cause } => Fact::Stored { object: object.into_owned(), cause },
            Self::Removed { tenant, key, group, was, cause } => {
                let [tenant, key] = [tenant, key].map(owned);
                Fact::Removed { tenant, key, group: group.map(owned), was, cause }
            }
            Self::Held { segment, offset, size, until_ms } => Fact::Held { segment, offset, size, until_ms },
            Self::Released { segment, offset } => Fact::Released { segment, offset },
            Self::TenantQuota { tenant, requested } => Fact::TenantQuota { tenant: owned(tenant), requested },
            Self::Transferring(it) => Fact::Transferring(it.into_owned()),
            Self::TransferOver { tenant, key } => {
                Fact::TransferOver { tenant: owned(tenant), key: owned(key) }
            }
            Self::Task(it) => Fact::Task(it.into_owned()),
            Self::DrainJob(it) => Fact::DrainJob(it.into_owned()),
            Self::DrainMove { job, task, tenant, key, size } => {
                Fact::DrainMove { job, task, tenant: owned(tenant), key: owned(key), size }
            }
            Self::DrainMoved { job, task, tenant, key, tries } => {
                Fact::DrainMoved { job, task, tenant: owned(tenant), key: owned(key), tries }
            }
        }
    }
}
