//! Which prefill and decode engines may hand KV cache over to each other: those with the same protocol and, if the rule says so, of the
//! same release. Two releases of an engine's transfer code may be incompatible, and both run while a rollout is in progress.

use std::collections::{BTreeSet, HashMap, HashSet};

use moongate_discovery::{EngineFacts, EngineKind, EngineRole, KvTransferMethod, Topology};
use moongate_scheduler::PairingDomain;

use super::version_pairing::{VersionPairing, VersionRule};

/// What decides whether two engines may pair: protocol and model, without the version.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct PairingGroup<'a> {
    protocol: usize,
    /// The first served model: LoRA adapters follow it, and do not have versions.
    model: &'a str,
}

/// The domains of the engines of one topology.
#[derive(Debug)]
pub(super) struct PairingDomains<'a> {
    rule: &'a VersionRule,
    /// Classes of the versions of all engines, in order.
    versions: Vec<&'a str>,
    /// Groups with a pair of one version, each with all of these versions.
    complete: HashMap<PairingGroup<'a>, HashSet<&'a str>>,
    /// Groups with an engine that does not report its version.
    unknown: HashSet<PairingGroup<'a>>,
}

impl<'a> PairingDomains<'a> {
    /// Compares the usable engines of a topology.
    pub(super) fn new(topology: &'a Topology, rule: &'a VersionRule) -> Self {
        let engines = || {
            let usable = |instance: &'a moongate_discovery::EngineInstance| {
                instance.usable_facts().map(|facts| (instance.role, facts))
            };
            topology.instances.iter().filter_map(move |instance| usable(instance))
        };
        let versions: BTreeSet<&str> = engines().map(|(_, facts)| rule.class(facts)).collect();
        let mut roles: HashMap<(PairingGroup<'_>, &str), HashSet<EngineRole>> = HashMap::new();
        for (role, facts) in engines() {
            roles.entry((group(facts), rule.class(facts))).or_default().insert(role);
        }
        let (mut complete, mut unknown) = (HashMap::<_, HashSet<&str>>::new(), HashSet::new());
        for ((group, version), roles) in roles {
            if version.is_empty() {
                unknown.insert(group.clone());
            }
            if roles.contains(&EngineRole::Prefill) && roles.contains(&EngineRole::Decode) {
                complete.entry(group).or_default().insert(version);
            }
        }
        Self { rule, versions: versions.into_iter().collect(), complete, unknown }
    }

    /// The domain of an engine: equal for two engines that may pair.
    pub(super) fn of(&self, facts: &EngineFacts) -> PairingDomain {
        let version = if self.separates_versions(facts) {
            let position = self.versions.binary_search(&self.rule.class(facts));
            position.map_or(0, |position| position + 1)
        } else {
            0
        };
        let number = version * KvTransferMethod::NAMES.len() + protocol(facts);
        PairingDomain(u32::try_from(number).unwrap_or_default())
    }

    fn separates_versions(&self, facts: &EngineFacts) -> bool {
        match self.rule.pairing {
            VersionPairing::Any => false,
            VersionPairing::Preferred => {
                let group = group(facts);
                self.complete.contains_key(&group) && !self.unknown.contains(&group)
            }
            VersionPairing::Equal => true,
        }
    }

    /// Whether a prefill or decode has no partner because of its version.
    pub(super) fn is_unpaired(&self, role: EngineRole, facts: &EngineFacts) -> bool {
        let has_partner =
            || self.complete.get(&group(facts)).is_some_and(|all| all.contains(self.rule.class(facts)));
        role != EngineRole::Plain && self.separates_versions(facts) && !has_partner()
    }
}

/// Name of a domain's hand-over protocol.
pub(crate) fn domain_name(domain: PairingDomain) -> Option<&'static str> {
    KvTransferMethod::NAMES.get(domain.0 as usize % KvTransferMethod::NAMES.len()).copied()
}

/// Position of the engine's protocol in [`KvTransferMethod::NAMES`].
fn protocol(facts: &EngineFacts) -> usize {
    let name = match (&facts.transfer, facts.engine) {
        (Some(transfer), _) => transfer.name(),
        (None, EngineKind::Sglang) => "sglang",
        (None, EngineKind::Vllm) => "store",
    };
    KvTransferMethod::NAMES.iter().position(|other| *other == name).unwrap_or_default()
}

fn group(facts: &EngineFacts) -> PairingGroup<'_> {
    PairingGroup { protocol: protocol(facts), model: facts.models.first().map_or("", String::as_str) }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moongate_discovery::EngineInstance;

    use super::*;
    use crate::test_fleet::with_facts;

    const PREFILL: EngineRole = EngineRole::Prefill;
    const DECODE: EngineRole = EngineRole::Decode;

    fn engine(role: EngineRole, model: &str, version: &str) -> Arc<EngineInstance> {
        let (models, version) = (vec![model.to_owned()], version.to_owned());
        let facts = EngineFacts { models, version, ..EngineFacts::unreported(EngineKind::Sglang) };
        with_facts("engine", role, facts)
    }

    /// Pairs of positions of a prefill and a decode in one domain, and the positions of unpaired engines.
    fn pairs(instances: &[Arc<EngineInstance>], rule: VersionPairing) -> (Vec<(usize, usize)>, Vec<usize>) {
        pairs_by(instances, &VersionRule::new(rule, &[]))
    }

    fn pairs_by(instances: &[Arc<EngineInstance>], rule: &VersionRule) -> (Vec<(usize, usize)>, Vec<usize>) {
        let topology = Topology { instances: instances.to_vec(), ..Topology::default() };
        let domains = PairingDomains::new(&topology, rule);
        let facts = |position: usize| instances[position].facts.as_ref().unwrap();
        let all = || 0..instances.len();
        let of = |role: EngineRole| all().filter(move |position| instances[*position].role == role);
        let pairs = of(PREFILL).flat_map(|prefill| of(DECODE).map(move |decode| (prefill, decode)));
        let pairs =
            pairs.filter(|(prefill, decode)| domains.of(facts(*prefill)) == domains.of(facts(*decode)));
        let unpaired = all().filter(|it| domains.is_unpaired(instances[*it].role, facts(*it)));
        (pairs.collect(), unpaired.collect())
    }

    #[test]
    fn a_mixed_fleet_pairs_within_a_version() {
        let fleet = [
            engine(PREFILL, "m", "0.5.5"),
            engine(PREFILL, "m", "0.5.6+cu129"),
            engine(DECODE, "m", "0.5.5"),
            engine(DECODE, "m", "0.5.6"),
            engine(EngineRole::Plain, "m", "0.5.7"),
        ];
        let within = (vec![(0, 2), (1, 3)], vec![]);
        assert_eq!(pairs(&fleet, VersionPairing::Preferred), within);
        assert_eq!(pairs(&fleet, VersionPairing::Equal), within);
        let all = vec![(0, 2), (0, 3), (1, 2), (1, 3)];
        assert_eq!(pairs(&fleet, VersionPairing::Any), (all, vec![]));
    }

    #[test]
    fn an_engine_waits_for_a_partner_of_its_version() {
        let fleet = [
            engine(PREFILL, "m", "1"),
            engine(PREFILL, "m", "2"),
            engine(DECODE, "m", "1"),
            engine(DECODE, "m", "3"),
        ];
        for rule in [VersionPairing::Preferred, VersionPairing::Equal] {
            assert_eq!(pairs(&fleet, rule), (vec![(0, 2)], vec![1, 3]), "{rule:?}");
        }
    }

    #[test]
    fn compatible_versions_pair_with_each_other_only() {
        let fleet = [engine(PREFILL, "m", "1"), engine(PREFILL, "m", "3"), engine(DECODE, "m", "2")];
        for pairing in [VersionPairing::Preferred, VersionPairing::Equal] {
            let rule = VersionRule::new(pairing, &["1=2".parse().unwrap()]);
            assert_eq!(pairs_by(&fleet, &rule), (vec![(0, 2)], vec![1]), "{pairing:?}");
        }
    }

    #[test]
    fn an_unreported_version_is_no_reason_to_wait() {
        let fleet = [engine(PREFILL, "m", "1"), engine(DECODE, "m", "1"), engine(DECODE, "m", "")];
        assert_eq!(pairs(&fleet, VersionPairing::Preferred), (vec![(0, 1), (0, 2)], vec![]));
        assert_eq!(pairs(&fleet, VersionPairing::Equal), (vec![(0, 1)], vec![2]));
    }

    #[test]
    fn without_an_equal_pair_only_the_strict_rule_waits() {
        // Another model with pairs does not count.
        let fleet = [
            engine(PREFILL, "m", "2"),
            engine(DECODE, "m", "1"),
            engine(PREFILL, "n", "1"),
            engine(DECODE, "n", "1"),
        ];
        let (found, unpaired) = pairs(&fleet, VersionPairing::Preferred);
        assert!(found.contains(&(0, 1)) && found.contains(&(2, 3)) && unpaired.is_empty(), "{found:?}");
        let (found, unpaired) = pairs(&fleet, VersionPairing::Equal);
        assert!(!found.contains(&(0, 1)) && found.contains(&(2, 3)), "{found:?}");
        assert_eq!(unpaired, [0, 1]);
    }

    #[test]
    fn domains_keep_the_name_of_their_protocol() {
        for (version, name) in [("1", "sglang"), ("2", "sglang")] {
            let fleet = [engine(PREFILL, "m", "1"), engine(DECODE, "m", "1"), engine(DECODE, "m", version)];
            let topology = Topology { instances: fleet.to_vec(), ..Topology::default() };
            let rule = VersionRule::new(VersionPairing::Equal, &[]);
            let domains = PairingDomains::new(&topology, &rule);
            assert_eq!(domain_name(domains.of(fleet[2].facts.as_ref().unwrap())), Some(name));
        }
    }
}
