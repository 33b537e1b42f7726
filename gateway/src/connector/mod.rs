//! Connectors: how a prefill and a decode engine serve one request together. Makes a request for each of them and starts it.
//!
//! A new connector needs its own file here, an entry in [`for_attempt`], and the facts by which discovery recognises it
//! (`moongate_discovery::KvTransferMethod`).

mod body;
mod mooncake;
mod nixl;
mod plain;
mod sglang;
mod shared_store;
mod start;
mod vllm;

use moongate_discovery::{EngineFacts, EngineKind, KvTransferMethod, PriorityOrder};
use moongate_scheduler::RoutingDecision;

use self::mooncake::MooncakeConnector;
use self::nixl::NixlConnector;
use self::plain::PlainConnector;
use self::sglang::SglangConnector;
use self::shared_store::SharedStoreConnector;
pub(crate) use self::start::start_legs;
use crate::legs::EngineRequestId;
use crate::routed_request::RoutedRequest;
use crate::upstream::PreparedRequest;

/// Connects the legs of one attempt. Errors say what is wrong with the prefill engine.
trait LegConnector: Send + Sync {
    /// The leg that computes the prompt; `None` if the engine that answers the client does it.
    fn prefill(&self, attempt: &ConnectorAttempt<'_>) -> Option<PrefillLeg>;

    /// The request of the leg that answers the client. `prefill_response` is complete if the prefill leg ran first, else `None`.
    fn main(
        &self,
        attempt: &ConnectorAttempt<'_>,
        prefill_response: Option<&[u8]>,
    ) -> Result<PreparedRequest, &'static str>;

    /// The id in both legs by which the engines abort them; `None` if closing the connection is enough.
    fn abort_id(&self) -> Option<EngineRequestId> {
        None
    }

    /// Whether a failed decode may be due to facts of the prefill that are out of date.
    fn depends_on_prefill_facts(&self) -> bool {
        false
    }
}

/// The prefill leg of a connector.
#[derive(Debug)]
struct PrefillLeg {
    request: PreparedRequest,
    order: LegOrder,
}

/// When the leg that answers the client starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LegOrder {
    /// Together with the prefill leg. `may_cancel`: whether that leg may be aborted when its response is no longer needed.
    Together { may_cancel: bool },
    /// After the prefill leg's complete response.
    PrefillFirst,
}

/// One attempt, as a connector needs it.
#[derive(Debug, Clone, Copy)]
struct ConnectorAttempt<'a> {
    routed: &'a RoutedRequest,
    /// Counted from 1.
    number: u32,
    decision: Option<&'a RoutingDecision>,
    /// The engine that computes the prompt.
    prefill: LegEngine<'a>,
    /// The engine that answers the client, unless that is `prefill`.
    decode: Option<LegEngine<'a>>,
}

impl<'a> ConnectorAttempt<'a> {
    /// The engine that answers the client.
    fn main_engine(&self) -> LegEngine<'a> {
        self.decode.unwrap_or(self.prefill)
    }
}

/// The engine of a leg.
#[derive(Debug, Clone, Copy)]
struct LegEngine<'a> {
    facts: Option<&'a EngineFacts>,
    /// The chosen data-parallel rank.
    rank: u32,
    /// Number of data-parallel ranks.
    rank_count: u32,
}

impl LegEngine<'_> {
    /// The rank to send to the engine; `None` if it has only one.
    fn requested_rank(&self) -> Option<u32> {
        (self.rank_count > 1).then_some(self.rank)
    }

    /// The priority to send to the engine; `None` leaves the client's own, which such an engine ignores.
    fn priority(&self, decision: Option<&RoutingDecision>) -> Option<i64> {
        let smallest_first = decision?.engine_priority?;
        Some(match self.facts?.priority_order? {
            PriorityOrder::SmallestFirst => smallest_first,
            PriorityOrder::LargestFirst => -smallest_first,
        })
    }
}

/// The connector of a route, derived from the facts that its engines report, never guessed per request. The error says which fact is
/// missing.
fn for_attempt<'a>(attempt: &ConnectorAttempt<'a>) -> Result<Box<dyn LegConnector + 'a>, &'static str> {
    let LegEngine { facts, rank, .. } = attempt.prefill;
    if attempt.decode.is_none() {
        return Ok(Box::new(PlainConnector));
    }
    let facts = facts.ok_or("has not been probed")?;
    Ok(match &facts.transfer {
        Some(KvTransferMethod::SglangBootstrap { bootstrap }) => {
            Box::new(SglangConnector::new(attempt.routed.api, bootstrap.as_ref())?)
        }
        Some(KvTransferMethod::VllmNixl) => Box::new(NixlConnector),
        Some(KvTransferMethod::VllmMooncake { bootstrap, engine_ids }) => {
            Box::new(MooncakeConnector::new(bootstrap.as_ref(), engine_ids, rank)?)
        }
        Some(KvTransferMethod::VllmStore) => Box::new(SharedStoreConnector),
        None if facts.engine == EngineKind::Vllm => return Err("has an unknown KV connector"),
        None => return Err("has no bootstrap address"),
    })
}
