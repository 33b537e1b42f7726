//! Keeps the listing in step with RBG's file and with DNS.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::names::{Names, Resolve};
use super::{Member, RbgOptions, listing, parse};
use crate::file_watch::FileWatch;
use crate::listing::Update;
use crate::static_file::log_refused;

/// Between two looks at the host names.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Sends a new list after every change of the file or of the names; a bad file is logged and changes nothing.
pub(crate) struct Follower {
    pub(crate) file: FileWatch,
    pub(crate) options: RbgOptions,
    pub(crate) members: Vec<Member>,
    pub(crate) resolve: Resolve,
    pub(crate) slot: usize,
    pub(crate) out: mpsc::Sender<Update>,
}

impl Follower {
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut names = Names::default();
        let mut sent = listing(&self.members, &names, &self.options, self.slot);
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                read = self.file.changed() => match read.and_then(|text| parse(&text, &self.options)) {
                    Ok(members) => {
                        tracing::info!(file = %self.file.path().display(), members = members.len(), "RBG file read again");
                        self.members = members;
                    }
                    Err(error) => {
                        log_refused(self.file.path(), &error);
                        continue;
                    }
                },
                _ = ticks.tick() => {}
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = names.look(&self.members, &self.resolve) => {}
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
