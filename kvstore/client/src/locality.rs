//! How far nodes are.

use std::collections::HashSet;
use std::net::IpAddr;
use std::str::FromStr;

use ipnet::IpNet;

/// Where the kernel tells the host's name.
const HOST_NAME: &str = "/proc/sys/kernel/hostname";
/// The distance of a node that nothing is known of.
const DEFAULT_DISTANCE: u32 = 100;

/// Which nodes are near this client. A node's distance is 0 on the same host, that of the first rule that fits
/// it, or else 100.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Locality {
    /// The names and addresses of this host.
    own: HashSet<String>,
    rules: Vec<(LocalityPattern, u32)>,
    host_id: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum LocalityPattern {
    Host(String),
    Network(IpNet),
}

/// Text that is not a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not PLACE=DISTANCE, for example 10.1.0.0/16=1 or node-7=2")]
pub struct LocalityError(String);

/// Knows the own host by its name and its loopback addresses, and nothing else.
impl Default for Locality {
    fn default() -> Self {
        let name = std::fs::read_to_string(HOST_NAME).unwrap_or_default();
        let own = ["localhost", name.trim()].into_iter().filter(|name| !name.is_empty());
        Self { own: own.map(str::to_owned).collect(), rules: Vec::new(), host_id: String::new() }
    }
}

impl Locality {
    /// Also knows the own host by this name or address, for example its pod's IP address.
    #[must_use]
    pub fn with_own(mut self, host: &str) -> Self {
        self.own.insert(bare(host).to_owned());
        self
    }

    /// The own host's id, by which a master that is told to allocates on the same host.
    #[must_use]
    pub fn with_host_id(mut self, id: &str) -> Self {
        id.clone_into(&mut self.host_id);
        self
    }

    /// Adds a rule `PLACE=DISTANCE`: a host, an address or a network, and how far it is. Smaller is nearer.
    ///
    /// # Errors
    /// When it is not of that form.
    pub fn with_rule(mut self, rule: &str) -> Result<Self, LocalityError> {
        let wrong = || LocalityError(rule.to_owned());
        let (place, distance) = rule.rsplit_once('=').ok_or_else(wrong)?;
        let distance = distance.trim().parse().map_err(|_| wrong())?;
        let place = match (IpNet::from_str(place.trim()), bare(place.trim())) {
            (Ok(network), _) => LocalityPattern::Network(network),
            (_, "") => return Err(wrong()),
            (_, host) if host.contains('/') => return Err(wrong()),
            (_, host) => LocalityPattern::Host(host.to_owned()),
        };
        self.rules.push((place, distance));
        Ok(self)
    }

    pub(crate) fn host_id(&self) -> &str {
        &self.host_id
    }

    /// The distance of the node whose endpoint is `host:port`.
    pub(crate) fn distance(&self, endpoint: &str) -> u32 {
        let host = bare(endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host));
        let address: Option<IpAddr> = host.parse().ok();
        if self.own.contains(host) || address.is_some_and(|address| address.is_loopback()) {
            return 0;
        }
        let fits = |place: &LocalityPattern| match (place, address) {
            (LocalityPattern::Host(name), _) => name == host,
            (LocalityPattern::Network(network), Some(address)) => network.contains(&address),
            (LocalityPattern::Network(_), None) => false,
        };
        self.rules.iter().find(|(place, _)| fits(place)).map_or(DEFAULT_DISTANCE, |(_, distance)| *distance)
    }
}

/// A host without the brackets that IPv6 addresses have before a port.
fn bare(host: &str) -> &str {
    host.trim_matches(['[', ']'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_host_is_nearest_then_rules_count() {
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
    fn rules_that_are_none_are_refused() {
        for rule in ["", "a", "=1", "a=", "a=b", "10.0.0.0/99=1"] {
            assert!(Locality::default().with_rule(rule).is_err(), "{rule}");
        }
    }
}
