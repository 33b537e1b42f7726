//! The same with Mooncake's store service and Mooncake's master. The loss there and with Moongate is drawn for docs/upgrade.md by
//! `cargo test --test store upgrade:: -- --ignored --nocapture`.

use std::path::Path;
use std::time::{Duration, Instant};

use moongate_loadtest::simulate::{AxisScale, SvgPlot};

use super::load::{CacheHitSample, UpgradeLoadPlan, UpgradeLoadReport, replace_nodes};
use super::nodes::StoreImplementation;

/// Each prompt is sent again after about ten seconds, and a node is replaced after each round of all prompts.
const PLAN: UpgradeLoadPlan = UpgradeLoadPlan {
    prompts: 360,
    pause: Duration::from_millis(100),
    before: 360,
    after_each: 540,
    after_all: 360,
};
/// Seconds over which found pages are averaged.
const STEP: f64 = 1.0;
/// Length of the time axis in seconds.
const SHOWN: f64 = 80.0;
const STYLE: &str = "\
:root{--ink:#667085;--grid:#e4e7ec;--paper:#fff;--ours:#2563eb;--theirs:#d97706}\
@media(prefers-color-scheme:dark){:root{--ink:#98a2b3;--grid:#2b3340;--paper:#12161d;--ours:#60a5fa;--theirs:#fbbf24}}\
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--ink);fill:none}.tick{font-size:11px;fill:var(--ink)}\
.name{font-size:12px;fill:var(--ink)}.paper{fill:var(--paper)}.line{fill:none;stroke-width:1.8}\
.ours{stroke:var(--ours)}.theirs{stroke:var(--theirs)}.dash{stroke-dasharray:3 4;stroke-width:1}";

/// What was found in each step of time, in the middle of which each point is.
fn curve(samples: &[CacheHitSample], begun: Instant) -> Vec<(f64, f64)> {
    let seconds = |sample: &CacheHitSample| (sample.at - begun).as_secs_f64();
    let mut points = Vec::new();
    for step in 0..(SHOWN / STEP) as u32 {
        let (from, to) = (f64::from(step) * STEP, f64::from(step + 1) * STEP);
        let within = samples.iter().filter(|sample| (from..to).contains(&seconds(sample)));
        let found: Vec<f64> = within.map(|sample| sample.cached_share).collect();
        if !found.is_empty() {
            points.push((f64::midpoint(from, to), found.iter().sum::<f64>() / found.len() as f64));
        }
    }
    points
}

fn draw(ours: &UpgradeLoadReport, theirs: &UpgradeLoadReport, title: &str) -> String {
    let axes = ("seconds", "share of pages found");
    let mut plot = SvgPlot::new(AxisScale::Linear(0.0, SHOWN), AxisScale::Linear(0.0, 1.25), axes);
    for (report, class, name) in [(theirs, "theirs", "Mooncake"), (ours, "ours", "Moongate")] {
        let begun = report.samples[0].at;
        for replaced in &report.replaced {
            let at = (*replaced - begun).as_secs_f64();
            plot.line(
                &[(at, 0.0), (at, 1.0)],
                &format!("{class} dash"),
                &format!("{name}: a node is replaced"),
            );
        }
        plot.line(&curve(&report.samples, begun), class, name);
    }
    plot.legend(&[("ours".to_owned(), "Moongate"), ("theirs".to_owned(), "Mooncake")]);
    plot.file(title, STYLE)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes, and writes docs/upgrade"]
async fn both_stores_are_drawn() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/upgrade");
    std::fs::create_dir_all(&folder).unwrap();
    for (signal, name) in [("TERM", "sigterm"), ("KILL", "kill-9")] {
        let theirs = replace_nodes(StoreImplementation::Mooncake, signal, PLAN).await;
        println!("{signal}, Mooncake: {}", theirs.line());
        let ours = replace_nodes(StoreImplementation::Moongate, signal, PLAN).await;
        println!("{signal}, Moongate: {}", ours.line());
        let title = format!("Pages found while store nodes are replaced ({signal})");
        std::fs::write(folder.join(format!("{name}.svg")), draw(&ours, &theirs, &title)).unwrap();
    }
}
