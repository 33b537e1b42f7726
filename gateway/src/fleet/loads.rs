//! Asks engines for their own load: it includes what other gateways have sent there.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use moongate_discovery::InstanceId;
use moongate_scheduler::Reported;
use serde::Deserialize;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::endpoint::Endpoint;
use super::follow::FleetReader;
use super::snapshot::Member;

/// An engine that does not answer is not asked again for so long.
const PAUSE: Duration = Duration::from_secs(10);
/// vLLM tells its load among all its metrics, a hundred kilobytes: it is asked less often.
const VLLM_EVERY: Duration = Duration::from_secs(1);
/// Time for one answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longest answer that is read.
const MAX_BYTES: usize = 4 << 20;

/// Asks every engine each `every` until `stop`, and hands the answers to `reported`.
pub(crate) async fn poll_loads(
    fleet: FleetReader,
    client: reqwest::Client,
    every: Duration,
    reported: impl Fn(&Arc<Endpoint>, Reported),
    stop: CancellationToken,
) {
    // When to ask again. An engine that is being asked is not in it.
    let mut next: HashMap<InstanceId, Option<Instant>> = HashMap::new();
    let mut answers = FuturesUnordered::new();
    let mut tick = interval(every);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some((member, outcome)) = answers.next(), if !answers.is_empty() => {
                let (member, outcome): (Member, Result<Reported, String>) = (member, outcome);
                let pause = match outcome {
                    Ok(load) => {
                        reported(&member.endpoint, load);
                        if member.is_sglang() { Duration::ZERO } else { VLLM_EVERY }
                    }
                    Err(reason) => {
                        tracing::debug!(instance = %member.endpoint.id, reason, "engine does not tell its load");
                        PAUSE
                    }
                };
                next.insert(member.endpoint.id.clone(), Some(Instant::now() + pause));
            }
            _ = tick.tick() => {
                let current = fleet.current();
                next.retain(|id, _| current.members.iter().any(|member| member.endpoint.id == *id));
                for member in &current.members {
                    let due = next.entry(member.endpoint.id.clone()).or_insert_with(|| Some(Instant::now()));
                    if due.take_if(|at| *at <= Instant::now()).is_some() {
                        let (client, member) = (client.clone(), member.clone());
                        answers.push(async move {
                            let outcome = ask(&client, &member).await;
                            (member, outcome)
                        });
                    }
                }
            }
        }
    }
}

async fn ask(client: &reqwest::Client, member: &Member) -> Result<Reported, String> {
    let path = if member.is_sglang() { "/v1/loads?include=core" } else { "/metrics" };
    let request = client.get(format!("{}{path}", member.instance.url)).timeout(PATIENCE);
    let response = request.send().await.map_err(|error| error.without_url().to_string())?;
    if !response.status().is_success() {
        return Err(format!("GET {path} answered {}", response.status()));
    }
    let mut body = Vec::new();
    let mut pieces = response.bytes_stream();
    while let Some(piece) = pieces.next().await {
        body.extend_from_slice(&piece.map_err(|error| error.without_url().to_string())?);
        if body.len() > MAX_BYTES {
            return Err(format!("GET {path} answered more than {MAX_BYTES} bytes"));
        }
    }
    if member.is_sglang() { sglang(&body) } else { vllm(&String::from_utf8_lossy(&body)) }
}

/// SGLang's `/v1/loads`: an entry for each data-parallel rank.
fn sglang(body: &[u8]) -> Result<Reported, String> {
    #[derive(Deserialize)]
    struct Loads {
        loads: Vec<Rank>,
    }
    #[derive(Deserialize)]
    #[serde(default)]
    #[derive(Default)]
    struct Rank {
        num_running_reqs: u32,
        num_waiting_reqs: u32,
        num_waiting_uncached_tokens: u64,
        num_used_tokens: u64,
        max_total_num_tokens: u64,
    }
    let Loads { loads } = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    let mut sum = Reported::default();
    for rank in loads {
        sum.running = sum.running.saturating_add(rank.num_running_reqs);
        sum.waiting = sum.waiting.saturating_add(rank.num_waiting_reqs);
        sum.waiting_uncached_tokens =
            sum.waiting_uncached_tokens.saturating_add(rank.num_waiting_uncached_tokens);
        sum.used_tokens = sum.used_tokens.saturating_add(rank.num_used_tokens);
        sum.capacity_tokens = sum.capacity_tokens.saturating_add(rank.max_total_num_tokens);
    }
    Ok(sum)
}

/// vLLM's metrics: a line for each data-parallel engine. It does not tell how many tokens wait.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to what the type holds")]
fn vllm(text: &str) -> Result<Reported, String> {
    let (mut running, mut waiting, mut usage, mut engines, mut capacity) = (0.0, 0.0, 0.0, 0.0, 0);
    for line in text.lines() {
        let Some((name, rest)) = line.split_once('{') else { continue };
        let Some((labels, value)) = rest.rsplit_once("} ") else { continue };
        let value: f64 = value.trim().parse().unwrap_or(0.0);
        match name {
            "vllm:num_requests_running" => running += value,
            "vllm:num_requests_waiting" => waiting += value,
            "vllm:kv_cache_usage_perc" => {
                usage += value;
                engines += 1.0;
            }
            "vllm:cache_config_info" => {
                let number = |name| label(labels, name).and_then(|text| text.parse::<u64>().ok());
                // Older releases tell blocks only.
                let blocks = || Some(number("block_size")?.saturating_mul(number("num_gpu_blocks")?));
                capacity += number("kv_cache_size_tokens").or_else(blocks).unwrap_or(0);
            }
            _ => {}
        }
    }
    if engines == 0.0 {
        return Err("its metrics have no vllm:kv_cache_usage_perc".to_owned());
    }
    let share = (usage / engines).clamp(0.0, 1.0);
    Ok(Reported {
        running: running as u32,
        waiting: waiting as u32,
        used_tokens: (share * capacity as f64) as u64,
        capacity_tokens: capacity,
        ..Reported::default()
    })
}

fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels.split(',').find_map(|pair| {
        let (found, value) = pair.split_once('=')?;
        (found == name).then(|| value.trim_matches('"'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_added() {
        let rank = r#"{"dp_rank":0,"num_running_reqs":2,"num_waiting_reqs":1,"num_waiting_uncached_tokens":500,"num_used_tokens":70,"max_total_num_tokens":1000,"more":[1]}"#;
        let load = sglang(format!(r#"{{"timestamp":1.5,"loads":[{rank},{rank}]}}"#).as_bytes()).unwrap();
        let expected = Reported {
            running: 4,
            waiting: 2,
            waiting_uncached_tokens: 1000,
            used_tokens: 140,
            capacity_tokens: 2000,
            ..Reported::default()
        };
        assert_eq!(load, expected);
        assert!(sglang(b"[]").is_err());
    }

    #[test]
    fn metrics_are_read() {
        let text = "# TYPE vllm:num_requests_running gauge\n\
            vllm:num_requests_running{engine=\"0\",model_name=\"m\"} 3.0\n\
            vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 2.0\n\
            vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n\
            vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.25\n\
            vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n";
        let load = vllm(text).unwrap();
        assert_eq!((load.running, load.waiting, load.used_tokens, load.capacity_tokens), (3, 2, 400, 1600));
        assert!(vllm("nothing\n").is_err());
    }
}
