//! Reconciliation of one object: read, plan, write.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Error;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{ControllerContext, hook_client, stalled};
use crate::events::EventRecord;
use crate::metrics::ReconcileOutcome;
use crate::plan::{self, PlanError, PlanStep, ReconcilePlan, plan_for};
use crate::resource_cache::{ObservedResource, ResourceKey};
use crate::resource_writer::refusal;
use crate::spans::ReconcileSpan;
use crate::status;

/// Plans of one reconciliation. A worker loses its ports to another one rarely: each plan sees the reservations made before it.
const MAX_PLAN_ATTEMPTS: u32 = 8;

/// Takes keys from the queue until stopped. A write in progress is finished first.
pub(super) async fn run_worker(shared: Arc<ControllerContext>, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => return,
        is_listed = shared.cluster.wait_until_listed() => if !is_listed { return },
    }
    loop {
        let key = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            key = shared.cluster.next() => key,
        };
        shared.metrics.set_queued(shared.cluster.ready_count());
        let started = Instant::now();
        // Deleted objects are skipped.
        let live = shared.cluster.get(&key);
        let mut is_done = true;
        if let Some(live) = live {
            let outcome = reconcile(&shared, &live, &stop).await;
            shared.metrics.observe_reconcile(key.kind, outcome, started.elapsed());
            is_done = outcome == ReconcileOutcome::Done;
        }
        shared.cluster.done(&key, is_done);
    }
}

async fn reconcile(
    shared: &Arc<ControllerContext>,
    live: &Arc<ObservedResource>,
    stop: &CancellationToken,
) -> ReconcileOutcome {
    let key = &live.key;
    let started = Instant::now();
    let plan = plan(shared, key);
    shared.metrics.observe_plan(key.kind, started.elapsed());
    let plan = match plan {
        Ok(Some(plan)) => plan,
        Ok(None) => {
            tracing::warn!(
                kind = key.kind.name(),
                namespace = key.namespace,
                name = key.name,
                attempts = MAX_PLAN_ATTEMPTS,
                "other workers took the chosen ports; retrying later"
            );
            return ReconcileOutcome::Failed;
        }
        Err(error) => {
            let (reason, text) = (plan::condition_reason(&error), error.to_string());
            if stalled::report(shared, key, (reason, &text)).await {
                log_unplanned(key, reason, &text);
            }
            shared.event_recorder.record(live, [EventRecord::warning(reason, text)]);
            ReconcileSpan::planned(&shared.traces, live, started, 0).record_plan_error(&error);
            return ReconcileOutcome::InvalidSpec;
        }
    };
    if let Some(at) = plan.requeue_at {
        let wait = Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
        shared.cluster.schedule(Instant::now() + wait, key.clone());
    }
    hook_client::spawn_calls(shared, key, plan.hook_calls);
    if plan.steps.is_empty() {
        return ReconcileOutcome::Done;
    }
    let span = ReconcileSpan::planned(&shared.traces, live, started, plan.steps.len());
    for step in &plan.steps {
        if stop.is_cancelled() {
            return ReconcileOutcome::Done;
        }
        tracing::debug!(kind = key.kind.name(), name = key.name, reason = step.reason, action = ?step.action, "step");
        let write_span = span.write(step);
        let outcome = shared.writer.write(&key.namespace, &step.action).await;
        write_span.finish(&outcome);
        match outcome {
            Ok(change) => {
                record_events(shared, live, step);
                if let Some(action) = plan::requested_action(step) {
                    shared.metrics.count_fault_action(action.label());
                }
                if let Some(change) = change {
                    shared.cluster.apply(change);
                }
            }
            Err(error) => {
                report_failure(shared, key, step, &error, span.trace_id()).await;
                shared.event_recorder.record(live, EventRecord::for_failure(step, &error));
                span.record_write_error(&error);
                return ReconcileOutcome::Failed;
            }
        }
    }
    span.finish();
    if plan.is_truncated {
        shared.cluster.schedule(Instant::now(), key.clone());
    }
    ReconcileOutcome::Done
}

/// Reports a failed write: in the object's status if the API server refused it, and in the log. A refusal that the status already
/// reports is not logged again.
async fn report_failure(
    shared: &ControllerContext,
    key: &ResourceKey,
    step: &PlanStep,
    error: &Error,
    trace_id: Option<impl tracing::Value>,
) {
    let (kind, namespace, name, reason) = (key.kind.name(), &key.namespace, &key.name, &step.reason);
    match refusal(error) {
        Some(message) => {
            let text = format!("{reason}: {message}");
            if stalled::report(shared, key, (status::WRITE_REFUSED, &text)).await {
                tracing::warn!(kind, namespace, name, reason, %error, trace_id, "write refused; retrying");
            }
        }
        None => {
            tracing::info!(kind, namespace, name, reason, %error, trace_id, "write rejected; planning again");
        }
    }
}

/// Records the events of a completed step. A spec that has just been found unplannable is logged as well: once, since its event is
/// derived from a change of the status.
fn record_events(shared: &ControllerContext, live: &ObservedResource, step: &PlanStep) {
    let records = EventRecord::for_step(step, || live.read().unwrap_or_default());
    for record in records.iter().filter(|record| record.is_of_spec()) {
        log_unplanned(&live.key, &record.reason, &record.note);
    }
    shared.event_recorder.record(live, records);
}

fn log_unplanned(key: &ResourceKey, reason: &str, error: &str) {
    tracing::warn!(
        kind = key.kind.name(),
        namespace = key.namespace,
        name = key.name,
        reason,
        error,
        "invalid spec, not reconciled"
    );
}

/// Plans from a snapshot, and reserves the ports that the plan chose. Plans again if another worker has taken one of them
/// meanwhile; `None` if that happened [`MAX_PLAN_ATTEMPTS`] times.
fn plan(shared: &ControllerContext, key: &ResourceKey) -> Result<Option<ReconcilePlan>, PlanError> {
    for _ in 0..MAX_PLAN_ATTEMPTS {
        let now = Timestamp::now();
        let Some(snapshot) = shared.cluster.snapshot(key, now) else {
            return Ok(Some(ReconcilePlan::default()));
        };
        let plan = plan_for(&snapshot, shared.plan_settings, now)?;
        if shared.cluster.reserve_ports(&plan.port_choices, now) {
            return Ok(Some(plan));
        }
    }
    Ok(None)
}
