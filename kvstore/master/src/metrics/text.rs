//! Writer for the text format of Prometheus, version 0.0.4.

use std::fmt::{Display, Write as _};

/// Accumulates the families in the order of writing.
#[derive(Debug, Default)]
pub(super) struct MasterMetricsText(String);

/// A family whose samples are being written.
pub(super) struct MasterMetricFamily<'t> {
    text: &'t mut String,
    name: &'t str,
}

impl MasterMetricsText {
    fn family<'t>(&'t mut self, name: &'t str, kind: &str, help: &str) -> MasterMetricFamily<'t> {
        let text = &mut self.0;
        // Writing to a string does not fail, here and below.
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        MasterMetricFamily { text, name }
    }

    /// Starts a gauge with labels.
    pub(super) fn gauges<'t>(&'t mut self, name: &'t str, help: &str) -> MasterMetricFamily<'t> {
        self.family(name, "gauge", help)
    }

    /// Starts a counter with labels.
    pub(super) fn counters<'t>(&'t mut self, name: &'t str, help: &str) -> MasterMetricFamily<'t> {
        self.family(name, "counter", help)
    }

    pub(super) fn histograms<'t>(&'t mut self, name: &'t str, help: &str) -> MasterMetricFamily<'t> {
        self.family(name, "histogram", help)
    }

    /// Writes a gauge without labels.
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.gauges(name, help).value(&[], value);
    }

    /// Writes a counter without labels.
    pub(super) fn counter(&mut self, name: &str, help: &str, value: impl Display) {
        self.counters(name, help).value(&[], value);
    }

    pub(super) fn finish(self) -> String {
        self.0
    }
}

impl MasterMetricFamily<'_> {
    /// Writes one sample with its labels.
    pub(super) fn value(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.sample("", labels, value);
    }

    fn sample(&mut self, suffix: &str, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        for (index, (name, label)) in labels.iter().enumerate() {
            self.text.push(if index == 0 { '{' } else { ',' });
            let _ = write!(self.text, "{name}=\"{}\"", escaped(label));
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    /// Writes a histogram: the count of each bucket alone, with its upper bound as text, and the sum of all values.
    pub(super) fn histogram(
        &mut self,
        labels: &[(&str, &str)],
        buckets: impl Iterator<Item = (String, u64)>,
        sum: impl Display,
    ) {
        let mut count = 0;
        for (bound, number) in buckets {
            count += number;
            let labels: Vec<(&str, &str)> = labels.iter().copied().chain([("le", &*bound)]).collect();
            self.sample("_bucket", &labels, count);
        }
        self.sample("_sum", labels, sum);
        self.sample("_count", labels, count);
    }
}

fn escaped(label: &str) -> String {
    let mut escaped = String::with_capacity(label.len());
    for character in label.chars() {
        match character {
            '\\' => escaped.push_str("\\\\"),
            '"' => escaped.push_str("\\\""),
            '\n' => escaped.push_str("\\n"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_cumulative_and_labels_are_escaped() {
        let mut text = MasterMetricsText::default();
        let buckets = [("1", 2), ("+Inf", 3)].map(|(bound, number)| (bound.to_owned(), number));
        text.histograms("h", "A histogram.").histogram(&[("a", "x\"\\\n")], buckets.into_iter(), 7);
        text.gauge("g", "A gauge.", 1.5);
        let expected = "# HELP h A histogram.\n# TYPE h histogram\nh_bucket{a=\"x\\\"\\\\\\n\",le=\"1\"} 2\n\
            h_bucket{a=\"x\\\"\\\\\\n\",le=\"+Inf\"} 5\nh_sum{a=\"x\\\"\\\\\\n\"} 7\nh_count{a=\"x\\\"\\\\\\n\"} 5\n\
            # HELP g A gauge.\n# TYPE g gauge\ng 1.5\n";
        assert_eq!(text.finish(), expected);
    }
}
