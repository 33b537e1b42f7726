//! Encoding of state changes.

use mooncake_wire::types::Uuid;

use super::{REMOVE_CAUSES, STORE_CAUSES, UNMOUNT_CAUSES, VERSION, kind, tasks};
use crate::change::{ObjectState, ReplicaLocation, StateChange};

/// Appends the encoding of a state change to `out`.
pub fn encode(change: &StateChange<'_>, out: &mut Vec<u8>) {
    let mut writer = StateChangeWriter(out);
    match change {
        StateChange::SegmentMounted { segment, client, at_ms } => {
            writer.head(match segment.locality {
                Some(_) => kind::MOUNTED_WITH_LOCALITY,
                None => kind::MOUNTED,
            });
            writer.id(segment.id);
            writer.text(&segment.name);
            writer.numbers([segment.base, segment.size]);
            for text in [&segment.te_endpoint, &segment.protocol, &segment.host_id] {
                writer.text(text);
            }
            writer.id(*client);
            writer.number(*at_ms);
            if let Some(locality) = &segment.locality {
                writer.code(locality.numa_node);
                writer.number(locality.hca_names.len() as u64);
                locality.hca_names.iter().for_each(|name| writer.text(name));
            }
        }
        StateChange::SegmentStatus { segment, status, until_ms } => {
            writer.head(kind::SEGMENT_STATUS);
            writer.id(*segment);
            writer.number(u64::from(status.0.cast_unsigned()));
            writer.option(*until_ms);
        }
        StateChange::SegmentUnmounted { segment, cause } => {
            writer.head(kind::UNMOUNTED);
            writer.id(*segment);
            writer.cause(&UNMOUNT_CAUSES, *cause);
        }
        StateChange::ClientSilent { client, at_ms } => writer.client(kind::CLIENT_SILENT, *client, *at_ms),
        StateChange::ClientRecovered { client, at_ms } => {
            writer.client(kind::CLIENT_RECOVERED, *client, *at_ms);
        }
        StateChange::ClientExpired { client } => {
            writer.head(kind::CLIENT_EXPIRED);
            writer.id(*client);
        }
        StateChange::ObjectStarted(object) => {
            writer.head(kind::STARTED);
            writer.object(object);
        }
        StateChange::ObjectStored { object, cause } => {
            writer.head(kind::STORED);
            writer.cause(&STORE_CAUSES, *cause);
            writer.object(object);
        }
        StateChange::DiskMounted { client } => {
            writer.head(kind::DISK_MOUNTED);
            writer.id(*client);
        }
        StateChange::DiskUnmounted { client } => {
            writer.head(kind::DISK_UNMOUNTED);
            writer.id(*client);
        }
        StateChange::Removed { tenant, key, group, tiers, cause } => {
            writer.head(kind::REMOVED);
            writer.text(tenant);
            writer.text(key);
            writer.optional_text(group.as_deref());
            writer.flag(tiers.memory);
            writer.flag(tiers.disk);
            writer.cause(&REMOVE_CAUSES, *cause);
        }
        StateChange::RangeQuarantined { segment, offset, size, until_ms } => {
            writer.head(kind::QUARANTINED);
            writer.id(*segment);
            writer.numbers([*offset, *size, *until_ms]);
        }
        StateChange::RangeReleased { segment, offset } => {
            writer.head(kind::RELEASED);
            writer.id(*segment);
            writer.number(*offset);
        }
        StateChange::TenantQuota { tenant, requested } => {
            writer.head(kind::QUOTA);
            writer.text(tenant);
            writer.option(*requested);
        }
        StateChange::ReturnTimes { counts } => {
            writer.head(kind::RETURN_TIMES);
            writer.bytes(counts);
        }
        StateChange::TransferStarted(_)
        | StateChange::TransferEnded { .. }
        | StateChange::Task(_)
        | StateChange::DrainJob(_)
        | StateChange::DrainMoveStarted { .. }
        | StateChange::DrainMoveEnded { .. } => tasks::write(&mut writer, change),
    }
}

pub(super) struct StateChangeWriter<'a>(&'a mut Vec<u8>);

impl StateChangeWriter<'_> {
    pub(super) fn head(&mut self, kind: u8) {
        self.0.extend([VERSION, kind]);
    }

    pub(super) fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    pub(super) fn numbers<const N: usize>(&mut self, numbers: [u64; N]) {
        numbers.into_iter().for_each(|number| self.number(number));
    }

    fn option(&mut self, number: Option<u64>) {
        self.flag(number.is_some());
        if let Some(number) = number {
            self.number(number);
        }
    }

    pub(super) fn id(&mut self, id: Uuid) {
        self.0.extend(id.first.to_le_bytes());
        self.0.extend(id.second.to_le_bytes());
    }

    pub(super) fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend(bytes);
    }

    fn flag(&mut self, flag: bool) {
        self.0.push(u8::from(flag));
    }

    fn optional_text(&mut self, text: Option<&str>) {
        self.flag(text.is_some());
        if let Some(text) = text {
            self.text(text);
        }
    }

    fn cause<T: PartialEq>(&mut self, all: &[T], cause: T) {
        let index = all.iter().position(|candidate| *candidate == cause).unwrap_or(all.len());
        self.number(index as u64);
    }

    fn client(&mut self, kind: u8, client: Uuid, at_ms: u64) {
        self.head(kind);
        self.id(client);
        self.number(at_ms);
    }

    pub(super) fn code(&mut self, code: i32) {
        self.number(u64::from(code.cast_unsigned()));
    }

    pub(super) fn locations(&mut self, locations: &[ReplicaLocation]) {
        self.number(locations.len() as u64);
        for location in locations {
            self.number(location.replica);
            self.id(location.segment);
            self.number(location.offset);
        }
    }

    fn object(&mut self, object: &ObjectState<'_>) {
        self.text(&object.tenant);
        self.text(&object.key);
        self.number(object.size);
        self.id(object.client);
        self.locations(&object.locations);
        self.flag(object.disk_copy.is_some());
        if let Some(copy) = &object.disk_copy {
            self.number(copy.replica);
            self.id(copy.client);
            self.number(copy.size);
            self.text(&copy.endpoint);
        }
        self.option(object.checksum);
        self.flag(object.hard_pin);
        self.option(object.soft_pin_until_ms);
        self.optional_text(object.group.as_deref());
        self.number(object.since_ms);
    }
}
