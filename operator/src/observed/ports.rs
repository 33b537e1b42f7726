//! Ports that are chosen for pods: each once in the whole cluster, since pods may have their node's network.

use std::collections::{BTreeSet, HashMap};
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
    made: HashMap<(Key, String), (u16, Timestamp)>,
}

impl Promises {
    /// The object is gone.
    pub(super) fn end(&mut self, object: &Key) {
        self.made.retain(|(other, _), _| other != object);
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
        self.promises.made.retain(|_, (_, made)| after(*made, KEPT) > now);
        let key = (object.clone(), name.to_owned());
        if let Some((port, _)) = self.promises.made.get(&key) {
            return Ok(Some(*port));
        }
        let promised: BTreeSet<u16> = self.promises.made.values().map(|(port, _)| *port).collect();
        let is_taken = |port| self.index.has_port(port) || promised.contains(&port);
        let wanted = format!("{}/{}/{name}", object.namespace, object.name);
        let port = ports::choose(range.clone(), is_taken, &wanted);
        let port = port.ok_or(RenderError::NoPort { first: range.start, after: range.end })?;
        self.promises.made.insert(key, (port, now));
        Ok(Some(port))
    }
}
