//! What is due without being asked for.

use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::Supervisor;
use tokio::time::MissedTickBehavior;

use crate::server::MasterServer;

/// How often the state machine is given the time, as in Mooncake's own master.
const TICK_INTERVAL: Duration = Duration::from_millis(10);

/// Gives the state machine the time until the supervisor's shutdown.
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
