//! Metrics of every long-running command: dropped log lines and task panics.

use std::fmt::Write as _;

use crate::log_output::log_lines_dropped;
use crate::supervisor::task_panics;

/// Last line of OpenMetrics text. Prometheus' own text format has no such line, and names counter families differently.
const OPENMETRICS_END: &str = "# EOF\n";

/// Appends the process metrics to a scrape in either text format.
pub fn append_process_metrics(text: &mut String) {
    let is_openmetrics = text.ends_with(OPENMETRICS_END);
    if is_openmetrics {
        text.truncate(text.len() - OPENMETRICS_END.len());
    }
    let families = [
        (
            "moongate_log_lines_lost",
            "Log lines that could not be written to standard error (no reader, disk full, reader stopped).",
            log_lines_dropped(),
        ),
        (
            "moongate_task_panics",
            "Tasks that panicked. The log has the task's name at level ERROR.",
            task_panics(),
        ),
    ];
    for (name, help, value) in families {
        let suffix = if is_openmetrics { "" } else { "_total" };
        let _infallible = writeln!(
            text,
            "# HELP {name}{suffix} {help}\n# TYPE {name}{suffix} counter\n{name}_total {value}"
        );
    }
    if is_openmetrics {
        text.push_str(OPENMETRICS_END);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats_stay_well_formed() {
        let mut prometheus = "# TYPE up gauge\nup 1\n".to_owned();
        append_process_metrics(&mut prometheus);
        assert!(prometheus.starts_with("# TYPE up gauge\nup 1\n# HELP moongate_log_lines_lost_total "));
        assert!(
            prometheus.contains("\n# TYPE moongate_task_panics_total counter\nmoongate_task_panics_total ")
        );

        let mut openmetrics = "# TYPE up gauge\nup 1\n# EOF\n".to_owned();
        append_process_metrics(&mut openmetrics);
        assert!(
            openmetrics.contains("\n# TYPE moongate_log_lines_lost counter\nmoongate_log_lines_lost_total ")
        );
        assert!(openmetrics.ends_with("\n# EOF\n") && openmetrics.matches("# EOF").count() == 1);
    }
}
