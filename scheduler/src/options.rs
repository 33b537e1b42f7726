//! What a person may set. What can be learned from the engines is not here.

use crate::prefill_time::PrefillTimeModel;
use crate::request::Seconds;

/// Settings of a scheduler and its policy.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerOptions {
    /// How long engines compute, until first tokens have shown it.
    pub service_prior: PrefillTimeModel,
    /// Seconds per token whose KV cache goes to the decode after the last pass, until first tokens have shown it. The default is
    /// 192,512 bytes over a 200 Gbit/s link.
    pub handover_prior_s_per_token: f64,
    /// A request is handed over once its engine's backlog is at most this. Less starves the engine between two prompts; more binds
    /// requests before it is known where they are best computed.
    /// On the conversation trace half a second costs 6 % of mean TTFT; 0.03 to 0.1 s differ by less than the seeds.
    pub slack: Seconds,
    /// Price of computing or fetching what another engine has in its own cache, as a share of the time to compute it: the
    /// copy pushes out something else.
    /// 0 costs 2 to 4 % at the recorded speeds and 7 to 10 % at 1.2 times them; 0.3 to 1 are alike.
    pub duplicate_price: f64,
    /// Price of a second of an engine for every request per engine that is held behind, in seconds. It makes a busy fleet prefer what
    /// costs the least computation to what is there the soonest.
    /// 0 costs 7 % without a store and 16 % at 1.2 times the recorded speed; 1 gives half of that, 6 no more.
    pub congestion_price: f64,
    /// Price of a second of an engine whose place in the row from short prompts to long ones is not the prompt's: times the distance,
    /// where the row is 1 long.
    /// 0 costs 2 % on the conversation trace, 2 to 4 % with slow or best-effort fetching, 5 % without a store and 9 % with four gateways; 0.3
    /// to 0.6 are alike.
    pub length_price: f64,
    /// Share of the computation that goes to the requests that have waited longest. The rest goes to the shortest. 0 lets long
    /// prompts starve under overload.
    /// A tenth costs 4 to 9 % at 1.2 times the recorded speed, three hundredths are within the noise.
    pub aged_share: f64,
    /// How much shorter a request must be to overtake one that came a second earlier, in the queue of an engine that orders it by
    /// priority: seconds of computation.
    pub engine_ageing: f64,
    /// Share of the fleet that is promised to refused clients for when they come back: what `Retry-After` tells. More lets
    /// them come back sooner and displaces others then.
    pub promised_share: f64,
    /// Longest wait for the first token of requests that name none; `None` never refuses them for being late.
    pub ttft_target: Option<TtftTarget>,
}

/// A time to first token that grows with the prompt: `max(base, factor × time to compute the whole prompt)`. A target that is the
/// same for all prompts would refuse just the long ones.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TtftTarget {
    /// For short prompts.
    pub base: Seconds,
    /// For long ones.
    pub cold_factor: f64,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            service_prior: PrefillTimeModel::default(),
            handover_prior_s_per_token: 192_512.0 / 25e9,
            slack: 0.05,
            duplicate_price: 0.6,
            congestion_price: 3.0,
            length_price: 0.5,
            aged_share: 0.03,
            engine_ageing: 0.1,
            promised_share: 0.2,
            ttft_target: None,
        }
    }
}
