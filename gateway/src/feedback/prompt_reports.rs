//! Reports to the store's master whether the prompts of finished requests will be used again.

use std::fmt::Debug;
use std::time::Duration;

use futures_util::future::join_all;
use mooncake_wire::admin::{DescribePromptsRequest, DescribedPrompt, ReturnHint, TENANT_BUCKETS};
use moongate_master_client::admin::{AdminClient, AdminError};
use moongate_runtime::metrics::MetricsRegistry;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Maximum number of reports that wait for the master. They are hints, so more are dropped.
const MAX_WAITING: usize = 1_024;
/// Maximum numbers of prompts and of objects in one request to the master, which accepts 131,072 objects.
const MAX_PROMPTS: usize = 64;
const MAX_OBJECTS: usize = 65_536;
/// Pause after the master failed.
const FAILURE_PAUSE: Duration = Duration::from_secs(1);
/// Pause after the master did not have the extension: it may be replaced by one that does.
const UNSUPPORTED_PAUSE: Duration = Duration::from_secs(60);

/// A hint whether a request's prompt will be used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PromptHint {
    pub(crate) returns: ReturnHint,
    pub(crate) source: HintSource,
}

/// Where a hint comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HintSource {
    /// The header for hints.
    Header,
    /// Members of the body by which clients ask to keep a prompt.
    Body,
    /// A response that requests tool calls.
    ToolCalls,
    /// A session that has returned before.
    Session,
}

impl HintSource {
    fn name(self) -> &'static str {
        match self {
            Self::Header => "header",
            Self::Body => "body",
            Self::ToolCalls => "tool_calls",
            Self::Session => "session",
        }
    }
}

/// A prompt whose blocks a store can have.
pub(crate) trait StoredPrompt: Debug + Send + Sync {
    /// The prompt's length and its objects.
    fn describe(&self) -> DescribedPrompt<'static>;
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct HintLabels {
    returns: &'static str,
    source: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

/// Metrics of hints and reports.
#[derive(Debug, Clone)]
pub(crate) struct PromptReportMetrics {
    hints: Family<HintLabels, Counter>,
    outcomes: Family<OutcomeLabel, Counter>,
}

impl PromptReportMetrics {
    pub(super) fn register(registry: &mut MetricsRegistry) -> Self {
        let metrics = Self {
            hints: registry.register(
                "moongate_return_hints_total",
                "Requests with a hint whether their prompt will be used again, by its source: the header, members of the body, tool calls in the response, or a session that has returned before",
                Family::default(),
            ),
            outcomes: registry.register(
                "moongate_prompt_reports_total",
                "Reports of hinted prompts to the store's master: sent, dropped (too many waited), failed, unsupported by the master, or without blocks (the prompt's blocks are unknown, so there was nothing to report)",
                Family::default(),
            ),
        };
        for (returns, source) in [
            ("never", "header"),
            ("expected", "header"),
            ("expected", "body"),
            ("expected", "tool_calls"),
            ("expected", "session"),
        ] {
            drop(metrics.hints.get_or_create(&HintLabels { returns, source }));
        }
        for outcome in ["sent", "dropped", "failed", "unsupported", "without_blocks"] {
            metrics.count(outcome, 0);
        }
        metrics
    }

    fn count(&self, outcome: &'static str, prompts: usize) {
        self.outcomes.get_or_create(&OutcomeLabel { outcome }).inc_by(prompts as u64);
    }
}

/// The report about a request that has not ended.
#[derive(Debug)]
pub(crate) struct PromptReport {
    prompt: Box<dyn StoredPrompt>,
    /// The client's hint.
    hint: Option<PromptHint>,
    tenant_bucket: u8,
    queue: PromptReportQueue,
}

/// A finished request's prompt.
#[derive(Debug)]
pub(crate) struct FinishedPrompt {
    prompt: Box<dyn StoredPrompt>,
    returns: ReturnHint,
    tenant_bucket: u8,
    arrived: Instant,
}

/// Sends reports to the task that passes them to the master.
#[derive(Debug, Clone)]
pub(crate) struct PromptReportQueue {
    sender: mpsc::Sender<FinishedPrompt>,
    metrics: PromptReportMetrics,
}

impl PromptReportQueue {
    /// A queue, and its receiving end for [`run_prompt_reports`].
    pub(crate) fn new(metrics: PromptReportMetrics) -> (Self, mpsc::Receiver<FinishedPrompt>) {
        let (sender, receiver) = mpsc::channel(MAX_WAITING);
        (Self { sender, metrics }, receiver)
    }

    /// The report about a request, to be completed at its end. `hint` is the client's, and `tenant` the hash of its tenant's name.
    pub(crate) fn report(
        &self,
        prompt: Box<dyn StoredPrompt>,
        hint: Option<PromptHint>,
        tenant: Option<u64>,
    ) -> PromptReport {
        PromptReport { prompt, hint, tenant_bucket: tenant_bucket(tenant), queue: self.clone() }
    }

    /// Counts a hint about a prompt whose blocks are unknown.
    pub(crate) fn record_without_blocks(&self) {
        self.metrics.count("without_blocks", 1);
    }
}

impl PromptReport {
    /// Queues the report, if there is a hint. A response that requests tool calls is one: their results will be sent with the same
    /// prefix.
    pub(super) fn send(self, arrived: Instant, requests_tools: bool) {
        let tool_calls = PromptHint { returns: ReturnHint::Expected, source: HintSource::ToolCalls };
        let Some(PromptHint { returns, source }) = self.hint.or(requests_tools.then_some(tool_calls)) else {
            return;
        };
        let Self { prompt, tenant_bucket, queue: PromptReportQueue { sender, metrics }, .. } = self;
        let labels = HintLabels {
            returns: match returns {
                ReturnHint::Unknown => "unknown",
                ReturnHint::Never => "never",
                ReturnHint::Expected => "expected",
            },
            source: source.name(),
        };
        metrics.hints.get_or_create(&labels).inc();
        if sender.try_send(FinishedPrompt { prompt, returns, tenant_bucket, arrived }).is_err() {
            metrics.count("dropped", 1);
        }
    }
}

/// Passes reports to all masters of the store until `stop`. Each has a part of a prompt's objects.
pub(crate) async fn run_prompt_reports(
    admins: Vec<AdminClient>,
    metrics: PromptReportMetrics,
    mut reports: mpsc::Receiver<FinishedPrompt>,
    stop: CancellationToken,
) {
    let mut paused_until = Instant::now();
    // The outcome of the last request to the master: changes are logged once.
    let mut outcome = "sent";
    let mut batch = Vec::with_capacity(MAX_PROMPTS);
    loop {
        let received = tokio::select! {
            received = reports.recv_many(&mut batch, MAX_PROMPTS) => received,
            () = stop.cancelled() => return,
        };
        if received == 0 {
            return;
        }
        if Instant::now() < paused_until {
            metrics.count(outcome, received);
            batch.clear();
            continue;
        }
        for prompts in split(batch.drain(..).map(describe)) {
            let count = prompts.len();
            let pause = match describe_at_all(&admins, &DescribePromptsRequest { prompts }).await {
                Ok(()) => {
                    if std::mem::replace(&mut outcome, "sent") != "sent" {
                        tracing::info!("the store's master accepts return hints again");
                    }
                    Duration::ZERO
                }
                Err(AdminError::NotFound { .. }) => {
                    if std::mem::replace(&mut outcome, "unsupported") != "unsupported" {
                        tracing::info!("the store's master does not support return hints; they are dropped");
                    }
                    UNSUPPORTED_PAUSE
                }
                Err(error) => {
                    if std::mem::replace(&mut outcome, "failed") != "failed" {
                        tracing::warn!(%error, "cannot report return hints to the store's master; they are dropped until it responds");
                    }
                    FAILURE_PAUSE
                }
            };
            metrics.count(outcome, count);
            paused_until = Instant::now() + pause;
        }
    }
}

/// # Errors
/// The first failure. The other masters get the request nevertheless.
async fn describe_at_all(
    admins: &[AdminClient],
    request: &DescribePromptsRequest<'_>,
) -> Result<(), AdminError> {
    let described = join_all(admins.iter().map(|admin| admin.describe_prompts(request))).await;
    described.into_iter().try_for_each(|described| described.map(drop))
}

fn describe(finished: FinishedPrompt) -> DescribedPrompt<'static> {
    let elapsed_ms = u64::try_from(finished.arrived.elapsed().as_millis()).unwrap_or(u64::MAX);
    let FinishedPrompt { prompt, returns, tenant_bucket, .. } = finished;
    DescribedPrompt { returns, elapsed_ms, tenant_bucket, ..prompt.describe() }
}

/// The bucket of a tenant by the hash of its name; 0 without one.
fn tenant_bucket(tenant: Option<u64>) -> u8 {
    // Below TENANT_BUCKETS.
    tenant.map_or(0, |hash| 1 + (hash % u64::from(TENANT_BUCKETS)) as u8)
}

/// Groups prompts into requests of at most [`MAX_OBJECTS`] objects. The end of a longer prompt is cut off.
fn split(prompts: impl Iterator<Item = DescribedPrompt<'static>>) -> Vec<Vec<DescribedPrompt<'static>>> {
    let mut requests: Vec<Vec<DescribedPrompt<'static>>> = Vec::new();
    let mut objects = MAX_OBJECTS;
    for mut prompt in prompts {
        prompt.hashes.truncate(MAX_OBJECTS / prompt.parts.len().max(1));
        objects += prompt.key_count();
        match requests.last_mut() {
            Some(last) if objects <= MAX_OBJECTS => last.push(prompt),
            _ => {
                objects = prompt.key_count();
                requests.push(vec![prompt]);
            }
        }
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(hashes: usize) -> DescribedPrompt<'static> {
        DescribedPrompt {
            parts: vec![["".into(), "_k".into()], ["".into(), "_v".into()]],
            hashes: vec!["ab".into(); hashes],
            ..DescribedPrompt::default()
        }
    }

    #[test]
    fn tenants_share_a_bounded_number_of_buckets() {
        assert_eq!(tenant_bucket(None), 0);
        let mut buckets: Vec<u8> = (0..100).map(|hash| tenant_bucket(Some(u64::MAX - hash))).collect();
        buckets.sort_unstable();
        buckets.dedup();
        assert!(buckets.into_iter().eq(1..=TENANT_BUCKETS));
    }

    #[test]
    fn requests_stay_within_the_masters_limit() {
        let sizes = |prompts: &[usize]| -> Vec<Vec<usize>> {
            let requests = split(prompts.iter().map(|hashes| prompt(*hashes)));
            requests.iter().map(|request| request.iter().map(|p| p.hashes.len()).collect()).collect()
        };
        assert_eq!(sizes(&[10, 20_000, 12_000, 1_000]), [vec![10, 20_000, 12_000], vec![1_000]]);
        assert_eq!(sizes(&[50_000, 1]), [vec![32_768], vec![1]]);
        assert!(sizes(&[]).is_empty());
    }
}
