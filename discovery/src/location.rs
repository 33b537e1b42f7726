//! Physical locations of engines, and of hosts without an engine, such as those of store nodes.

use std::collections::BTreeMap;
use std::net::IpAddr;

/// Physical position, coarse to fine. Unknown levels are `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(deny_unknown_fields)]
pub struct PhysicalLocation {
    /// Availability zone.
    pub zone: Option<String>,
    /// Rack or RDMA rail.
    pub rack: Option<String>,
    /// Kubernetes node or host name.
    pub node: Option<String>,
    /// NVLink domain inside or across nodes.
    pub nvlink_domain: Option<String>,
}

impl From<rbg_api::TopologyLocation> for PhysicalLocation {
    fn from(location: rbg_api::TopologyLocation) -> Self {
        let rbg_api::TopologyLocation { node, nvlink_domain, rack, zone } = location;
        Self { zone, rack, node, nvlink_domain }
    }
}

/// Locations of hosts without an engine, by host name and IP address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLocations<P = PhysicalLocation>(BTreeMap<String, P>);

impl<P> HostLocations<P> {
    /// The location of a host, by its address, or by its name with or without the domain.
    #[must_use]
    pub fn location(&self, host: &str) -> Option<&P> {
        let host = host.trim_matches(['[', ']']);
        let short_name =
            || host.split_once('.').filter(|_| host.parse::<IpAddr>().is_err()).map(|(name, _)| name);
        self.0.get(host).or_else(|| self.0.get(short_name()?))
    }

    /// All hosts with their locations, sorted by host.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &P)> {
        self.0.iter().map(|(host, location)| (host.as_str(), location))
    }

    /// Whether no host has a known location.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<P> Default for HostLocations<P> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

/// For a host with several locations the first is kept; default locations are ignored.
impl<P: Default + PartialEq> FromIterator<(String, P)> for HostLocations<P> {
    fn from_iter<T: IntoIterator<Item = (String, P)>>(hosts: T) -> Self {
        let mut all = Self::default();
        for (host, location) in hosts.into_iter().filter(|(_, location)| *location != P::default()) {
            all.0.entry(host).or_insert(location);
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_resolves_by_address_and_by_short_or_full_name() {
        let on = |node: &str| PhysicalLocation { node: Some(node.to_owned()), ..PhysicalLocation::default() };
        let listed = [("10.0.0.7", on("a")), ("store-0", on("b")), ("fd00::7", on("c")), ("10", on("d"))];
        let hosts: HostLocations =
            listed.map(|(host, location)| (host.to_owned(), location)).into_iter().collect();
        for (host, node) in [
            ("10.0.0.7", Some("a")),
            ("store-0", Some("b")),
            ("store-0.s-store.prod.svc", Some("b")),
            ("[fd00::7]", Some("c")),
            ("10.0.0.8", None),
            ("store-1", None),
        ] {
            assert_eq!(hosts.location(host).and_then(|location| location.node.as_deref()), node, "{host}");
        }
    }

    #[test]
    fn an_unknown_location_is_not_listed() {
        assert!(HostLocations::from_iter([("a".to_owned(), PhysicalLocation::default())]).is_empty());
    }
}
