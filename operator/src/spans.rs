//! The trace of one look at an object: the plan, and each write with its reason.

use kube::Error;
use moongate_telemetry::{SpanHandle, SpanKind, TraceId, Traces, names};
use tokio::time::Instant;
use tracing::field::DisplayValue;

use crate::Kind;
use crate::observed::Live;
use crate::plan::{Action, Step};

/// Span of a look at an object that has led to something.
pub(crate) struct LookSpan<'a> {
    root: SpanHandle,
    traces: &'a Traces,
    since: Instant,
}

impl<'a> LookSpan<'a> {
    /// Begins a trace for a plan that has just been made, or could not be; the look began at `since`.
    pub(crate) fn planned(traces: &'a Traces, live: &Live, since: Instant, steps: usize) -> Self {
        let mut root = traces.work_span(format!("reconcile {}", live.key.kind.name()), since);
        if root.is_recording() {
            root.child_at("plan", SpanKind::Internal, since, || ()).end();
            root.set("k8s.namespace.name", live.key.namespace.clone());
            root.set("moongate.kind", live.key.kind.name());
            root.set("moongate.name", live.key.name.clone());
            let group =
                live.group.clone().or_else(|| (live.key.kind == Kind::Group).then(|| live.key.name.clone()));
            if let Some(group) = group {
                root.set("moongate.group", group);
            }
            root.set("moongate.steps", steps);
        }
        Self { root, traces, since }
    }

    /// Identity of the trace, for logs.
    pub(crate) fn trace_id(&self) -> Option<DisplayValue<TraceId>> {
        self.root.trace_id().map(tracing::field::display)
    }

    /// Span of one write.
    pub(crate) fn write(&self, step: &Step) -> WriteSpan {
        let mut span = self.root.child(verb(&step.action), SpanKind::Client);
        if span.is_recording() {
            let (kind, name) = target(&step.action);
            span.set("moongate.kind", kind);
            span.set("moongate.name", name.to_owned());
            span.set("moongate.reason", step.reason.clone());
            span.set("moongate.status", matches!(step.action, Action::Patch { status: true, .. }));
        }
        WriteSpan(span)
    }

    /// The object cannot be planned for.
    pub(crate) fn unplanned(mut self, error: &dyn std::fmt::Display) {
        self.root.set(names::ERROR_TYPE, "unplanned");
        self.root.error(error.to_string());
        self.root.keep("error");
    }

    /// A write was refused, which ended the look. That somebody else was faster is no error worth a trace.
    pub(crate) fn refused(mut self, error: &Error) {
        self.root.set(names::ERROR_TYPE, reason(error));
        self.root.error("a write was refused");
        if !matches!(error, Error::Api(status) if status.code == 409) {
            self.root.keep("error");
        }
    }

    /// All was done that could be.
    pub(crate) fn done(mut self) {
        if self.since.elapsed() > self.traces.slow() {
            self.root.keep("slow");
        }
    }
}

/// Span of one write.
pub(crate) struct WriteSpan(SpanHandle);

impl WriteSpan {
    /// Notes how it ended.
    pub(crate) fn ended<T>(mut self, outcome: &Result<T, Error>) {
        if let Err(error) = outcome {
            self.0.set(names::ERROR_TYPE, reason(error));
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

fn verb(action: &Action) -> &'static str {
    match action {
        Action::Apply(_) => "apply",
        Action::Create(_) => "create",
        Action::Replace { .. } => "replace",
        Action::Patch { .. } => "patch",
        Action::Delete { .. } => "delete",
    }
}

fn target(action: &Action) -> (&'static str, &str) {
    match action {
        Action::Apply(manifest) | Action::Create(manifest) => {
            (Kind::of(manifest).map_or("", Kind::name), manifest.name())
        }
        Action::Replace { kind, name, .. }
        | Action::Patch { kind, name, .. }
        | Action::Delete { kind, name, .. } => (kind.name(), name),
    }
}
