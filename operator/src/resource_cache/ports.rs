//! Port allocation: each port once in the cluster, since pods may use the host network.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::ObjectMeta;
use moongate_render::{RenderError, ports};

use super::{ResourceCache, ResourceKey};
use crate::ResourceKind;
use crate::time::add_duration;

/// A reserved port is written at once or never.
const RESERVATION_TTL: Duration = Duration::from_secs(60);

/// The port range, and ports reserved for objects whose annotation has not been observed yet. They need not survive a
/// failover: a reserved port is unused until it is written.
#[derive(Debug, Default)]
pub(super) struct PortReservations {
    range: Option<Range<u16>>,
    reserved: BTreeMap<PortReservationKey, (u16, Timestamp)>,
    /// Reservations by age, oldest first, including released ones.
    order: VecDeque<(Timestamp, PortReservationKey)>,
    ports: HashSet<u16>,
}

/// An object, and the annotation that will store the port.
type PortReservationKey = (ResourceKey, String);

impl PortReservations {
    fn reserve(&mut self, key: PortReservationKey, port: u16, now: Timestamp) {
        self.order.push_back((now, key.clone()));
        self.reserved.insert(key, (port, now));
        self.ports.insert(port);
    }

    /// Releases the reservations of a deleted object.
    pub(super) fn release_object(&mut self, object: &ResourceKey) {
        let first = (object.clone(), String::new());
        let object_keys = self.reserved.range(first..).map(|(key, _)| key);
        let object_keys: Vec<PortReservationKey> =
            object_keys.take_while(|(other, _)| other == object).cloned().collect();
        object_keys.iter().for_each(|key| self.release(key));
    }

    fn expire(&mut self, now: Timestamp) {
        while let Some((reserved_at, key)) =
            self.order.pop_front_if(|(reserved_at, _)| add_duration(*reserved_at, RESERVATION_TTL) <= now)
        {
            if self.reserved.get(&key).is_some_and(|(_, since)| *since == reserved_at) {
                self.release(&key);
            }
        }
    }

    fn release(&mut self, key: &PortReservationKey) {
        if let Some((port, _)) = self.reserved.remove(key) {
            self.ports.remove(&port);
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

impl ResourceCache {
    /// Creates a cache that allocates ports from this range; `None` turns allocation off.
    #[must_use]
    pub fn with_ports(range: Option<Range<u16>>) -> Self {
        let port_reservations = PortReservations { range, ..PortReservations::default() };
        Self { port_reservations, ..Self::default() }
    }

    /// Allocates a port that no object has, to be stored in the annotation `name`. Repeated calls return the same port for a
    /// while. `None` if allocation is off.
    ///
    /// # Errors
    /// [`RenderError::NoPort`].
    pub fn allocate_port(
        &mut self,
        object: &ResourceKey,
        name: &str,
        now: Timestamp,
    ) -> Result<Option<u16>, RenderError> {
        let Some(range) = self.port_reservations.range.clone() else { return Ok(None) };
        self.port_reservations.expire(now);
        let key = (object.clone(), name.to_owned());
        if let Some((port, _)) = self.port_reservations.reserved.get(&key) {
            return Ok(Some(*port));
        }
        let is_taken = |port| self.index.has_port(port) || self.port_reservations.ports.contains(&port);
        let wanted = format!("{}/{}/{name}", object.namespace, object.name);
        let port = ports::allocate(range.clone(), is_taken, &wanted);
        let port = port.ok_or(RenderError::NoPort { first: range.start, after: range.end })?;
        self.port_reservations.reserve(key, port, now);
        Ok(Some(port))
    }
}
