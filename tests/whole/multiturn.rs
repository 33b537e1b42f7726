//! SGLang's `bench_multiturn.py` with the settings of a published benchmark, against the deployed system: 150 clients in step, each of
//! which adds 2,048 tokens per round.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moongate_loadtest::engine::EngineTimeModel;
use moongate_loadtest::generate::prompt::unique_prompt;
use moongate_loadtest::generate::{LoadTarget, LoadTargetApi, RequestMeasurement};
use moongate_loadtest::simulate::{
    BenchmarkResult, MultiTurnOptions, PUBLISHED_MEASUREMENTS, published_plot,
};
use reqwest::header::HeaderMap;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::cluster::EndToEndCluster;
use super::{MODEL, RELEASE};

/// Pause of the sender while as many requests are in flight as allowed.
const FULL_PAUSE: Duration = Duration::from_millis(50);

/// So many times faster than the engines that are imitated.
const SCALE: f64 = 10.0;
/// Host cache of the benchmark: 80 GB on each of four ranks, at 192,512 bytes per token.
const HOST_TOKENS: u64 = 1_662_000;

/// Where the figures of the last run are, and what is drawn of them.
const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/whole-system");

/// The three rows of the published table, and the last one again with our routing. Renews the docs' figures and plot.
pub(crate) async fn rows() {
    let cluster = EndToEndCluster::start().await;
    let base = format!("http://{RELEASE}-gateway:8000");
    println!("| caches, policy | TTFT mean, s | TTFT p90, s | input, tokens/s | reused, % |");
    println!("|---|---:|---:|---:|---:|");
    let [l1, l2, l3] = &PUBLISHED_MEASUREMENTS;
    let (mut far, mut seen) = (Vec::new(), Vec::new());
    let runs = [(l1, "round_robin"), (l2, "round_robin"), (l3, "round_robin"), (l3, "predictive")];
    for (number, (row, policy)) in runs.into_iter().enumerate() {
        let host = if row.caches == "L1" { 0 } else { HOST_TOKENS };
        let arguments = format!("{{--time-scale={SCALE},--l2-tokens={host}}}");
        // All pods begin anew, with empty caches.
        let anew = ["gateway", "engines.worker", "store.nodes", "store.master"]
            .map(|part| format!("{part}.podAnnotations.row=row-{number}"));
        let settings = [
            format!("engines.worker.args={arguments}"),
            format!("store.enabled={}", row.caches.ends_with("L3")),
            format!("gateway.config.policy={policy}"),
        ];
        let command = if number == 0 { "install" } else { "upgrade" };
        cluster.helm(command, "multiturn", &[&settings[..], &anew].concat()).await;
        cluster.settled().await;
        let (all, took) = run(&base, MODEL, MultiTurnOptions::default(), SCALE).await;
        let shown = shown(&all, took, (row.caches, policy));
        let pairs = [
            (row.ttft_mean_s, shown.ttft_mean_s),
            (row.ttft_p90_s, shown.ttft_p90_s),
            (row.input_tokens_per_s, shown.input_tokens_per_s),
            (row.hit * 100.0, shown.hit * 100.0),
        ];
        let cells: Vec<String> = pairs.iter().map(|(then, now)| format!("{then:.2} / {now:.2}")).collect();
        println!("| {}, {policy} | {} |", row.caches, cells.join(" | "));
        // Of the first row's 2.2 % of reuse a tenth says nothing.
        if policy == "round_robin" && pairs[..3].iter().any(|(then, now)| (now / then - 1.0).abs() > 0.1) {
            far.push(row.caches);
        }
        seen.push(shown);
    }
    std::fs::write(format!("{DOCS}/published.json"), serde_json::to_string_pretty(&seen).unwrap()).unwrap();
    std::fs::write(format!("{DOCS}/published.svg"), published_plot(&seen)).unwrap();
    assert!(far.is_empty(), "not within a tenth of what was measured: {far:?}");
}

/// Runs it so many times faster than the engines that are imitated.
async fn run(
    base: &str,
    model: &str,
    settings: MultiTurnOptions,
    scale: f64,
) -> (Vec<RequestMeasurement>, Duration) {
    let target = Arc::new(LoadTarget {
        client: reqwest::Client::builder().no_proxy().build().unwrap(),
        base_url: base.to_owned(),
        api: LoadTargetApi::Completions,
        model: model.to_owned(),
        idle_timeout: Duration::from_secs(300),
    });
    let mut random = fastrand::Rng::with_seed(1);
    let slots = Arc::new(Semaphore::new(settings.in_flight as usize));
    let mut prompts: HashMap<u32, String> = HashMap::new();
    let mut all: Vec<RequestMeasurement> = Vec::new();
    let begun = Instant::now();
    for round in 0..settings.rounds {
        let mut ready: Vec<u32> = (0..settings.clients).collect();
        let mut sent = JoinSet::new();
        while !ready.is_empty() {
            let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
                tokio::time::sleep(FULL_PAUSE.div_f64(scale)).await;
                continue;
            };
            let client = ready.swap_remove(random.usize(..ready.len()));
            let text =
                unique_prompt(settings.text_tokens as usize, u64::from(client * settings.rounds + round));
            let prompt = prompts.entry(client).or_default();
            prompt.push_str(&text);
            let body = json!({ "model": target.model, "prompt": prompt, "max_tokens": 1, "stream": true,
                "stream_options": { "include_usage": true }, "temperature": 0, "ignore_eos": true });
            let (target, share) = (Arc::clone(&target), random.f64());
            sent.spawn(async move {
                let outcome = target
                    .post("completions", body.to_string().into_bytes(), HeaderMap::new())
                    .await
                    .unwrap();
                tokio::time::sleep(lag(&outcome, 2.0 * settings.in_flight_lag * share, scale)).await;
                drop(slot);
                outcome
            });
            let pause = -(1.0 - random.f64()).ln() / settings.per_second;
            tokio::time::sleep(Duration::from_secs_f64(pause / scale)).await;
        }
        all.extend(sent.join_all().await);
    }
    (all, begun.elapsed())
}

/// How long a request counts as in flight after its answer, as the published figures show by Little's law.
fn lag(outcome: &RequestMeasurement, times: f64, scale: f64) -> Duration {
    let (cached, all) = (outcome.cached_tokens as usize, outcome.prompt_tokens as usize);
    let model = EngineTimeModel::default();
    let computed = model.prefill_base_s + model.prefill_compute_s(all - cached, cached);
    Duration::from_secs_f64(times * computed / scale)
}

/// What they show, in the engines' own time.
fn shown(all: &[RequestMeasurement], took: Duration, (caches, policy): (&str, &str)) -> BenchmarkResult {
    let mut first: Vec<f64> = all.iter().map(|one| one.ttft.unwrap().as_secs_f64() * SCALE).collect();
    first.sort_by(f64::total_cmp);
    let sum = |count: fn(&RequestMeasurement) -> u64| all.iter().map(count).sum::<u64>() as f64;
    let tokens = sum(|one| one.prompt_tokens);
    BenchmarkResult {
        caches: caches.to_owned(),
        policy: policy.to_owned(),
        ttft_mean_s: first.iter().sum::<f64>() / first.len() as f64,
        ttft_p90_s: first[first.len() * 9 / 10],
        input_tokens_per_s: tokens / (took.as_secs_f64() * SCALE),
        hit: sum(|one| one.cached_tokens) / tokens,
    }
}
