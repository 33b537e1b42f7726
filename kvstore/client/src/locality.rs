//! Network distance of nodes, used to prefer near replicas.

use std::collections::HashSet;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// The kernel's file with the host name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// Distance of a node that matches no rule.
const DEFAULT_DISTANCE: u32 = 100;

/// Distances of nodes from this client: 0 on the same host, else that of the first matching rule, else 100.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locality {
    /// Names and addresses of this host.
    own: HashSet<String>,
    rules: Vec<(LocalityPattern, u32)>,
    host_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum LocalityPattern {
    Host(String),
    Network(IpNet),
}

/// The text is not a distance rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not HOST_OR_CIDR=DISTANCE, for example 10.1.0.0/16=1 or node-7=2")]
pub struct LocalityError(String);

/// No rules. The own host is recognized by its name and by loopback addresses.
impl Default for Locality {
    fn default() -> Self {
        let name = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
        let own = ["localhost", name.trim()].into_iter().filter(|name| !name.is_empty());
        Self { own: own.map(str::to_owned).collect(), rules: Vec::new(), host_id: String::new() }
    }
}

impl Locality {
    /// Adds a name or address of the own host, for example its pod's IP address.
    #[must_use]
    pub fn with_own(mut self, host: &str) -> Self {
        self.own.insert(strip_brackets(host).to_owned());
        self
    }

    /// Sets the own host's id, which a master with host-local allocation uses to allocate on the same host.
    #[must_use]
    pub fn with_host_id(mut self, id: &str) -> Self {
        id.clone_into(&mut self.host_id);
        self
    }

    /// Adds a rule `HOST_OR_CIDR=DISTANCE` for a host, an address or a network. Smaller is nearer.
    ///
    /// # Errors
    /// When the rule does not have this form.
    pub fn with_rule(mut self, rule: &str) -> Result<Self, LocalityError> {
        let invalid = || LocalityError(rule.to_owned());
        let (pattern, distance) = rule.rsplit_once('=').ok_or_else(invalid)?;
        let distance = distance.trim().parse().map_err(|_| invalid())?;
        let pattern = match (IpNet::from_str(pattern.trim()), strip_brackets(pattern.trim())) {
            (Ok(network), _) => LocalityPattern::Network(network),
            (_, "") => return Err(invalid()),
            (_, host) if host.contains('/') => return Err(invalid()),
            (_, host) => LocalityPattern::Host(host.to_owned()),
        };
        self.rules.push((pattern, distance));
        Ok(self)
    }

    pub(crate) fn host_id(&self) -> &str {
        &self.host_id
    }

    /// The distance of the node whose endpoint is `host:port`.
    pub(crate) fn distance(&self, endpoint: &str) -> u32 {
        let host = strip_brackets(endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host));
        let address: Option<IpAddr> = host.parse().ok();
        if self.own.contains(host) || address.is_some_and(|address| address.is_loopback()) {
            return 0;
        }
        let matches_node = |pattern: &LocalityPattern| match (pattern, address) {
            (LocalityPattern::Host(name), _) => name == host,
            (LocalityPattern::Network(network), Some(address)) => network.contains(&address),
            (LocalityPattern::Network(_), None) => false,
        };
        self.rules
            .iter()
            .find(|(pattern, _)| matches_node(pattern))
            .map_or(DEFAULT_DISTANCE, |(_, distance)| *distance)
    }
}

/// Removes the brackets around an IPv6 address.
fn strip_brackets(host: &str) -> &str {
    host.trim_matches(['[', ']'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_host_has_distance_zero_then_the_first_rule_matches() {
        let locality = Locality::default().with_own("10.1.2.3").with_rule("10.1.0.0/16=1").unwrap();
        let locality = locality.with_rule("rack-b=2").unwrap().with_rule("fd00::/8=3").unwrap();
        for (endpoint, distance) in [
            ("127.0.0.1:1", 0),
            ("[::1]:1", 0),
            ("localhost:1", 0),
            ("10.1.2.3:7", 0),
            ("10.1.2.4:7", 1),
            ("rack-b:7", 2),
            ("[fd00::7]:7", 3),
            ("10.2.0.1:7", DEFAULT_DISTANCE),
            ("elsewhere:7", DEFAULT_DISTANCE),
            ("", DEFAULT_DISTANCE),
        ] {
            assert_eq!(locality.distance(endpoint), distance, "{endpoint}");
        }
    }

    #[test]
    fn invalid_rules_are_rejected() {
        for rule in ["", "a", "=1", "a=", "a=b", "10.0.0.0/99=1"] {
            assert!(Locality::default().with_rule(rule).is_err(), "{rule}");
        }
    }
}
