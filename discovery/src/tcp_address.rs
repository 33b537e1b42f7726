//! ZeroMQ addresses over TCP, in the forms of engines and configuration files: `tcp://*:5557`, `tcp://10.0.0.1:5557`, `tcp://[::]:5557`.

use crate::endpoint::bracketed;

/// Longest accepted address in bytes; host names have at most 253 characters.
const MAX_LEN: usize = 300;
/// Hosts that mean all interfaces of the binding process.
const WILDCARDS: [&str; 3] = ["*", "0.0.0.0", "::"];

/// A checked `tcp://host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TcpAddress {
    /// Host name, IP without brackets, or a wildcard.
    host: String,
    port: u16,
}

impl TcpAddress {
    /// `None` for other transports (`ipc://`, `inproc://`), a missing or zero port, and an invalid host.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.strip_prefix("tcp://").filter(|_| text.len() <= MAX_LEN)?.rsplit_once(':')?;
        Self::from_host_port(host, port.parse().ok()?)
    }

    pub(crate) fn from_host_port(host: &str, port: u16) -> Option<Self> {
        let host = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
        let is_host_char =
            |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':' | '%' | '*');
        let is_valid =
            !host.is_empty() && host.len() <= MAX_LEN && host.chars().all(is_host_char) && port != 0;
        is_valid.then(|| Self { host: host.to_owned(), port })
    }

    /// Whether an engine binds its publisher to this address instead of connecting. Both engines bind if the address contains `*` or `::`,
    /// so a specific IPv6 address counts too; SGLang also binds to `0.0.0.0`, to which no client can connect.
    pub(crate) fn is_bound_by_engine(&self) -> bool {
        self.host.contains('*') || self.host.contains("::") || self.host == "0.0.0.0"
    }

    /// The same host at port + `rank`: both engines assign ports of data-parallel ranks this way. `None` beyond port 65535.
    pub(crate) fn of_rank(&self, rank: u32) -> Option<Self> {
        let port = self.port.checked_add(u16::try_from(rank).ok()?)?;
        Some(Self { host: self.host.clone(), port })
    }

    /// The address for clients on other machines, with `host` in place of a wildcard.
    pub(crate) fn reached_at(&self, host: &str) -> String {
        let host = if WILDCARDS.contains(&self.host.as_str()) { host } else { &self.host };
        format!("tcp://{}:{}", bracketed(host), self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_wildcard_address_becomes_the_host_that_the_engine_binds() {
        for (text, reached, bound) in [
            ("tcp://*:5557", "tcp://10.0.0.7:5557", true),
            ("tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557", true),
            ("tcp://[::]:5557", "tcp://10.0.0.7:5557", true),
            ("tcp://:::5557", "tcp://10.0.0.7:5557", true),
            ("tcp://[fd00::1]:5557", "tcp://[fd00::1]:5557", true),
            ("tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557", false),
            ("tcp://indexer.svc:5557", "tcp://indexer.svc:5557", false),
        ] {
            let address = TcpAddress::parse(text).unwrap();
            assert_eq!(
                (address.reached_at("10.0.0.7").as_str(), address.is_bound_by_engine()),
                (reached, bound)
            );
        }
        assert_eq!(TcpAddress::parse("tcp://*:1").unwrap().reached_at("fd00::2"), "tcp://[fd00::2]:1");
    }

    #[test]
    fn ranks_follow_each_other_and_end_with_the_ports() {
        let address = TcpAddress::parse("tcp://*:65534").unwrap();
        assert_eq!(address.of_rank(1).unwrap().reached_at("h"), "tcp://h:65535");
        assert_eq!(address.of_rank(2), None);
        assert_eq!(address.of_rank(u32::MAX), None);
    }

    #[test]
    fn addresses_that_clients_cannot_reach_are_rejected() {
        for bad in [
            "",
            "tcp://",
            "tcp://*",
            "tcp://*:0",
            "tcp://*:65536",
            "tcp://:1",
            "tcp://a b:1",
            "ipc://a:1",
            "inproc://a:1",
        ] {
            assert_eq!(TcpAddress::parse(bad), None, "{bad}");
        }
        assert_eq!(TcpAddress::parse(&format!("tcp://{}:1", "a".repeat(MAX_LEN))), None);
    }

    proptest! {
        #[test]
        fn never_panics_and_parses_its_own_output(text in "(tcp://)?[\\[a-f0-9:*.\\]]{0,12}(:[0-9]{1,6})?", host in "[a-z]{1,5}") {
            if let Some(address) = TcpAddress::parse(&text) {
                let written = address.reached_at(&host);
                prop_assert_eq!(TcpAddress::parse(&written).unwrap().reached_at(&host), written);
            }
        }
    }
}
