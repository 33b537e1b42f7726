//! Port allocation: each port once in the cluster, since pods may use the host network.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::ObjectMeta;
use moongate_render::{RenderError, ports};

use super::ResourceKey;
use crate::ResourceKind;
use crate::time::add_duration;

/// A reserved port is written at once or never.
const RESERVATION_TTL: Duration = Duration::from_secs(60);

/// A port that a plan chose for an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PortChoice {
    pub object: ResourceKey,
    /// The object's annotation that will store the port.
    pub annotation: String,
    pub port: u16,
}

/// The port range, the ports that objects have, and those reserved for objects whose annotation has not been observed yet.
/// Reservations need not survive a failover: a reserved port is unused until it is written.
///
/// The cache and its snapshots share the table until the cache changes it.
#[derive(Debug, Clone, Default)]
pub struct PortTable {
    /// Ports to allocate; `None` if allocation is off.
    range: Option<Range<u16>>,
    /// Number of objects that have each port.
    allocated: BTreeMap<u16, usize>,
    reservations: BTreeMap<PortReservationKey, (u16, Timestamp)>,
    /// Reservations by age, oldest first, including released ones.
    order: VecDeque<(Timestamp, PortReservationKey)>,
    reserved: HashSet<u16>,
}

/// An object, and the annotation that will store the port.
type PortReservationKey = (ResourceKey, String);

impl PortTable {
    pub(super) fn new(range: Option<Range<u16>>) -> Self {
        Self { range, ..Self::default() }
    }

    /// The port that is reserved for the annotation of an object.
    #[must_use]
    pub fn reservation(&self, object: &ResourceKey, annotation: &str) -> Option<u16> {
        self.reservations.get(&(object.clone(), annotation.to_owned())).map(|(port, _)| *port)
    }

    /// A port for the annotation of an object that is neither in use nor excluded by the caller. `None` if allocation is off.
    ///
    /// # Errors
    /// [`RenderError::NoPort`].
    pub fn find_free(
        &self,
        object: &ResourceKey,
        annotation: &str,
        is_excluded: impl Fn(u16) -> bool,
    ) -> Result<Option<u16>, RenderError> {
        let Some(range) = self.range.clone() else { return Ok(None) };
        let wanted = format!("{}/{}/{annotation}", object.namespace, object.name);
        let port = ports::allocate(range.clone(), |port| self.is_taken(port) || is_excluded(port), &wanted);
        port.map(Some).ok_or(RenderError::NoPort { first: range.start, after: range.end })
    }

    fn is_taken(&self, port: u16) -> bool {
        self.allocated.contains_key(&port) || self.reserved.contains(&port)
    }

    /// Records that an object has other ports than before.
    pub(super) fn replace(table: &mut Arc<Self>, before: &[u16], after: &[u16]) {
        if before == after {
            return;
        }
        let allocated = &mut Arc::make_mut(table).allocated;
        for port in after {
            *allocated.entry(*port).or_default() += 1;
        }
        for port in before {
            if let Some(objects) = allocated.get_mut(port) {
                *objects -= 1;
                if *objects == 0 {
                    allocated.remove(port);
                }
            }
        }
    }

    /// Reserves all of these ports, or none if one of them is taken. Returns whether they are reserved.
    pub(super) fn reserve_all(&mut self, choices: &[PortChoice], now: Timestamp) -> bool {
        let is_free = |choice: &PortChoice| {
            !self.is_taken(choice.port) && self.reservation(&choice.object, &choice.annotation).is_none()
        };
        if !choices.iter().all(is_free) {
            return false;
        }
        for PortChoice { object, annotation, port } in choices {
            let key = (object.clone(), annotation.clone());
            self.order.push_back((now, key.clone()));
            self.reservations.insert(key, (*port, now));
            self.reserved.insert(*port);
        }
        true
    }

    /// Releases the reservations of a deleted object.
    pub(super) fn release_object(table: &mut Arc<Self>, object: &ResourceKey) {
        let first = (object.clone(), String::new());
        let object_keys = table.reservations.range(first..).map(|(key, _)| key);
        let object_keys: Vec<PortReservationKey> =
            object_keys.take_while(|(other, _)| other == object).cloned().collect();
        if !object_keys.is_empty() {
            let table = Arc::make_mut(table);
            object_keys.iter().for_each(|key| table.release(key));
        }
    }

    /// Releases reservations that have not been observed in time.
    pub(super) fn expire(table: &mut Arc<Self>, now: Timestamp) {
        let is_over = |reserved_at: Timestamp| add_duration(reserved_at, RESERVATION_TTL) <= now;
        if !table.order.front().is_some_and(|(oldest, _)| is_over(*oldest)) {
            return;
        }
        let table = Arc::make_mut(table);
        while let Some((reserved_at, key)) =
            table.order.pop_front_if(|(reserved_at, _)| is_over(*reserved_at))
        {
            if table.reservations.get(&key).is_some_and(|(_, since)| *since == reserved_at) {
                table.release(&key);
            }
        }
    }

    fn release(&mut self, key: &PortReservationKey) {
        if let Some((port, _)) = self.reservations.remove(key) {
            self.reserved.remove(&port);
        }
    }
}

/// Ports that an object has allocated: numbers in annotations without a prefix, `<component or pod>.<name>`.
pub(super) fn allocated_ports(kind: ResourceKind, metadata: &ObjectMeta) -> Vec<u16> {
    if !matches!(kind, ResourceKind::Set | ResourceKind::Instance) {
        return Vec::new();
    }
    let annotations = metadata.annotations.iter().flatten();
    let object_keys = annotations.filter(|(key, _)| key.contains('.') && !key.contains('/'));
    object_keys.filter_map(|(_, value)| value.parse().ok()).collect()
}
