//! Settings of the scheduler. Values that can be learned from the engines are not settings.

use crate::decode_step::DecodeStepModel;
use crate::prefill_time::PrefillTimeModel;
use crate::seconds::Seconds;

/// Settings of a scheduler and its policy.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SchedulerOptions {
    /// Computing time of engines until first tokens have been observed.
    pub service_prior: PrefillTimeModel,
    /// Seconds per token whose KV cache is transferred to the decode after the last pass, until first tokens have been
    /// observed. The default is 192,512 bytes over a 200 Gbit/s link.
    pub handover_prior_s_per_token: f64,
    /// Seconds in which an engine loads a LoRA adapter, until a load was observed.
    pub adapter_load_prior: Seconds,
    /// Time of a decode step until responses have been observed.
    pub decode_step_prior: DecodeStepModel,
    /// A request is dispatched once its engine's backlog is at most this. A smaller value leaves the engine idle
    /// between two prompts; a larger one binds requests before the best engine is known. On the conversation trace 0.5
    /// s costs 6 % of mean TTFT; 0.03 to 0.1 s differ by less than the seeds.
    pub slack: Seconds,
    /// Price of computing or fetching what another engine already caches, as a share of the time to compute it, or to
    /// fetch the part that the store has: the copy evicts other blocks, which come back in the same way. 0 costs 2 to
    /// 4 % at the recorded speeds and 7 to 10 % at 1.2 times them; 0.3 to 1 are alike. The constant time of a pass is
    /// always priced in full, in proportion to what is computed again.
    pub duplicate_price: f64,
    /// Price of a second of an engine for every queued request per engine, in seconds. With it, a busy fleet prefers
    /// the engine with the least computation to the one that is free first. 0 costs 7 % without a store and 16 % at 1.2
    /// times the recorded speed; 1 gives half of that, 6 no more.
    pub congestion_price: f64,
    /// Price of a second of an engine that serves other prompt lengths: multiplied by the distance between the engine's
    /// and the prompt's position on a scale of 0 to 1 from short to long prompts, and by the share of the computation
    /// that caches do not avoid: long conversations stay where their caches are. 0 costs 2 % on the conversation
    /// trace, 2 to 4 % with slow or best-effort fetching, 5 % without a store and 9 % with four gateways; 0.3 to 0.6
    /// are alike.
    pub length_price: f64,
    /// How much shorter, in seconds of computation, a request must be to overtake one that arrived a second earlier, in
    /// the queue of an engine that orders by priority.
    pub engine_ageing: f64,
    /// Share of the fleet reserved for rejected clients that retry; determines `Retry-After`. A larger share lets them
    /// retry sooner and displaces other requests then.
    pub reserved_share: f64,
    /// Maximum time to first token of requests without a target of their own; `None` never rejects them for being late.
    pub ttft_target: Option<TtftTarget>,
    /// Maximum time per output token: a decode gets no further sequence while its steps would take longer. `None` fills
    /// decodes as far as their KV cache allows.
    pub tpot_target: Option<Seconds>,
}

/// A target for the time to first token that grows with the prompt: `max(base, factor × time to compute the whole
/// prompt)`. A constant target would reject only long prompts.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TtftTarget {
    /// Minimum target in seconds, for short prompts.
    pub base: Seconds,
    /// Factor on the computation of the whole prompt, for long prompts.
    pub cold_factor: f64,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self {
            service_prior: PrefillTimeModel::default(),
            handover_prior_s_per_token: 192_512.0 / 25e9,
            adapter_load_prior: 1.0,
            decode_step_prior: DecodeStepModel::default(),
            slack: 0.05,
            duplicate_price: 0.6,
            congestion_price: 3.0,
            length_price: 0.75,
            engine_ageing: 0.1,
            reserved_share: 0.2,
            ttft_target: None,
            tpot_target: None,
        }
    }
}
