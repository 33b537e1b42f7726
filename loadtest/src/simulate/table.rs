//! Results as text, JSON and HTML.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::calibrate::{PUBLISHED_MEASUREMENTS, calibrate};
use super::sweep::PolicyResult;

pub(crate) fn text(standings: &[PolicyResult], elapsed: Duration) -> String {
    let width = standings.iter().map(|standing| standing.variant.name.len()).max().unwrap_or(0).max(8);
    let mut text = format!(
        "{:width$}  {:>8} {:>6} {:>8} {:>8} {:>8}  {:>6} {:>6}  {:>7} {:>7} {:>6}  {:>5} {:>5} {:>5}  {:>9}  {:>6}\n",
        "policy",
        "mean s",
        "± s",
        "p50 s",
        "p90 s",
        "p99 s",
        "SLO",
        "reject",
        "TPOT ms",
        "p99 ms",
        "both",
        "L1 %",
        "L2 %",
        "L3 %",
        "tokens/s",
        "retry ok"
    );
    for standing in standings {
        let s = &standing.summary;
        let right = s.retry_after_accuracy.map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
        let _ = writeln!(
            text,
            "{:width$}  {:>8.3} {:>6.2} {:>8.2} {:>8.2} {:>8.2}  {:>6.3} {:>6.3}  {:>7.1} {:>7.1} {:>6.3}  {:>5.1} {:>5.1} {:>5.1}  {:>9.0}  {:>6}{}",
            standing.variant.name,
            s.ttft_mean_s,
            s.ttft_mean_sd_s,
            s.ttft_p50_s,
            s.ttft_p90_s,
            s.ttft_p99_s,
            s.slo_attainment,
            s.rejected,
            1_000.0 * s.tpot_mean_s,
            1_000.0 * s.tpot_p99_s,
            s.goodput,
            100.0 * s.hit_l1,
            100.0 * s.hit_l2,
            100.0 * s.hit_l3,
            s.input_tokens_per_s,
            right,
            if s.failed > 0.0 { format!("  {:.3} of the requests failed", s.failed) } else { String::new() },
        );
    }
    text.push_str(&classes_text(standings, width));
    let requests: usize = standings.iter().map(|standing| standing.first_run.records.len()).sum();
    let _ = writeln!(text, "{requests} requests per seed simulated; {:.2} s in all", elapsed.as_secs_f64());
    text
}

/// Results by tenant and priority; empty if none are simulated.
fn classes_text(standings: &[PolicyResult], width: usize) -> String {
    let mut text = String::new();
    for standing in standings {
        for class in &standing.classes {
            if text.is_empty() {
                let _ = writeln!(
                    text,
                    "\n{:width$}  {:10}  {:>8} {:>8} {:>9}  {:>14} {:>16}",
                    "policy", "class", "mean s", "p99 s", "longest s", "computation, %", "of equal part, %"
                );
            }
            let _ = writeln!(
                text,
                "{:width$}  {:10}  {:>8.3} {:>8.2} {:>9.1}  {:>14.1} {:>16}",
                standing.variant.name,
                class.name,
                class.ttft_mean_s,
                class.ttft_p99_s,
                class.ttft_max_s,
                100.0 * class.computation,
                percent(class.equal_share),
            );
        }
    }
    text
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "-".to_owned(), |share| format!("{:.1}", 100.0 * share))
}

/// A JSON object: the results of one contender, or a list for several.
pub(crate) fn json(standings: &[PolicyResult]) -> String {
    let object = |standing: &PolicyResult| {
        let mut object = json!(standing.summary);
        object["policy"] = Value::from(standing.variant.name.as_str());
        if !standing.classes.is_empty() {
            object["classes"] = json!(standing.classes);
        }
        object
    };
    let value = match standings {
        [standing] => object(standing),
        several => json!({ "policies": several.iter().map(object).collect::<Vec<_>>() }),
    };
    format!("{value}\n")
}

/// The same lines as an HTML table.
pub(crate) fn html(standings: &[PolicyResult]) -> String {
    let mut html = String::from(
        "<div class='scroll'><table><tr><th>policy</th><th>mean s</th><th>±</th><th>p50 s</th><th>p90 s</th><th>p99 s</th>\
         <th>SLO attainment</th><th>rejected</th><th>TPOT ms</th><th>p99 ms</th><th>both</th><th>L1</th><th>L2</th><th>L3</th><th>tokens/s</th></tr>",
    );
    for standing in standings {
        let s = &standing.summary;
        let _ = write!(
            html,
            "<tr><td>{}</td><td>{:.2}</td><td>{:.2}</td><td>{:.2}</td><td>{:.2}</td><td>{:.1}</td><td>{:.1} %</td>\
             <td>{:.1} %</td><td>{:.1}</td><td>{:.1}</td><td>{:.1} %</td><td>{:.1} %</td><td>{:.1} %</td><td>{:.1} %</td><td>{:.0}</td></tr>",
            standing.variant.name,
            s.ttft_mean_s,
            s.ttft_mean_sd_s,
            s.ttft_p50_s,
            s.ttft_p90_s,
            s.ttft_p99_s,
            100.0 * s.slo_attainment,
            100.0 * s.rejected,
            1_000.0 * s.tpot_mean_s,
            1_000.0 * s.tpot_p99_s,
            100.0 * s.goodput,
            100.0 * s.hit_l1,
            100.0 * s.hit_l2,
            100.0 * s.hit_l3,
            s.input_tokens_per_s,
        );
    }
    html + "</table></div>" + &classes_html(standings)
}

fn classes_html(standings: &[PolicyResult]) -> String {
    let mut rows = String::new();
    for standing in standings {
        for class in &standing.classes {
            let _ = write!(
                rows,
                "<tr><td>{}</td><td>{}</td><td>{:.2}</td><td>{:.1}</td><td>{:.0}</td><td>{:.1} %</td><td>{}</td></tr>",
                standing.variant.name,
                class.name,
                class.ttft_mean_s,
                class.ttft_p99_s,
                class.ttft_max_s,
                100.0 * class.computation,
                percent(class.equal_share),
            );
        }
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "<h2>Tenants and priorities</h2><p>Computation while the fleet was saturated, and relative to an equal division.</p>\
         <div class='scroll'><table><tr><th>policy</th><th>class</th><th>mean s</th><th>p99 s</th><th>longest s</th>\
         <th>computation</th><th>of equal part, %</th></tr>{rows}</table></div>"
    )
}

/// Measured and simulated results of one engine, in Markdown.
pub(crate) fn calibration(seeds: u64) -> String {
    let mut table = String::from(
        "| caches | TTFT mean, s | TTFT p90, s | input, tokens/s | reused, % |\n|---|---:|---:|---:|---:|\n",
    );
    for row in &PUBLISHED_MEASUREMENTS {
        let shown = calibrate(row, seeds);
        let _ = writeln!(
            table,
            "| {} | {:.2} / {:.2} | {:.2} / {:.2} | {:.0} / {:.0} | {:.1} / {:.1} |",
            row.caches,
            row.ttft_mean_s,
            shown.ttft_mean_s,
            row.ttft_p90_s,
            shown.ttft_p90_s,
            row.input_tokens_per_s,
            shown.input_tokens_per_s,
            100.0 * row.hit,
            100.0 * shown.hit(),
        );
    }
    table
}
