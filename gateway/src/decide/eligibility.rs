//! Which engines are eligible for a request, and the route of paths that bypass the scheduler.

use std::sync::Arc;

use moongate_discovery::{EngineRole, InstanceId};
use moongate_scheduler::{
    self as scheduler, EngineRoute, InstanceIndex, ModelIndex, RequestProfile, ScheduleRejection,
};
use tokio::time::Instant;

use super::in_flight::InFlightGuard;
use crate::feedback::DecidedRoute;
use crate::fleet::{FleetDecision, FleetMember, FleetSnapshot, UpstreamEndpoint, VersionRule};
use crate::request_body::InferenceApi;
use crate::routed_request::{PickScope, RoutedRequest, needs_translation};

/// A route with its fleet members, counted as in flight.
#[derive(Debug)]
pub(crate) struct ChosenRoute {
    pub(crate) prefill: FleetMember,
    /// The decode engine; `None` for a single worker.
    pub(crate) decode: Option<FleetMember>,
    pub(crate) in_flight: InFlightGuard,
    /// `None` on paths that are passed through without a decision.
    pub(crate) decision: Option<FleetDecision>,
}

impl ChosenRoute {
    /// Whether it is a pair whose engines report versions that are neither equal nor declared compatible.
    pub(crate) fn mixes_versions(&self, rule: &VersionRule) -> bool {
        let decode = self.decode.as_ref().and_then(FleetMember::facts);
        decode.zip(self.prefill.facts()).is_some_and(|(decode, prefill)| rule.are_mixed(prefill, decode))
    }

    /// The route as traces describe it.
    pub(crate) fn decided(&self) -> DecidedRoute<'_> {
        match &self.decision {
            Some(decision) => DecidedRoute::Scheduled(decision),
            None => DecidedRoute::Passthrough(&self.prefill.endpoint),
        }
    }
}

/// Which engines are eligible, tried in this order: a suspect engine whose trial is due; available engines; also suspect ones and
/// those with an open breaker; any engine that was not tried yet. So suspicions, open breakers or failing health checks on all
/// engines never make a live fleet reject everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EligibilityTier {
    /// The trial of a suspect engine. Without it, a policy that ranks the engine no better than others would never send one.
    Trial,
    Available,
    Healthy,
    Untried,
}

impl EligibilityTier {
    pub(super) const ALL: [EligibilityTier; 4] = [
        EligibilityTier::Trial,
        EligibilityTier::Available,
        EligibilityTier::Healthy,
        EligibilityTier::Untried,
    ];
}

/// Which engines one request may use.
#[derive(Debug, Clone)]
pub(super) struct RouteConstraints {
    api: InferenceApi,
    /// Whether engines that lack the API can get the request in another one.
    is_translated: bool,
    samples: u32,
    /// Whether it continues a response that only the engine that made it has.
    continues_response: bool,
    /// That engine, if it is known.
    response_engine: Option<InstanceId>,
    tried: Vec<Arc<UpstreamEndpoint>>,
    /// The only engines that the proxy which sends the request lets it use.
    scope: Option<PickScope>,
    /// Name of the model, if it is a LoRA adapter that engines can load.
    adapter: Option<Arc<str>>,
    tier: EligibilityTier,
}

impl RouteConstraints {
    pub(super) fn new(
        routed: &RoutedRequest,
        tried: &[Arc<UpstreamEndpoint>],
        tier: EligibilityTier,
        fleet: &FleetSnapshot,
    ) -> Self {
        let continues_response = routed.needs_stored_response();
        let is_adapter = |request: &RequestProfile| !fleet.cluster.loadable(request.model).is_empty();
        Self {
            api: routed.api,
            is_translated: matches!(routed.translated, Some(Ok(_))),
            samples: routed.routing.n,
            continues_response,
            response_engine: routed.stored.engine.clone().filter(|_| continues_response),
            tried: tried.to_vec(),
            scope: routed.pick_scope.clone().filter(PickScope::is_restricted),
            adapter: routed.model.clone().filter(|_| routed.request.as_ref().is_some_and(is_adapter)),
            tier,
        }
    }

    /// The engines that the request must avoid.
    pub(super) fn excluded(&self, fleet: &FleetSnapshot) -> Vec<InstanceIndex> {
        if self.allows_all_available() && fleet.is_all_available() {
            return Vec::new();
        }
        let (trial, required) = (self.trial(fleet), self.required_engine(fleet));
        let is_other = |member: &FleetMember| {
            member.instance.role != EngineRole::Prefill
                && required.is_some_and(|required| member.endpoint.id != *required)
        };
        let members = (0_u32..).map(InstanceIndex).zip(&fleet.members);
        members
            .filter(|(_, member)| is_other(member) || self.excludes(member, trial))
            .map(|(ix, _)| ix)
            .collect()
    }

    /// Whether the request may use each engine that is available, without a look at it.
    fn allows_all_available(&self) -> bool {
        matches!(self.api, InferenceApi::Chat | InferenceApi::Completions)
            && self.tier != EligibilityTier::Trial
            && self.samples == 1
            && !self.continues_response
            && self.adapter.is_none()
            && self.tried.is_empty()
            && self.scope.is_none()
    }

    /// The engine that has the response to be continued, if it is in the fleet and has not failed this request. Others answer that they do
    /// not have it.
    fn required_engine(&self, fleet: &FleetSnapshot) -> Option<&InstanceId> {
        let engine = self.response_engine.as_ref()?;
        let is_tried = self.tried.iter().any(|tried| tried.id == *engine);
        (!is_tried && fleet.members.iter().any(|member| member.endpoint.id == *engine)).then_some(engine)
    }

    fn excludes(&self, member: &FleetMember, trial: Option<&FleetMember>) -> bool {
        let is_trial = trial.is_some_and(|trial| Arc::ptr_eq(&trial.endpoint, &member.endpoint));
        let is_replaced = self.tier == EligibilityTier::Trial
            && trial.is_none_or(|trial| can_substitute(member.instance.role, trial.instance.role));
        !self.allows(member, is_trial) || (is_replaced && !is_trial)
    }

    /// Whether a suspect engine is due for a trial for which this request is suitable. A stream can be redispatched after its
    /// engine's silence limit; a long silence before a non-streamed response is normal.
    pub(super) fn is_due_for_trial(&self, routed: &RoutedRequest, fleet: &FleetSnapshot) -> bool {
        routed.routing.stream && self.trial(fleet).is_some()
    }

    /// Whether these constraints are for the trial of a suspect engine.
    pub(super) fn is_trial(&self) -> bool {
        self.tier == EligibilityTier::Trial
    }

    /// A request must not be queued for a trial: it uses available engines instead.
    pub(super) fn cancel_trial(&mut self) {
        self.tier = EligibilityTier::Available;
    }

    /// A suspect engine that this request may try. Only one, so that a pair has an available side; and not for a request that
    /// another engine has already delayed.
    fn trial<'a>(&self, fleet: &'a FleetSnapshot) -> Option<&'a FleetMember> {
        if !matches!(self.tier, EligibilityTier::Trial | EligibilityTier::Available) || !self.tried.is_empty()
        {
            return None;
        }
        if fleet.is_all_available() {
            return None;
        }
        let mut suspects =
            fleet.members.iter().filter(|member| member.endpoint.silence.is_suspect()).peekable();
        suspects.peek()?;
        let now = Instant::now();
        let due = suspects.filter(|member| member.endpoint.silence.is_trial_due(now));
        due.min_by_key(|_| fastrand::u32(..))
    }

    /// Whether an engine or a pair can serve `model` for this request.
    pub(super) fn has_route(&self, fleet: &FleetSnapshot, model: ModelIndex) -> bool {
        let allowed = |role: scheduler::InstanceRole| {
            let members = fleet.cluster.instances().iter().zip(&fleet.members);
            let serving =
                members.filter(move |(candidate, _)| candidate.role == role && candidate.is_eligible(model));
            serving.filter(|(_, member)| self.allows(member, false)).map(|(instance, _)| instance)
        };
        allowed(scheduler::InstanceRole::Plain).next().is_some()
            || allowed(scheduler::InstanceRole::Prefill).any(|prefill| {
                allowed(scheduler::InstanceRole::Decode).any(|decode| decode.domain == prefill.domain)
            })
    }

    /// Whether an engine has the API of the request, or gets it translated. Only SGLang has `/generate`.
    fn has_api(&self, member: &FleetMember) -> bool {
        (self.api != InferenceApi::Generate || member.is_sglang())
            && (self.is_translated || !needs_translation(self.api, member))
    }

    /// Whether the engine could not load the request's adapter a short time ago.
    fn is_adapter_avoided(&self, endpoint: &UpstreamEndpoint) -> bool {
        let adapter = self.adapter.as_ref();
        adapter.is_some_and(|adapter| endpoint.adapter_loads.is_avoided(adapter, Instant::now()))
    }

    pub(super) fn allows(&self, member: &FleetMember, is_trial: bool) -> bool {
        let endpoint = &member.endpoint;
        // An SGLang pair cannot run several samples of one prompt.
        self.has_api(member)
            && (!self.continues_response || can_continue(member))
            && (self.tier == EligibilityTier::Untried || !self.is_adapter_avoided(endpoint))
            && (self.samples == 1 || !member.is_sglang() || member.instance.role == EngineRole::Plain)
            && (self.tier == EligibilityTier::Untried || endpoint.is_healthy())
            && (!matches!(self.tier, EligibilityTier::Trial | EligibilityTier::Available)
                || (!endpoint.breaker.is_open() && (is_trial || !endpoint.silence.is_suspect())))
            && !self.tried.iter().any(|tried| Arc::ptr_eq(tried, endpoint))
            && self.scope.as_ref().is_none_or(|scope| scope.contains(endpoint))
    }
}

/// Whether the engine can continue a response, or be the prefill of one that can. SGLang's pairs keep only a part of a response.
fn can_continue(member: &FleetMember) -> bool {
    !member.is_sglang() || member.instance.role == EngineRole::Plain
}

/// Whether an engine of the model can continue the response that the request continues, if it does.
pub(super) fn can_continue_response(
    fleet: &FleetSnapshot,
    model: ModelIndex,
    routed: &RoutedRequest,
) -> bool {
    !routed.needs_stored_response() || fleet.members_serving(model).any(can_continue)
}

/// Whether an engine of role `candidate` makes a route without the engine of role `other`.
fn can_substitute(candidate: EngineRole, other: EngineRole) -> bool {
    candidate == other || candidate == EngineRole::Plain || other == EngineRole::Plain
}

/// The fleet members of a route.
pub(super) fn route_members(
    fleet: &FleetSnapshot,
    route: EngineRoute,
) -> Option<(FleetMember, Option<FleetMember>)> {
    let prefill = fleet.member(route.prefill_instance())?.clone();
    let target = match route {
        EngineRoute::Single { .. } => None,
        EngineRoute::Pair { decode, .. } => Some(fleet.member(decode)?.clone()),
    };
    Some((prefill, target))
}

/// Paths that tokenize and compute nothing: an engine of any role serves them equally well.
const TOKENIZER_PATHS: [&str; 5] =
    ["/detokenize", "/tokenize", "/v1/detokenize", "/v1/messages/count_tokens", "/v1/tokenize"];

/// Route of paths that the gateway does not interpret: one engine gets the request unchanged. A plain worker is preferred, then a
/// decode (vLLM's computes the prompt itself without a KV cache), then a prefill, except for paths that only tokenize; among equal
/// engines, the one with the fewest requests. Engines themselves reject what they do not support. A request about a stored response goes
/// to the engine that has it, if that is known and still there.
pub(super) fn choose_passthrough(
    fleet: &FleetSnapshot,
    request: Option<&RequestProfile>,
    routed: &RoutedRequest,
    tried: &[Arc<UpstreamEndpoint>],
) -> Result<ChosenRoute, ScheduleRejection> {
    let has_response = |member: &FleetMember| Some(&member.endpoint.id) == routed.stored.engine.as_ref();
    let serves = |ix: usize| {
        let instance = &fleet.cluster.instances()[ix];
        request.is_none_or(|request| instance.is_eligible(request.model))
    };
    let needs_load = |ix: usize| {
        let instance = &fleet.cluster.instances()[ix];
        request.is_some_and(|request| !instance.models.contains(&request.model))
    };
    let only_tokenizes = TOKENIZER_PATHS.contains(&routed.uri.path());
    let rank = |member: &FleetMember| match member.instance.role {
        _ if only_tokenizes => 0,
        EngineRole::Plain => 0,
        EngineRole::Decode => 1,
        EngineRole::Prefill => 2,
    };
    let best = fleet
        .members
        .iter()
        .enumerate()
        .filter(|(ix, _)| serves(*ix))
        .filter(|(_, member)| !tried.iter().any(|tried| Arc::ptr_eq(tried, &member.endpoint)))
        .filter(|(_, member)| routed.pick_scope.as_ref().is_none_or(|scope| scope.contains(&member.endpoint)))
        .min_by_key(|(ix, member)| {
            let endpoint = &member.endpoint;
            let order =
                (!endpoint.is_available(), rank(member), endpoint.in_flight.count(), fastrand::u32(..));
            (!has_response(member), needs_load(*ix), order)
        });
    let Some((_, member)) = best else { return Err(ScheduleRejection::UnknownModel) };
    let in_flight = InFlightGuard::passthrough(member.endpoint.clone());
    Ok(ChosenRoute { prefill: member.clone(), decode: None, in_flight, decision: None })
}

#[cfg(test)]
mod tests {
    use moongate_discovery::EngineKind;

    use super::*;
    use crate::kv_index::KvIndex;
    use crate::lora_adapters::AdapterTable;
    use crate::test_fleet::{engine, snapshot, snapshot_with_adapters};

    /// Two engines that can load the adapter `poet`, and a request for it.
    fn adapter_fleet() -> (FleetSnapshot, RoutedRequest) {
        let engines = ["a", "b"].map(|name| engine(name, EngineRole::Plain, EngineKind::Vllm, 1));
        let adapters = AdapterTable::parse("[[adapter]]\nname = \"poet\"\npath = \"/poet\"\n").unwrap();
        let index = KvIndex::new(10);
        let fleet =
            snapshot_with_adapters(engines.into(), &FleetSnapshot::default(), &index, Arc::new(adapters));
        let mut routed = RoutedRequest::of_body(InferenceApi::Completions, r#"{"prompt":"a"}"#);
        routed.model = Some("poet".into());
        routed.request = Some(RequestProfile {
            model: fleet.model("poet").unwrap(),
            input_tokens: 1,
            max_output_tokens: None,
            sequences: 1,
            priority: 0,
            session: None,
            tenant: None,
            ttft_target: None,
        });
        (fleet, routed)
    }

    #[test]
    fn an_adapter_that_can_be_loaded_is_a_served_model() {
        let (fleet, routed) = adapter_fleet();
        let model = fleet.model("poet").unwrap();
        assert_eq!(fleet.cluster.loadable(model).len(), 2);
        assert_eq!((fleet.members_serving(model).count(), fleet.members_eligible(model).count()), (0, 2));
        assert_eq!(fleet.only_model(), fleet.model("m").ok(), "an adapter is no further model");
        assert_eq!(fleet.model("coder"), Err(crate::fleet::ModelUnavailable::NotFound));
        let constraints = RouteConstraints::new(&routed, &[], EligibilityTier::Available, &fleet);
        assert!(constraints.has_route(&fleet, model));
    }

    #[tokio::test]
    async fn an_engine_that_could_not_load_an_adapter_is_avoided() {
        let (fleet, routed) = adapter_fleet();
        let error = crate::lora_adapters::AdapterLoadError::Interrupted;
        fleet.members[0].endpoint.adapter_loads.record(&"poet".into(), &Err(error), Instant::now());
        let excluded =
            |routed: &RoutedRequest, tier| RouteConstraints::new(routed, &[], tier, &fleet).excluded(&fleet);
        assert_eq!(excluded(&routed, EligibilityTier::Available), [InstanceIndex(0)]);
        assert!(excluded(&routed, EligibilityTier::Untried).is_empty(), "if there is no other");
        let base = RequestProfile { model: fleet.model("m").unwrap(), ..routed.request.clone().unwrap() };
        let base = RoutedRequest { model: Some("m".into()), request: Some(base), ..routed };
        assert!(excluded(&base, EligibilityTier::Available).is_empty());
    }

    #[test]
    fn any_engine_tokenizes_but_plain_ones_serve_other_paths() {
        let roles = [EngineRole::Prefill, EngineRole::Decode, EngineRole::Plain];
        let engines = ["p", "d", "w"].into_iter().zip(roles);
        let engines = engines.map(|(name, role)| engine(name, role, EngineKind::Vllm, 1));
        let fleet = snapshot(engines.collect(), &FleetSnapshot::default(), &KvIndex::new(10));
        // The in-flight guards of earlier requests count.
        let chosen = |path: &'static str| -> Vec<ChosenRoute> {
            let mut routed = RoutedRequest::of_body(InferenceApi::Other, "{}");
            routed.uri = http::Uri::from_static(path);
            (0..3).map(|_| choose_passthrough(&fleet, None, &routed, &[]).unwrap()).collect()
        };
        let names = |routes: &[ChosenRoute]| {
            let mut names: Vec<String> = routes.iter().map(|route| route.prefill.name.to_string()).collect();
            names.sort_unstable();
            names
        };
        for path in TOKENIZER_PATHS {
            assert_eq!(names(&chosen(path)), ["d", "p", "w"], "{path}");
        }
        assert_eq!(names(&chosen("/v1/embeddings")), ["w", "w", "w"]);
    }
}
