//! Runs the state machine's periodic work.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use moongate_runtime::Supervisor;
use tokio::time::MissedTickBehavior;

use crate::server::MasterServer;

/// Tick interval, as in Mooncake's master.
const TICK_INTERVAL: Duration = Duration::from_millis(10);

/// Number of ticks between two calls of [`release_freed_memory`].
const TICKS_PER_RELEASE: u32 = 200;
/// Size of an allocation for which the allocator looks for freed memory.
const LARGE_ALLOCATION: usize = 1 << 20;

/// Ticks the state machine until the supervisor's shutdown.
pub fn start(server: &Arc<MasterServer>, supervisor: &Supervisor) {
    let (server, stop) = (Arc::clone(server), supervisor.token());
    supervisor.spawn_essential("ticks", async move {
        let mut recorder = server.recorder();
        let mut ticks = tokio::time::interval(TICK_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for tick in (0..TICKS_PER_RELEASE).cycle() {
            tokio::select! {
                _ = ticks.tick() => server.tick(&mut recorder),
                () = stop.cancelled() => return,
            }
            if tick == 0 {
                release_freed_memory();
            }
        }
    });
}

/// Lets the allocator return freed memory to the system. It does so a second after the memory was freed, but only during a larger
/// allocation, so that an idle master would keep the memory of removed objects.
fn release_freed_memory() {
    drop(black_box(Vec::<u8>::with_capacity(LARGE_ALLOCATION)));
}
