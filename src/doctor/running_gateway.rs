//! What a gateway that already runs with these settings has found out about its engines' caches.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use moongate_gateway::GatewayOptions;
use serde::Deserialize;

use super::DoctorReport;

/// Time limit for its response.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Response of `GET /workers`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Workers {
    workers: Vec<Worker>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Worker {
    id: String,
    ranks: Option<Vec<Rank>>,
    not_predicted: Option<Vec<Gap>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Rank {
    rank: usize,
    block_hashes: String,
    lmcache: Option<String>,
    drops_last_block: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Gap {
    message: String,
}

/// Adds a section about the engines, if a gateway answers at the admin address.
pub(super) async fn check(findings: &mut DoctorReport, options: &GatewayOptions) {
    let address = options.admin_listen;
    // With TLS, a client would need files that these settings do not have.
    if address.port() == 0 || options.listeners.admin_tls_cert.is_some() {
        return;
    }
    let Some(workers) = fetch(options, reachable(address)).await else { return };
    findings.section(&format!("Predictions of the gateway at {address}"));
    for worker in &workers.workers {
        describe(findings, worker);
    }
    if workers.workers.is_empty() {
        findings.note("it has no engines");
    }
}

/// The address at which this machine reaches a listener on all addresses.
fn reachable(listen: SocketAddr) -> SocketAddr {
    let ip = match listen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, listen.port())
}

/// `None` if no gateway answers there.
async fn fetch(options: &GatewayOptions, address: SocketAddr) -> Option<Workers> {
    let client = reqwest::Client::builder().timeout(REQUEST_TIMEOUT).no_proxy().build().ok()?;
    let mut request = client.get(format!("http://{address}/workers"));
    if let Some(token) = &options.access.admin_token {
        request = request.bearer_auth(token.expose());
    }
    let response = request.send().await.ok()?;
    if !response.status().is_success() {
        return None;
    }
    response.json().await.ok()
}

fn describe(findings: &mut DoctorReport, worker: &Worker) {
    let Worker { id, ranks, not_predicted } = worker;
    let ranks = ranks.as_deref().unwrap_or_default();
    if ranks.is_empty() {
        findings.note(&format!("{id}: not usable yet"));
    }
    for status in ranks {
        let rank = if ranks.len() > 1 { format!(", rank {}", status.rank) } else { String::new() };
        let lmcache =
            status.lmcache.as_ref().map(|chunks| format!(", LMCache: {chunks}")).unwrap_or_default();
        let last = match status.drops_last_block {
            Some(true) => ", computes the last cached block again",
            Some(false) | None => "",
        };
        findings.ok(&format!("{id}{rank}: block hashes {}{lmcache}{last}", status.block_hashes));
    }
    for Gap { message } in not_predicted.as_deref().unwrap_or_default() {
        findings.note(&format!("not predicted: {message}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_and_gaps_are_listed() {
        let json = r#"{"workers": [
            {"id": "a", "ranks": [{"rank": 0, "block_hashes": "confirmed", "lmcache": null, "drops_last_block": null}],
             "not_predicted": []},
            {"id": "b", "ranks": [{"rank": 0, "block_hashes": "unchecked", "lmcache": "unknown rule"},
                                  {"rank": 1, "block_hashes": "confirmed", "drops_last_block": true}],
             "not_predicted": [{"reason": "lmcache", "message": "unknown"}]},
            {"id": "c", "ranks": null, "not_predicted": null, "another": 1}]}"#;
        let workers: Workers = serde_json::from_str(json).unwrap();
        let mut findings = DoctorReport::default();
        workers.workers.iter().for_each(|worker| describe(&mut findings, worker));
        let expected = "  ok    a: block hashes confirmed
  ok    b, rank 0: block hashes unchecked, LMCache: unknown rule
  ok    b, rank 1: block hashes confirmed, computes the last cached block again
        not predicted: unknown
        c: not usable yet
";
        assert_eq!(findings.text, expected);
    }

    #[test]
    fn listeners_on_all_addresses_are_reached_at_the_loopback() {
        assert_eq!(reachable("0.0.0.0:9000".parse().unwrap()).to_string(), "127.0.0.1:9000");
        assert_eq!(reachable("[::]:9000".parse().unwrap()).to_string(), "[::1]:9000");
        assert_eq!(reachable("10.0.0.1:9000".parse().unwrap()).to_string(), "10.0.0.1:9000");
    }
}
