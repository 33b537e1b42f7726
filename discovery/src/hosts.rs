//! Where hosts run that are no engines, such as those of store nodes.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::topology::PhysicalLocation;

/// Places by host name and IP address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLocations<P = PhysicalLocation>(BTreeMap<String, P>);

impl<P> HostLocations<P> {
    /// Where a host runs, by its address, or by its name: with its domain, or without.
    #[must_use]
    pub fn location(&self, host: &str) -> Option<&P> {
        let host = host.trim_matches(['[', ']']);
        let alone =
            || host.split_once('.').filter(|_| host.parse::<IpAddr>().is_err()).map(|(alone, _)| alone);
        self.0.get(host).or_else(|| self.0.get(alone()?))
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &P)> {
        self.0.iter().map(|(host, place)| (host.as_str(), place))
    }

    /// Whether nothing is known of any host.
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

/// Of what has several places the first stays; no place is none.
impl<P: Default + PartialEq> FromIterator<(String, P)> for HostLocations<P> {
    fn from_iter<T: IntoIterator<Item = (String, P)>>(hosts: T) -> Self {
        let mut all = Self::default();
        for (host, place) in hosts.into_iter().filter(|(_, place)| *place != P::default()) {
            all.0.entry(host).or_insert(place);
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
        let told = [("10.0.0.7", on("a")), ("store-0", on("b")), ("fd00::7", on("c")), ("10", on("d"))];
        let hosts: HostLocations = told.map(|(host, place)| (host.to_owned(), place)).into_iter().collect();
        for (host, node) in [
            ("10.0.0.7", Some("a")),
            ("store-0", Some("b")),
            ("store-0.s-store.prod.svc", Some("b")),
            ("[fd00::7]", Some("c")),
            ("10.0.0.8", None),
            ("store-1", None),
        ] {
            assert_eq!(hosts.location(host).and_then(|place| place.node.as_deref()), node, "{host}");
        }
    }

    #[test]
    fn nothing_known_of_a_host_is_no_place() {
        assert!(HostLocations::from_iter([("a".to_owned(), PhysicalLocation::default())]).is_empty());
    }
}
