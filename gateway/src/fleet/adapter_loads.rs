//! LoRA adapters that one engine loads, or has loaded since it was last probed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::lora_adapters::AdapterLoadError;

/// How long requests avoid an engine that could not load their adapter.
const AVOIDED_FOR: Duration = Duration::from_secs(10);
/// How long a completed load counts before a probe lists the adapter.
const UNLISTED_FOR: Duration = Duration::from_secs(10);
/// Most adapters with a state; the oldest states are removed first.
const MAX_STATES: usize = 4096;

/// Result of a load; `None` while it runs.
type AdapterLoadResult = Option<Result<(), AdapterLoadError>>;

/// The end of a load that several requests may wait for.
#[derive(Debug, Clone)]
pub(crate) struct RunningAdapterLoad(watch::Receiver<AdapterLoadResult>);

impl RunningAdapterLoad {
    /// Waits for the result.
    pub(crate) async fn wait(mut self) -> Result<(), AdapterLoadError> {
        match self.0.wait_for(Option::is_some).await {
            Ok(result) => (*result).clone().unwrap_or(Err(AdapterLoadError::Interrupted)),
            // The task that loads has ended without a result.
            Err(_) => Err(AdapterLoadError::Interrupted),
        }
    }
}

/// What a request for an adapter has to do.
#[derive(Debug)]
pub(crate) enum AdapterLoadStep {
    /// The engine has loaded the adapter.
    Done,
    /// Wait for a load that another request has started.
    Wait(RunningAdapterLoad),
    /// Load it: the result is to be sent.
    Load(watch::Sender<AdapterLoadResult>, RunningAdapterLoad),
    /// A recent load has failed.
    Failed(AdapterLoadError),
}

#[derive(Debug)]
enum AdapterLoadState {
    Running(RunningAdapterLoad),
    Loaded(Instant),
    Failed(Instant, AdapterLoadError),
}

/// States by the model name of the adapter. Shared by the data-parallel ranks of the engine.
#[derive(Debug, Default)]
pub(crate) struct AdapterLoadStates(Mutex<HashMap<Arc<str>, AdapterLoadState>>);

impl AdapterLoadStates {
    /// The step of a request for `model`, which the engine has not listed.
    pub(crate) fn next_step(&self, model: &Arc<str>, now: Instant) -> AdapterLoadStep {
        let mut states = self.0.lock();
        match states.get(model) {
            Some(AdapterLoadState::Loaded(at)) if now - *at < UNLISTED_FOR => return AdapterLoadStep::Done,
            Some(AdapterLoadState::Failed(at, error)) if now - *at < AVOIDED_FOR => {
                return AdapterLoadStep::Failed(error.clone());
            }
            Some(AdapterLoadState::Running(load)) if load.0.has_changed().is_ok() => {
                return AdapterLoadStep::Wait(load.clone());
            }
            _ => {}
        }
        if states.len() >= MAX_STATES {
            states.retain(|_, state| state.is_current(now));
        }
        let (sender, receiver) = watch::channel(None);
        let load = RunningAdapterLoad(receiver);
        states.insert(model.clone(), AdapterLoadState::Running(load.clone()));
        AdapterLoadStep::Load(sender, load)
    }

    /// Records the result of a load before it is sent.
    pub(crate) fn record(&self, model: &Arc<str>, result: &Result<(), AdapterLoadError>, now: Instant) {
        let state = match result {
            Ok(()) => AdapterLoadState::Loaded(now),
            Err(error) => AdapterLoadState::Failed(now, error.clone()),
        };
        self.0.lock().insert(model.clone(), state);
    }

    /// Removes completed loads of models that the engine lists: if it does not list one later, it has evicted it.
    pub(super) fn remove_listed(&self, models: &[String]) {
        let is_listed = |model: &str| models.iter().any(|listed| *listed == *model);
        let is_kept = |model: &str, state: &AdapterLoadState| {
            !matches!(state, AdapterLoadState::Loaded(_)) || !is_listed(model)
        };
        self.0.lock().retain(|model, state| is_kept(model, state));
    }

    /// Whether requests for `model` should use other engines.
    pub(crate) fn is_avoided(&self, model: &str, now: Instant) -> bool {
        match self.0.lock().get(model) {
            Some(AdapterLoadState::Failed(at, _)) => now - *at < AVOIDED_FOR,
            _ => false,
        }
    }
}

impl AdapterLoadState {
    fn is_current(&self, now: Instant) -> bool {
        match self {
            Self::Running(load) => load.0.has_changed().is_ok(),
            Self::Loaded(at) => now - *at < UNLISTED_FOR,
            Self::Failed(at, _) => now - *at < AVOIDED_FOR,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_request_loads_and_the_others_wait() {
        let (states, model) = (AdapterLoadStates::default(), Arc::from("sql"));
        let AdapterLoadStep::Load(sender, first) = states.next_step(&model, Instant::now()) else {
            panic!("no load has been started")
        };
        let AdapterLoadStep::Wait(second) = states.next_step(&model, Instant::now()) else {
            panic!("the first request loads it")
        };
        assert!(matches!(states.next_step(&Arc::from("poet"), Instant::now()), AdapterLoadStep::Load(..)));
        states.record(&model, &Ok(()), Instant::now());
        sender.send_replace(Some(Ok(())));
        first.wait().await.unwrap();
        second.wait().await.unwrap();
        assert!(matches!(states.next_step(&model, Instant::now()), AdapterLoadStep::Done));
        tokio::time::advance(UNLISTED_FOR).await;
        let step = states.next_step(&model, Instant::now());
        assert!(matches!(step, AdapterLoadStep::Load(..)), "the engine has restarted: {step:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_load_is_not_repeated_at_once() {
        let (states, model) = (AdapterLoadStates::default(), Arc::from("sql"));
        let step = states.next_step(&model, Instant::now());
        states.record(&model, &Err(AdapterLoadError::Timeout(AVOIDED_FOR)), Instant::now());
        assert!(states.is_avoided("sql", Instant::now()) && !states.is_avoided("poet", Instant::now()));
        assert!(matches!(states.next_step(&model, Instant::now()), AdapterLoadStep::Failed(_)));
        tokio::time::advance(AVOIDED_FOR).await;
        assert!(!states.is_avoided("sql", Instant::now()));
        assert!(matches!(states.next_step(&model, Instant::now()), AdapterLoadStep::Load(..)));
        drop(step);
    }

    #[tokio::test(start_paused = true)]
    async fn an_adapter_that_was_listed_and_evicted_is_loaded_again() {
        let (states, model) = (AdapterLoadStates::default(), Arc::from("sql"));
        states.record(&model, &Ok(()), Instant::now());
        states.remove_listed(&["m".to_owned()]);
        assert!(matches!(states.next_step(&model, Instant::now()), AdapterLoadStep::Done), "not listed yet");
        states.remove_listed(&["m".to_owned(), "sql".to_owned()]);
        assert!(matches!(states.next_step(&model, Instant::now()), AdapterLoadStep::Load(..)));
    }

    #[tokio::test]
    async fn an_interrupted_load_is_started_again() {
        let (states, model) = (AdapterLoadStates::default(), Arc::from("sql"));
        let AdapterLoadStep::Load(sender, load) = states.next_step(&model, Instant::now()) else {
            panic!("no load has been started")
        };
        drop(sender);
        assert!(matches!(load.wait().await, Err(AdapterLoadError::Interrupted)));
        assert!(matches!(states.next_step(&model, Instant::now()), AdapterLoadStep::Load(..)));
    }
}
