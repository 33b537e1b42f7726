//! Engines that register at run time; a registration expires with its lease.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::InstanceError;
use crate::listing::{ListedInstance, SourceUpdate};
use crate::static_file::StaticInstance;
use crate::topology::{InstanceId, InstanceSource, MAX_INSTANCES};

/// Longest lease, in seconds.
pub const MAX_LEASE: u32 = 3600;
/// Longest id and longest reason for unavailability, in bytes.
const MAX_TEXT: usize = 512;

/// A registration of an engine, sent by the engine or its sidecar. In JSON one flat object: the members of an instance as in the instances
/// file, and those below.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub struct EngineRegistration {
    /// The engine's role, address and declared facts.
    #[serde(flatten)]
    pub instance: StaticInstance,
    /// Seconds until the registration expires unless it is renewed; `None`: it does not expire.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_seconds: Option<u32>,
    /// Reason why no new request may be sent to the engine, such as "draining". Requests in progress continue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<String>,
    /// Any number; a changed number means that the engine has changed (a LoRA adapter was loaded) and must be probed again.
    #[serde(default)]
    pub revision: u64,
}

/// The result of a registration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistrationResult {
    /// Id of the instance: the given one, else the URL.
    pub id: InstanceId,
    /// Whether the instance was registered with another revision before.
    pub revised: bool,
}

/// Why a registration was rejected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineRegistryError {
    /// The instance's description is invalid.
    #[error(transparent)]
    Instance(#[from] InstanceError),
    /// A text that is too long or contains control characters.
    #[error("`{0}` is longer than {MAX_TEXT} bytes or has a control character; shorten it")]
    Text(&'static str),
    /// The lease is out of range.
    #[error(
        "`lease_seconds` is {0}; set 1 to {MAX_LEASE}, or omit it for a registration that does not expire"
    )]
    Lease(u32),
    /// The number of registrations has reached its limit.
    #[error("{MAX_INSTANCES} instances are registered, which is the limit; remove others first")]
    Full,
}

/// Registered instances. Clones share the same registry.
#[derive(Debug, Clone, Default)]
pub struct EngineRegistry(Arc<EngineRegistryState>);

#[derive(Debug, Default)]
struct EngineRegistryState {
    leases: Mutex<RegistrationLeases>,
    changed: Notify,
}

impl EngineRegistry {
    /// Adds or renews a registration. The instance is listed asynchronously.
    ///
    /// # Errors
    /// [`EngineRegistryError`]; an earlier registration under the same id then remains.
    pub fn register(
        &self,
        registration: &EngineRegistration,
    ) -> Result<RegistrationResult, EngineRegistryError> {
        let registered = self.0.leases.lock().grant(registration, Instant::now())?;
        self.0.changed.notify_one();
        Ok(registered)
    }

    /// Removes an instance; returns whether it was registered.
    #[must_use]
    pub fn remove(&self, id: &InstanceId) -> bool {
        let removed = self.0.leases.lock().by_id.remove(id).is_some();
        self.0.changed.notify_one();
        removed
    }

    /// Sends the new list after every change and every expiry of a lease.
    pub(crate) async fn run(self, slot: usize, out: mpsc::Sender<SourceUpdate>, stop: CancellationToken) {
        let mut sent = Vec::new();
        loop {
            let (instances, next_expiry) = self.0.leases.lock().current(Instant::now());
            if instances != sent {
                sent.clone_from(&instances);
                if out.send(SourceUpdate::of_engines(slot, instances)).await.is_err() {
                    return;
                }
            }
            let expired = async {
                match next_expiry {
                    Some(expiry) => tokio::time::sleep_until(expiry).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = self.0.changed.notified() => {}
                () = expired => {}
            }
        }
    }
}

/// The leases by id. Pure: callers pass the time.
#[derive(Debug, Default)]
struct RegistrationLeases {
    by_id: BTreeMap<InstanceId, RegistrationLease>,
}

#[derive(Debug)]
struct RegistrationLease {
    listed: ListedInstance,
    revision: u64,
    /// `None`: the registration does not expire.
    expires_at: Option<Instant>,
}

impl RegistrationLeases {
    fn grant(
        &mut self,
        registration: &EngineRegistration,
        now: Instant,
    ) -> Result<RegistrationResult, EngineRegistryError> {
        let listed = ListedInstance {
            source: InstanceSource::Registry,
            unavailable_reason: registration.held.clone(),
            ..registration.instance.listed()?
        };
        check_text("id", &listed.id.0)?;
        check_text("held", listed.unavailable_reason.as_deref().unwrap_or_default())?;
        let expires_at = match registration.lease_seconds {
            None => None,
            Some(seconds @ 1..=MAX_LEASE) => Some(now + Duration::from_secs(seconds.into())),
            Some(seconds) => return Err(EngineRegistryError::Lease(seconds)),
        };
        if self.by_id.len() >= MAX_INSTANCES && !self.by_id.contains_key(&listed.id) {
            return Err(EngineRegistryError::Full);
        }
        let (id, revision) = (listed.id.clone(), registration.revision);
        let before = self.by_id.insert(id.clone(), RegistrationLease { listed, revision, expires_at });
        Ok(RegistrationResult { id, revised: before.is_some_and(|before| before.revision != revision) })
    }

    /// Removes expired leases; returns the remaining instances and the time of the next expiry.
    fn current(&mut self, now: Instant) -> (Vec<ListedInstance>, Option<Instant>) {
        self.by_id.retain(|id, lease| {
            let is_expired = lease.expires_at.is_some_and(|expires_at| expires_at <= now);
            if is_expired {
                tracing::warn!(%id, "registration lease expired; engine removed");
            }
            !is_expired
        });
        let listed = self.by_id.values().map(|lease| lease.listed.clone()).collect();
        (listed, self.by_id.values().filter_map(|lease| lease.expires_at).min())
    }
}

fn check_text(member: &'static str, text: &str) -> Result<(), EngineRegistryError> {
    let is_valid = text.len() <= MAX_TEXT && !text.chars().any(char::is_control);
    is_valid.then_some(()).ok_or(EngineRegistryError::Text(member))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::EngineRole;

    fn registration(id: &str) -> EngineRegistration {
        let instance = StaticInstance {
            id: Some(id.to_owned()),
            ..StaticInstance::new(EngineRole::Plain, "http://a:1")
        };
        EngineRegistration { instance, lease_seconds: Some(10), held: None, revision: 0 }
    }

    #[test]
    fn only_registrations_with_a_lease_expire() {
        let (mut leases, now) = (RegistrationLeases::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        leases.grant(&registration("renewed"), now).unwrap();
        leases.grant(&registration("dead"), now).unwrap();
        leases.grant(&EngineRegistration { lease_seconds: None, ..registration("staying") }, now).unwrap();
        leases.grant(&registration("renewed"), at(5)).unwrap();
        assert_eq!(leases.current(at(9)).0.len(), 3);
        assert_eq!(leases.current(at(9)).1, Some(at(10)));
        let ids = |leases: &mut RegistrationLeases, now| -> Vec<String> {
            leases.current(now).0.iter().map(|listed| listed.id.to_string()).collect()
        };
        assert_eq!(ids(&mut leases, at(10)), ["renewed", "staying"]);
        assert_eq!(ids(&mut leases, at(3600)), ["staying"]);
        assert_eq!(leases.current(at(3600)).1, None);
    }

    #[test]
    fn a_new_revision_is_reported_once() {
        let (mut leases, now) = (RegistrationLeases::default(), Instant::now());
        let second = EngineRegistration { revision: 1, ..registration("a") };
        assert!(!leases.grant(&registration("a"), now).unwrap().revised, "its first registration");
        assert!(leases.grant(&second, now).unwrap().revised);
        assert!(!leases.grant(&second, now).unwrap().revised);
    }

    #[test]
    fn a_rejected_registration_changes_nothing() {
        let (mut leases, now) = (RegistrationLeases::default(), Instant::now());
        leases.grant(&registration("a"), now).unwrap();
        let mut wrong_url = registration("a");
        wrong_url.instance.url = "https://a:1/v1".to_owned();
        for (wrong, part) in [
            (wrong_url, "path"),
            (EngineRegistration { lease_seconds: Some(0), ..registration("a") }, "lease_seconds"),
            (EngineRegistration { lease_seconds: Some(3601), ..registration("a") }, "lease_seconds"),
            (EngineRegistration { held: Some("a\nb".to_owned()), ..registration("a") }, "held"),
            (registration(&"a".repeat(513)), "id"),
        ] {
            let error = leases.grant(&wrong, now).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert_eq!(leases.current(now).0[0].url, "http://a:1");
        for index in 1..MAX_INSTANCES {
            leases.grant(&registration(&index.to_string()), now).unwrap();
        }
        assert_eq!(leases.grant(&registration("one more"), now), Err(EngineRegistryError::Full));
        assert!(leases.grant(&registration("a"), now).is_ok(), "a renewal needs no free slot");
    }

    #[test]
    fn registrations_are_flat_objects_and_smg_names_are_accepted() {
        let text = r#"{"url":"http://a:1","worker_type":"regular","priority":1,"lease_seconds":5}"#;
        let read: EngineRegistration = serde_json::from_str(text).unwrap();
        assert_eq!((read.instance.role, read.lease_seconds), (EngineRole::Plain, Some(5)));
        let again = serde_json::to_string(&read).unwrap();
        assert_eq!(serde_json::from_str::<EngineRegistration>(&again).unwrap(), read, "{again}");
    }
}
