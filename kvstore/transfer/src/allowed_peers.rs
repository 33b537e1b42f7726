//! Address filter for incoming connections. Mooncake's protocol has no authentication of its own.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnet::IpNet;

/// Networks from which connections are accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedPeers(Vec<IpNet>);

/// A list of networks that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is neither an address nor a network; write 10.0.0.7, 10.0.0.0/8 or fd00::/8, with commas between several"
)]
pub struct AllowedPeersError(String);

impl AllowedPeers {
    /// All IPv4 and IPv6 addresses.
    #[must_use]
    pub fn all() -> Self {
        Self(vec![IpNet::V4(ipnet::Ipv4Net::default()), IpNet::V6(ipnet::Ipv6Net::default())])
    }

    /// Loopback only: `127.0.0.0/8` and `::1`.
    #[must_use]
    pub fn loopback() -> Self {
        let (v4, v6) = (Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST);
        let v4_net = ipnet::Ipv4Net::new(v4, 8)
            .map_or_else(|_| IpNet::from(IpAddr::V4(v4)), |net| IpNet::V4(net.trunc()));
        Self(vec![v4_net, IpAddr::V6(v6).into()])
    }

    /// Whether connections from `address` are accepted. An IPv4-mapped IPv6 address counts as IPv4.
    #[must_use]
    pub fn allow(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.0.iter().any(|network| network.contains(&address))
    }
}

impl FromStr for AllowedPeers {
    type Err = AllowedPeersError;

    fn from_str(text: &str) -> Result<Self, AllowedPeersError> {
        let network = |part: &str| {
            let part = part.trim();
            let single = part.parse::<IpAddr>().map(IpNet::from);
            single.or_else(|_| part.parse()).map_err(|_| AllowedPeersError(part.to_owned()))
        };
        text.split(',').map(network).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for AllowedPeers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, network) in self.0.iter().enumerate() {
            write!(f, "{}{network}", if position == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_listed_networks_are_allowed() {
        let peers: AllowedPeers = "10.1.0.0/16, 192.168.7.1,fd00::/8".parse().unwrap();
        for (address, allowed) in [
            ("10.1.255.1", true),
            ("10.2.0.1", false),
            ("192.168.7.1", true),
            ("192.168.7.2", false),
            ("::ffff:10.1.0.1", true),
            ("fd12::1", true),
            ("fe80::1", false),
        ] {
            assert_eq!(peers.allow(address.parse().unwrap()), allowed, "{address}");
            assert!(AllowedPeers::all().allow(address.parse().unwrap()));
        }
        let loopback = AllowedPeers::loopback();
        assert_eq!(loopback.to_string(), "127.0.0.0/8,::1/128");
        assert!(loopback.allow("127.9.0.1".parse().unwrap()) && !loopback.allow("10.0.0.1".parse().unwrap()));
        assert_eq!(peers.to_string().parse(), Ok(peers));
        for wrong in ["", "10.0.0.0/40", "everyone", "10.0.0.1,,"] {
            assert!(wrong.parse::<AllowedPeers>().is_err(), "{wrong}");
        }
    }
}
