//! One look at one object: read, plan, write.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Shared, ask};
use crate::Kind;
use crate::apply::Outcome;
use crate::events::News;
use crate::metrics::Ended;
use crate::observed::{Key, Live};
use crate::plan;
use crate::spans::LookSpan;

/// Takes keys from the queue until stopped. A write in progress is ended first.
pub(super) async fn work(shared: Arc<Shared>, stop: CancellationToken) {
    let mut listed = shared.listed.subscribe();
    tokio::select! {
        () = stop.cancelled() => return,
        all = listed.wait_for(|listed| listed.len() == Kind::ALL.len()) => if all.is_err() { return },
    }
    drop(listed);
    loop {
        let key = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            key = shared.queue.next() => key,
        };
        shared.metrics.queued(shared.queue.waiting());
        let begun = Instant::now();
        // What is gone by now is not looked at.
        let live = shared.observed.lock().get(&key);
        let mut is_done = true;
        if let Some(live) = live {
            let ended = reconcile(&shared, &live, &stop).await;
            shared.metrics.reconciled(key.kind, ended, begun.elapsed());
            is_done = ended == Ended::Done;
        }
        shared.queue.done(&key, is_done);
    }
}

async fn reconcile(shared: &Arc<Shared>, live: &Arc<Live>, stop: &CancellationToken) -> Ended {
    let key = &live.key;
    let begun = Instant::now();
    let plan = plan::observed(&shared.observed, key, shared.gang, Timestamp::now());
    shared.metrics.planned(key.kind, begun.elapsed());
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => {
            tracing::warn!(kind = key.kind.name(), namespace = key.namespace, name = key.name, %error, "no plan");
            shared.teller.tell(live, [News::warning("InvalidSpec", error.to_string())]);
            LookSpan::planned(&shared.traces, live, begun, 0).unplanned(&error);
            return Ended::Unplanned;
        }
    };
    if let Some(at) = plan.again_at {
        let wait = Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
        shared.queue.push_at(Instant::now() + wait, key.clone());
    }
    ask::ask(shared, key, plan.asks);
    if plan.steps.is_empty() {
        return Ended::Done;
    }
    let span = LookSpan::planned(&shared.traces, live, begun, plan.steps.len());
    for step in &plan.steps {
        if stop.is_cancelled() {
            return Ended::Done;
        }
        tracing::debug!(kind = key.kind.name(), name = key.name, reason = step.reason, action = ?step.action, "step");
        let writing = span.write(step);
        let outcome = shared.writer.write(&key.namespace, &step.action).await;
        writing.ended(&outcome);
        match outcome {
            Ok(outcome) => {
                shared.teller.tell(live, News::of(step, || live.read().unwrap_or_default()));
                take(shared, outcome, &key.namespace);
            }
            Err(error) => {
                let reason = &step.reason;
                let trace_id = span.trace_id();
                tracing::info!(kind = key.kind.name(), namespace = key.namespace, name = key.name, reason, %error, trace_id, "a write was refused; the plan is made anew");
                shared.teller.tell(live, News::of_failure(step, &error));
                span.refused(&error);
                return Ended::Failed;
            }
        }
    }
    span.done();
    Ended::Done
}

fn take(shared: &Shared, outcome: Outcome, namespace: &str) {
    let concerns = {
        let mut observed = shared.observed.lock();
        match outcome {
            Outcome::Is(kind, object) => observed.take(kind, *object),
            Outcome::Gone(kind, name, uid) => {
                let key = Key { kind, namespace: namespace.to_owned(), name };
                observed.lose(&key, &uid)
            }
            Outcome::Unknown => Vec::new(),
        }
    };
    for key in concerns {
        shared.queue.push(key);
    }
}
