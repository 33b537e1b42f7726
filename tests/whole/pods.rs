//! Pods with a network of their own, and processes as their containers.

use std::collections::HashMap;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};
use kube::Client;
use moongate_testkit::{ContainerHealth, PodRuntime};
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::host::{HOST, resolv_conf};
use super::launch::ContainerLaunch;
use super::probes::{self, ProbeResult};
use super::volumes;

const CONTAINER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/whole/container");
/// How long a pod has to end where its spec does not say.
const GRACE: i64 = 30;

/// What all containers run: this build, or another one that is to be looked at.
pub(crate) fn program() -> String {
    std::env::var("MOONGATE_PROGRAM").unwrap_or_else(|_| env!("CARGO_BIN_EXE_moongate").to_owned())
}

/// What runs in the pods of a namespace.
#[derive(Clone)]
pub(crate) struct ProcessPodRuntime(Arc<ProcessPodRuntimeState>);

struct ProcessPodRuntimeState {
    client: Client,
    folder: PathBuf,
    next: AtomicU16,
    /// By uid.
    sandboxes: Mutex<HashMap<String, Arc<PodSandbox>>>,
}

/// A pod's network and what runs in it.
struct PodSandbox {
    address: String,
    /// Holds its network.
    _holder: Child,
    process: String,
    folder: PathBuf,
    containers: Mutex<HashMap<String, ContainerRunner>>,
    /// Told of whatever happens to a container.
    changes: Notify,
}

/// Keeps a container running.
struct ContainerRunner {
    /// The pod that it is to run for, or none if it is to end.
    desired_pod: watch::Sender<Option<Pod>>,
    state: Arc<Mutex<ContainerHealth>>,
    process: Arc<Mutex<Option<u32>>>,
    /// Has an end when it has ended.
    ended: watch::Receiver<()>,
    /// So often it was started.
    starts: watch::Receiver<u32>,
}

fn uid(pod: &Pod) -> String {
    pod.metadata.uid.clone().unwrap()
}

impl ProcessPodRuntime {
    /// Files of pods, and what they print, come into the folder.
    pub(crate) fn new(client: Client, folder: PathBuf) -> Self {
        let (next, sandboxes) = (AtomicU16::new(2), Mutex::default());
        Self(Arc::new(ProcessPodRuntimeState { client, folder, next, sandboxes }))
    }

    /// Kills the process of a container, as a fault would.
    pub(crate) async fn kill(&self, pod: &Pod, container: &str) {
        let sandbox = self.sandbox(pod).unwrap();
        let process = sandbox.containers.lock()[container].process.lock().unwrap().to_string();
        assert!(Command::new("kill").args(["-KILL", &process]).status().await.unwrap().success());
    }

    fn sandbox(&self, pod: &Pod) -> Option<Arc<PodSandbox>> {
        self.0.sandboxes.lock().get(&uid(pod)).cloned()
    }
}

impl PodRuntime for ProcessPodRuntime {
    async fn start(&self, pod: &Pod) -> String {
        let number = self.0.next.fetch_add(1, Ordering::Relaxed);
        let address = format!("10.244.{}.{}", number >> 8, number & 255);
        let name = pod.metadata.name.clone().unwrap();
        let folder = self.0.folder.join(format!("{name}-{number}"));
        std::fs::create_dir_all(&folder).unwrap();
        let (holder, process) = network(&format!("pod{number}"), &address).await;
        volumes::make(&self.0.client, pod, &folder.join("volumes"), &address).await;
        let namespace = pod.metadata.namespace.clone().unwrap();
        std::fs::write(folder.join("resolv.conf"), resolv_conf(&namespace)).unwrap();
        std::fs::write(folder.join("hosts"), format!("127.0.0.1 localhost\n{address} {name}\n")).unwrap();
        let (containers, changes) = (Mutex::default(), Notify::new());
        let address_of_it = address.clone();
        let sandbox =
            PodSandbox { address: address_of_it, _holder: holder, process, folder, containers, changes };
        let sandbox = Arc::new(sandbox);
        self.0.sandboxes.lock().insert(uid(pod), Arc::clone(&sandbox));
        let spec = pod.spec.as_ref().unwrap();
        for container in sidecars(spec).chain(&spec.containers) {
            let mut starts = sandbox.run_container(&self.0.client, pod, &container.name);
            starts.wait_for(|starts| *starts > 0).await.unwrap();
        }
        address
    }

    async fn restart(&self, pod: &Pod, container: &str) {
        let Some(sandbox) = self.sandbox(pod) else { return };
        let mut starts = {
            let containers = sandbox.containers.lock();
            let keeper = &containers[container];
            let starts = keeper.starts.clone();
            keeper.desired_pod.send_replace(Some(pod.clone()));
            starts
        };
        let before = *starts.borrow_and_update();
        starts.wait_for(|starts| *starts > before).await.unwrap();
    }

    async fn stop(&self, pod: &Pod) {
        let Some(sandbox) = self.sandbox(pod) else { return };
        let spec = pod.spec.as_ref().unwrap();
        // Sidecars end after the others, whose hooks may call them.
        sandbox.end(&spec.containers.iter().collect::<Vec<_>>()).await;
        sandbox.end(&sidecars(spec).collect::<Vec<_>>()).await;
        self.0.sandboxes.lock().remove(&uid(pod));
    }

    fn state(&self, pod: &Pod, container: &str) -> ContainerHealth {
        let sandbox = self.sandbox(pod);
        let containers = sandbox.as_ref().map(|sandbox| sandbox.containers.lock());
        let keeper = containers.as_ref().and_then(|containers| containers.get(container));
        keeper.map_or(ContainerHealth { is_running: false, is_ready: false, exit_count: 0 }, |keeper| {
            *keeper.state.lock()
        })
    }

    async fn changed(&self, pod: &Pod) {
        match self.sandbox(pod) {
            Some(sandbox) => sandbox.changes.notified().await,
            None => std::future::pending().await,
        }
    }
}

/// Init containers that run as long as the pod. The chart has no others in this test.
fn sidecars(spec: &PodSpec) -> impl Iterator<Item = &Container> {
    let init = spec.init_containers.iter().flatten();
    init.inspect(|one| assert_eq!(one.restart_policy.as_deref(), Some("Always"), "{}", one.name))
}

impl PodSandbox {
    /// Ends containers, and waits until they have ended.
    async fn end(&self, ending: &[&Container]) {
        let ended: Vec<_> = {
            let containers = self.containers.lock();
            let runners = ending.iter().filter_map(|container| containers.get(&container.name));
            runners
                .map(|runner| {
                    runner.desired_pod.send_replace(None);
                    runner.ended.clone()
                })
                .collect()
        };
        for mut ended in ended {
            while ended.changed().await.is_ok() {}
        }
    }

    /// Begins to keep a container; answers how often it was started.
    fn run_container(self: &Arc<Self>, client: &Client, pod: &Pod, container: &str) -> watch::Receiver<u32> {
        let (wish, wishes) = watch::channel(Some(pod.clone()));
        let (ending, ended) = watch::channel(());
        let (starting, starts) = watch::channel(0);
        let state =
            Arc::new(Mutex::new(ContainerHealth { is_running: false, is_ready: false, exit_count: 0 }));
        let process = Arc::<Mutex<Option<u32>>>::default();
        let keeper = ContainerRunner {
            desired_pod: wish,
            state: Arc::clone(&state),
            process: Arc::clone(&process),
            ended,
            starts: starts.clone(),
        };
        self.containers.lock().insert(container.to_owned(), keeper);
        let (sandbox, client, container) = (Arc::clone(self), client.clone(), container.to_owned());
        tokio::spawn(async move {
            sandbox.run(&client, &container, wishes, &starting, &state, &process).await;
            drop(ending);
        });
        starts
    }

    async fn run(
        &self,
        client: &Client,
        container: &str,
        mut wishes: watch::Receiver<Option<Pod>>,
        starting: &watch::Sender<u32>,
        state: &Mutex<ContainerHealth>,
        process: &Mutex<Option<u32>>,
    ) {
        let tell = |change: &dyn Fn(&mut ContainerHealth)| {
            change(&mut state.lock());
            self.changes.notify_one();
        };
        loop {
            let Some(pod) = wishes.borrow_and_update().clone() else { return };
            let spec = pod.spec.as_ref().unwrap();
            let one = sidecars(spec).chain(&spec.containers).find(|one| one.name == container).unwrap();
            let number = *starting.borrow();
            let mut child = self.spawn(client, &pod, one, &format!("{container}-{number}")).await;
            *process.lock() = child.id();
            starting.send_modify(|starts| *starts += 1);
            tell(&|state| {
                *state = ContainerHealth { is_running: true, is_ready: false, exit_count: state.exit_count }
            });
            let (sender, mut found) = watch::channel(ProbeResult::Ready(false));
            let looked_after = async {
                while found.changed().await.is_ok() {
                    match *found.borrow_and_update() {
                        ProbeResult::Ready(is_ready) => tell(&|state| state.is_ready = is_ready),
                        ProbeResult::NotLive => return,
                    }
                }
            };
            let asked = tokio::select! {
                _ = child.wait() => false,
                () = looked_after => false,
                () = probes::run(one, &self.address, &sender) => false,
                changed = wishes.changed() => changed.is_ok(),
            };
            let grace = spec.termination_grace_period_seconds.unwrap_or(GRACE);
            let end = Instant::now() + Duration::from_secs(u64::try_from(grace).unwrap());
            if asked {
                self.run_pre_stop(client, &pod, one, end).await;
            }
            terminate(&mut child, end).await;
            let exits = i32::from(!asked);
            tell(&|state| {
                *state = ContainerHealth {
                    is_running: false,
                    is_ready: false,
                    exit_count: state.exit_count + exits,
                }
            });
            if !asked {
                // As kubelets do, but shorter.
                let wait = Duration::from_secs(1)
                    .min(Duration::from_millis(200) * state.lock().exit_count.unsigned_abs());
                tokio::time::sleep(wait).await;
            }
        }
    }

    /// Runs the hook of a container before it ends, within the pod's grace period.
    async fn run_pre_stop(&self, client: &Client, pod: &Pod, container: &Container, end: Instant) {
        let Some(hook) = container.lifecycle.as_ref().and_then(|lifecycle| lifecycle.pre_stop.clone()) else {
            return;
        };
        let command = hook.exec.and_then(|exec| exec.command).expect("the chart's hooks are commands");
        let as_container = Container { command: Some(command), args: None, ..container.clone() };
        let log = format!("{}-pre-stop", container.name);
        let mut child = self.spawn(client, pod, &as_container, &log).await;
        let _ = tokio::time::timeout_at(end, child.wait()).await;
    }

    async fn spawn(&self, client: &Client, pod: &Pod, container: &Container, log: &str) -> Child {
        let launch = ContainerLaunch::from_spec(client, pod, container, &self.address).await;
        let log = std::fs::File::create(self.folder.join(format!("{log}.log"))).unwrap();
        let root = self.folder.join(format!("{}-root", container.name));
        std::fs::create_dir_all(&root).unwrap();
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &self.process, "--net", "unshare", "--mount", CONTAINER])
            .arg(&root)
            .arg(program());
        for name in ["resolv.conf", "hosts"] {
            command.arg(self.folder.join(name)).arg(format!("/etc/{name}")).arg("ro");
        }
        for mount in volumes::mounts(container, &self.folder.join("volumes")) {
            command.arg(mount.source).arg(mount.target).arg(if mount.is_read_only { "ro" } else { "rw" });
        }
        command.arg("--").args(&launch.arguments).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        // Another image is another release of the engine.
        let tag = container.image.as_deref().and_then(|image| Some(image.rsplit_once(':')?.1));
        command.env("MOONGATE_LOADTEST_REPORTED_VERSION", tag.unwrap_or_default());
        command.envs(launch.env).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        command.kill_on_drop(true).spawn().unwrap()
    }
}

/// A network with this address on the pods' bridge, what holds it, and the number of that process.
async fn network(name: &str, address: &str) -> (Child, String) {
    let mut holder = Command::new("unshare");
    holder
        .args(["--net", "sh", "-c", "echo; exec sleep infinity"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut holder = holder.kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    lines.next_line().await.unwrap().expect("it says that it has entered its network");
    let process = holder.id().unwrap().to_string();
    let inside = format!("nsenter --target {process} --net ip");
    let script = format!(
        "ip link add {name} type veth peer name eth0 netns {process}
         ip link set {name} master pods up
         {inside} link set lo up
         {inside} address add {address}/16 dev eth0
         {inside} link set eth0 up
         {inside} route add default via {HOST}"
    );
    let made = Command::new("sh").args(["-ec", &script]).stdin(Stdio::null()).output().await.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    (holder, process)
}

/// Sends SIGTERM to a process, and kills it if it is still running at `end`.
async fn terminate(child: &mut Child, end: Instant) {
    let Some(id) = child.id() else { return };
    // It may be gone already.
    let _ = Command::new("kill").args(["-TERM", &id.to_string()]).stderr(Stdio::null()).status().await;
    if tokio::time::timeout_at(end, child.wait()).await.is_err() {
        child.kill().await.unwrap();
    }
}
