//! Traces of reconciliations: the plan, and each write with its reason.

use kube::Error;
use moongate_telemetry::{SpanHandle, SpanKind, TraceId, Tracer, attribute_names};
use tokio::time::Instant;
use tracing::field::DisplayValue;

use crate::ResourceKind;
use crate::plan::{PlanStep, WriteAction};
use crate::resource_cache::ObservedResource;

/// Span of a reconciliation with steps or errors.
pub(crate) struct ReconcileSpan<'a> {
    root: SpanHandle,
    traces: &'a Tracer,
    since: Instant,
}

impl<'a> ReconcileSpan<'a> {
    /// Starts a trace after planning; the reconciliation started at `since`.
    pub(crate) fn planned(traces: &'a Tracer, live: &ObservedResource, since: Instant, steps: usize) -> Self {
        let mut root = traces.internal_span(format!("reconcile {}", live.key.kind.name()), since);
        if root.is_recording() {
            root.child_at("plan", SpanKind::Internal, since, || ()).end();
            root.set("k8s.namespace.name", live.key.namespace.clone());
            root.set("moongate.kind", live.key.kind.name());
            root.set("moongate.name", live.key.name.clone());
            let group = live
                .group
                .clone()
                .or_else(|| (live.key.kind == ResourceKind::Group).then(|| live.key.name.clone()));
            if let Some(group) = group {
                root.set("moongate.group", group);
            }
            root.set("moongate.steps", steps);
        }
        Self { root, traces, since }
    }

    pub(crate) fn trace_id(&self) -> Option<DisplayValue<TraceId>> {
        self.root.trace_id().map(tracing::field::display)
    }

    /// Starts the span of one write.
    pub(crate) fn write(&self, step: &PlanStep) -> WriteSpan {
        let mut span = self.root.child(verb(&step.action), SpanKind::Client);
        if span.is_recording() {
            let (kind, name) = target(&step.action);
            span.set("moongate.kind", kind);
            span.set("moongate.name", name.to_owned());
            span.set("moongate.reason", step.reason.clone());
            span.set("moongate.status", matches!(step.action, WriteAction::Patch { status: true, .. }));
        }
        WriteSpan(span)
    }

    /// Records that the object's spec is invalid.
    pub(crate) fn record_plan_error(mut self, error: &dyn std::fmt::Display) {
        self.root.set(attribute_names::ERROR_TYPE, "invalid_spec");
        self.root.error(error.to_string());
        self.root.force_export("error");
    }

    /// Records a rejected write, which ends the reconciliation. Conflicts alone do not export the trace.
    pub(crate) fn record_write_error(mut self, error: &Error) {
        self.root.set(attribute_names::ERROR_TYPE, reason(error));
        self.root.error("a write was rejected");
        if !matches!(error, Error::Api(status) if status.code == 409) {
            self.root.force_export("error");
        }
    }

    /// Ends a reconciliation without errors.
    pub(crate) fn finish(mut self) {
        if self.since.elapsed() > self.traces.slow_threshold() {
            self.root.force_export("slow");
        }
    }
}

pub(crate) struct WriteSpan(SpanHandle);

impl WriteSpan {
    /// Ends the span with the result of the write.
    pub(crate) fn finish<T>(mut self, outcome: &Result<T, Error>) {
        if let Err(error) = outcome {
            self.0.set(attribute_names::ERROR_TYPE, reason(error));
            self.0.error(error.to_string());
        }
    }
}

fn reason(error: &Error) -> String {
    match error {
        Error::Api(status) if !status.reason.is_empty() => status.reason.clone(),
        Error::Api(status) => status.code.to_string(),
        _ => "unreachable".to_owned(),
    }
}

fn verb(action: &WriteAction) -> &'static str {
    match action {
        WriteAction::Apply(_) => "apply",
        WriteAction::Create(_) => "create",
        WriteAction::Replace { .. } => "replace",
        WriteAction::Patch { .. } => "patch",
        WriteAction::Delete { .. } | WriteAction::ForceDelete { .. } => "delete",
    }
}

fn target(action: &WriteAction) -> (&'static str, &str) {
    match action {
        WriteAction::Apply(manifest) | WriteAction::Create(manifest) => {
            (ResourceKind::from_manifest(manifest).map_or("", ResourceKind::name), manifest.name())
        }
        WriteAction::Replace { kind, name, .. }
        | WriteAction::Patch { kind, name, .. }
        | WriteAction::Delete { kind, name, .. } => (kind.name(), name),
        WriteAction::ForceDelete { name, .. } => (ResourceKind::Pod.name(), name),
    }
}
