//! Where a new replica goes.

use std::sync::Arc;

use crate::object::MemoryReplica;
use crate::segment::{SegmentEntry, SegmentTable};
use crate::settings::{MasterCoreOptions, PlacementStrategy};

/// Segments that are looked at per replica, to take the emptiest.
const SAMPLE_SIZE: usize = 6;
/// Draws before every segment is tried in turn.
const MAX_DRAWS: usize = 10;

/// What a writer wants.
#[derive(Clone, Debug)]
pub(crate) struct PlacementRequest<'a> {
    /// Bytes of the object.
    pub(crate) size: u64,
    /// Replicas, each on another node.
    pub(crate) replicas: usize,
    /// Names of segments to try first.
    pub(crate) preferred: &'a [&'a str],
    /// The writer's host.
    pub(crate) host: &'a str,
    /// Makes the choice; writers with the same number are sent to the same nodes.
    pub(crate) entropy: u64,
}

/// The next of a sequence of numbers that look random.
pub(crate) fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The whole part of `number`, taken as a share of one, of `count`.
fn pick(number: u64, count: usize) -> usize {
    ((u128::from(number) * count as u128) >> 64) as usize
}

/// A search for places.
pub(crate) struct PlacementSearch<'a> {
    segments: &'a SegmentTable,
    settings: &'a MasterCoreOptions,
    request: &'a PlacementRequest<'a>,
    now_ms: u64,
    /// Weight of the heaviest segment, if some are still on their ramp.
    max_weight: Option<f64>,
    entropy: u64,
    found: Vec<MemoryReplica>,
}

impl<'a> PlacementSearch<'a> {
    pub(crate) fn new(
        segments: &'a SegmentTable,
        settings: &'a MasterCoreOptions,
        wish: &'a PlacementRequest<'a>,
        now_ms: u64,
    ) -> Self {
        let mut search = Self {
            segments,
            settings,
            request: wish,
            now_ms,
            max_weight: None,
            entropy: wish.entropy,
            found: Vec::new(),
        };
        if segments.newest_mount_ms.saturating_add(settings.ramp_ms) > now_ms {
            let weights = segments.iter().filter(|(_, it)| it.is_writable()).map(|(_, it)| search.weight(it));
            search.max_weight = Some(weights.fold(0.0, f64::max));
        }
        search
    }

    /// Allocates as many replicas as there are nodes for; none if there is no room at all.
    pub(crate) fn run(mut self) -> Vec<MemoryReplica> {
        for name in self.request.preferred {
            for at in self.segments.indices_by_name(name) {
                self.try_place(*at);
            }
        }
        if self.settings.placement == PlacementStrategy::LocalFirst && !self.request.host.is_empty() {
            for (at, segment) in self.segments.iter() {
                if *segment.descriptor.host_id == *self.request.host {
                    self.try_place(at);
                }
            }
        }
        if self.settings.placement == PlacementStrategy::FreeRatioFirst {
            self.place_by_free_ratio();
        } else {
            self.place_randomly();
        }
        self.place_first_fit();
        self.found
    }

    fn is_done(&self) -> bool {
        self.found.len() >= self.request.replicas
    }

    fn draw(&mut self) -> u64 {
        self.entropy = mix(self.entropy);
        self.entropy
    }

    /// A number from 0 to 1.
    fn admission_probability(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// From 0 to 1: how far a segment is on its ramp.
    fn weight(&self, segment: &SegmentEntry) -> f64 {
        let age = self.now_ms.saturating_sub(segment.mounted_at_ms);
        if age >= self.settings.ramp_ms { 1.0 } else { (age + 1) as f64 / (self.settings.ramp_ms + 1) as f64 }
    }

    /// Whether a freshly mounted segment is taken this time.
    fn is_admitted(&mut self, segment: &SegmentEntry) -> bool {
        match self.max_weight {
            None => true,
            Some(heaviest) => self.weight(segment) >= self.admission_probability() * heaviest,
        }
    }

    fn random_segment(&mut self) -> Option<(u16, &'a Arc<SegmentEntry>)> {
        let places = self.segments.mounted_indices();
        let at = *places.get(pick(self.draw(), places.len()))?;
        Some((at, self.segments.get(at)?))
    }

    fn place_randomly(&mut self) {
        for _ in 0..MAX_DRAWS * self.request.replicas.min(16) {
            if self.is_done() {
                return;
            }
            let Some((at, segment)) = self.random_segment() else { return };
            if self.is_admitted(segment) {
                self.try_place(at);
            }
        }
    }

    /// The emptiest of a sample. A segment on its ramp is the emptiest wherever it is in the sample, so it gets there
    /// only in one of so many cases: its share of the writes is at most an equal one.
    fn place_by_free_ratio(&mut self) {
        let mut sample = Vec::new();
        for _ in 0..SAMPLE_SIZE * self.request.replicas.min(16) {
            let Some((at, segment)) = self.random_segment() else { return };
            let on_ramp = self.max_weight.is_some_and(|heaviest| self.weight(segment) < heaviest);
            if !on_ramp
                || self.is_admitted(segment) && self.admission_probability() * (SAMPLE_SIZE as f64) < 1.0
            {
                sample.push((segment.free_ratio(), at));
            }
        }
        sample.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        for (_, at) in sample {
            self.try_place(at);
        }
    }

    /// Every segment, those on their ramp last.
    fn place_first_fit(&mut self) {
        let places = self.segments.mounted_indices();
        if self.is_done() || places.is_empty() {
            return;
        }
        let start = pick(self.draw(), places.len());
        for fresh in [false, true] {
            for step in 0..places.len() {
                let at = places[(start + step) % places.len()];
                let Some(segment) = self.segments.get(at) else { continue };
                let is_fresh = self.max_weight.is_some_and(|heaviest| self.weight(segment) < heaviest);
                if is_fresh == fresh {
                    self.try_place(at);
                }
            }
        }
    }

    fn try_place(&mut self, at: u16) {
        let Some(segment) = self.segments.get(at) else { return };
        let segments = self.segments;
        let is_other_node = |it: &MemoryReplica| {
            segments.get(it.segment).is_none_or(|other| other.descriptor.name != segment.descriptor.name)
        };
        if self.is_done() || !segment.is_writable() || !self.found.iter().all(is_other_node) {
            return;
        }
        if let Some(space) = segment.allocate(self.request.size) {
            let (offset, block) = (space.offset, space.block);
            self.found.push(MemoryReplica { id: 0, offset, block, segment: at, ready: false });
        }
    }
}
