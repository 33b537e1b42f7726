//! Kubernetes events: changes of an object that its status does not record. Creations and progress emit no events; objects
//! and their conditions show them.

mod warmup;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client, Error};
use rbg_api::conversion::fold_mirrors;
use rbg_api::keys;
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::plan::{PlanStep, WriteAction};
use crate::resource_cache::ObservedResource;
use crate::resource_writer::refusal;
use crate::{OperatorMetrics, ResourceKind, status};

/// Events that wait to be written. Beyond that, events are dropped: nothing depends on them.
const MAX_PENDING: usize = 256;
/// Interval in which the same event is not repeated.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);
/// Number of recent events to keep for that.
const MAX_RECENT: usize = 4096;
/// Longest note that the API server accepts, in bytes.
const MAX_NOTE: usize = 1024;

/// Condition reasons that emit a warning.
const WARNINGS: [&str; 10] = [
    status::INVALID_SPEC,
    status::INCOMPATIBLE_GANG,
    status::LIMIT_EXCEEDED,
    "RestartPolicyTriggered",
    status::TIMED_OUT,
    status::CANNOT_PULL,
    status::NOT_PULLED,
    status::INSTANCE_FAULT,
    status::FAULT_BUDGET_EXHAUSTED,
    status::INVALID_POLICY,
];

/// An event about an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EventRecord {
    /// Whether its type is `Warning`.
    pub is_warning: bool,
    /// The reason, as one CamelCase word.
    pub reason: String,
    pub note: String,
}

impl EventRecord {
    fn normal(reason: &str, note: String) -> Self {
        Self { is_warning: false, reason: reason.to_owned(), note }
    }

    pub(crate) fn warning(reason: &str, note: String) -> Self {
        Self { is_warning: true, reason: reason.to_owned(), note }
    }

    /// Whether it reports a spec that cannot be planned.
    pub(crate) fn is_of_spec(&self) -> bool {
        let reasons = [status::INVALID_SPEC, status::LIMIT_EXCEEDED, status::INCOMPATIBLE_GANG];
        self.is_warning && reasons.contains(&self.reason.as_str())
    }

    fn template_conflict(role: &str) -> Self {
        let note = format!(
            "role {role}: its pattern's template and the role's `template` were edited to different templates; the \
             pattern's is used"
        );
        Self::warning("TemplateConflict", note)
    }

    /// Events for a completed step; `before` is the object whose plan contains the step.
    #[must_use]
    pub fn for_step(step: &PlanStep, before: impl FnOnce() -> Value) -> Vec<Self> {
        match &step.action {
            WriteAction::Delete { kind: ResourceKind::Revision, .. } => Vec::new(),
            WriteAction::Delete { kind: ResourceKind::Warmup, .. } => {
                vec![Self::normal("TTLExpired", step.reason.clone())]
            }
            WriteAction::Create(manifest)
                if ResourceKind::from_manifest(manifest) == Some(ResourceKind::WarmupPod) =>
            {
                vec![Self::normal("CreatedPod", step.reason.clone())]
            }
            WriteAction::Patch { kind: ResourceKind::Warmup, status: true, body, .. } => {
                warmup::event_records(&before(), body)
            }
            WriteAction::ForceDelete { name, .. } => {
                vec![Self::normal("Deleted", format!("Pod {name}: {}", step.reason))]
            }
            WriteAction::Delete { kind, name, .. } => {
                vec![Self::normal("Deleted", format!("{} {name}: {}", kind.name(), step.reason))]
            }
            WriteAction::Patch { kind: ResourceKind::Instance, status: false, body, .. }
                if body["metadata"]["annotations"][keys::LIFECYCLE_DRAIN] == "true" =>
            {
                vec![Self::normal("Draining", step.reason.clone())]
            }
            WriteAction::Patch { kind: ResourceKind::Pod, status: false, .. } => {
                vec![Self::normal("UpdatedInPlace", step.reason.clone())]
            }
            WriteAction::Replace { kind: ResourceKind::Group, .. } => {
                fold_mirrors(&mut before()).iter().map(|role| Self::template_conflict(role)).collect()
            }
            WriteAction::Patch { status: true, body, .. } => {
                let mut records: Vec<_> = warnings(body).collect();
                let before = before();
                let old: Vec<_> = warnings(&before).collect();
                records.retain(|record| !old.contains(record));
                records.dedup();
                records
            }
            _ => Vec::new(),
        }
    }

    /// Event for a write that the API server rejected. Conflicts and overload are transient and emit none.
    #[must_use]
    pub fn for_failure(step: &PlanStep, error: &Error) -> Option<Self> {
        let message = refusal(error)?;
        Some(Self::warning(status::WRITE_REFUSED, format!("{}: {message}", step.reason)))
    }
}

fn warnings(object: &Value) -> impl Iterator<Item = EventRecord> {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    conditions.filter_map(|condition| {
        let reason = condition["reason"].as_str().filter(|reason| WARNINGS.contains(reason))?;
        Some(EventRecord::warning(reason, condition["message"].as_str()?.to_owned()))
    })
}

#[derive(Debug, Clone)]
pub(crate) struct EventRecorder {
    pending: mpsc::Sender<(ObjectReference, EventRecord)>,
    metrics: Arc<OperatorMetrics>,
}

impl EventRecorder {
    /// A recorder, and the task that writes its events.
    pub(crate) fn new(client: Client, metrics: Arc<OperatorMetrics>) -> (Self, impl Future<Output = ()>) {
        let (waiting, recorded) = mpsc::channel(MAX_PENDING);
        (Self { pending: waiting, metrics }, write_events(client, recorded))
    }

    pub(crate) fn record(&self, of: &ObservedResource, records: impl IntoIterator<Item = EventRecord>) {
        for record in records {
            let object = ObjectReference {
                api_version: Some(of.key.kind.api_version().to_owned()),
                kind: Some(of.key.kind.name().to_owned()),
                namespace: Some(of.key.namespace.clone()),
                name: Some(of.key.name.clone()),
                uid: Some(of.uid.clone()),
                ..ObjectReference::default()
            };
            if self.pending.try_send((object, record)).is_err() {
                self.metrics.event_dropped();
            }
        }
    }
}

async fn write_events(client: Client, mut waiting: mpsc::Receiver<(ObjectReference, EventRecord)>) {
    let host = std::env::var("HOSTNAME").unwrap_or_else(|_| "moongate".to_owned());
    let mut recent = RecentEvents::default();
    while let Some((object, record)) = waiting.recv().await {
        if !recent.is_new(object.uid.as_deref().unwrap_or_default(), &record, Instant::now()) {
            continue;
        }
        let events: Api<Event> =
            Api::namespaced(client.clone(), object.namespace.as_deref().unwrap_or_default());
        if let Err(error) = events.create(&PostParams::default(), &event(object, record, &host)).await {
            tracing::debug!(%error, "cannot write an event");
        }
    }
}

fn event(object: ObjectReference, record: EventRecord, host: &str) -> Event {
    let mut note = record.note;
    note.truncate(note.floor_char_boundary(MAX_NOTE));
    let name = format!("{}.{:016x}", object.name.as_deref().unwrap_or_default(), fastrand::u64(..));
    Event {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: object.namespace.clone(),
            ..ObjectMeta::default()
        },
        action: Some("Reconcile".to_owned()),
        event_time: Some(MicroTime(Timestamp::now())),
        note: Some(note),
        reason: Some(record.reason),
        regarding: Some(object),
        reporting_controller: Some("moongate-operator".to_owned()),
        reporting_instance: Some(host.to_owned()),
        type_: Some(if record.is_warning { "Warning" } else { "Normal" }.to_owned()),
        ..Event::default()
    }
}

#[derive(Default)]
struct RecentEvents(HashMap<(String, EventRecord), Instant>);

impl RecentEvents {
    fn is_new(&mut self, uid: &str, record: &EventRecord, now: Instant) -> bool {
        let key = (uid.to_owned(), record.clone());
        let is_recent = |at: &Instant| now.duration_since(*at) < REPEAT_INTERVAL;
        if self.0.get(&key).is_some_and(is_recent) {
            return false;
        }
        if self.0.len() >= MAX_RECENT {
            self.0.retain(|_, at| is_recent(at));
        }
        if self.0.len() < MAX_RECENT {
            self.0.insert(key, now);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn step(action: WriteAction) -> PlanStep {
        PlanStep { action, reason: "because".to_owned() }
    }

    fn status(conditions: Value) -> Value {
        json!({ "status": { "conditions": conditions } })
    }

    fn patch(kind: ResourceKind, is_status: bool, body: Value) -> PlanStep {
        step(WriteAction::Patch { kind, name: "p".to_owned(), status: is_status, body })
    }

    #[test]
    fn deletions_and_restarts_emit_events() {
        let delete = |kind| step(WriteAction::Delete { kind, name: "p".to_owned(), uid: String::new() });
        let recorded = EventRecord::for_step(&delete(ResourceKind::Pod), || Value::Null);
        assert_eq!(recorded, [EventRecord::normal("Deleted", "Pod p: because".to_owned())]);
        assert_eq!(EventRecord::for_step(&delete(ResourceKind::Revision), || Value::Null), []);
        let recorded = EventRecord::for_step(&patch(ResourceKind::Pod, false, json!({})), || Value::Null);
        assert_eq!(recorded, [EventRecord::normal("UpdatedInPlace", "because".to_owned())]);
        let drains =
            |value: Value| json!({ "metadata": { "annotations": { keys::LIFECYCLE_DRAIN: value } } });
        let recorded = |value: Value| {
            EventRecord::for_step(&patch(ResourceKind::Instance, false, drains(value)), || Value::Null)
        };
        assert_eq!(recorded(json!("true")), [EventRecord::normal("Draining", "because".to_owned())]);
        assert_eq!(recorded(Value::Null), []);
    }

    #[test]
    fn a_warning_is_emitted_once_until_its_message_changes() {
        let invalid = |message: &str| json!({ "reason": "InvalidSpec", "message": message });
        let fine = json!({ "reason": "AllRolesReady", "message": "" });
        let recorded = |now: Value, before: Value| {
            let records =
                EventRecord::for_step(&patch(ResourceKind::Group, true, status(now)), || status(before));
            records.into_iter().map(|record| record.note).collect::<Vec<_>>()
        };
        assert_eq!(recorded(json!([invalid("a"), invalid("a")]), json!([fine])), ["a"]);
        assert_eq!(recorded(json!([invalid("a")]), json!([invalid("a")])), [""; 0]);
        assert_eq!(recorded(json!([invalid("b")]), json!([invalid("a")])), ["b"]);
        assert_eq!(recorded(json!([fine]), json!([invalid("a")])), [""; 0]);
    }

    #[test]
    fn different_edits_of_a_mirrored_template_emit_a_warning() {
        let role = |name: &str, image: &str, mirrored: &str| {
            json!({ "name": name, "mirroredTemplateHash": "0", "template": { "image": mirrored },
                "standalonePattern": { "template": { "image": image } } })
        };
        let before = json!({ "metadata": { "annotations": { rbg_api::conversion::ORIGIN: "v1alpha1" } },
            "spec": { "roles": [role("a", "i:1", "i:2"), role("b", "i:1", "i:1")] } });
        let replace =
            WriteAction::Replace { kind: ResourceKind::Group, name: "g".to_owned(), object: Value::Null };
        let recorded = EventRecord::for_step(&step(replace), || before);
        assert_eq!(recorded, [EventRecord::template_conflict("a")]);
    }

    #[test]
    fn only_permanent_rejections_emit_events() {
        let refused = |code| {
            let status = kube::core::Status::failure("quota", "Forbidden").with_code(code);
            EventRecord::for_failure(
                &patch(ResourceKind::Pod, true, json!({})),
                &Error::Api(Box::new(status)),
            )
        };
        assert_eq!(refused(403), Some(EventRecord::warning("WriteRefused", "because: quota".to_owned())));
        assert_eq!(refused(409), None);
        assert_eq!(refused(500), None);
    }

    #[test]
    fn an_event_is_repeated_only_after_the_interval() {
        let (mut recent, now) = (RecentEvents::default(), Instant::now());
        let record = EventRecord::warning("WriteRefused", "quota".to_owned());
        assert!(recent.is_new("a", &record, now));
        assert!(!recent.is_new("a", &record, now + REPEAT_INTERVAL / 2));
        assert!(recent.is_new("b", &record, now));
        assert!(recent.is_new("a", &record, now + REPEAT_INTERVAL));
        for uid in 0..2 * MAX_RECENT {
            assert!(recent.is_new(&format!("{uid}"), &record, now + REPEAT_INTERVAL));
        }
        assert!(recent.0.len() <= MAX_RECENT);
    }

    #[test]
    fn long_notes_are_truncated_at_a_character_boundary() {
        let record = EventRecord::warning("WriteRefused", "ä".repeat(MAX_NOTE));
        let event = event(ObjectReference::default(), record, "host");
        assert_eq!(event.note.unwrap().len(), MAX_NOTE);
    }
}
