//! Updates the listing on changes of RBG's file and of DNS.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::resolved_names::{HostResolver, ResolvedNames};
use super::{RbgDiscoveryOptions, RbgMember, listing, parse};
use crate::file_watch::TopologyFileWatcher;
use crate::listing::SourceUpdate;

/// Interval of DNS lookups.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(10);

/// Sends a new list after every change of the file or of the names. An invalid file is logged and ignored.
pub(crate) struct RbgFileWatcher {
    pub(crate) file: TopologyFileWatcher,
    pub(crate) options: RbgDiscoveryOptions,
    pub(crate) members: Vec<RbgMember>,
    pub(crate) resolve: HostResolver,
    pub(crate) slot: usize,
    pub(crate) out: mpsc::Sender<SourceUpdate>,
}

impl RbgFileWatcher {
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut names = ResolvedNames::default();
        let mut sent = listing(&self.members, &names, &self.options, self.slot);
        let mut ticks = tokio::time::interval(RESOLVE_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                read = self.file.changed() => match read.and_then(|text| parse(&text, &self.options)) {
                    Ok(members) => {
                        tracing::info!(file = %self.file.path().display(), members = members.len(), "RBG file reloaded");
                        self.members = members;
                    }
                    Err(error) => {
                        self.file.log_rejected(&error);
                        continue;
                    }
                },
                _ = ticks.tick() => {}
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = names.resolve(&self.members, &self.resolve) => {}
            }
            let update = listing(&self.members, &names, &self.options, self.slot);
            if update != sent {
                sent.clone_from(&update);
                if self.out.send(update).await.is_err() {
                    return;
                }
            }
        }
    }
}
