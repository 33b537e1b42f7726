//! Loads the LoRA adapter of a request on engines that were chosen for it and have not loaded it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join;
use http::header::AUTHORIZATION;
use http::{HeaderValue, StatusCode};
use moongate_discovery::{EngineFacts, EngineKind, TopologyReader};
use moongate_runtime::Supervisor;
use moongate_scheduler::ModelIndex;
use serde_json::json;
use tokio::time::Instant;

use crate::decide::{AdmissionQueue, ChosenRoute};
use crate::feedback::{AdapterLoadMetrics, AdapterLoadOutcome};
use crate::fleet::{AdapterLoadStep, FleetMember, FleetReader};
use crate::legs::AttemptFailure;
use crate::lora_adapters::{AdapterLoadError, LoadableAdapter};
use crate::routed_request::RoutedRequest;
use crate::upstream::LegKind;

/// Longest part of an engine's message that is kept, in characters.
const MAX_MESSAGE: usize = 300;

/// Loads adapters on engines: each at most once at a time on one engine, however many requests wait for it.
#[derive(Debug)]
pub(crate) struct AdapterLoader {
    pub(crate) client: reqwest::Client,
    pub(crate) authorization: Option<HeaderValue>,
    /// Time limit for one load.
    pub(crate) timeout: Duration,
    pub(crate) fleet: FleetReader,
    pub(crate) topology: TopologyReader,
    pub(crate) admission: Arc<AdmissionQueue>,
    pub(crate) metrics: AdapterLoadMetrics,
    pub(crate) supervisor: Supervisor,
}

impl AdapterLoader {
    /// Waits until all engines of the route have loaded the request's adapter. A load continues if the future is dropped.
    pub(super) async fn load_on_route(
        self: &Arc<Self>,
        routed: &RoutedRequest,
        chosen: &ChosenRoute,
    ) -> Result<(), AttemptFailure> {
        let (Some(model), Some(request)) = (&routed.model, &routed.request) else { return Ok(()) };
        let ChosenRoute { prefill, decode, in_flight, .. } = chosen;
        if ![Some(prefill), decode.as_ref()].into_iter().flatten().any(|member| lacks(member, model)) {
            return Ok(());
        }
        let index = request.model;
        let load = async |side, member: &FleetMember| {
            let loaded = self.load(member, model, index).await;
            loaded.map_err(|error| AttemptFailure::unloaded_adapter(side, member, error))
        };
        match decode {
            Some(decode) => {
                try_join(load(LegKind::Prefill, prefill), load(LegKind::Decode, decode)).await?;
            }
            None => load(LegKind::Worker, prefill).await?,
        }
        in_flight.record_adapter_wait_ended();
        Ok(())
    }

    async fn load(
        self: &Arc<Self>,
        member: &FleetMember,
        model: &Arc<str>,
        index: ModelIndex,
    ) -> Result<(), AdapterLoadError> {
        let fleet = self.fleet.current();
        let Some(facts) = member.facts().filter(|facts| !serves(facts, model)) else { return Ok(()) };
        // Not an adapter of the file any more: the engine decides whether it serves the request.
        let Some(adapter) = fleet.adapters.find(model, facts) else { return Ok(()) };
        match member.endpoint.adapter_loads.next_step(model, Instant::now()) {
            AdapterLoadStep::Done => Ok(()),
            AdapterLoadStep::Failed(error) => Err(error),
            AdapterLoadStep::Wait(load) => load.wait().await,
            AdapterLoadStep::Load(sender, load) => {
                let (loader, member, model) = (self.clone(), member.clone(), model.clone());
                let (adapter, engine) = (adapter.clone(), facts.engine);
                self.supervisor.spawn("adapter-load", async move {
                    let result = loader.run(&member, engine, &adapter, (&model, index)).await;
                    sender.send_replace(Some(result));
                });
                load.wait().await
            }
        }
    }

    /// Runs one load and records its result.
    async fn run(
        &self,
        member: &FleetMember,
        engine: EngineKind,
        adapter: &LoadableAdapter,
        (model, index): (&Arc<str>, ModelIndex),
    ) -> Result<(), AdapterLoadError> {
        let started = Instant::now();
        let stop = self.supervisor.token();
        let result = tokio::select! {
            result = self.request_load(member, engine, adapter) => result,
            () = stop.cancelled() => Err(AdapterLoadError::Interrupted),
        };
        let (took, id) = (started.elapsed(), &member.endpoint.id);
        let outcome = match &result {
            Ok(outcome) => {
                tracing::info!(engine = %id, adapter = %adapter.name, path = %adapter.path, ?took, outcome = outcome.as_str(), "LoRA adapter loaded");
                *outcome
            }
            Err(error) => {
                tracing::warn!(engine = %id, adapter = %adapter.name, path = %adapter.path, ?took, %error, "LoRA adapter not loaded");
                AdapterLoadOutcome::of_error(error)
            }
        };
        self.metrics.record_load(outcome, took);
        let result = result.map(drop);
        member.endpoint.adapter_loads.record(model, &result, Instant::now());
        let learned = (outcome == AdapterLoadOutcome::Loaded).then_some(took);
        self.admission.record_adapter_load(&member.endpoint, index, result.is_ok(), learned);
        // Its facts have what block hashes depend on. SGLang may also have evicted another adapter.
        self.topology.request_probe(id);
        result
    }

    /// vLLM's `/v1/load_lora_adapter` (0.32), SGLang's `/load_lora_adapter` (0.5.23).
    async fn request_load(
        &self,
        member: &FleetMember,
        engine: EngineKind,
        adapter: &LoadableAdapter,
    ) -> Result<AdapterLoadOutcome, AdapterLoadError> {
        let path = match engine {
            EngineKind::Vllm => "/v1/load_lora_adapter",
            EngineKind::Sglang => "/load_lora_adapter",
        };
        let url = format!("{}{path}", member.instance.url.trim_end_matches('/'));
        let body = json!({"lora_name": &*adapter.name, "lora_path": &*adapter.path});
        let mut request = self.client.post(url).timeout(self.timeout).json(&body);
        if let Some(key) = &self.authorization {
            request = request.header(AUTHORIZATION, key);
        }
        let failed = |error: reqwest::Error| match error.is_timeout() {
            true => AdapterLoadError::Timeout(self.timeout),
            false => AdapterLoadError::Exchange(error.without_url().to_string()),
        };
        let exchange = async {
            let mut response = moongate_runtime::net::send_request(request).await.map_err(failed)?;
            let status = response.status();
            if status.is_success() {
                return Ok(AdapterLoadOutcome::Loaded);
            }
            let message = read_start(&mut response).await.map_err(failed)?;
            if is_loaded_already(status, &message) {
                return Ok(AdapterLoadOutcome::AlreadyLoaded);
            }
            Err(AdapterLoadError::Rejected { status, message, hint: hint(status, engine) })
        };
        // A connection that is being opened counts, too.
        tokio::time::timeout(self.timeout, exchange)
            .await
            .unwrap_or(Err(AdapterLoadError::Timeout(self.timeout)))
    }
}

/// Whether an engine has to load `model` before it serves it.
fn lacks(member: &FleetMember, model: &str) -> bool {
    member.facts().is_some_and(|facts| !serves(facts, model))
}

fn serves(facts: &EngineFacts, model: &str) -> bool {
    facts.models.iter().any(|served| *served == *model)
}

/// Whether an engine rejects a load because it has the adapter: another gateway was faster, or the probe is late. Both engines answer
/// 400 with a sentence: vLLM "… has already been loaded …", SGLang "… already loaded …".
fn is_loaded_already(status: StatusCode, message: &str) -> bool {
    status == StatusCode::BAD_REQUEST && message.contains("already") && message.contains("loaded")
}

fn hint(status: StatusCode, engine: EngineKind) -> &'static str {
    match (status, engine) {
        (StatusCode::NOT_FOUND, EngineKind::Vllm) => {
            "; check the path, and start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
        }
        (StatusCode::BAD_REQUEST, EngineKind::Sglang) => {
            "; check the path, and start SGLang with --enable-lora"
        }
        _ => "",
    }
}

async fn read_start(response: &mut reqwest::Response) -> reqwest::Result<String> {
    let mut body = Vec::new();
    while body.len() < 4 * MAX_MESSAGE {
        let Some(chunk) = response.chunk().await? else { break };
        body.extend_from_slice(&chunk);
    }
    Ok(String::from_utf8_lossy(&body).chars().take(MAX_MESSAGE).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_that_is_loaded_already_is_no_failure() {
        let vllm =
            "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set …";
        let sglang = "LoRA adapter with name sql is already loaded. Existing loaded adapters: …";
        assert!([vllm, sglang].iter().all(|message| is_loaded_already(StatusCode::BAD_REQUEST, message)));
        assert!(!is_loaded_already(StatusCode::NOT_FOUND, vllm));
        assert!(!is_loaded_already(
            StatusCode::BAD_REQUEST,
            "Loading lora sql failed: No adapter found for /x"
        ));
    }
}
