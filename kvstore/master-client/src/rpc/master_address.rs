//! Addresses of masters: one `HOST:PORT`, or etcd with the leader of several masters.

use std::fmt;

/// Default name of the cluster, equal to the masters' default.
const DEFAULT_CLUSTER: &str = "mooncake_cluster";
/// Scheme of the addresses of masters that publish their leader in etcd.
const ETCD: &str = "etcd://";

/// An invalid address of a master.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{address}` is not a master's address: {reason}")]
pub struct MasterAddressError {
    pub address: String,
    pub reason: &'static str,
}

/// A parsed address of a master. Its text form is the argument of [`MasterClient::new`](super::MasterClient::new).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MasterAddress {
    /// `HOST:PORT` of a single master.
    Fixed(String),
    /// `etcd://HOST:PORT;HOST:PORT`, with `;` or `,` between endpoints and optionally `/CLUSTER` at the end.
    Etcd {
        /// `HOST:PORT` of each etcd node.
        endpoints: Vec<String>,
        /// Name of the masters' cluster.
        cluster: String,
    },
}

impl MasterAddress {
    /// Parses an address. `cluster` selects the masters if several clusters share an etcd, unless the address contains a cluster.
    ///
    /// # Errors
    /// When the scheme is unknown, or there is no etcd endpoint.
    pub fn parse(address: &str, cluster: Option<&str>) -> Result<Self, MasterAddressError> {
        let address = address.trim();
        let invalid = |reason| MasterAddressError { address: address.to_owned(), reason };
        let Some(rest) = address.strip_prefix(ETCD) else {
            if address.contains("://") {
                return Err(invalid("write HOST:PORT, or etcd://HOST:PORT;HOST:PORT for masters with etcd"));
            }
            return Ok(Self::Fixed(address.to_owned()));
        };
        let (endpoints, named) = rest.split_once('/').unwrap_or((rest, ""));
        let named = Some(named.trim_matches('/')).filter(|name| !name.is_empty());
        let cluster = named.or(cluster.filter(|name| !name.is_empty())).unwrap_or(DEFAULT_CLUSTER);
        let endpoints = endpoints.split([';', ',']).map(str::trim).filter(|endpoint| !endpoint.is_empty());
        let endpoints: Vec<String> = endpoints.map(str::to_owned).collect();
        let is_endpoint = |endpoint: &String| {
            let has_port = endpoint.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
            let url = reqwest::Url::parse(&format!("http://{endpoint}"));
            has_port && url.is_ok_and(|url| url.has_host() && url.path() == "/")
        };
        if endpoints.is_empty() || !endpoints.iter().all(is_endpoint) {
            return Err(invalid("write etcd://HOST:PORT, with ; between several etcd nodes"));
        }
        Ok(Self::Etcd { endpoints, cluster: cluster.to_owned() })
    }
}

impl fmt::Display for MasterAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(address) => out.write_str(address),
            Self::Etcd { endpoints, cluster } => write!(out, "{ETCD}{}/{cluster}", endpoints.join(";")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_and_formatted() {
        let read = |address: &str, cluster| MasterAddress::parse(address, cluster).map(|it| it.to_string());
        assert_eq!(read(" m:50051 ", Some("c")).unwrap(), "m:50051");
        let two = "etcd://a:2379, [::1]:2379";
        assert_eq!(read(two, None).unwrap(), "etcd://a:2379;[::1]:2379/mooncake_cluster");
        assert_eq!(read(two, Some("")).unwrap(), "etcd://a:2379;[::1]:2379/mooncake_cluster");
        assert_eq!(read(two, Some("blue")).unwrap(), "etcd://a:2379;[::1]:2379/blue");
        assert_eq!(read("etcd://a:2379/red/", Some("blue")).unwrap(), "etcd://a:2379/red");
        for invalid in ["etcd://", "etcd://;", "etcd://a", "etcd://a:b", "etcd://http://a:1", "redis://a:1"] {
            assert!(read(invalid, None).is_err(), "{invalid}");
        }
    }
}
