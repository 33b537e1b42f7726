//! Runs the state machine's periodic work.

use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::Supervisor;
use tokio::time::MissedTickBehavior;

use crate::server::MasterServer;

/// Tick interval, as in Mooncake's master.
const TICK_INTERVAL: Duration = Duration::from_millis(10);

/// Ticks the state machine until the supervisor's shutdown.
pub fn start(server: &Arc<MasterServer>, supervisor: &Supervisor) {
    let (server, stop) = (Arc::clone(server), supervisor.token());
    supervisor.spawn_essential("ticks", async move {
        let mut recorder = server.recorder();
        let mut ticks = tokio::time::interval(TICK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = ticks.tick() => server.tick(&mut recorder),
                () = stop.cancelled() => return,
            }
        }
    });
}
