//! Histograms of durations by API, whose buckets link to traces.

use std::fmt::{self, Write as _};
use std::time::Duration;

use moongate_runtime::metrics::MetricsRegistry;
use moongate_telemetry::TraceId;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;

use crate::request_body::InferenceApi;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ApiLabels {
    api: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ExemplarLabels {
    trace_id: TraceIdLabel,
}

/// Formatted only when scraped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct TraceIdLabel(TraceId);

impl EncodeLabelValue for TraceIdLabel {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        write!(encoder, "{}", self.0)
    }
}

/// A histogram whose buckets link to the trace of their latest value.
pub(super) type ExemplarHistogram = HistogramWithExemplars<ExemplarLabels>;
/// The metric that is registered.
pub(super) type ApiHistogramFamily = Family<ApiLabels, ExemplarHistogram, fn() -> ExemplarHistogram>;

/// One histogram per API, distinguished by a label.
#[derive(Debug)]
pub(super) struct ApiHistogram {
    pub(super) family: ApiHistogramFamily,
    /// Indexed by `InferenceApi as usize`.
    histograms: [ExemplarHistogram; InferenceApi::ALL.len()],
}

impl ApiHistogram {
    pub(super) fn register(
        registry: &mut MetricsRegistry,
        name: &'static str,
        help: &'static str,
        histogram: fn() -> ExemplarHistogram,
    ) -> Self {
        let family = registry.register(name, help, ApiHistogramFamily::new_with_constructor(histogram));
        let histograms =
            InferenceApi::ALL.map(|api| family.get_or_create_owned(&ApiLabels { api: api.as_str() }));
        Self { family, histograms }
    }

    /// `trace` is set if the trace is exported.
    pub(super) fn observe(&self, api: InferenceApi, took: Duration, trace: Option<TraceId>) {
        let label = trace.map(|trace| ExemplarLabels { trace_id: TraceIdLabel(trace) });
        self.histograms[api as usize].observe(took.as_secs_f64(), label, None);
    }
}
