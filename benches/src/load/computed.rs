//! What the prefill engines have computed: the prefixes that the load's prompts share, and other prompts during the run.
//!
//! Canned responses compute nothing, so that engines do not limit the gateway. For a gateway that predicts cache hits, the prefixes are
//! computed before the run, by their tokens, and prompts of other clients are computed during it; the engines publish both as KV events.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::prompts::PromptGenerator;
use crate::wire::post_json;

/// Host of a decode engine that does not exist: SGLang computes the prompt, and transfers nothing.
const NO_DECODE_HOST: &str = "2.2.2.2";
/// Time limit for events to reach the gateway's index.
const INDEX_TIMEOUT: Duration = Duration::from_secs(30);
/// Length of the prompts computed during a run, and the time between two: 80,000 tokens per second.
const LIVE_PROMPT_TOKENS: usize = 4_096;
const LIVE_INTERVAL: Duration = Duration::from_millis(50);

/// The ports of a gateway's admin listener and of its prefill engines.
#[derive(Debug, Clone)]
pub(super) struct PredictedEngines {
    pub(super) admin: u16,
    pub(super) prefills: Vec<u16>,
}

impl PredictedEngines {
    /// Computes each shared prefix on one engine, and waits until the gateway predicts the last one.
    pub(super) async fn compute_prefixes(&self, prompts: &PromptGenerator) -> anyhow::Result<()> {
        let mut last = None;
        for (body, &engine) in prompts.prefix_bodies().zip(self.prefills.iter().cycle()) {
            let tokens = post_json(self.admin, "/debug/tokens/v1/chat/completions", &body).await?;
            self.compute(engine, &tokens["sglang"]).await?;
            last = Some(body);
        }
        let last = last.context("no prefixes")?;
        let started = Instant::now();
        loop {
            let predicted = post_json(self.admin, "/debug/predict/v1/chat/completions", &last).await?;
            let engines = predicted["engines"].as_array().map(Vec::as_slice).unwrap_or_default();
            let cached = engines.iter().filter_map(|engine| engine["l1_tokens"].as_u64()).max().unwrap_or(0);
            // Short prompts have no full block.
            if cached > 0 || predicted["input_tokens"].as_u64() < Some(2 * 64) {
                return Ok(());
            }
            ensure!(started.elapsed() < INDEX_TIMEOUT, "the gateway predicts nothing: {predicted}");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Computes prompts of other clients until it is dropped.
    pub(super) async fn compute_others(&self) -> anyhow::Result<()> {
        let mut rng = fastrand::Rng::new();
        for &engine in self.prefills.iter().cycle() {
            let tokens: Vec<u32> = (0..LIVE_PROMPT_TOKENS).map(|_| rng.u32(1_000..100_000)).collect();
            self.compute(engine, &tokens.into()).await?;
            sleep(LIVE_INTERVAL).await;
        }
        Ok(())
    }

    async fn compute(&self, engine: u16, tokens: &Value) -> anyhow::Result<()> {
        let request = json!({
            "model": "mock", "prompt": tokens, "max_tokens": 1,
            "bootstrap_host": NO_DECODE_HOST, "bootstrap_port": 1, "bootstrap_room": 1,
        });
        post_json(engine, "/v1/completions", request.to_string().as_bytes()).await?;
        Ok(())
    }
}
