//! Replicas of both roles, and their states.

use moongate_capacity::StartingReplica;

use crate::simulate::decode::DecodeEngine;

/// Role of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReplicaRole {
    Prefill,
    Decode,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ReplicaState {
    /// Created, or waiting for the engine that takes over its GPUs to drain.
    Starting,
    Ready,
    /// Accepts nothing further. When it is idle, it ends, or its GPUs continue as a replica of the other role.
    Draining {
        flip_to: Option<usize>,
    },
    Ended,
}

/// A replica: its state, and the engine of its role.
#[derive(Debug)]
pub(crate) struct Replica<E> {
    pub(crate) state: ReplicaState,
    pub(crate) since_s: f64,
    pub(crate) ready_s: f64,
    pub(crate) engine: E,
}

/// A prefill engine: computes one prompt after the other.
#[derive(Debug, Default)]
pub(crate) struct PromptEngine {
    pub(crate) is_busy: bool,
    /// Prompt tokens that it has seen, which warm its cache.
    pub(crate) seen_tokens: f64,
    /// Prompt tokens, and those of them that were cached, since the last observation.
    pub(crate) prompt_tokens: f64,
    pub(crate) cached_tokens: f64,
}

/// All replicas of a role that ever existed. Their positions do not change.
#[derive(Debug)]
pub(crate) struct RoleFleet<E> {
    pub(crate) replicas: Vec<Replica<E>>,
    /// Positions of those that have not ended, in the order of their creation.
    pub(crate) live: Vec<usize>,
}

impl<E> Default for RoleFleet<E> {
    fn default() -> Self {
        Self { replicas: Vec::new(), live: Vec::new() }
    }
}

impl<E: Default> RoleFleet<E> {
    /// Creates a replica and returns its position.
    pub(crate) fn create(&mut self, now: f64) -> usize {
        let replica =
            Replica { state: ReplicaState::Starting, since_s: now, ready_s: now, engine: E::default() };
        self.replicas.push(replica);
        let position = self.replicas.len() - 1;
        self.live.push(position);
        position
    }
}

impl<E> RoleFleet<E> {
    pub(crate) fn is(&self, position: usize, state: ReplicaState) -> bool {
        self.replicas[position].state == state
    }

    pub(crate) fn ready(&self) -> impl Iterator<Item = usize> {
        self.live.iter().copied().filter(|&position| self.is(position, ReplicaState::Ready))
    }

    pub(crate) fn starting(&self) -> impl Iterator<Item = usize> {
        self.live.iter().copied().filter(|&position| self.is(position, ReplicaState::Starting))
    }

    /// Ready and starting replicas.
    pub(crate) fn current(&self) -> usize {
        self.ready().count() + self.starting().count()
    }

    pub(crate) fn draining(&self) -> usize {
        self.live.len() - self.current()
    }

    pub(crate) fn end(&mut self, position: usize) {
        self.replicas[position].state = ReplicaState::Ended;
        self.live.retain(|&live| live != position);
    }

    /// The starting replicas as planners see them.
    pub(crate) fn starting_since(&self) -> Vec<StartingReplica> {
        self.starting().map(|position| StartingReplica { since_s: self.replicas[position].since_s }).collect()
    }
}

impl RoleFleet<PromptEngine> {
    /// The replica that a controller removes next: one that is not ready, or else the one with the coldest cache.
    pub(crate) fn next_removed(&self) -> Option<usize> {
        let coldest = |&one: &usize, &other: &usize| {
            let seen = |position: usize| self.replicas[position].engine.seen_tokens;
            seen(one).total_cmp(&seen(other))
        };
        self.starting().last().or_else(|| self.ready().min_by(coldest))
    }
}

impl RoleFleet<DecodeEngine> {
    /// The replica that a controller removes next: one that is not ready, or else the one with the smallest batch.
    pub(crate) fn next_removed(&self) -> Option<usize> {
        let running = |&position: &usize| self.replicas[position].engine.load().running;
        self.starting().last().or_else(|| self.ready().min_by_key(running))
    }
}
