//! Puts sources, prober and snapshot together.

use std::path::Path;

use moongate_runtime::Supervisor;
use tokio::sync::mpsc;

use crate::error::{DiscoveryError, FileError};
use crate::file_watch::FileWatch;
use crate::hub::Hub;
use crate::kubernetes;
use crate::listing::Update;
use crate::options::{DiscoveryOptions, ProbeOptions};
use crate::probe::Prober;
use crate::probe::report::ProbeReport;
use crate::rbg;
use crate::reader::{TopologyReader, channel};
use crate::registry::Registry;
use crate::static_file::{self, StaticInstance};

/// Lists that may wait for the hub; a source that is faster waits.
const MAX_UPDATES: usize = 16;

/// Order of the sources; the lower one wins where two list one id.
const SLOT_FLAGS: usize = 0;
const SLOT_FILE: usize = 1;
const SLOT_RBG: usize = 2;
const SLOT_REGISTRY: usize = 3;
const SLOT_KUBERNETES: usize = 4;

/// Starts discovery under `supervisor`. The first snapshot already lists what flags and files name, not yet probed;
/// pods follow as soon as the API server has answered.
///
/// # Errors
/// When the options name no source, or what they name is wrong from the start: a bad instance, a missing or malformed
/// file, no client configuration. Trouble after the start never stops discovery.
pub async fn start(
    options: DiscoveryOptions,
    supervisor: &Supervisor,
) -> Result<TopologyReader, DiscoveryError> {
    if options.instances.is_empty()
        && options.file.is_none()
        && options.rbg.is_none()
        && options.registry.is_none()
        && options.kubernetes.is_none()
    {
        return Err(DiscoveryError::NoSource);
    }
    let prober = Prober::new(&options.probe)?;
    let (publisher, reader) = channel();
    let (out, updates) = mpsc::channel(MAX_UPDATES);
    let mut hub = Hub::new(prober, options.probe, publisher);
    if !options.instances.is_empty() {
        hub.list(Update::engines(SLOT_FLAGS, static_file::listing(&options.instances)?));
    }
    let mut tasks = Vec::new();
    if let Some(path) = &options.file {
        let mut file = FileWatch::new(path);
        let read = file.read().await;
        hub.list(
            read.and_then(|text| static_file::parse(&text, SLOT_FILE))
                .map_err(at("--instances-file", path))?,
        );
        tasks.push(Task::File(file));
    }
    if let Some(rbg) = options.rbg {
        let mut file = FileWatch::new(&rbg.path);
        let members = file
            .read()
            .await
            .and_then(|text| rbg::parse(&text, &rbg))
            .map_err(at("--rbg-config", &rbg.path))?;
        hub.list(rbg::listing(&members, &rbg::Names::default(), &rbg, SLOT_RBG));
        tasks.push(Task::Rbg(Box::new(rbg::follow::Follower {
            file,
            options: rbg,
            members,
            resolve: rbg::system_resolver(),
            slot: SLOT_RBG,
            out: out.clone(),
        })));
    }
    if let Some(registry) = options.registry {
        tasks.push(Task::Registry(registry));
    }
    if let Some(options) = options.kubernetes {
        let (client, namespace) = kubernetes::client(&options).await?;
        for (index, selector) in options.selectors().into_iter().enumerate() {
            tasks.push(Task::Kubernetes(Box::new(kubernetes::follow::Follower {
                client: client.clone(),
                namespace: namespace.clone(),
                selector,
                options: options.clone(),
                slot: SLOT_KUBERNETES + index,
                out: out.clone(),
            })));
        }
    }
    for task in tasks {
        let (stop, out) = (supervisor.token(), out.clone());
        match task {
            Task::File(file) => {
                supervisor.spawn_essential("discovery-file", static_file::follow(file, SLOT_FILE, out, stop));
            }
            Task::Rbg(follower) => {
                supervisor.spawn_essential("discovery-rbg", follower.run(stop));
            }
            Task::Registry(registry) => {
                supervisor.spawn_essential("discovery-registry", registry.follow(SLOT_REGISTRY, out, stop));
            }
            Task::Kubernetes(follower) => {
                supervisor.spawn_essential("discovery-kubernetes", follower.run(stop));
            }
        }
    }
    supervisor.spawn_essential("discovery", hub.run(updates, supervisor.token()));
    Ok(reader)
}

/// What is spawned once nothing can fail any more.
enum Task {
    File(FileWatch),
    Rbg(Box<rbg::follow::Follower>),
    Registry(Registry),
    Kubernetes(Box<kubernetes::follow::Follower>),
}

fn at(flag: &'static str, path: &Path) -> impl FnOnce(FileError) -> DiscoveryError {
    let path = path.to_owned();
    move |error| DiscoveryError::File { flag, path, error }
}

/// Probes one engine once and answers every check that was made, for a person to read.
///
/// # Errors
/// When the instance's URL is wrong. An engine that does not answer is a report, not an error.
pub async fn probe_once(
    instance: &StaticInstance,
    options: &ProbeOptions,
) -> Result<ProbeReport, DiscoveryError> {
    let listed = instance.listed()?;
    Ok(Prober::new(options)?.probe(&listed).await)
}
