//! From the body of a 128k-token conversation to its predicted cache hits: the first turn, and the next one.
//!
//! A simulated engine caches the conversation's pages and publishes them as events, like a real engine. Then a later
//! turn is sent to the gateway's admin listener, which reports the duration of the prediction.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use serde_json::{Value, json};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep};

use crate::ports::free_port;
use crate::text::append_word;
use crate::wire::post_json;

/// Minimum tokens of a first turn.
const MIN_FIRST_TURN_TOKENS: usize = 131_072;
/// Time limit for gateway and engine to become ready, and for events to arrive.
const TIMEOUT: Duration = Duration::from_secs(60);
const MODEL: &str = "sim";

/// Command-line arguments of `gateway-bench predict`.
#[derive(Debug, Args)]
pub(crate) struct BenchPredictArgs {
    /// Path of the moongate binary to measure.
    #[arg(long, value_name = "FILE")]
    moongate: PathBuf,

    /// Folder with the model's tokenizer and chat template.
    #[arg(long, value_name = "DIR")]
    tokenizer: PathBuf,

    /// Number of conversations, each new to the gateway.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1000))]
    conversations: u64,
}

pub(crate) async fn run(options: BenchPredictArgs) -> anyhow::Result<()> {
    let testbed = PredictionTestbed::start(&options.moongate, &options.tokenizer).await?;
    let (mut first, mut next) = (Vec::new(), Vec::new());
    for number in 0..options.conversations {
        let mut chat = SyntheticChat::new(number);
        testbed.extend_to_length(&mut chat).await?;
        // Other words of the same length, so that nothing of it is cached.
        let mut chat = chat.regenerated(number + 1_000_000);
        first.push(testbed.predict_as_routed(&chat.body()).await?);
        testbed.compute_and_wait_for_index(&chat.body()).await?;
        chat.add_message("assistant", 150);
        chat.add_message("user", 50);
        next.push(testbed.predict_as_routed(&chat.body()).await?);
        let last = &next[next.len() - 1];
        ensure!(
            last.cached * 100 >= last.tokens * 99,
            "only {} of {} tokens were predicted",
            last.cached,
            last.tokens
        );
    }
    print(&[("first turn", &first), ("follow-up turn", &next)])
}

fn print(rows: &[(&str, &Vec<PredictionSample>)]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "| 128k-token conversation | tokens | body, kB | median ms | p10 ms | p90 ms |\n| --- | --- | --- | --- | --- | --- |"
    )?;
    for (name, all) in rows {
        let mut times: Vec<f64> = all.iter().map(|one| one.ms).collect();
        times.sort_by(f64::total_cmp);
        let at_share = |share: usize| times[(times.len() - 1) * share / 100];
        let mean = |of: fn(&PredictionSample) -> usize| all.iter().map(of).sum::<usize>() / all.len();
        let (tokens, bytes) = (mean(|one| one.tokens), mean(|one| one.bytes) / 1000);
        writeln!(
            out,
            "| {name} | {tokens} | {bytes} | {:.2} | {:.2} | {:.2} |",
            at_share(50),
            at_share(10),
            at_share(90)
        )?;
    }
    Ok(())
}

/// The gateway's prediction for one prompt.
struct PredictionSample {
    tokens: usize,
    cached: usize,
    bytes: usize,
    ms: f64,
}

/// A gateway with one simulated engine.
struct PredictionTestbed {
    _engine: Child,
    _gateway: Child,
    engine: u16,
    admin: u16,
}

impl PredictionTestbed {
    async fn start(moongate: &Path, tokenizer: &Path) -> anyhow::Result<Self> {
        let [engine, port, admin] = [free_port()?, free_port()?, free_port()?];
        let spawn = |arguments: &[&str]| {
            let mut command = Command::new(moongate);
            command.args(arguments).kill_on_drop(true).stdin(Stdio::null()).stdout(Stdio::null());
            command.spawn().with_context(|| format!("{command:?}"))
        };
        let address = |port: u16| format!("127.0.0.1:{port}");
        let engine_process = spawn(&[
            "loadtest",
            "engine",
            "--model",
            MODEL,
            "--page-size",
            "64",
            "--time-scale",
            "1000",
            "--l1-tokens",
            "100000000",
            "--kv-events",
            "127.0.0.1:0",
            "--listen",
            &address(engine),
        ])?;
        let model = format!("{MODEL}={}", tokenizer.display());
        let gateway_process = spawn(&[
            "gateway",
            "--listen",
            &address(port),
            "--admin-listen",
            &address(admin),
            "--worker",
            &format!("http://{}", address(engine)),
            "--model",
            &model,
            "--log-filter",
            "error",
            // Prevents tokenization by an engine while the tokenizer is being loaded.
            "--tokenize-timeout",
            "0s",
        ])?;
        let testbed = Self { _engine: engine_process, _gateway: gateway_process, engine, admin };
        let asked = Instant::now();
        loop {
            let ready = testbed.predict(&SyntheticChat::new(u64::MAX).body()).await;
            match ready {
                Ok(_) => return Ok(testbed),
                Err(error) if asked.elapsed() > TIMEOUT => {
                    return Err(error.context("the gateway does not predict"));
                }
                Err(_) => sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Adds turns until the conversation is long enough.
    async fn extend_to_length(&self, chat: &mut SyntheticChat) -> anyhow::Result<()> {
        let mut tokens = 0;
        while tokens < MIN_FIRST_TURN_TOKENS {
            // Turns have 1,200 words; the token count is checked after each of the last few.
            let missing = (MIN_FIRST_TURN_TOKENS - tokens) / 2_500;
            for _ in 0..missing.max(1) {
                chat.add_message("user", 600);
                chat.add_message("assistant", 600);
            }
            let mut asked = chat.body();
            asked["messages"]
                .as_array_mut()
                .context("messages")?
                .push(json!({"role": "user", "content": "?"}));
            tokens = self.predict(&asked).await?.tokens;
        }
        chat.add_message("user", 200);
        Ok(())
    }

    async fn predict(&self, body: &Value) -> anyhow::Result<PredictionSample> {
        self.predict_at("/debug/predict/v1/chat/completions", body).await
    }

    async fn predict_as_routed(&self, body: &Value) -> anyhow::Result<PredictionSample> {
        self.predict_at("/debug/predict/v1/chat/completions?length=estimated", body).await
    }

    async fn predict_at(&self, path: &str, body: &Value) -> anyhow::Result<PredictionSample> {
        let body = body.to_string();
        let response = self.admin(path, &body).await?;
        let number = |value: &Value| value.as_u64().and_then(|number| usize::try_from(number).ok());
        let (Some(tokens), Some(ms)) = (number(&response["input_tokens"]), response["took_ms"].as_f64())
        else {
            bail!("no prediction: {response}");
        };
        let cached = number(&response["engines"][0]["l1_tokens"]).unwrap_or(0);
        Ok(PredictionSample { tokens, cached, bytes: body.len(), ms })
    }

    /// Sends the prompt to the engine, and waits until the gateway's index contains it.
    async fn compute_and_wait_for_index(&self, body: &Value) -> anyhow::Result<()> {
        let tokens = self.admin("/debug/tokens/v1/chat/completions", &body.to_string()).await?;
        let request = json!({"model": MODEL, "prompt": tokens["sglang"], "max_tokens": 1}).to_string();
        post_json(self.engine, "/v1/completions", request.as_bytes()).await?;
        let asked = Instant::now();
        loop {
            let known = self.predict(body).await?;
            if known.cached + 64 >= known.tokens {
                return Ok(());
            }
            ensure!(
                asked.elapsed() < TIMEOUT,
                "the gateway has indexed {} of {} tokens",
                known.cached,
                known.tokens
            );
            sleep(Duration::from_millis(10)).await;
        }
    }

    async fn admin(&self, path: &str, body: &str) -> anyhow::Result<Value> {
        post_json(self.admin, path, body.as_bytes()).await
    }
}

/// A conversation of synthetic text.
struct SyntheticChat {
    random: fastrand::Rng,
    /// Role and length of every message, for generating another conversation of the same shape.
    message_lengths: Vec<(&'static str, usize)>,
    messages: Vec<Value>,
}

impl SyntheticChat {
    fn new(seed: u64) -> Self {
        let mut chat = Self {
            random: fastrand::Rng::with_seed(seed),
            message_lengths: Vec::new(),
            messages: Vec::new(),
        };
        chat.add_message("system", 2000);
        chat
    }

    fn regenerated(&self, seed: u64) -> Self {
        let mut chat = Self {
            random: fastrand::Rng::with_seed(seed),
            message_lengths: Vec::new(),
            messages: Vec::new(),
        };
        self.message_lengths.iter().for_each(|(role, words)| chat.add_message(role, *words));
        chat
    }

    fn add_message(&mut self, role: &'static str, words: usize) {
        let content = self.paragraph(words);
        self.message_lengths.push((role, words));
        self.messages.push(json!({"role": role, "content": content}));
    }

    fn body(&self) -> Value {
        json!({"model": MODEL, "messages": self.messages, "stream": true})
    }

    fn paragraph(&mut self, words: usize) -> String {
        let mut text = String::new();
        (0..words).for_each(|_| append_word(&mut text, &mut self.random));
        text
    }
}
