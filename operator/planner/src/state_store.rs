//! What planners have learned, in one ConfigMap per deployment.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Error};
use moongate_capacity::PlannerState;
use serde_json::json;

use crate::deployments_file::DeploymentKey;
use crate::scale_target::{FIELD_MANAGER, REQUEST_TIMEOUT};

/// Time between two writes of one state.
pub(crate) const SAVE_INTERVAL: Duration = Duration::from_secs(300);
/// Key of the ConfigMap.
const STATE_KEY: &str = "state.json";
/// Largest state in bytes: a ConfigMap has at most 1 MiB.
const MAX_STATE_BYTES: usize = 900 << 10;

/// Why a state was not read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    #[error("it is damaged: {0}")]
    Damaged(serde_json::Error),
    #[error("it has {0} bytes, more than {MAX_STATE_BYTES}")]
    TooLarge(usize),
    #[error("no response within {} s", REQUEST_TIMEOUT.as_secs())]
    TimedOut,
    #[error(transparent)]
    Api(#[from] Error),
}

/// The stored state of one deployment.
pub(crate) struct StateStore {
    configs: Api<ConfigMap>,
    name: String,
    saved: Option<PlannerState>,
    saved_at: Instant,
}

impl StateStore {
    /// The ConfigMap `moongate-planner.NAMESPACE.NAME` in the planner's namespace.
    pub(crate) fn new(client: Client, own_namespace: &str, deployment: &DeploymentKey) -> Self {
        Self {
            configs: Api::namespaced(client, own_namespace),
            name: format!("moongate-planner.{}.{}", deployment.namespace, deployment.name),
            saved: None,
            saved_at: Instant::now(),
        }
    }

    /// Name of the ConfigMap.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Reads the state; `None` if there is none.
    pub(crate) async fn load(&mut self) -> Result<Option<PlannerState>, StateError> {
        let stored = tokio::time::timeout(REQUEST_TIMEOUT, self.configs.get_opt(&self.name)).await;
        let stored = stored.map_err(|_| StateError::TimedOut)??;
        let Some(text) = stored.and_then(|stored| stored.data).and_then(|mut data| data.remove(STATE_KEY))
        else {
            return Ok(None);
        };
        let state: PlannerState = serde_json::from_str(&text).map_err(StateError::Damaged)?;
        self.saved = Some(state.clone());
        Ok(Some(state))
    }

    /// Whether the next write is due.
    pub(crate) fn is_due(&self) -> bool {
        self.saved_at.elapsed() >= SAVE_INTERVAL
    }

    /// Writes the state, unless it is already stored.
    pub(crate) async fn save(&mut self, state: &PlannerState) -> Result<(), StateError> {
        self.saved_at = Instant::now();
        if self.saved.as_ref() == Some(state) {
            return Ok(());
        }
        let text = serde_json::to_string(state).map_err(StateError::Damaged)?;
        if text.len() > MAX_STATE_BYTES {
            return Err(StateError::TooLarge(text.len()));
        }
        let config = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": { "name": self.name, "labels": { "app.kubernetes.io/managed-by": FIELD_MANAGER } },
            "data": { STATE_KEY: text },
        });
        let params = PatchParams::apply(FIELD_MANAGER).force();
        let patch = Patch::Apply(&config);
        let written =
            tokio::time::timeout(REQUEST_TIMEOUT, self.configs.patch(&self.name, &params, &patch)).await;
        written.map_err(|_| StateError::TimedOut)??;
        self.saved = Some(state.clone());
        Ok(())
    }
}
