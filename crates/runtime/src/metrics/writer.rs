//! Writer of metrics that are read at each scrape, instead of being counted in types of prometheus-client.

use std::fmt;

use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelValue, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;

use super::{FamilyName, TOTAL};

/// Counts of a histogram at one moment.
#[derive(Debug, Clone)]
pub struct HistogramSnapshot {
    /// Upper bound and count of each bucket alone; the last bound is infinite.
    pub buckets: Vec<(f64, u64)>,
    pub sum: f64,
}

/// Writes metric families. A help has no full stop at its end.
#[derive(Debug)]
pub struct MetricsWriter<'e> {
    encoder: DescriptorEncoder<'e>,
    result: fmt::Result,
}

impl<'e> MetricsWriter<'e> {
    pub(super) fn new(encoder: DescriptorEncoder<'e>) -> Self {
        Self { encoder, result: Ok(()) }
    }

    /// The first error; nothing is written after it.
    pub(super) fn finish(self) -> fmt::Result {
        self.result
    }

    /// Writes a counter. Names without `_total`, which only Mooncake has, get the type `unknown` in OpenMetrics.
    pub fn counter(&mut self, name: &str, help: &str, value: impl EncodeCounterValue + EncodeGaugeValue) {
        self.family(name, help, counter_type(name), |metric| encode_counter(metric, name, &value));
    }

    /// Writes a counter with a value for each value of a label.
    pub fn counter_by<L: EncodeLabelValue, V: EncodeCounterValue + EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (L, V)>,
    ) {
        self.family(name, help, counter_type(name), |metric| {
            values.into_iter().try_for_each(|(of, value)| {
                encode_counter(&mut metric.encode_family(&[(label, of)])?, name, &value)
            })
        });
    }

    /// Writes a gauge.
    pub fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) {
        self.family(name, help, MetricType::Gauge, |metric| metric.encode_gauge(&value));
    }

    /// Writes a gauge with a value for each value of a label.
    pub fn gauge_by<L: EncodeLabelValue, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (L, V)>,
    ) {
        self.family(name, help, MetricType::Gauge, |metric| {
            values
                .into_iter()
                .try_for_each(|(of, value)| metric.encode_family(&[(label, of)])?.encode_gauge(&value))
        });
    }

    /// Writes a histogram.
    pub fn histogram(&mut self, name: &str, help: &str, snapshot: &HistogramSnapshot) {
        self.family(name, help, MetricType::Histogram, |metric| encode_histogram(metric, snapshot));
    }

    /// Writes a histogram for each value of a label.
    pub fn histogram_by<L: EncodeLabelValue>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        snapshots: impl IntoIterator<Item = (L, HistogramSnapshot)>,
    ) {
        self.family(name, help, MetricType::Histogram, |metric| {
            snapshots.into_iter().try_for_each(|(of, snapshot)| {
                encode_histogram(&mut metric.encode_family(&[(label, of)])?, &snapshot)
            })
        });
    }

    fn family(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        write: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
    ) {
        let family = FamilyName::parse(name, kind);
        let encoder = &mut self.encoder;
        self.result = self.result.and_then(|()| {
            write(&mut encoder.encode_descriptor(
                family.base,
                &format!("{help}."),
                family.unit.as_ref(),
                kind,
            )?)
        });
    }
}

fn counter_type(name: &str) -> MetricType {
    if name.ends_with(TOTAL) { MetricType::Counter } else { MetricType::Unknown }
}

fn encode_counter(
    metric: &mut MetricEncoder<'_>,
    name: &str,
    value: &(impl EncodeCounterValue + EncodeGaugeValue),
) -> fmt::Result {
    match counter_type(name) {
        MetricType::Counter => metric.encode_counter::<NoLabelSet, _, f64>(value, None),
        _ => metric.encode_gauge(value),
    }
}

fn encode_histogram(metric: &mut MetricEncoder<'_>, snapshot: &HistogramSnapshot) -> fmt::Result {
    let count = snapshot.buckets.iter().map(|(_, count)| count).sum();
    metric.encode_histogram::<NoLabelSet>(snapshot.sum, count, &snapshot.buckets, None)
}
