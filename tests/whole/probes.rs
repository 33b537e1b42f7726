//! Probes of containers.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Probe};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use tokio::net::TcpStream;
use tokio::sync::watch;

/// What probes have found out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    Ready(bool),
    /// It must be started anew.
    NotLive,
}

/// Probes a container that has just been started, for as long as this is awaited.
pub(crate) async fn run(container: &Container, address: &str, found: &watch::Sender<ProbeResult>) {
    if let Some(probe) = &container.startup_probe
        && !wait_for_probe(container, probe, address, true).await
    {
        found.send_replace(ProbeResult::NotLive);
        return;
    }
    let readiness = async {
        let Some(probe) = &container.readiness_probe else {
            found.send_replace(ProbeResult::Ready(true));
            return std::future::pending().await;
        };
        tokio::time::sleep(seconds(probe.initial_delay_seconds, 0)).await;
        loop {
            for ready in [true, false] {
                wait_for_probe(container, probe, address, ready).await;
                found.send_if_modified(|found| {
                    let new = *found != ProbeResult::NotLive && *found != ProbeResult::Ready(ready);
                    if new {
                        *found = ProbeResult::Ready(ready);
                    }
                    new
                });
            }
        }
    };
    let liveness = async {
        let Some(probe) = &container.liveness_probe else { return std::future::pending().await };
        let probe = Probe { success_threshold: None, ..probe.clone() };
        tokio::time::sleep(seconds(probe.initial_delay_seconds, 10)).await;
        wait_for_probe(container, &probe, address, false).await;
        found.send_replace(ProbeResult::NotLive);
    };
    tokio::select! {
        () = readiness => {}
        () = liveness => {}
    }
}

fn seconds(given: Option<i32>, default: u64) -> Duration {
    Duration::from_secs(given.map_or(default, |given| u64::try_from(given).unwrap()))
}

/// Waits until the probe succeeds or fails as often in a row as it takes. For a success it gives up when it has failed too often,
/// if that is what `startupProbe` says.
async fn wait_for_probe(container: &Container, probe: &Probe, address: &str, wanted: bool) -> bool {
    let threshold =
        if wanted { probe.success_threshold.unwrap_or(1) } else { probe.failure_threshold.unwrap_or(3) };
    let most = probe.failure_threshold.unwrap_or(3);
    let is_startup = container.startup_probe.as_ref() == Some(probe);
    let (mut in_row, mut failures) = (0, 0);
    loop {
        let good = probe_once(container, probe, address).await;
        in_row = if good == wanted { in_row + 1 } else { 0 };
        failures = if good { 0 } else { failures + 1 };
        if in_row >= threshold {
            return true;
        }
        if is_startup && failures >= most {
            return false;
        }
        tokio::time::sleep(seconds(probe.period_seconds, 10)).await;
    }
}

fn port_number(container: &Container, port: &IntOrString) -> u16 {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            ports.find(|port| port.name.as_ref() == Some(name)).unwrap().container_port
        }
    };
    u16::try_from(number).unwrap()
}

async fn probe_once(container: &Container, probe: &Probe, address: &str) -> bool {
    let limit = seconds(probe.timeout_seconds, 1);
    if let Some(get) = &probe.http_get {
        let path = get.path.as_deref().unwrap_or("/");
        let url = format!("http://{address}:{}{path}", port_number(container, &get.port));
        let client = reqwest::Client::builder().no_proxy().timeout(limit).build().unwrap();
        return client.get(url).send().await.is_ok_and(|answer| answer.status().as_u16() < 400);
    }
    if let Some(socket) = &probe.tcp_socket {
        let connected = TcpStream::connect((address, port_number(container, &socket.port)));
        return tokio::time::timeout(limit, connected).await.is_ok_and(|connected| connected.is_ok());
    }
    panic!("a probe of a kind that there is not: {probe:?}")
}
