//! Placement of new replicas on segments.

use std::sync::Arc;

use crate::indices::SegmentIndex;
use crate::object::MemoryReplica;
use crate::segment::{SegmentEntry, SegmentTable};
use crate::settings::{MasterCoreOptions, PlacementStrategy};
use crate::split_mix::mix;

/// Number of segments sampled per replica for free-ratio-first placement.
const SAMPLE_SIZE: usize = 6;
/// Random draws per replica before all segments are tried in order.
const MAX_DRAWS: usize = 10;

/// Requirements for the placement of an object.
#[derive(Clone, Debug)]
pub(crate) struct PlacementRequest<'a> {
    pub(crate) size: u64,
    /// Number of replicas, each on another node.
    pub(crate) replicas: usize,
    /// Names of segments that are tried first.
    pub(crate) preferred: &'a [&'a str],
    /// Host id of the writer; empty if unknown.
    pub(crate) host: &'a str,
    /// Seed of the random choice; requests with the same seed prefer the same nodes.
    pub(crate) entropy: u64,
}

/// Maps a 64-bit number to a number below `count` (multiply and shift).
fn pick(number: u64, count: u64) -> u64 {
    ((u128::from(number) * u128::from(count)) >> 64) as u64
}

/// State of one placement search.
pub(crate) struct PlacementSearch<'a> {
    segments: &'a SegmentTable,
    settings: &'a MasterCoreOptions,
    request: &'a PlacementRequest<'a>,
    now_ms: u64,
    /// Highest weight of a writable segment, if a segment is still in its ramp.
    max_weight: Option<f64>,
    /// Whether filling segments are not used in place of full ones.
    avoids_filling: bool,
    entropy: u64,
    found: Vec<MemoryReplica>,
}

impl<'a> PlacementSearch<'a> {
    pub(crate) fn new(
        segments: &'a SegmentTable,
        settings: &'a MasterCoreOptions,
        request: &'a PlacementRequest<'a>,
        now_ms: u64,
    ) -> Self {
        let mut search = Self {
            segments,
            settings,
            request,
            now_ms,
            max_weight: None,
            avoids_filling: false,
            entropy: request.entropy,
            found: Vec::new(),
        };
        if segments.newest_mount_ms.saturating_add(settings.ramp_ms) > now_ms {
            let weights = segments
                .iter()
                .filter(|(_, segment)| segment.is_writable())
                .map(|(_, segment)| search.weight(segment));
            search.max_weight = Some(weights.fold(0.0, f64::max));
        }
        search
    }

    /// Uses filling segments in place of full ones only with this probability.
    pub(crate) fn limit_fallback(&mut self, share: f64) {
        self.avoids_filling = share < 1.0 && self.random_share() >= share;
    }

    /// Whether there may be space in filling segments that this search does not use.
    pub(crate) fn avoids_filling(&self) -> bool {
        self.avoids_filling
    }

    /// Allocates up to the requested number of replicas, as many as there are nodes with free space.
    pub(crate) fn run(mut self) -> Vec<MemoryReplica> {
        for name in self.request.preferred {
            for index in self.segments.indices_by_name(name) {
                self.try_place(*index);
            }
        }
        if self.settings.placement == PlacementStrategy::LocalFirst && !self.request.host.is_empty() {
            for (index, segment) in self.segments.iter() {
                if *segment.descriptor.host_id == *self.request.host {
                    self.try_place(index);
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

    /// A random number from 0 to 1.
    fn random_share(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Progress of a segment's ramp, 0 to 1.
    fn weight(&self, segment: &SegmentEntry) -> f64 {
        let age = self.now_ms.saturating_sub(segment.mounted_at_ms);
        if age >= self.settings.ramp_ms { 1.0 } else { (age + 1) as f64 / (self.settings.ramp_ms + 1) as f64 }
    }

    /// Random decision whether a segment in its ramp is used.
    fn is_admitted(&mut self, segment: &SegmentEntry) -> bool {
        match self.max_weight {
            None => true,
            Some(max_weight) => self.weight(segment) >= self.random_share() * max_weight,
        }
    }

    /// A position in the list of mounted segments, chosen with the probability of the segment's share of the capacity.
    fn random_position(&mut self) -> usize {
        let byte = pick(self.draw(), self.segments.total_size());
        self.segments.position_of_byte(byte)
    }

    fn random_segment(&mut self) -> Option<(SegmentIndex, &'a Arc<SegmentEntry>)> {
        let position = self.random_position();
        let index = *self.segments.mounted_indices().get(position)?;
        Some((index, self.segments.get(index)?))
    }

    fn is_avoided(&self, segment: &SegmentEntry) -> bool {
        self.avoids_filling && segment.is_filling()
    }

    fn place_randomly(&mut self) {
        for draw in 0..MAX_DRAWS * self.request.replicas.min(16) {
            if self.is_done() {
                return;
            }
            let Some((index, segment)) = self.random_segment() else { return };
            let replaces_full_segment = draw > self.found.len();
            if (!replaces_full_segment || !self.is_avoided(segment)) && self.is_admitted(segment) {
                self.try_place(index);
            }
        }
    }

    /// Takes the emptiest segments of a sample. A segment in its ramp would be the emptiest of every sample, so it is sampled with
    /// probability 1/6: its share of writes is at most an equal one.
    fn place_by_free_ratio(&mut self) {
        let mut sample = Vec::new();
        for draw in 0..SAMPLE_SIZE * self.request.replicas.min(16) {
            let Some((index, segment)) = self.random_segment() else { return };
            let on_ramp = self.max_weight.is_some_and(|max_weight| self.weight(segment) < max_weight);
            if !on_ramp && (draw == 0 || !self.is_avoided(segment))
                || on_ramp && self.is_admitted(segment) && self.random_share() * (SAMPLE_SIZE as f64) < 1.0
            {
                sample.push((segment.free_ratio(), index));
            }
        }
        sample.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        for (_, index) in sample {
            self.try_place(index);
        }
    }

    /// Tries every segment in order, those that are in their ramp or filling last.
    fn place_first_fit(&mut self) {
        if self.is_done() || self.segments.mounted_indices().is_empty() {
            return;
        }
        let start = self.random_position();
        self.place_in_order(start, |search, segment| !search.is_late(segment));
        self.place_in_order(start, |search, segment| search.is_late(segment) && !search.is_avoided(segment));
        // Fewer replicas would be worse than too many on a filling segment.
        if !self.found.is_empty() {
            self.place_in_order(start, Self::is_avoided);
        }
    }

    fn is_late(&self, segment: &SegmentEntry) -> bool {
        segment.is_filling() || self.max_weight.is_some_and(|max_weight| self.weight(segment) < max_weight)
    }

    fn place_in_order(&mut self, start: usize, is_wanted: impl Fn(&Self, &SegmentEntry) -> bool) {
        let indices = self.segments.mounted_indices();
        for step in 0..indices.len() {
            let index = indices[(start + step) % indices.len()];
            if self.segments.get(index).is_some_and(|segment| is_wanted(self, segment)) {
                self.try_place(index);
            }
        }
    }

    fn try_place(&mut self, index: SegmentIndex) {
        let Some(segment) = self.segments.get(index) else { return };
        let segments = self.segments;
        let is_other_node = |replica: &MemoryReplica| {
            segments.get(replica.segment).is_none_or(|other| other.descriptor.name != segment.descriptor.name)
        };
        if self.is_done() || !segment.is_writable() || !self.found.iter().all(is_other_node) {
            return;
        }
        if let Some(range) = segment.allocate(self.request.size) {
            let (offset, block) = (range.offset, range.block);
            self.found.push(MemoryReplica { id: 0, offset, block, segment: index, ready: false });
        }
    }
}
