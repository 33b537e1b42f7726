//! Ports that are chosen for pods: each once in the whole cluster, since pods may have their node's network.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::ObjectMeta;
use moongate_render::{RenderError, ports};

use super::{Key, Observed};
use crate::Kind;
use crate::plan::after;

/// A promise is written at once or never.
const KEPT: Duration = Duration::from_secs(60);

/// Ports that may be chosen, and those that were promised to an object that does not show them yet. Whoever takes over has
/// no need of them: promises that were not written were not used.
#[derive(Debug, Default)]
pub(super) struct Promises {
    range: Option<Range<u16>>,
    made: BTreeMap<Promise, (u16, Timestamp)>,
    /// The same, the oldest first, with those that were ended.
    order: VecDeque<(Timestamp, Promise)>,
    ports: HashSet<u16>,
}

/// An object, and the annotation in which it will keep the port.
type Promise = (Key, String);

impl Promises {
    fn make(&mut self, promise: Promise, port: u16, now: Timestamp) {
        self.order.push_back((now, promise.clone()));
        self.made.insert(promise, (port, now));
        self.ports.insert(port);
    }

    /// The object is gone.
    pub(super) fn end(&mut self, object: &Key) {
        let first = (object.clone(), String::new());
        let own = self.made.range(first..).map(|(promise, _)| promise);
        let own: Vec<Promise> = own.take_while(|(other, _)| other == object).cloned().collect();
        own.iter().for_each(|promise| self.take_back(promise));
    }

    fn end_old(&mut self, now: Timestamp) {
        while let Some((made, promise)) = self.order.pop_front_if(|(made, _)| after(*made, KEPT) <= now) {
            if self.made.get(&promise).is_some_and(|(_, since)| *since == made) {
                self.take_back(&promise);
            }
        }
    }

    fn take_back(&mut self, promise: &Promise) {
        if let Some((port, _)) = self.made.remove(promise) {
            self.ports.remove(&port);
        }
    }
}

/// Ports that an object has: they are numbers in annotations without a prefix, `<component or pod>.<name>`.
pub(super) fn of(kind: Kind, metadata: &ObjectMeta) -> Vec<u16> {
    if !matches!(kind, Kind::Set | Kind::Instance) {
        return Vec::new();
    }
    let annotations = metadata.annotations.iter().flatten();
    let own = annotations.filter(|(key, _)| key.contains('.') && !key.contains('/'));
    own.filter_map(|(_, value)| value.parse().ok()).collect()
}

impl Observed {
    /// Ports are chosen from this range; from none if no ports are to be chosen.
    #[must_use]
    pub fn with_ports(range: Option<Range<u16>>) -> Self {
        let promises = Promises { range, ..Promises::default() };
        Self { promises, ..Self::default() }
    }

    /// A port that no object has, for one that keeps it as the annotation `name`. The same question has the same answer for
    /// a while. `None` if no ports are to be chosen.
    ///
    /// # Errors
    /// [`RenderError::NoPort`].
    pub fn choose_port(
        &mut self,
        object: &Key,
        name: &str,
        now: Timestamp,
    ) -> Result<Option<u16>, RenderError> {
        let Some(range) = self.promises.range.clone() else { return Ok(None) };
        self.promises.end_old(now);
        let key = (object.clone(), name.to_owned());
        if let Some((port, _)) = self.promises.made.get(&key) {
            return Ok(Some(*port));
        }
        let is_taken = |port| self.index.has_port(port) || self.promises.ports.contains(&port);
        let wanted = format!("{}/{}/{name}", object.namespace, object.name);
        let port = ports::choose(range.clone(), is_taken, &wanted);
        let port = port.ok_or(RenderError::NoPort { first: range.start, after: range.end })?;
        self.promises.make(key, port, now);
        Ok(Some(port))
    }
}
