//! SGLang's disaggregation protocol: the same body goes to both engines at once, with the bootstrap triple and a request id of the
//! gateway appended, the priority for engines that order their queue by it, and the rank for engines with several.
//!
//! A prefill with several data-parallel ranks must process the request on rank `room % dp_size`: the decode looks for the KV cache
//! there, and a prefill on another rank fails the request. So the room is chosen by the rank.

use std::fmt::Write as _;
use std::sync::Arc;

use moongate_discovery::BootstrapAddress;

use super::body::with_members;
use super::{ConnectorAttempt, LegConnector, LegEngine, LegOrder, PrefillLeg};
use crate::legs::EngineRequestId;
use crate::request_body::{BodyMember, InferenceApi};
use crate::routed_request::{RoutedRequest, random_uuid};
use crate::upstream::PreparedRequest;

/// The values that link the legs of a pair: the same on both.
#[derive(Debug)]
pub(super) struct SglangConnector<'a> {
    bootstrap: &'a BootstrapAddress,
    rid: Arc<str>,
    /// The member with the request id; `None` in Messages, which have neither an id nor a priority.
    id_member: Option<BodyMember>,
    entropy: u64,
}

/// Data-parallel ranks to select on both sides: `(rank, dp_size)`.
#[derive(Debug, Clone, Copy)]
struct PairRanks {
    prefill: (u32, u32),
    decode: (u32, u32),
}

impl<'a> SglangConnector<'a> {
    pub(super) fn new(
        api: InferenceApi,
        bootstrap: Option<&'a BootstrapAddress>,
    ) -> Result<Self, &'static str> {
        let bootstrap = bootstrap.ok_or("has no bootstrap address")?;
        let (id_member, rid) = match api {
            // It becomes the id of the response.
            InferenceApi::Responses => {
                (Some(BodyMember::RequestId), format!("resp_{}", random_uuid()).into())
            }
            InferenceApi::Messages => (None, random_uuid().into()),
            _ => (Some(BodyMember::Rid), random_uuid().into()),
        };
        Ok(Self { bootstrap, rid, id_member, entropy: fastrand::u64(..) })
    }

    fn request(&self, attempt: &ConnectorAttempt<'_>, engine: LegEngine<'_>) -> PreparedRequest {
        let (routed, main) = (attempt.routed, attempt.main_engine());
        let ranks = PairRanks {
            prefill: (attempt.prefill.rank, attempt.prefill.rank_count),
            decode: (main.rank, main.rank_count),
        };
        let sequences = if is_batch(routed) { Some(routed.routing.sequences()) } else { None };
        let mut appended = bootstrap_members(self.bootstrap, ranks, sequences, self.entropy);
        if let Some(rank) = rank_member(engine) {
            appended.push(',');
            appended.push_str(&rank);
        }
        let mut members = Vec::with_capacity(2);
        if let Some(member) = self.id_member {
            members.push((member, format!("\"{}\"", self.rid)));
            let priority = engine.priority(attempt.decision);
            members.extend(priority.map(|priority| (BodyMember::Priority, priority.to_string())));
        }
        routed.prepare(with_members(routed, members, appended), Vec::new())
    }
}

impl LegConnector for SglangConnector<'_> {
    fn prefill(&self, attempt: &ConnectorAttempt<'_>) -> Option<PrefillLeg> {
        let request = self.request(attempt, attempt.prefill);
        Some(PrefillLeg { request, order: LegOrder::Together { may_cancel: true } })
    }

    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        _: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str> {
        Ok(self.request(attempt, attempt.main_engine()))
    }

    /// SGLang notices a closed connection only at its next check.
    fn abort_id(&self) -> Option<EngineRequestId> {
        self.id_member.map(|_| EngineRequestId { rid: self.rid.clone() })
    }
}

/// The body's member that selects the engine's data-parallel rank; `None` if it has only one.
pub(super) fn rank_member(engine: LegEngine<'_>) -> Option<String> {
    engine.requested_rank().map(|rank| format!("\"routed_dp_rank\":{rank}"))
}

/// Whether the engine gets more than one sequence.
fn is_batch(routed: &RoutedRequest) -> bool {
    routed.routing.sequences() > 1
}

/// `"bootstrap_host":…,"bootstrap_port":…,"bootstrap_room":…`; arrays with one room per sequence for a batch.
fn bootstrap_members(
    bootstrap: &BootstrapAddress,
    ranks: PairRanks,
    sequences: Option<u32>,
    entropy: u64,
) -> String {
    let host = serde_json::Value::from(bootstrap.host.as_str()).to_string();
    let (first, step) = room(ranks, entropy);
    let Some(sequences) = sequences else {
        return format!(
            "\"bootstrap_host\":{host},\"bootstrap_port\":{},\"bootstrap_room\":{first}",
            bootstrap.port
        );
    };
    let mut hosts = String::new();
    let mut ports = String::new();
    let mut rooms = String::new();
    for sequence in 0..u64::from(sequences) {
        let comma = if sequence == 0 { "" } else { "," };
        hosts.push_str(comma);
        hosts.push_str(&host);
        // Writing into a String does not fail.
        let _infallible = write!(ports, "{comma}{}", bootstrap.port);
        let _infallible = write!(rooms, "{comma}{}", first + sequence * step);
    }
    format!("\"bootstrap_host\":[{hosts}],\"bootstrap_port\":[{ports}],\"bootstrap_room\":[{rooms}]")
}

/// A random room that selects the wanted rank on both sides (engines use `room % dp_size`), and the step to the next such room. If
/// no number satisfies both, it selects the prefill's: a decode may run on another rank, which its body names.
fn room(ranks: PairRanks, entropy: u64) -> (u64, u64) {
    let (prefill_rank, prefill_dp) = (u64::from(ranks.prefill.0), u64::from(ranks.prefill.1.max(1)));
    let (decode_rank, decode_dp) = (u64::from(ranks.decode.0), u64::from(ranks.decode.1.max(1)));
    let step = lcm(prefill_dp, decode_dp);
    let offset = (prefill_rank % prefill_dp..step)
        .step_by(usize::try_from(prefill_dp).unwrap_or(1))
        .find(|room| room % decode_dp == decode_rank % decode_dp)
        .unwrap_or(prefill_rank % prefill_dp);
    // Below 2^62, so that a batch's last room stays below 2^63.
    let base = (entropy >> 2) / step * step;
    (base + offset, step)
}

fn lcm(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rooms_select_the_ranks(p in 1_u32..9, d in 1_u32..9, rank in any::<u32>(), entropy in any::<u64>()) {
            let ranks = PairRanks { prefill: (rank % p, p), decode: (rank % p.min(d), d) };
            let (first, step) = room(ranks, entropy);
            prop_assert!(first + 4096 * step < 1 << 63);
            for room in [first, first + step, first + 7 * step] {
                prop_assert_eq!(room % u64::from(p), u64::from(rank % p));
            }
            if p == d {
                prop_assert_eq!(first % u64::from(d), u64::from(rank % p));
            }
        }
    }

    fn members(sequences: Option<u32>, dp: u32, entropy: u64) -> serde_json::Value {
        let bootstrap = BootstrapAddress { host: "10.0.0.1".into(), port: 8998 };
        let ranks = PairRanks { prefill: (0, dp), decode: (0, dp) };
        let text = bootstrap_members(&bootstrap, ranks, sequences, entropy);
        serde_json::from_str(&format!("{{{text}}}")).unwrap()
    }

    #[test]
    fn one_sequence_has_scalars_and_a_batch_has_arrays() {
        let one = members(None, 1, 4 * 5_821_501);
        assert_eq!(
            one,
            serde_json::json!({"bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":5_821_501})
        );
        let batch = members(Some(2), 4, 160);
        let expected = serde_json::json!({
            "bootstrap_host":["10.0.0.1","10.0.0.1"], "bootstrap_port":[8998,8998], "bootstrap_room":[40,44]
        });
        assert_eq!(batch, expected);
    }
}
