//! Starts the sources, the prober and the hub that publishes the snapshot.

use std::path::Path;

use futures_util::future::BoxFuture;
use moongate_runtime::Supervisor;
use tokio::sync::mpsc;

use crate::error::{DiscoveryError, TopologyFileError};
use crate::file_watch::TopologyFileWatcher;
use crate::hub::DiscoveryHub;
use crate::kubernetes;
use crate::listing::SourceUpdate;
use crate::options::DiscoveryOptions;
use crate::probe::EngineProber;
use crate::probe::options::ProbeOptions;
use crate::probe::report::ProbeReport;
use crate::publish::{TopologyReader, channel};
use crate::rbg;
use crate::static_file::{self, StaticInstance};

/// Capacity of the hub's queue of lists; sources wait while it is full.
const MAX_UPDATES: usize = 16;

/// Precedence of the sources: the lower slot wins if two sources list the same id.
const SLOT_FLAGS: usize = 0;
const SLOT_FILE: usize = 1;
const SLOT_RBG: usize = 2;
const SLOT_REGISTRY: usize = 3;
const SLOT_KUBERNETES: usize = 4;

/// Starts discovery under `supervisor`. The first snapshot contains the instances of flags and files, not yet probed;
/// pods follow as soon as the API server has responded.
///
/// # Errors
/// When the options name no source, or one of them is invalid at start: an invalid instance, a missing or malformed
/// file, no client configuration. Errors after the start never stop discovery.
pub async fn start(
    options: DiscoveryOptions,
    supervisor: &Supervisor,
) -> Result<TopologyReader, DiscoveryError> {
    let prober = EngineProber::new(&options.probe)?;
    let (publisher, reader) = channel();
    let (out, updates) = mpsc::channel(MAX_UPDATES);
    let mut hub = DiscoveryHub::new(prober, options.probe, publisher);
    if !options.instances.is_empty() {
        hub.apply_update(SourceUpdate::of_engines(SLOT_FLAGS, static_file::listing(&options.instances)?));
    }
    // Spawned only after every source has started without error.
    let mut tasks: Vec<(&'static str, BoxFuture<'static, ()>)> = Vec::new();
    let stop = || supervisor.token();
    if let Some(path) = &options.file {
        let mut file = TopologyFileWatcher::new(path);
        let read = file.read().await;
        hub.apply_update(
            read.and_then(|text| static_file::parse(&text, SLOT_FILE))
                .map_err(file_error("--instances-file", path))?,
        );
        let watch = static_file::watch(file, SLOT_FILE, out.clone(), stop());
        tasks.push(("discovery-file", Box::pin(watch)));
    }
    if let Some(rbg) = options.rbg {
        let mut file = TopologyFileWatcher::new(&rbg.path);
        let members = file
            .read()
            .await
            .and_then(|text| rbg::parse(&text, &rbg))
            .map_err(file_error("--rbg-config", &rbg.path))?;
        hub.apply_update(rbg::listing(&members, &rbg::ResolvedNames::default(), &rbg, SLOT_RBG));
        let watcher = rbg::watch::RbgFileWatcher {
            file,
            options: rbg,
            members,
            resolve: rbg::system_resolver(),
            slot: SLOT_RBG,
            out: out.clone(),
        };
        tasks.push(("discovery-rbg", Box::pin(watcher.run(stop()))));
    }
    if let Some(registry) = options.registry {
        let run = registry.run(SLOT_REGISTRY, out.clone(), stop());
        tasks.push(("discovery-registry", Box::pin(run)));
    }
    if let Some(options) = options.kubernetes {
        let (client, namespace) = kubernetes::client(&options).await?;
        for (index, selector) in options.selectors().into_iter().enumerate() {
            let watcher = kubernetes::watch::PodWatcher {
                client: client.clone(),
                namespace: namespace.clone(),
                selector,
                options: options.clone(),
                slot: SLOT_KUBERNETES + index,
                out: out.clone(),
            };
            tasks.push(("discovery-kubernetes", Box::pin(watcher.run(stop()))));
        }
    }
    if options.instances.is_empty() && tasks.is_empty() {
        return Err(DiscoveryError::NoSource);
    }
    for (name, task) in tasks {
        supervisor.spawn_essential(name, task);
    }
    supervisor.spawn_essential("discovery", hub.run(updates, stop()));
    Ok(reader)
}

fn file_error(flag: &'static str, path: &Path) -> impl FnOnce(TopologyFileError) -> DiscoveryError {
    let path = path.to_owned();
    move |error| DiscoveryError::File { flag, path, error }
}

/// Probes one engine once and returns the report of all checks.
///
/// # Errors
/// When the instance is invalid. An engine that does not respond results in a report, not in an error.
pub async fn probe_once(
    instance: &StaticInstance,
    options: &ProbeOptions,
) -> Result<ProbeReport, DiscoveryError> {
    let listed = instance.listed()?;
    Ok(EngineProber::new(options)?.probe(&listed).await)
}
