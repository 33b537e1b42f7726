//! Reconciles the engine's LoRA adapters with the desired ones, through the engine's own API.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use moongate_discovery::EngineKind;
use reqwest::StatusCode;
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::context::SidecarContext;
use crate::http_client::{HttpExchangeError, read_bounded_body};
use crate::options::SidecarOptions;
use crate::pod_metadata::{PodMetadata, read_bounded};
use crate::state::{LocalEngine, LoraAdapterStatus};

/// Annotation of the pod with the desired adapters.
const ANNOTATION: &str = "moongate.io/lora-adapters";
/// Maximum number of adapters.
const MAX_ADAPTERS: usize = 1000;
/// Longest pair of name and path, in bytes.
const MAX_TEXT: usize = 1024;
/// Interval of reading the files and polling the engine.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Delay before a failed load is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Time limit for one query.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for loading one adapter, possibly from a slow volume.
const LOAD_TIMEOUT: Duration = Duration::from_secs(300);

/// Paths of adapters by name.
type LoraAdapterPaths = BTreeMap<String, String>;

/// Watches the files and reconciles the engine's adapters until `stop`. Adapters that were never in the files, such as those of the
/// engine's command line, are not touched.
pub(crate) async fn run(sidecar: Arc<SidecarContext>, stop: CancellationToken) {
    let mut reconciler = LoraReconciler { error: None, managed: BTreeSet::new() };
    loop {
        let delay = tokio::select! {
            () = stop.cancelled() => return,
            delay = reconciler.poll(&sidecar) => delay,
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(delay) => {}
        }
    }
}

/// Why the desired adapters cannot be read.
#[derive(Debug, thiserror::Error)]
enum DesiredLoraError {
    #[error("--pod-info: {0}")]
    PodInfo(#[source] io::Error),
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("LoRA adapter {pair:?} {problem}; write NAME=PATH")]
    Pair { pair: String, problem: &'static str },
    #[error("{0} LoRA adapters are listed; the limit is {MAX_ADAPTERS}")]
    TooMany(usize),
}

/// Why a call of the engine's API failed.
#[derive(Debug, thiserror::Error)]
enum LoraApiError {
    #[error(transparent)]
    Exchange(#[from] HttpExchangeError),
    #[error("{path}: HTTP {status}: {message}{hint}")]
    Rejected {
        path: String,
        status: StatusCode,
        /// The start of the response.
        message: String,
        /// The engine's flags that permit the call, after a semicolon; empty if they are not the cause.
        hint: &'static str,
    },
    /// The list of models has an unexpected form.
    #[error(transparent)]
    Format(#[from] serde_json::Error),
}

struct LoraReconciler {
    /// Why the desired adapters could not be read the last time.
    error: Option<DesiredLoraError>,
    /// Names of all adapters that were ever desired.
    managed: BTreeSet<String>,
}

impl LoraReconciler {
    async fn poll(&mut self, sidecar: &SidecarContext) -> Duration {
        let info = match PodMetadata::read(&sidecar.options.pod_info).await {
            Ok(info) => info,
            Err(error) => return self.report_error(DesiredLoraError::PodInfo(error)),
        };
        let location = info.fill_location(&sidecar.options.location());
        sidecar
            .state
            .send_if_modified(|state| std::mem::replace(&mut state.location, location.clone()) != location);
        let text = match desired_text(&sidecar.options, &info).await {
            Ok(Some(text)) => text,
            Ok(None) => return POLL_INTERVAL,
            Err(error) => return self.report_error(error),
        };
        let desired = match parse(&text) {
            Ok(desired) => desired,
            Err(error) => return self.report_error(error),
        };
        self.managed.extend(desired.keys().cloned());
        self.error = None;
        let engine = {
            let state = sidecar.state.borrow();
            state.local_engine.clone().filter(|_| state.error.is_none() && state.drain.is_none())
        };
        match engine {
            Some(engine) => self.reconcile(sidecar, &engine, &desired).await,
            None => {
                let pending = desired.into_keys().collect();
                let adapters = LoraAdapterStatus { pending, ..LoraAdapterStatus::default() };
                sidecar.state.send_modify(|state| state.adapters = adapters);
                POLL_INTERVAL
            }
        }
    }

    /// Logs an error once. The loaded adapters are kept.
    fn report_error(&mut self, error: DesiredLoraError) -> Duration {
        if self.error.as_ref().is_none_or(|reported| reported.to_string() != error.to_string()) {
            tracing::error!(%error, "cannot read the desired LoRA adapters; keeping the loaded ones");
        }
        self.error = Some(error);
        POLL_INTERVAL
    }

    async fn reconcile(
        &self,
        sidecar: &SidecarContext,
        engine: &LocalEngine,
        desired: &LoraAdapterPaths,
    ) -> Duration {
        let api = LoraAdapterApi { sidecar, engine };
        let loaded = match api.loaded().await {
            Ok(loaded) => loaded,
            Err(error) => {
                tracing::debug!(%error, "cannot list the engine's LoRA adapters");
                return POLL_INTERVAL;
            }
        };
        let changes = changes(&loaded, desired, &self.managed);
        let mut adapters = LoraAdapterStatus {
            loaded: desired.keys().filter(|name| !changes.contains_key(*name)).cloned().collect(),
            pending: desired.keys().filter(|name| changes.contains_key(*name)).cloned().collect(),
            failed: Vec::new(),
        };
        if changes.is_empty() {
            sidecar.state.send_if_modified(|state| {
                std::mem::replace(&mut state.adapters, adapters.clone()) != adapters
            });
            return POLL_INTERVAL;
        }
        // Retries of adapters that failed before do not count as pending.
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
                    tracing::error!(name, ?change, %error, "LoRA adapter could not be changed");
                    adapters.failed.push((name.clone(), error.to_string()));
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

/// The change of one adapter that reconciles it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum LoraAdapterChange {
    /// Load it from this path.
    Load(String),
    /// Unload it and load it from this other path.
    Replace(String),
    Unload,
}

fn changes(
    loaded: &LoraAdapterPaths,
    desired: &LoraAdapterPaths,
    managed: &BTreeSet<String>,
) -> BTreeMap<String, LoraAdapterChange> {
    let removed = loaded.keys().filter(|name| managed.contains(*name) && !desired.contains_key(*name));
    let changed = desired.iter().filter_map(|(name, path)| match loaded.get(name) {
        None => Some((name.clone(), LoraAdapterChange::Load(path.clone()))),
        Some(now) if now != path => Some((name.clone(), LoraAdapterChange::Replace(path.clone()))),
        Some(_) => None,
    });
    removed.map(|name| (name.clone(), LoraAdapterChange::Unload)).chain(changed).collect()
}

async fn desired_text(
    options: &SidecarOptions,
    info: &PodMetadata,
) -> Result<Option<String>, DesiredLoraError> {
    match &options.lora_file {
        Some(file) => {
            let unread = |source| DesiredLoraError::File { path: file.clone(), source };
            read_bounded(file).await.map(Some).map_err(unread)
        }
        // A removed annotation means no adapters.
        None if !options.pod_info.is_empty() => Ok(Some(info.get(ANNOTATION).unwrap_or_default().to_owned())),
        None => Ok(None),
    }
}

/// Parses `NAME=PATH` pairs, separated by commas or white space; `#` starts a comment until the end of the line.
fn parse(text: &str) -> Result<LoraAdapterPaths, DesiredLoraError> {
    let mut adapters = LoraAdapterPaths::new();
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    for pair in lines.flat_map(|line| line.split([',', ' ', '\t', '\r'])).filter(|pair| !pair.is_empty()) {
        let invalid = |problem| DesiredLoraError::Pair { pair: pair.to_owned(), problem };
        let (name, path) = pair.split_once('=').ok_or_else(|| invalid("has no path"))?;
        if name.is_empty() || path.is_empty() || pair.len() > MAX_TEXT {
            return Err(invalid("has an empty part, or is too long"));
        }
        if adapters.insert(name.to_owned(), path.to_owned()).is_some() {
            return Err(invalid("has a name that is listed twice"));
        }
    }
    if adapters.len() > MAX_ADAPTERS {
        return Err(DesiredLoraError::TooMany(adapters.len()));
    }
    Ok(adapters)
}

/// The engine's own API: vLLM's `/v1/load_lora_adapter` (0.32), SGLang's `/load_lora_adapter` (0.5.23). Both list loaded adapters in
/// `/v1/models`, each adapter with its base model as `parent` and its path as `root`.
struct LoraAdapterApi<'a> {
    sidecar: &'a SidecarContext,
    engine: &'a LocalEngine,
}

impl LoraAdapterApi<'_> {
    async fn loaded(&self) -> Result<LoraAdapterPaths, LoraApiError> {
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
        let list: LoadedModelList = serde_json::from_slice(&body)?;
        let adapters = list.data.into_iter().filter(|card| card.parent.is_some());
        Ok(adapters.map(|card| (card.id, card.root.unwrap_or_default())).collect())
    }

    async fn apply(&self, name: &str, change: &LoraAdapterChange) -> Result<(), LoraApiError> {
        match change {
            LoraAdapterChange::Load(path) => self.load(name, path).await,
            LoraAdapterChange::Replace(path) => {
                self.unload(name).await?;
                self.load(name, path).await
            }
            LoraAdapterChange::Unload => self.unload(name).await,
        }
    }

    async fn load(&self, name: &str, path: &str) -> Result<(), LoraApiError> {
        self.post("load_lora_adapter", &json!({"lora_name": name, "lora_path": path})).await
    }

    async fn unload(&self, name: &str) -> Result<(), LoraApiError> {
        self.post("unload_lora_adapter", &json!({"lora_name": name})).await
    }

    async fn post(&self, call: &str, body: &serde_json::Value) -> Result<(), LoraApiError> {
        let prefix = match self.engine.engine {
            EngineKind::Vllm => "/v1",
            EngineKind::Sglang => "",
        };
        let request = self.sidecar.client.post(format!("{}{prefix}/{call}", self.engine.url));
        self.send(request.json(body).timeout(LOAD_TIMEOUT)).await.map(drop)
    }

    async fn send(&self, mut request: reqwest::RequestBuilder) -> Result<Vec<u8>, LoraApiError> {
        if let Some(key) = &self.sidecar.options.engine_api_key {
            request = request.bearer_auth(key);
        }
        let response = request.send().await.map_err(HttpExchangeError::from)?;
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
        let message = String::from_utf8_lossy(&body).chars().take(500).collect();
        Err(LoraApiError::Rejected { path, status, message, hint })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapters(pairs: &[(&str, &str)]) -> LoraAdapterPaths {
        pairs.iter().map(|(name, path)| ((*name).to_owned(), (*path).to_owned())).collect()
    }

    #[test]
    fn pairs_may_be_separated_by_commas_or_white_space() {
        let read = parse("a=/x, b=/y # of the sales people\n#c=/z\n\td=/v=1\n").unwrap();
        assert_eq!(read, adapters(&[("a", "/x"), ("b", "/y"), ("d", "/v=1")]));
        assert!(parse(" \n").unwrap().is_empty());
        for (invalid, part) in [("a", "no path"), ("=x", "empty"), ("a=", "empty"), ("a=1 a=2", "twice")] {
            assert!(parse(invalid).unwrap_err().to_string().contains(part), "{invalid}");
        }
    }

    #[test]
    fn only_adapters_that_were_desired_before_are_unloaded() {
        let loaded =
            adapters(&[("kept", "/k"), ("moved", "/old"), ("left", "/l"), ("of the command line", "/c")]);
        let desired = adapters(&[("kept", "/k"), ("moved", "/new"), ("new", "/n")]);
        let managed = ["kept", "moved", "left"].map(str::to_owned).into();
        let expected = [
            ("left", LoraAdapterChange::Unload),
            ("moved", LoraAdapterChange::Replace("/new".to_owned())),
            ("new", LoraAdapterChange::Load("/n".to_owned())),
        ];
        let expected = expected.map(|(name, change)| (name.to_owned(), change)).into();
        assert_eq!(changes(&loaded, &desired, &managed), expected);
    }
}
