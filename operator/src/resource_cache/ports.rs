//! Ports that are chosen for pods: each once in the whole cluster, since pods may have their node's network.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::ObjectMeta;
use moongate_render::{RenderError, ports};

use super::{ResourceCache, ResourceKey};
use crate::ResourceKind;
use crate::plan::add_duration;

/// A promise is written at once or never.
const RESERVATION_TTL: Duration = Duration::from_secs(60);

/// Ports that may be chosen, and those that were promised to an object that does not show them yet. Whoever takes over has
/// no need of them: promises that were not written were not used.
#[derive(Debug, Default)]
pub(super) struct PortReservations {
    range: Option<Range<u16>>,
    reserved: BTreeMap<PortReservationKey, (u16, Timestamp)>,
    /// The same, the oldest first, with those that were ended.
    order: VecDeque<(Timestamp, PortReservationKey)>,
    ports: HashSet<u16>,
}

/// An object, and the annotation in which it will keep the port.
type PortReservationKey = (ResourceKey, String);

impl PortReservations {
    fn reserve(&mut self, promise: PortReservationKey, port: u16, now: Timestamp) {
        self.order.push_back((now, promise.clone()));
        self.reserved.insert(promise, (port, now));
        self.ports.insert(port);
    }

    /// The object is gone.
    pub(super) fn release_object(&mut self, object: &ResourceKey) {
        let first = (object.clone(), String::new());
        let own = self.reserved.range(first..).map(|(promise, _)| promise);
        let own: Vec<PortReservationKey> = own.take_while(|(other, _)| other == object).cloned().collect();
        own.iter().for_each(|promise| self.release(promise));
    }

    fn expire(&mut self, now: Timestamp) {
        while let Some((made, promise)) =
            self.order.pop_front_if(|(made, _)| add_duration(*made, RESERVATION_TTL) <= now)
        {
            if self.reserved.get(&promise).is_some_and(|(_, since)| *since == made) {
                self.release(&promise);
            }
        }
    }

    fn release(&mut self, promise: &PortReservationKey) {
        if let Some((port, _)) = self.reserved.remove(promise) {
            self.ports.remove(&port);
        }
    }
}

/// Ports that an object has: they are numbers in annotations without a prefix, `<component or pod>.<name>`.
pub(super) fn allocated_ports(kind: ResourceKind, metadata: &ObjectMeta) -> Vec<u16> {
    if !matches!(kind, ResourceKind::Set | ResourceKind::Instance) {
        return Vec::new();
    }
    let annotations = metadata.annotations.iter().flatten();
    let own = annotations.filter(|(key, _)| key.contains('.') && !key.contains('/'));
    own.filter_map(|(_, value)| value.parse().ok()).collect()
}

impl ResourceCache {
    /// Ports are chosen from this range; from none if no ports are to be chosen.
    #[must_use]
    pub fn with_ports(range: Option<Range<u16>>) -> Self {
        let port_reservations = PortReservations { range, ..PortReservations::default() };
        Self { port_reservations, ..Self::default() }
    }

    /// A port that no object has, for one that keeps it as the annotation `name`. The same question has the same answer for
    /// a while. `None` if no ports are to be chosen.
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
