//! Loads of LoRA adapters that requests wait for.

use super::{AttemptId, Scheduler};
use crate::adapter_loads::AdapterResidencies;
use crate::fleet::{InstanceIndex, ModelIndex};
use crate::request::RequestProfile;
use crate::seconds::Seconds;

impl Scheduler {
    /// Records that an engine has loaded an adapter, in `took` seconds if the load was observed. `ix` is any of its ranks.
    pub fn adapter_loaded(
        &mut self,
        now: Seconds,
        ix: InstanceIndex,
        adapter: ModelIndex,
        took: Option<Seconds>,
    ) {
        self.adapter_loads.complete(now, &self.cluster, ix, (adapter, took));
        self.next_poll_at = Some(now);
    }

    /// Records that an engine could not load an adapter. Exclude the engine for requests that are not to try it again.
    pub fn adapter_load_failed(&mut self, now: Seconds, ix: InstanceIndex, adapter: ModelIndex) {
        self.adapter_loads.fail(&self.cluster, ix, adapter);
        self.next_poll_at = Some(now);
    }

    /// Records that the engines of a sent request have loaded its adapter: they get the request now.
    pub fn adapter_wait_ended(&mut self, now: Seconds, attempt: AttemptId) {
        let Some(sent) = self.in_flight.get_mut(&attempt) else { return };
        let Some(fetch) = sent.fetch_after_load.take() else { return };
        if let Some(book) = sent.prefill.and_then(|ix| self.engines.get_mut(ix.as_usize())) {
            book.end_adapter_load(now, attempt, fetch);
        }
        sent.prefill.into_iter().for_each(|ix| self.load_refresh.mark(ix));
    }

    pub(super) fn adapter_residencies(&self, now: Seconds, request: &RequestProfile) -> AdapterResidencies {
        self.adapter_loads.residencies(now, &self.cluster, request.model)
    }

    /// Longest wait of any queued request for a load.
    pub(super) fn max_adapter_load(&self, now: Seconds) -> Seconds {
        let mut longest: Seconds = 0.0;
        let mut models: Vec<ModelIndex> = Vec::new();
        for queued in &self.queued {
            let request = &queued.submission.request;
            if self.cluster.loadable(request.model).is_empty() || models.contains(&request.model) {
                continue;
            }
            models.push(request.model);
            longest = longest.max(self.adapter_residencies(now, request).max_wait());
        }
        longest
    }
}
