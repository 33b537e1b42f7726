//! Load during the faults, and the checks of every response.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use moongate_store_client::{KvClient, KvError, PutOptions};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::harness::openai_error;

/// Prompts, each with one correct response.
const PROMPTS: u64 = 8;
/// No request takes longer, whatever happens to its engines.
const REQUEST_DEADLINE: Duration = Duration::from_secs(60);
/// How long a client waits that leaves.
const CLIENT_PATIENCE: Duration = Duration::from_millis(30);

/// How clients' requests ended, by the code that the gateway counts.
#[derive(Debug, Default)]
pub(crate) struct ChaosOutcomes {
    codes: Mutex<BTreeMap<String, u64>>,
    /// Requests whose client disconnected: their result does not matter.
    abandoned: AtomicU64,
    expected: Mutex<BTreeMap<u64, String>>,
}

impl ChaosOutcomes {
    fn count(&self, code: &str) {
        *self.codes.lock().entry(code.to_owned()).or_default() += 1;
    }

    pub(crate) fn of(&self, code: &str) -> u64 {
        self.codes.lock().get(code).copied().unwrap_or(0)
    }

    pub(crate) fn codes(&self) -> BTreeMap<String, u64> {
        self.codes.lock().clone()
    }

    pub(crate) fn abandoned(&self) -> u64 {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// A request of a client that may leave.
    pub(crate) async fn send_or_abandon(&self, client: &reqwest::Client, url: &str, random: u64) {
        let (prompt, stream, leaves) =
            (random % PROMPTS, !(random / 8).is_multiple_of(3), (random / 32).is_multiple_of(20));
        if !leaves {
            self.send(client, url, prompt, stream).await;
            return;
        }
        self.abandoned.fetch_add(1, Ordering::Relaxed);
        drop(
            tokio::time::timeout(
                CLIENT_PATIENCE,
                read_response(&request(client, url, prompt, stream), stream),
            )
            .await,
        );
    }

    /// A request. A complete response must be the correct one, and every other response an error of the gateway.
    pub(crate) async fn send(&self, client: &reqwest::Client, url: &str, number: u64, stream: bool) {
        let prompt = number % PROMPTS;
        let request = request(client, url, prompt, stream);
        let answer = tokio::time::timeout(REQUEST_DEADLINE, read_response(&request, stream)).await;
        match answer.unwrap_or_else(|_| panic!("a request hangs for {REQUEST_DEADLINE:?}")) {
            Ok(text) => {
                let right = self.expected.lock().entry(prompt).or_insert_with(|| text.clone()).clone();
                assert_eq!(text, right, "prompt {prompt} has one right answer");
                self.count("ok");
            }
            Err(code) => self.count(&code),
        }
    }
}

fn request(client: &reqwest::Client, url: &str, prompt: u64, stream: bool) -> reqwest::RequestBuilder {
    let prompt = format!("prompt number {prompt}");
    let body = json!({"model": "sim", "prompt": prompt, "max_tokens": 40, "stream": stream});
    client.post(format!("{url}/v1/completions")).json(&body)
}

/// The text of a complete response, or the code of the gateway's error.
async fn read_response(request: &reqwest::RequestBuilder, stream: bool) -> Result<String, String> {
    let response = request.try_clone().unwrap().send().await.expect("the gateway itself answers");
    let status = response.status();
    let (mut bytes, mut is_broken) = (Vec::new(), false);
    let mut pieces = response.bytes_stream();
    while let Some(piece) = pieces.next().await {
        match piece {
            Ok(piece) => bytes.extend_from_slice(&piece),
            Err(_) => is_broken = true,
        }
    }
    let text = String::from_utf8(bytes).unwrap();
    let code = |json: &str| openai_error(json.as_bytes())["code"].as_str().unwrap().to_owned();
    if status != 200 {
        assert!(!is_broken, "an error answer is complete: {text}");
        return Err(code(&text));
    }
    let part = |json: &str| -> Option<String> {
        let event: Value = serde_json::from_str(json).ok()?;
        event["choices"][0]["text"].as_str().map(str::to_owned)
    };
    if !stream {
        assert!(!is_broken, "an answer in one piece is held until it is complete: {text}");
        return Ok(part(&text).unwrap_or_else(|| panic!("no answer: {text}")));
    }
    let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let is_done = events.last() == Some(&"[DONE]");
    assert_eq!(is_done, !is_broken, "a stream ends with [DONE] or breaks: {text}");
    match is_done {
        true => Ok(events.iter().filter_map(|event| part(event)).collect()),
        false => Err(code(events.last().expect("a broken stream has an error event"))),
    }
}

/// What became of the store's operations.
#[derive(Debug, Default)]
pub(crate) struct ChaosStoreCounts {
    pub(crate) got: AtomicU64,
    pub(crate) missed: AtomicU64,
    pub(crate) put: AtomicU64,
    pub(crate) failed: AtomicU64,
}

const KEYS: u64 = 200;

fn content(key: u64, version: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(key.rotate_left(32) ^ version);
    let mut bytes = version.to_le_bytes().to_vec();
    let length = 1000 + usize::try_from(key * 997 % 60_000).unwrap();
    bytes.extend(std::iter::repeat_with(|| random.u8(..)).take(length));
    bytes
}

/// Puts and gets until the end. Objects that are read must equal those that were put.
pub(crate) async fn run_store_client(
    client: KvClient,
    seed: u64,
    counts: Arc<ChaosStoreCounts>,
    end: Arc<AtomicBool>,
) {
    let mut random = fastrand::Rng::with_seed(seed);
    while !end.load(Ordering::Relaxed) {
        let (key, version) = (random.u64(..KEYS), random.u64(..));
        let count = if random.bool() { put(&client, key, version).await } else { get(&client, key).await };
        match count {
            Ok(true) => &counts.put,
            Ok(false) => &counts.got,
            Err(KvError::NotFound { .. }) => &counts.missed,
            Err(_) => &counts.failed,
        }
        .fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Puts a version of an object, and returns true.
pub(crate) async fn put(client: &KvClient, key: u64, version: u64) -> Result<bool, KvError> {
    client.upsert(&format!("chaos-{key}"), &content(key, version), &PutOptions::default()).await.map(|_| true)
}

/// Reads an object and checks it, and returns false.
pub(crate) async fn get(client: &KvClient, key: u64) -> Result<bool, KvError> {
    let bytes = client.get(&format!("chaos-{key}")).await?;
    let version = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
    assert!(*bytes == *content(key, version), "object {key} has other bytes than were put");
    Ok(false)
}
