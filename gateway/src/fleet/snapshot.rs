//! One immutable view of the fleet: the scheduler's cluster and, in the same order, the engines behind it.

use std::collections::HashMap;
use std::sync::Arc;

use moongate_discovery::{
    EngineFacts, EngineInstance, EngineKind, EngineRole, HostLocations, InstanceId, InstanceReadiness,
    PhysicalLocation, Topology,
};
use moongate_scheduler as scheduler;
use scheduler::index::EngineSlot;
use scheduler::{InstanceIndex, ModelIndex, SchedulableFleet};

use super::availability::{AvailabilityCheck, AvailabilityEvents};
use super::cache_rules::cache_rules;
use super::endpoint::{EndpointLimits, UpstreamEndpoint};
use super::group::EngineGroup;
use super::pairing::PairingDomains;
use super::version_pairing::VersionRule;
use crate::kv_index::{BlockKeyspace, EngineSlotGuard, KvIndex, RankSlots, StoreKeyNaming};
use crate::lora_adapters::AdapterTable;
use crate::upstream::split_url;

/// The reason that discovery gives before it has probed an engine.
const NOT_PROBED: &str = "not probed yet";

/// Most models recorded per engine.
const MAX_KNOWN_MODELS: usize = 1024;

/// A data-parallel rank of an engine that may receive requests; most engines have one.
#[derive(Debug, Clone)]
pub(crate) struct FleetMember {
    /// The id of its instance, with the rank if there are several: `ID#0`.
    pub(crate) name: Arc<str>,
    pub(crate) rank: u32,
    /// Slots of all ranks of the engine in the index.
    pub(crate) slots: RankSlots,
    /// The engine's instance and endpoint, which all its ranks share.
    pub(crate) instance: Arc<EngineInstance>,
    pub(crate) endpoint: Arc<UpstreamEndpoint>,
    /// How its blocks are hashed; `None` if unknown.
    pub(crate) keyspace: Option<Arc<BlockKeyspace>>,
    /// How its blocks are named in the store; `None` if it uses none, or if unknown.
    pub(crate) store_naming: Option<Arc<StoreKeyNaming>>,
}

impl FleetMember {
    /// Facts that the engine reports. Always `Some`, because members are built from usable instances.
    pub(crate) fn facts(&self) -> Option<&EngineFacts> {
        self.instance.facts.as_ref()
    }

    /// Number of data-parallel ranks of its engine.
    pub(crate) fn rank_count(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(u32::MAX)
    }

    /// The rank's slot in the index. Always `Some`, because members are built from the slots.
    pub(crate) fn slot(&self) -> Option<&Arc<EngineSlotGuard>> {
        self.slots.get(self.rank as usize)
    }

    pub(crate) fn is_sglang(&self) -> bool {
        self.facts().is_some_and(|facts| facts.engine == EngineKind::Sglang)
    }
}

/// Usable engines of one topology generation.
#[derive(Debug, Default)]
pub(crate) struct FleetSnapshot {
    pub(crate) generation: u64,
    pub(crate) cluster: Arc<SchedulableFleet>,
    /// In the same order as `cluster`.
    pub(crate) members: Vec<FleetMember>,
    /// Each member's slot in the index, in the same order: read for each request, without a look at the members.
    pub(crate) slots: Vec<Option<EngineSlot>>,
    /// Position of each member, by its name.
    pub(super) positions: HashMap<Arc<str>, InstanceIndex>,
    /// Every endpoint of the topology, including instances that are not usable now.
    endpoints: HashMap<InstanceId, Arc<UpstreamEndpoint>>,
    /// Models served at any time, by name.
    models: HashMap<Arc<str>, ModelIndex>,
    /// Names of `models` by index.
    model_names: Vec<Arc<str>>,
    /// Models that are served now, in order of first appearance.
    served_models: Vec<Arc<str>>,
    /// Models that each listed engine has ever served, usable or not, until it is delisted.
    models_of: HashMap<InstanceId, Arc<[Arc<str>]>>,
    /// By model: engines with equal block hashes.
    groups: Vec<Vec<Arc<EngineGroup>>>,
    /// Locations of hosts, including those of engines.
    pub(crate) hosts: HostLocations<scheduler::LocationIds>,
    /// LoRA adapters that engines can load.
    pub(crate) adapters: Arc<AdapterTable>,
    /// Which versions of engines may pair.
    pub(crate) versions: VersionRule,
    /// Usable engines that get no requests until there is a partner of their version.
    pub(crate) unpaired: Vec<InstanceId>,
    /// Listed instances that are not usable, with the reason.
    pub(crate) unusable: Vec<UnusableInstance>,
    /// Of all endpoints, including those of earlier snapshots.
    pub(super) availability: Arc<AvailabilityEvents>,
    pub(super) all_available: AvailabilityCheck,
}

/// Why no engine can receive requests for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModelUnavailable {
    /// Engines that serve it are listed, and none of them is usable now.
    Outage,
    /// Some listed engines have not been probed yet and may serve it.
    Undetermined,
    /// Every listed engine was probed, and none serves it.
    NotFound,
}

/// An instance that is listed but not usable now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UnusableInstance {
    pub(crate) id: InstanceId,
    pub(crate) reason: String,
    /// Whether it has been probed at least once.
    pub(crate) probed: bool,
}

impl FleetSnapshot {
    /// A fleet without engines. Those of later snapshots pair by this rule.
    pub(super) fn pairing_by(versions: VersionRule) -> Self {
        Self { versions, ..Self::default() }
    }

    /// Builds the view of `topology`, keeping the endpoints of `previous` whose id and address are unchanged.
    pub(crate) fn build(
        topology: &Topology,
        previous: &FleetSnapshot,
        limits: &EndpointLimits,
        (index, adapters): (&Arc<KvIndex>, Arc<AdapterTable>),
    ) -> Self {
        // A model keeps its index, because queued requests refer to it.
        let mut fleet = FleetSnapshot {
            generation: topology.generation,
            models: previous.models.clone(),
            model_names: previous.model_names.clone(),
            adapters,
            availability: previous.availability.clone(),
            versions: previous.versions.clone(),
            ..FleetSnapshot::default()
        };
        let domains = PairingDomains::new(topology, &previous.versions);
        let mut interner = TopologyInterner::default();
        let mut instances = Vec::with_capacity(topology.instances.len());
        for instance in &topology.instances {
            let authority = authority(&instance.url);
            let existing =
                previous.endpoints.get(&instance.id).filter(|existing| existing.pool.goes_to(&instance.url));
            let endpoint = existing.cloned().unwrap_or_else(|| {
                let id = instance.id.clone();
                let availability = fleet.availability.clone();
                Arc::new(UpstreamEndpoint::new(id, &instance.url, limits, index.clone(), availability))
            });
            fleet.endpoints.insert(instance.id.clone(), endpoint.clone());
            if let Some(models) = models(instance, previous) {
                fleet.models_of.insert(instance.id.clone(), models);
            }
            let Some(facts) = instance.usable_facts() else {
                let reason = match &instance.readiness {
                    InstanceReadiness::NotReady { reason } => reason.clone(),
                    InstanceReadiness::Ready => NOT_PROBED.to_owned(),
                };
                let probed = reason != NOT_PROBED;
                fleet.unusable.push(UnusableInstance { id: instance.id.clone(), reason, probed });
                continue;
            };
            endpoint.adapter_loads.remove_listed(&facts.models);
            // For an engine given by a flag, only its host's location is known.
            let host_location = topology
                .hosts
                .location(host(authority))
                .filter(|_| instance.location == PhysicalLocation::default());
            let location = host_location.unwrap_or(&instance.location);
            let name = instance.id.0.clone();
            let schedulable = scheduler::SchedulableInstance {
                name: name.clone(),
                role: role(instance.role),
                models: facts.models.iter().map(|model| fleet.intern(model)).collect(),
                loadable: fleet.intern_loadable(facts),
                domain: domains.of(facts),
                rank: 0,
                location: interner.location(location),
                cache: cache_rules(facts),
                local_prefill: computes_alone(instance.role, facts),
            };
            if domains.is_unpaired(instance.role, facts) {
                fleet.unpaired.push(instance.id.clone());
            }
            let keyspace = BlockKeyspace::from_facts(facts).map(Arc::new);
            let naming = keyspace.as_ref().and_then(|keyspace| keyspace.store_naming(facts)).map(Arc::new);
            let member = FleetMember {
                name,
                rank: 0,
                slots: endpoint.index_slots.of_ranks(facts.dp_size),
                instance: instance.clone(),
                endpoint,
                keyspace,
                store_naming: naming,
            };
            fleet.add_ranks(&member, &schedulable, &mut instances);
        }
        let listed = topology.hosts.iter();
        let engines =
            topology.instances.iter().map(|instance| (host(authority(&instance.url)), &instance.location));
        let hosts =
            listed.chain(engines).map(|(host, location)| (host.to_owned(), interner.location(location)));
        fleet.hosts = hosts.collect();
        fleet.cluster = Arc::new(SchedulableFleet::new(instances));
        fleet.slots = fleet.members.iter().map(|member| member.slot().map(|slot| slot.slot())).collect();
        let models =
            (0..fleet.model_names.len()).map(|index| ModelIndex(u32::try_from(index).unwrap_or(u32::MAX)));
        fleet.groups = models.map(|model| fleet.group_members(model)).collect();
        fleet
    }

    /// Whether the topology still lists this endpoint, usable or not.
    pub(crate) fn has_endpoint(&self, endpoint: &Arc<UpstreamEndpoint>) -> bool {
        self.endpoints.get(&endpoint.id).is_some_and(|known| Arc::ptr_eq(known, endpoint))
    }

    /// The endpoint of a listed instance, usable or not.
    pub(crate) fn endpoint(&self, id: &InstanceId) -> Option<&Arc<UpstreamEndpoint>> {
        self.endpoints.get(id)
    }

    /// Whether requests may be sent to an instance.
    pub(crate) fn is_usable(&self, id: &InstanceId) -> bool {
        self.engines().any(|member| member.instance.id == *id)
    }

    fn group_members(&self, model: ModelIndex) -> Vec<Arc<EngineGroup>> {
        let name = self.model_name(model).map_or("", AsRef::as_ref);
        EngineGroup::group_by_keyspace(name, self.members_serving(model)).into_iter().map(Arc::new).collect()
    }

    /// The engines that serve a model.
    pub(crate) fn members_serving(&self, model: ModelIndex) -> impl Iterator<Item = &FleetMember> {
        let instances = self.cluster.instances().iter().zip(&self.members);
        instances.filter(move |(instance, _)| instance.models.contains(&model)).map(|(_, member)| member)
    }

    /// The engines that requests for a model may be sent to, if need be after a load.
    pub(crate) fn members_eligible(&self, model: ModelIndex) -> impl Iterator<Item = &FleetMember> {
        let instances = self.cluster.instances().iter().zip(&self.members);
        instances.filter(move |(instance, _)| instance.is_eligible(model)).map(|(_, member)| member)
    }

    /// Engines of a model, grouped by equal block hashes.
    pub(crate) fn groups(&self, model: ModelIndex) -> &[Arc<EngineGroup>] {
        self.groups.get(model.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// Distinct key namings of the engines in the store.
    pub(crate) fn store_namings(&self) -> Vec<StoreKeyNaming> {
        let mut all: Vec<StoreKeyNaming> = Vec::new();
        for naming in self.engines().filter_map(|member| member.store_naming.as_ref()) {
            if !all.contains(&**naming) {
                all.push(StoreKeyNaming::clone(naming));
            }
        }
        all
    }

    fn intern(&mut self, model: &str) -> ModelIndex {
        let number = match self.models.get(model) {
            Some(&known) => known,
            None => {
                let name: Arc<str> = model.into();
                let new = ModelIndex(u32::try_from(self.model_names.len()).unwrap_or(u32::MAX));
                self.models.insert(name.clone(), new);
                self.model_names.push(name);
                new
            }
        };
        if !self.served_models.iter().any(|served| **served == *model) {
            self.served_models.push(model.into());
        }
        number
    }

    fn intern_loadable(&mut self, facts: &EngineFacts) -> Vec<ModelIndex> {
        let adapters = self.adapters.clone();
        adapters.loadable_on(facts).map(|(model, _)| self.intern(&model)).collect()
    }

    /// Finds a model by its name.
    pub(crate) fn model(&self, name: &str) -> Result<ModelIndex, ModelUnavailable> {
        if self.served_models.iter().any(|served| **served == *name)
            && let Some(&model) = self.models.get(name)
        {
            return Ok(model);
        }
        let serves = |models: &Arc<[Arc<str>]>| models.iter().any(|model| **model == *name);
        Err(if self.models_of.values().any(serves) || self.may_be_loaded(name) {
            ModelUnavailable::Outage
        } else if self.models_of.len() < self.endpoints.len() || self.endpoints.is_empty() {
            ModelUnavailable::Undetermined
        } else {
            ModelUnavailable::NotFound
        })
    }

    /// Whether listed engines that are not usable now may be able to load the adapter.
    fn may_be_loaded(&self, name: &str) -> bool {
        !self.unusable.is_empty() && self.adapters.contains(name)
    }

    /// The model of requests that name none: there must be exactly one besides its adapters, also among engines that are not usable
    /// now.
    pub(crate) fn only_model(&self) -> Option<ModelIndex> {
        let mut bases = self.served_models.iter().filter(|model| !self.is_adapter(model));
        let (Some(only), None) = (bases.next(), bases.next()) else { return None };
        let unusable_models = self.unusable.iter().filter_map(|waiting| self.models_of.get(&waiting.id));
        let mut others = unusable_models.flat_map(|models| models.iter());
        let is_only = others.all(|model| model == only || self.is_adapter(model));
        is_only.then(|| self.models.get(only).copied())?
    }

    /// Whether a name is one of an adapter; SGLang's have their base before them.
    fn is_adapter(&self, model: &str) -> bool {
        let names =
            |name: &str| model.strip_suffix(name).is_some_and(|base| base.is_empty() || base.ends_with(':'));
        let mut facts = self.members.iter().filter_map(|member| member.facts());
        self.adapters.contains(model)
            || facts.any(|facts| facts.adapters.iter().any(|adapter| names(&adapter.name)))
    }

    pub(crate) fn model_name(&self, model: ModelIndex) -> Option<&Arc<str>> {
        self.model_names.get(model.0 as usize)
    }

    /// Names of all served models, in order of first appearance.
    pub(crate) fn served_models(&self) -> &[Arc<str>] {
        &self.served_models
    }

    /// The member with this name.
    pub(crate) fn index_of(&self, name: &str) -> Option<InstanceIndex> {
        self.positions.get(name).copied()
    }

    pub(crate) fn member(&self, ix: InstanceIndex) -> Option<&FleetMember> {
        self.members.get(ix.as_usize())
    }

    /// Whether some request can be served: a plain worker, or a prefill with a matching decode.
    pub(crate) fn can_serve(&self) -> bool {
        let healthy = |role: scheduler::InstanceRole| {
            let members = self.cluster.instances().iter().zip(&self.members);
            members.filter(move |(i, m)| i.role == role && m.endpoint.is_healthy()).map(|(i, _)| i)
        };
        healthy(scheduler::InstanceRole::Plain).next().is_some()
            || healthy(scheduler::InstanceRole::Prefill).any(|prefill| {
                healthy(scheduler::InstanceRole::Decode).any(|decode| {
                    decode.domain == prefill.domain
                        && decode.models.iter().any(|m| prefill.models.contains(m))
                })
            })
    }
}

/// Models that a listed instance has ever served, the latest first: an engine that restarts reports its adapters only once they are
/// loaded again. `None` if neither it nor its source has ever named one.
fn models(instance: &EngineInstance, previous: &FleetSnapshot) -> Option<Arc<[Arc<str>]>> {
    let before = previous.models_of.get(&instance.id);
    let now = instance.facts.as_ref().map_or(&*instance.declared.models, |facts| &*facts.models);
    let is_known = |name: &String| before.is_some_and(|before| before.iter().any(|known| **known == **name));
    if now.iter().all(is_known) {
        return before.cloned();
    }
    let names = now.iter().map(|name| Arc::from(name.as_str()));
    let earlier = before.into_iter().flat_map(|before| before.iter());
    let earlier = earlier.filter(|known| !now.iter().any(|name| **name == ***known)).cloned();
    Some(names.chain(earlier).take(MAX_KNOWN_MODELS).collect())
}

/// `host:port` of an instance URL.
fn authority(url: &str) -> &str {
    split_url(url).1
}

/// The host part of `host:port`.
pub(crate) fn host(authority: &str) -> &str {
    authority.rsplit_once(':').map_or(authority, |(host, _)| host).trim_matches(['[', ']'])
}

fn role(role: EngineRole) -> scheduler::InstanceRole {
    match role {
        EngineRole::Prefill => scheduler::InstanceRole::Prefill,
        EngineRole::Decode => scheduler::InstanceRole::Decode,
        EngineRole::Plain => scheduler::InstanceRole::Plain,
    }
}

/// Whether a decode also computes prompts: vLLM's does it for a request without transfer parameters, SGLang's only decodes.
fn computes_alone(role: EngineRole, facts: &EngineFacts) -> bool {
    role == EngineRole::Decode && facts.engine == EngineKind::Vllm
}

/// Assigns a number to every location name.
#[derive(Default)]
struct TopologyInterner(HashMap<(u8, String), u32>);

impl TopologyInterner {
    fn level(&mut self, level: u8, name: Option<&String>) -> Option<u32> {
        let next = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        name.map(|name| *self.0.entry((level, name.clone())).or_insert(next))
    }

    fn location(&mut self, location: &PhysicalLocation) -> scheduler::LocationIds {
        scheduler::LocationIds {
            zone: self.level(0, location.zone.as_ref()),
            rack: self.level(1, location.rack.as_ref()),
            node: self.level(2, location.node.as_ref()),
            nvlink_domain: self.level(3, location.nvlink_domain.as_ref()),
        }
    }
}
