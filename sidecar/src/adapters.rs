//! LoRA adapters: which the engine shall have, and the calls of its own API that get it there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::EngineKind;
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::http_client::{read_bounded_body, root_cause};
use crate::options::SidecarOptions;
use crate::pod_metadata::{PodMetadata, read_bounded};
use crate::sidecar::SidecarContext;
use crate::state::{LocalEngine, LoraAdapterStatus};

/// Annotation: the adapters that the engine shall have.
const ANNOTATION: &str = "moongate.io/lora-adapters";
/// Most adapters, and the longest name or path in bytes.
const MAX_ADAPTERS: usize = 1000;
const MAX_TEXT: usize = 1024;
/// Between two looks at the files and at the engine.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Until an adapter that could not be loaded is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// For one question, and for loading one adapter from a slow volume.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// Paths by name.
type LoraAdapterPaths = BTreeMap<String, String>;

/// Follows the files and brings the engine's adapters in line, until `stop`. Adapters that the sidecar was never asked for, such as those
/// of the engine's command line, are left alone.
pub(crate) async fn run(sidecar: Arc<SidecarContext>, stop: CancellationToken) {
    let mut follower = LoraReconciler { desired: Ok(LoraAdapterPaths::new()), managed: BTreeSet::new() };
    loop {
        let pause = tokio::select! {
            () = stop.cancelled() => return,
            pause = follower.poll(&sidecar) => pause,
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

struct LoraReconciler {
    /// What was asked for last, or what was wrong with it.
    desired: Result<LoraAdapterPaths, String>,
    /// Names that were ever asked for.
    managed: BTreeSet<String>,
}

impl LoraReconciler {
    async fn poll(&mut self, sidecar: &SidecarContext) -> Duration {
        let info = match PodMetadata::read(&sidecar.options.pod_info).await {
            Ok(info) => info,
            Err(error) => return self.report_error(&format!("--pod-info: {error}")),
        };
        let place = info.fill_location(&sidecar.options.location());
        sidecar
            .state
            .send_if_modified(|state| std::mem::replace(&mut state.location, place.clone()) != place);
        let text = match desired_text(&sidecar.options, &info).await {
            Ok(Some(text)) => text,
            Ok(None) => return POLL_INTERVAL,
            Err(error) => return self.report_error(&error),
        };
        let wanted = match parse(&text) {
            Ok(wanted) => wanted,
            Err(error) => return self.report_error(&error),
        };
        self.managed.extend(wanted.keys().cloned());
        self.desired = Ok(wanted.clone());
        let found = {
            let state = sidecar.state.borrow();
            state.local_engine.clone().filter(|_| state.error.is_none() && state.drain.is_none())
        };
        match found {
            Some(found) => self.reconcile(sidecar, &found, &wanted).await,
            None => {
                let pending = wanted.into_keys().collect();
                let adapters = LoraAdapterStatus { pending, ..LoraAdapterStatus::default() };
                sidecar.state.send_modify(|state| state.adapters = adapters);
                POLL_INTERVAL
            }
        }
    }

    /// A wrong file changes nothing; it is told once.
    fn report_error(&mut self, error: &str) -> Duration {
        if self.desired.as_ref().err().is_none_or(|told| told != error) {
            tracing::error!(error, "the wanted LoRA adapters are not known; what is loaded stays");
            self.desired = Err(error.to_owned());
        }
        POLL_INTERVAL
    }

    async fn reconcile(
        &self,
        sidecar: &SidecarContext,
        found: &LocalEngine,
        wanted: &LoraAdapterPaths,
    ) -> Duration {
        let api = LoraAdapterApi { sidecar, engine: found };
        let loaded = match api.loaded().await {
            Ok(loaded) => loaded,
            Err(error) => {
                tracing::debug!(error, "the engine does not tell its LoRA adapters");
                return POLL_INTERVAL;
            }
        };
        let changes = changes(&loaded, wanted, &self.managed);
        let mut adapters = LoraAdapterStatus {
            loaded: wanted.keys().filter(|name| !changes.contains_key(*name)).cloned().collect(),
            pending: wanted.keys().filter(|name| changes.contains_key(*name)).cloned().collect(),
            failed: Vec::new(),
        };
        if changes.is_empty() {
            sidecar.state.send_if_modified(|state| {
                std::mem::replace(&mut state.adapters, adapters.clone()) != adapters
            });
            return POLL_INTERVAL;
        }
        // Adapters that failed before and are tried again do not count as pending again.
        let failed_before: Vec<_> =
            sidecar.state.borrow().adapters.failed.iter().map(|(name, _)| name.clone()).collect();
        adapters.pending.retain(|name| !failed_before.contains(name));
        sidecar.state.send_modify(|state| state.adapters.pending.clone_from(&adapters.pending));
        for (name, change) in &changes {
            match api.apply(name, change).await {
                Ok(()) => {
                    tracing::info!(name, ?change, "LoRA adapter changed");
                    if matches!(change, LoraAdapterChange::Load(_) | LoraAdapterChange::Replace(_)) {
                        adapters.loaded.push(name.clone());
                    }
                }
                Err(error) => {
                    tracing::error!(name, ?change, error, "LoRA adapter could not be changed");
                    adapters.failed.push((name.clone(), error));
                }
            }
        }
        adapters.pending.clear();
        adapters.loaded.sort();
        let failed = !adapters.failed.is_empty();
        sidecar.state.send_modify(|state| {
            state.adapters = adapters;
            state.revision += 1;
        });
        if failed { RETRY_INTERVAL } else { POLL_INTERVAL }
    }
}

/// What is to be done about one adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LoraAdapterChange {
    /// From this path.
    Load(String),
    /// From another path than now.
    Replace(String),
    Unload,
}

fn changes(
    loaded: &LoraAdapterPaths,
    wanted: &LoraAdapterPaths,
    ours: &BTreeSet<String>,
) -> BTreeMap<String, LoraAdapterChange> {
    let gone = loaded.keys().filter(|name| ours.contains(*name) && !wanted.contains_key(*name));
    let wrong = wanted.iter().filter_map(|(name, path)| match loaded.get(name) {
        None => Some((name.clone(), LoraAdapterChange::Load(path.clone()))),
        Some(now) if now != path => Some((name.clone(), LoraAdapterChange::Replace(path.clone()))),
        Some(_) => None,
    });
    gone.map(|name| (name.clone(), LoraAdapterChange::Unload)).chain(wrong).collect()
}

async fn desired_text(options: &SidecarOptions, info: &PodMetadata) -> Result<Option<String>, String> {
    match &options.lora_file {
        Some(file) => {
            let text = read_bounded(file).await.map_err(|error| format!("{}: {error}", file.display()))?;
            Ok(Some(text))
        }
        // An annotation that was removed wants no adapters any more.
        None if !options.pod_info.is_empty() => Ok(Some(info.get(ANNOTATION).unwrap_or_default().to_owned())),
        None => Ok(None),
    }
}

/// `NAME=PATH`, separated by commas or white space; what follows `#` on a line is a comment.
fn parse(text: &str) -> Result<LoraAdapterPaths, String> {
    let mut adapters = LoraAdapterPaths::new();
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    for pair in lines.flat_map(|line| line.split([',', ' ', '\t', '\r'])).filter(|pair| !pair.is_empty()) {
        let wrong = |problem: &str| format!("LoRA adapter {pair:?} {problem}; write NAME=PATH");
        let (name, path) = pair.split_once('=').ok_or_else(|| wrong("has no path"))?;
        if name.is_empty() || path.is_empty() || pair.len() > MAX_TEXT {
            return Err(wrong("has an empty part, or is too long"));
        }
        if adapters.insert(name.to_owned(), path.to_owned()).is_some() {
            return Err(wrong("has a name that is given twice"));
        }
    }
    if adapters.len() > MAX_ADAPTERS {
        return Err(format!("{} LoRA adapters are wanted, {MAX_ADAPTERS} are the most", adapters.len()));
    }
    Ok(adapters)
}

/// The engine's own API: vLLM's `/v1/load_lora_adapter` (0.32), SGLang's `/load_lora_adapter` (0.5.23). Both list what is loaded in
/// `/v1/models`, each adapter with its base model as `parent` and its path as `root`.
struct LoraAdapterApi<'a> {
    sidecar: &'a SidecarContext,
    engine: &'a LocalEngine,
}

impl LoraAdapterApi<'_> {
    async fn loaded(&self) -> Result<LoraAdapterPaths, String> {
        #[derive(Deserialize)]
        struct LoadedModelList {
            data: Vec<LoadedModelCard>,
        }
        #[derive(Deserialize)]
        struct LoadedModelCard {
            id: String,
            parent: Option<String>,
            root: Option<String>,
        }
        let request =
            self.sidecar.client.get(format!("{}/v1/models", self.engine.url)).timeout(REQUEST_TIMEOUT);
        let body = self.send(request).await?;
        let list: LoadedModelList = serde_json::from_slice(&body).map_err(|error| error.to_string())?;
        let adapters = list.data.into_iter().filter(|card| card.parent.is_some());
        Ok(adapters.map(|card| (card.id, card.root.unwrap_or_default())).collect())
    }

    async fn apply(&self, name: &str, change: &LoraAdapterChange) -> Result<(), String> {
        match change {
            LoraAdapterChange::Load(path) => self.load(name, path).await,
            LoraAdapterChange::Replace(path) => {
                self.unload(name).await?;
                self.load(name, path).await
            }
            LoraAdapterChange::Unload => self.unload(name).await,
        }
    }

    async fn load(&self, name: &str, path: &str) -> Result<(), String> {
        self.post("load_lora_adapter", &json!({"lora_name": name, "lora_path": path})).await
    }

    async fn unload(&self, name: &str) -> Result<(), String> {
        self.post("unload_lora_adapter", &json!({"lora_name": name})).await
    }

    async fn post(&self, what: &str, body: &serde_json::Value) -> Result<(), String> {
        let prefix = match self.engine.engine {
            EngineKind::Vllm => "/v1",
            EngineKind::Sglang => "",
        };
        let request = self.sidecar.client.post(format!("{}{prefix}/{what}", self.engine.url));
        self.send(request.json(body).timeout(LOAD_TIMEOUT)).await.map(drop)
    }

    async fn send(&self, mut request: reqwest::RequestBuilder) -> Result<Vec<u8>, String> {
        if let Some(key) = &self.sidecar.options.engine_api_key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(|error| root_cause(&error))?;
        let (status, path) = (response.status(), response.url().path().to_owned());
        let body = read_bounded_body(response).await?;
        if status.is_success() {
            return Ok(body);
        }
        let hint = match (status.as_u16(), self.engine.engine) {
            (404, EngineKind::Vllm) => {
                "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            }
            (400, EngineKind::Sglang) => "; start SGLang with --enable-lora",
            _ => "",
        };
        let said: String = String::from_utf8_lossy(&body).chars().take(500).collect();
        Err(format!("{path}: HTTP {status}: {said}{hint}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapters(pairs: &[(&str, &str)]) -> LoraAdapterPaths {
        pairs.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
    }

    #[test]
    fn pairs_are_read_however_they_are_separated() {
        let read = parse("a=/x, b=/y # of the sales people\n#c=/z\n\td=/v=1\n").unwrap();
        assert_eq!(read, adapters(&[("a", "/x"), ("b", "/y"), ("d", "/v=1")]));
        assert_eq!(parse(" \n"), Ok(LoraAdapterPaths::new()));
        for (wrong, part) in [("a", "no path"), ("=x", "empty"), ("a=", "empty"), ("a=1 a=2", "twice")] {
            assert!(parse(wrong).unwrap_err().contains(part), "{wrong}");
        }
    }

    #[test]
    fn only_what_was_asked_for_once_is_unloaded() {
        let loaded =
            adapters(&[("kept", "/k"), ("moved", "/old"), ("left", "/l"), ("of the command line", "/c")]);
        let wanted = adapters(&[("kept", "/k"), ("moved", "/new"), ("new", "/n")]);
        let ours = ["kept", "moved", "left"].map(str::to_owned).into();
        let expected = [
            ("left", LoraAdapterChange::Unload),
            ("moved", LoraAdapterChange::Replace("/new".to_owned())),
            ("new", LoraAdapterChange::Load("/n".to_owned())),
        ];
        let expected = expected.map(|(name, change)| (name.to_owned(), change)).into();
        assert_eq!(changes(&loaded, &wanted, &ours), expected);
    }
}
