//! Gateway, two pairs of engines, master, two stores with their holders, and the proxies between them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use moongate_runtime::Supervisor;
use moongate_store_client::{KvClient, KvClientOptions};
use moongate_testkit::free_port;

use super::process::{ChaosProcess, ProcessUsage};
use super::proxy::{ChaosProxy, ProxiedLinkState};
use super::schedule::{ChaosFault, ChaosTarget, ProxiedLink, STORES};
use crate::harness::client;
use crate::harness::polling::poll_until;

const DISK: &str = "size=24m";

pub(crate) struct ChaosFleet {
    pub(crate) gateway: ChaosProcess,
    engines: Vec<ChaosProcess>,
    pub(crate) master: ChaosProcess,
    pub(crate) stores: Vec<ChaosProcess>,
    _holders: Vec<ChaosProcess>,
    engine_links: Vec<ChaosProxy>,
    master_link: ChaosProxy,
    pub(crate) engine_urls: Vec<String>,
    pub(crate) url: String,
    pub(crate) admin: String,
    disk: Option<PathBuf>,
    http: reqwest::Client,
}

fn split_args(line: &str) -> Vec<String> {
    line.split(' ').map(str::to_owned).collect()
}

impl ChaosFleet {
    pub(crate) async fn start(folder: &Path, supervisor: &Supervisor) -> Self {
        let log = |name: &str| folder.join(format!("{name}.log"));
        let (mut engines, mut engine_links, mut engine_urls, mut flags) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for (number, role) in ["prefill", "prefill", "decode", "decode"].into_iter().enumerate() {
            let (port, bootstrap) = (free_port(), free_port());
            let mut line = format!(
                "loadtest engine --role {role} --protocol sglang --listen 127.0.0.1:{port} --time-scale 5"
            );
            if role == "prefill" {
                line.push_str(&format!(" --bootstrap-listen 127.0.0.1:{bootstrap}"));
            }
            engines.push(ChaosProcess::start(
                &log(&format!("engine-{number}")),
                split_args(&line),
                Vec::new(),
            ));
            let proxy = ChaosProxy::start(format!("127.0.0.1:{port}"), supervisor).await;
            let port_flag = if role == "prefill" { format!(",{bootstrap}") } else { String::new() };
            flags.push(format!("--{role}=http://{}{port_flag}", proxy.address));
            engine_urls.push(format!("http://127.0.0.1:{port}"));
            engine_links.push(proxy);
        }
        let (public, admin) = (free_port(), free_port());
        let mut args = split_args(&format!(
            "gateway --listen 127.0.0.1:{public} --admin-listen 127.0.0.1:{admin} --health-interval 1s --health-timeout 1s --stall-timeout 3s --breaker-pause 500ms"
        ));
        args.extend(flags);
        let gateway = ChaosProcess::start(&log("gateway"), args, Vec::new());

        let disk = small_disk(&folder.join("disk"));
        let data = disk.clone().unwrap_or_else(|| folder.join("data"));
        let (rpc, metrics) = (free_port(), free_port());
        let line = format!(
            "master --rpc_address=127.0.0.1 --metrics_host=127.0.0.1 --rpc_port={rpc} --metrics_port={metrics} --default_kv_lease_ttl=1000 --data_dir={}",
            data.display()
        );
        let master = ChaosProcess::start(&log("master"), split_args(&line), Vec::new());
        let master_link = ChaosProxy::start(format!("127.0.0.1:{rpc}"), supervisor).await;
        let (mut holders, mut stores) = (Vec::new(), Vec::new());
        for number in 0..STORES {
            let socket = folder.join(format!("holder-{number}"));
            let line = format!("store-holder --socket {}", socket.display());
            holders.push(ChaosProcess::start(
                &log(&format!("holder-{number}")),
                split_args(&line),
                Vec::new(),
            ));
            poll_until(&format!("holder {number} listens"), async || socket.exists()).await;
            let line =
                format!("store --port=0 --memory=holder:{} -Dglobal_segment_size=64mb", socket.display());
            let variables = vec![
                ("MOONCAKE_MASTER", master_link.address.clone()),
                ("MOONCAKE_LOCAL_HOSTNAME", "127.0.0.1".to_owned()),
            ];
            stores.push(ChaosProcess::start(&log(&format!("store-{number}")), split_args(&line), variables));
        }
        Self {
            gateway,
            engines,
            master,
            stores,
            _holders: holders,
            engine_links,
            master_link,
            engine_urls,
            url: format!("http://127.0.0.1:{public}"),
            admin: format!("http://127.0.0.1:{admin}"),
            disk,
            http: client(),
        }
    }

    pub(crate) fn client(&self, supervisor: &Supervisor) -> KvClient {
        KvClient::new(&self.master_link.address, KvClientOptions::default(), supervisor).unwrap()
    }

    /// Begins a fault, or ends it.
    pub(crate) fn set(&mut self, fault: ChaosFault, begins: bool) {
        match fault {
            ChaosFault::Kill(target) if begins => self.process(target).kill(),
            ChaosFault::Kill(target) => self.process(target).restart(),
            ChaosFault::Stop(target) => self.process(target).stop(begins),
            ChaosFault::Cut(link) => {
                self.link(link).set(if begins { ProxiedLinkState::Cut } else { ProxiedLinkState::Open });
            }
            ChaosFault::Slow(link) => {
                self.link(link).set(if begins { ProxiedLinkState::Slow } else { ProxiedLinkState::Open });
            }
            ChaosFault::DiskFull => self.fill_disk(begins),
        }
    }

    fn process(&mut self, target: ChaosTarget) -> &mut ChaosProcess {
        match target {
            ChaosTarget::Gateway => &mut self.gateway,
            ChaosTarget::Engine(number) => &mut self.engines[number],
            ChaosTarget::Master => &mut self.master,
            ChaosTarget::Store(number) => &mut self.stores[number],
        }
    }

    fn link(&self, link: ProxiedLink) -> &ChaosProxy {
        match link {
            ProxiedLink::Engine(number) => &self.engine_links[number],
            ProxiedLink::Master => &self.master_link,
        }
    }

    fn fill_disk(&self, full: bool) {
        let Some(disk) = &self.disk else { return };
        let filler = disk.join("filler");
        if full {
            // Fails when the disk is full, which is what it is for.
            let _full = std::fs::write(&filler, vec![0_u8; 32 << 20]);
        } else {
            let _gone = std::fs::remove_file(&filler);
        }
    }

    /// Programs that have ended by themselves, with the ends of their logs.
    pub(crate) fn ended(&mut self) -> Vec<String> {
        let all = self.engines.iter_mut().chain([&mut self.gateway, &mut self.master]);
        all.chain(&mut self.stores).filter_map(|one| one.has_ended().then(|| one.log())).collect()
    }

    pub(crate) async fn get(&self, url: &str) -> Option<String> {
        let answer = self.http.get(url).timeout(Duration::from_secs(5)).send().await.ok()?;
        let is_success = answer.status().is_success();
        answer.text().await.ok().filter(|_| is_success)
    }

    /// What the programs use that hold something for others.
    pub(crate) fn usages(&self) -> Vec<(&'static str, ProcessUsage)> {
        let others = [("gateway", &self.gateway), ("master", &self.master)];
        let stores = self.stores.iter().map(|store| ("store", store));
        others.into_iter().chain(stores).map(|(name, process)| (name, process.usage())).collect()
    }

    /// Waits until every engine is used.
    pub(crate) async fn wait_until_healthy(&self) {
        poll_until("all engines are used", async || {
            let ready = self.get(&format!("{}/ready", self.admin)).await.unwrap_or_default();
            let ready: serde_json::Value = serde_json::from_str(&ready).unwrap_or_default();
            ready["waiting"].as_array().is_some_and(Vec::is_empty)
        })
        .await;
    }

    /// The samples of a metric whose labels contain `label`, added up.
    pub(crate) async fn metric(&self, name: &str, label: &str) -> u64 {
        let text = self.get(&format!("{}/metrics", self.admin)).await.expect("the gateway's metrics");
        let is_sample = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' '])) && line.contains(label)
        };
        let values = text.lines().filter(is_sample).map(|line| line.rsplit(' ').next().unwrap());
        values.map(|value| value.parse::<f64>().unwrap() as u64).sum()
    }
}

/// A disk that can be filled, if this user may mount one.
fn small_disk(at: &Path) -> Option<PathBuf> {
    std::fs::create_dir(at).unwrap();
    let mut mount = std::process::Command::new("mount");
    let mounted = mount.args(["-t", "tmpfs", "-o", DISK, "tmpfs"]).arg(at).output();
    mounted.is_ok_and(|ended| ended.status.success()).then(|| at.to_owned())
}

impl Drop for ChaosFleet {
    fn drop(&mut self) {
        if let Some(disk) = &self.disk {
            self.master.kill();
            let _left = std::process::Command::new("umount").arg(disk).status();
        }
    }
}
