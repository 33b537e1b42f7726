//! What goes wrong in a world.

use crate::simulation::{HaSimulation, HaSimulationEvent, MASTERS, STORE};

impl HaSimulation {
    /// One thing goes wrong; another follows.
    pub(crate) fn inject_fault(&mut self) {
        if !self.faults.enabled {
            return;
        }
        let delay = self.rng.u64(100_000..3_000_000);
        self.after(delay, HaSimulationEvent::InjectFault);
        let at = self.rng.usize(0..MASTERS);
        match self.rng.u32(0..10) {
            0..2 => self.crash(at),
            2 => (0..MASTERS).for_each(|at| self.crash(at)),
            3..5 => {
                let sleep = self.rng.u64(100_000..8_000_000);
                self.masters[at].asleep_until = self.now + sleep;
            }
            other => {
                let whom = if other < 8 { STORE } else { (at + 1) % MASTERS };
                let pair = (at.min(whom), at.max(whom));
                self.cuts.insert(pair);
                let heal = self.rng.u64(50_000..8_000_000);
                self.after(heal, HaSimulationEvent::Heal(pair.0, pair.1));
            }
        }
    }

    pub(crate) fn crash(&mut self, at: usize) {
        if !self.masters[at].alive {
            return;
        }
        self.crashes += 1;
        let torn = self.rng.u64(0..4);
        self.masters[at].crash(torn);
        if !self.durable || self.rng.u32(0..20) == 0 {
            let incarnation = self.rng.u64(..);
            self.masters[at].lose_disk(incarnation);
        }
        let listed = self.store.members();
        if !self.masters.iter().any(|it| listed.contains(&it.member)) {
            // Nobody is left who has it.
            self.acknowledged.clear();
        }
        let delay = self.rng.u64(100_000..6_000_000);
        self.after(delay, HaSimulationEvent::Restart(at));
    }

    pub(crate) fn restart(&mut self, at: usize) {
        self.masters[at].restart();
        let life = self.masters[at].process_number;
        self.after(0, HaSimulationEvent::Step(at, life));
    }
}
