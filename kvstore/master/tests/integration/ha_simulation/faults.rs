//! Faults of the simulation.

use super::simulation::{HaSimulation, HaSimulationEvent, MASTERS, STORE};

impl HaSimulation {
    /// Injects one fault and schedules the next.
    pub(crate) fn inject_fault(&mut self) {
        if !self.faults.enabled {
            return;
        }
        let delay = self.rng.u64(100_000..3_000_000);
        self.after(delay, HaSimulationEvent::InjectFault);
        let master = self.rng.usize(0..MASTERS);
        match self.rng.u32(0..10) {
            0..2 => self.crash(master),
            2 => (0..MASTERS).for_each(|master| self.crash(master)),
            3..5 => {
                let sleep = self.rng.u64(100_000..8_000_000);
                self.masters[master].asleep_until = self.now + sleep;
            }
            other => {
                let peer = if other < 8 { STORE } else { (master + 1) % MASTERS };
                let pair = (master.min(peer), master.max(peer));
                self.cuts.insert(pair);
                let heal = self.rng.u64(50_000..8_000_000);
                self.after(heal, HaSimulationEvent::Heal(pair.0, pair.1));
            }
        }
    }

    pub(crate) fn crash(&mut self, master: usize) {
        if !self.masters[master].alive {
            return;
        }
        self.crashes += 1;
        let torn = self.rng.u64(0..4);
        self.masters[master].crash(torn);
        if !self.durable || self.rng.u32(0..20) == 0 {
            let incarnation = self.rng.u64(..);
            self.masters[master].lose_disk(incarnation);
        }
        let listed = self.store.members();
        if !self.masters.iter().any(|master| listed.contains(&master.member)) {
            // No living master has the acknowledged values.
            self.acknowledged.clear();
        }
        let delay = self.rng.u64(100_000..6_000_000);
        self.after(delay, HaSimulationEvent::Restart(master));
    }

    pub(crate) fn restart(&mut self, master: usize) {
        self.masters[master].restart();
        let process = self.masters[master].process_number;
        self.after(0, HaSimulationEvent::Step(master, process));
    }
}
