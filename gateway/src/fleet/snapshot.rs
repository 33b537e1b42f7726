//! One immutable view of the fleet: the scheduler's cluster and, in the same order, the engines behind it.

use std::collections::HashMap;
use std::sync::Arc;

use moongate_discovery::{
    Engine, EngineFacts, Hosts, Instance, InstanceId, KvTransfer, Place, Readiness, Role, Topology,
};
use moongate_scheduler as scheduler;
use scheduler::{Cluster, InstanceIx, ModelIx, PairingDomain};

use super::endpoint::{Endpoint, EndpointLimits};
use super::rules::cache_rules;
use crate::predict::{Group, Keyspace, KvIndex, StoredAs};
use crate::upstream::parts;

/// The reason that discovery gives before it has asked an engine.
const NOT_PROBED: &str = "not probed yet";

/// Most models remembered of one engine.
const MODELS_REMEMBERED: usize = 1024;

/// An engine that may be sent traffic.
#[derive(Debug, Clone)]
pub(crate) struct Member {
    pub(crate) instance: Arc<Instance>,
    pub(crate) endpoint: Arc<Endpoint>,
    /// How its pages are named; `None` if that is not known.
    pub(crate) keyspace: Option<Arc<Keyspace>>,
    /// How its pages are named in the store; `None` if it uses none, or that is not known.
    pub(crate) stored: Option<Arc<StoredAs>>,
}

impl Member {
    /// What the engine said of itself. Members are made of usable instances only, so it is there.
    pub(crate) fn facts(&self) -> Option<&EngineFacts> {
        self.instance.facts.as_ref()
    }

    pub(crate) fn is_sglang(&self) -> bool {
        self.facts().is_some_and(|facts| facts.engine == Engine::Sglang)
    }
}

/// Usable engines of one topology generation.
#[derive(Debug, Default)]
pub(crate) struct Fleet {
    pub(crate) generation: u64,
    pub(crate) cluster: Arc<Cluster>,
    /// In the cluster's order.
    pub(crate) members: Vec<Member>,
    /// Every endpoint of the topology, also of instances that are not usable now.
    endpoints: HashMap<InstanceId, Arc<Endpoint>>,
    /// Models ever served, by name.
    models: HashMap<Arc<str>, ModelIx>,
    /// The same by number.
    names: Vec<Arc<str>>,
    /// Those served now, in order of first appearance.
    served: Vec<Arc<str>>,
    /// Models that each listed engine has ever served, usable or not, until it is delisted.
    models_of: HashMap<InstanceId, Arc<[Arc<str>]>>,
    /// By model: engines that name pages alike.
    groups: Vec<Vec<Arc<Group>>>,
    /// Where hosts run, those of engines included.
    pub(crate) hosts: Hosts<scheduler::Place>,
    /// Instances that discovery lists but that are not usable, with the reason.
    pub(crate) waiting: Vec<Waiting>,
}

/// Why no engine can be sent requests for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModelUnavailable {
    /// Engines that serve it are listed, and none of them is usable now.
    Outage,
    /// Some listed engines have not been probed yet; it may be one of theirs.
    Undetermined,
    /// Every listed engine was probed, and none serves it.
    Unknown,
}

/// An instance that is known but not usable now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) id: InstanceId,
    pub(crate) reason: String,
    /// Whether it has been asked at all.
    pub(crate) probed: bool,
}

impl Fleet {
    /// Builds the view of `topology`, keeping the endpoints of `previous` whose id and address are the same.
    pub(crate) fn build(
        topology: &Topology,
        previous: &Fleet,
        limits: &EndpointLimits,
        index: &Arc<KvIndex>,
    ) -> Self {
        // A model keeps its number: requests that wait for engines carry it.
        let mut fleet = Fleet {
            generation: topology.generation,
            models: previous.models.clone(),
            names: previous.names.clone(),
            ..Fleet::default()
        };
        let mut places = Interner::default();
        let mut instances = Vec::with_capacity(topology.instances.len());
        for instance in &topology.instances {
            let authority = authority(&instance.url);
            let kept = previous.endpoints.get(&instance.id).filter(|kept| kept.pool.goes_to(&instance.url));
            let endpoint = kept.cloned().unwrap_or_else(|| {
                let id = instance.id.clone();
                Arc::new(Endpoint::new(id, &instance.url, limits, index.clone()))
            });
            fleet.endpoints.insert(instance.id.clone(), endpoint.clone());
            if let Some(models) = models(instance, previous) {
                fleet.models_of.insert(instance.id.clone(), models);
            }
            let Some(facts) = instance.usable() else {
                let reason = match &instance.readiness {
                    Readiness::NotReady { reason } => reason.clone(),
                    Readiness::Ready => NOT_PROBED.to_owned(),
                };
                let probed = reason != NOT_PROBED;
                fleet.waiting.push(Waiting { id: instance.id.clone(), reason, probed });
                continue;
            };
            // Of who is named by a flag, only the host's place is known.
            let of_host =
                topology.hosts.place(host(authority)).filter(|_| instance.place == Place::default());
            let place = of_host.unwrap_or(&instance.place);
            instances.push(scheduler::Instance {
                name: instance.id.0.clone(),
                role: role(instance.role),
                models: facts.models.iter().map(|model| fleet.intern(model)).collect(),
                domain: domain(facts),
                dp_size: facts.dp_size.max(1),
                place: places.place(place),
                cache: cache_rules(facts),
            });
            let keyspace = Keyspace::of(instance).map(Arc::new);
            let stored = keyspace.as_ref().and_then(|keyspace| keyspace.stored_as(facts)).map(Arc::new);
            fleet.members.push(Member { instance: instance.clone(), endpoint, keyspace, stored });
        }
        let told = topology.hosts.iter();
        let engines =
            topology.instances.iter().map(|instance| (host(authority(&instance.url)), &instance.place));
        let hosts = told.chain(engines).map(|(host, place)| (host.to_owned(), places.place(place)));
        fleet.hosts = hosts.collect();
        fleet.cluster = Arc::new(Cluster::new(instances));
        let models = (0..fleet.names.len()).map(|at| ModelIx(u32::try_from(at).unwrap_or(u32::MAX)));
        fleet.groups = models.map(|model| fleet.divide(model)).collect();
        fleet
    }

    /// Whether the topology still has this endpoint, usable or not.
    pub(crate) fn has_endpoint(&self, endpoint: &Arc<Endpoint>) -> bool {
        self.endpoints.get(&endpoint.id).is_some_and(|known| Arc::ptr_eq(known, endpoint))
    }

    /// The endpoint of an instance that the topology has, usable or not.
    pub(crate) fn endpoint(&self, id: &InstanceId) -> Option<&Arc<Endpoint>> {
        self.endpoints.get(id)
    }

    /// Whether requests may be sent to an instance.
    pub(crate) fn is_usable(&self, id: &InstanceId) -> bool {
        self.members.iter().any(|member| member.instance.id == *id)
    }

    fn divide(&self, model: ModelIx) -> Vec<Arc<Group>> {
        Group::divide(self.serving(model)).into_iter().map(Arc::new).collect()
    }

    /// The engines that serve a model.
    pub(crate) fn serving(&self, model: ModelIx) -> impl Iterator<Item = &Member> {
        let instances = self.cluster.instances().iter().zip(&self.members);
        instances.filter(move |(instance, _)| instance.models.contains(&model)).map(|(_, member)| member)
    }

    /// Engines of a model that name pages alike.
    pub(crate) fn groups(&self, model: ModelIx) -> &[Arc<Group>] {
        self.groups.get(model.0 as usize).map_or(&[], Vec::as_slice)
    }

    /// How engines' pages are named in the store, each form once.
    pub(crate) fn stored_as(&self) -> Vec<StoredAs> {
        let mut all: Vec<StoredAs> = Vec::new();
        for stored in self.members.iter().filter_map(|member| member.stored.as_ref()) {
            if !all.contains(&**stored) {
                all.push(StoredAs::clone(stored));
            }
        }
        all
    }

    fn intern(&mut self, model: &str) -> ModelIx {
        let number = match self.models.get(model) {
            Some(&known) => known,
            None => {
                let name: Arc<str> = model.into();
                let new = ModelIx(u32::try_from(self.names.len()).unwrap_or(u32::MAX));
                self.models.insert(name.clone(), new);
                self.names.push(name);
                new
            }
        };
        if !self.served.iter().any(|served| **served == *model) {
            self.served.push(model.into());
        }
        number
    }

    /// Finds a model by name.
    pub(crate) fn model(&self, name: &str) -> Result<ModelIx, ModelUnavailable> {
        if self.served.iter().any(|served| **served == *name)
            && let Some(&model) = self.models.get(name)
        {
            return Ok(model);
        }
        let serves = |models: &Arc<[Arc<str>]>| models.iter().any(|model| **model == *name);
        Err(if self.models_of.values().any(serves) {
            ModelUnavailable::Outage
        } else if self.models_of.len() < self.endpoints.len() || self.endpoints.is_empty() {
            ModelUnavailable::Undetermined
        } else {
            ModelUnavailable::Unknown
        })
    }

    /// The model of requests that name none: there must be just one, also among engines that are not usable now.
    pub(crate) fn only_model(&self) -> Option<ModelIx> {
        let [only] = self.served.as_slice() else { return None };
        let of_waiting = self.waiting.iter().filter_map(|waiting| self.models_of.get(&waiting.id));
        let is_only = of_waiting.flat_map(|models| models.iter()).all(|model| model == only);
        is_only.then(|| self.models.get(only).copied())?
    }

    /// Name of a model.
    pub(crate) fn model_name(&self, model: ModelIx) -> Option<&Arc<str>> {
        self.names.get(model.0 as usize)
    }

    /// Names of all models that are served, in order of first appearance.
    pub(crate) fn model_names(&self) -> &[Arc<str>] {
        &self.served
    }

    /// One engine.
    pub(crate) fn member(&self, ix: InstanceIx) -> Option<&Member> {
        self.members.get(ix.at())
    }

    /// Whether some request can be served: a plain worker, or a prefill with a decode to pair with.
    pub(crate) fn can_serve(&self) -> bool {
        let healthy = |role: scheduler::Role| {
            let members = self.cluster.instances().iter().zip(&self.members);
            members.filter(move |(i, m)| i.role == role && m.endpoint.is_healthy()).map(|(i, _)| i)
        };
        healthy(scheduler::Role::Plain).next().is_some()
            || healthy(scheduler::Role::Prefill).any(|prefill| {
                healthy(scheduler::Role::Decode).any(|decode| {
                    decode.domain == prefill.domain
                        && decode.models.iter().any(|m| prefill.models.contains(m))
                })
            })
    }
}

/// The models that a listed instance has ever served, the latest first: an engine that restarts names its adapters only once they are
/// loaded again. `None` if neither it nor its source has ever named one.
fn models(instance: &Instance, previous: &Fleet) -> Option<Arc<[Arc<str>]>> {
    let before = previous.models_of.get(&instance.id);
    let now = instance.facts.as_ref().map_or(&*instance.declared.models, |facts| &*facts.models);
    let is_known = |name: &String| before.is_some_and(|before| before.iter().any(|known| **known == **name));
    if now.iter().all(is_known) {
        return before.cloned();
    }
    let names = now.iter().map(|name| Arc::from(name.as_str()));
    let earlier = before.into_iter().flat_map(|before| before.iter());
    let earlier = earlier.filter(|known| !now.iter().any(|name| **name == ***known)).cloned();
    Some(names.chain(earlier).take(MODELS_REMEMBERED).collect())
}

/// `host:port` of an instance URL.
fn authority(url: &str) -> &str {
    parts(url).1
}

/// The host of `host:port`.
pub(crate) fn host(authority: &str) -> &str {
    authority.rsplit_once(':').map_or(authority, |(host, _)| host).trim_matches(['[', ']'])
}

fn role(role: Role) -> scheduler::Role {
    match role {
        Role::Prefill => scheduler::Role::Prefill,
        Role::Decode => scheduler::Role::Decode,
        Role::Plain => scheduler::Role::Plain,
    }
}

/// Engines of one kind and connector can hand over to each other.
fn domain(facts: &EngineFacts) -> PairingDomain {
    PairingDomain(match (&facts.transfer, facts.engine) {
        (Some(KvTransfer::SglangBootstrap { .. }), _) | (None, Engine::Sglang) => 0,
        (Some(KvTransfer::VllmNixl), _) => 1,
        (Some(KvTransfer::VllmMooncake { .. }), _) => 2,
        (Some(KvTransfer::VllmStore), _) | (None, Engine::Vllm) => 3,
    })
}

/// What engines of a domain hand over by.
pub(crate) fn domain_name(domain: PairingDomain) -> &'static str {
    match domain.0 {
        0 => "sglang",
        1 => "nixl",
        2 => "mooncake",
        _ => "store",
    }
}

/// Gives every name of a place a number.
#[derive(Default)]
struct Interner(HashMap<(u8, String), u32>);

impl Interner {
    fn level(&mut self, level: u8, name: Option<&String>) -> Option<u32> {
        let next = u32::try_from(self.0.len()).unwrap_or(u32::MAX);
        name.map(|name| *self.0.entry((level, name.clone())).or_insert(next))
    }

    fn place(&mut self, place: &Place) -> scheduler::Place {
        scheduler::Place {
            zone: self.level(0, place.zone.as_ref()),
            rack: self.level(1, place.rack.as_ref()),
            node: self.level(2, place.node.as_ref()),
            nvlink_domain: self.level(3, place.nvlink_domain.as_ref()),
        }
    }
}
