//! Where a new replica goes.

use std::sync::Arc;

use crate::object::Replica;
use crate::segment::{Mounted, Segments};
use crate::settings::{Placement, Settings};

/// Segments that are looked at per replica, to take the emptiest.
const SAMPLES: usize = 6;
/// Draws before every segment is tried in turn.
const DRAWS: usize = 10;

/// What a writer wants.
#[derive(Clone, Debug)]
pub(crate) struct Wish<'a> {
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
pub(crate) struct Search<'a> {
    segments: &'a Segments,
    settings: &'a Settings,
    wish: &'a Wish<'a>,
    now_ms: u64,
    /// Weight of the heaviest segment, if some are still on their ramp.
    heaviest: Option<f64>,
    entropy: u64,
    found: Vec<Replica>,
}

impl<'a> Search<'a> {
    pub(crate) fn new(
        segments: &'a Segments,
        settings: &'a Settings,
        wish: &'a Wish<'a>,
        now_ms: u64,
    ) -> Self {
        let mut search = Self {
            segments,
            settings,
            wish,
            now_ms,
            heaviest: None,
            entropy: wish.entropy,
            found: Vec::new(),
        };
        if segments.youngest_ms.saturating_add(settings.ramp_ms) > now_ms {
            let weights = segments.iter().filter(|(_, it)| it.is_writable()).map(|(_, it)| search.weight(it));
            search.heaviest = Some(weights.fold(0.0, f64::max));
        }
        search
    }

    /// Allocates as many replicas as there are nodes for; none if there is no room at all.
    pub(crate) fn run(mut self) -> Vec<Replica> {
        for name in self.wish.preferred {
            for at in self.segments.named(name) {
                self.try_place(*at);
            }
        }
        if self.settings.placement == Placement::LocalFirst && !self.wish.host.is_empty() {
            for (at, segment) in self.segments.iter() {
                if *segment.info.host_id == *self.wish.host {
                    self.try_place(at);
                }
            }
        }
        if self.settings.placement == Placement::FreeRatioFirst {
            self.by_free_ratio();
        } else {
            self.by_chance();
        }
        self.in_turn();
        self.found
    }

    fn is_done(&self) -> bool {
        self.found.len() >= self.wish.replicas
    }

    fn draw(&mut self) -> u64 {
        self.entropy = mix(self.entropy);
        self.entropy
    }

    /// A number from 0 to 1.
    fn chance(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// From 0 to 1: how far a segment is on its ramp.
    fn weight(&self, segment: &Mounted) -> f64 {
        let age = self.now_ms.saturating_sub(segment.mounted_at_ms);
        if age >= self.settings.ramp_ms { 1.0 } else { (age + 1) as f64 / (self.settings.ramp_ms + 1) as f64 }
    }

    /// Whether a freshly mounted segment is taken this time.
    fn is_admitted(&mut self, segment: &Mounted) -> bool {
        match self.heaviest {
            None => true,
            Some(heaviest) => self.weight(segment) >= self.chance() * heaviest,
        }
    }

    fn random_segment(&mut self) -> Option<(u16, &'a Arc<Mounted>)> {
        let places = self.segments.places();
        let at = *places.get(pick(self.draw(), places.len()))?;
        Some((at, self.segments.get(at)?))
    }

    fn by_chance(&mut self) {
        for _ in 0..DRAWS * self.wish.replicas.min(16) {
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
    fn by_free_ratio(&mut self) {
        let mut sample = Vec::new();
        for _ in 0..SAMPLES * self.wish.replicas.min(16) {
            let Some((at, segment)) = self.random_segment() else { return };
            let on_ramp = self.heaviest.is_some_and(|heaviest| self.weight(segment) < heaviest);
            if !on_ramp || self.is_admitted(segment) && self.chance() * (SAMPLES as f64) < 1.0 {
                sample.push((segment.free_ratio(), at));
            }
        }
        sample.sort_by(|(a, _), (b, _)| b.total_cmp(a));
        for (_, at) in sample {
            self.try_place(at);
        }
    }

    /// Every segment, those on their ramp last.
    fn in_turn(&mut self) {
        let places = self.segments.places();
        if self.is_done() || places.is_empty() {
            return;
        }
        let start = pick(self.draw(), places.len());
        for fresh in [false, true] {
            for step in 0..places.len() {
                let at = places[(start + step) % places.len()];
                let Some(segment) = self.segments.get(at) else { continue };
                let is_fresh = self.heaviest.is_some_and(|heaviest| self.weight(segment) < heaviest);
                if is_fresh == fresh {
                    self.try_place(at);
                }
            }
        }
    }

    fn try_place(&mut self, at: u16) {
        let Some(segment) = self.segments.get(at) else { return };
        let segments = self.segments;
        let is_other_node =
            |it: &Replica| segments.get(it.segment).is_none_or(|other| other.info.name != segment.info.name);
        if self.is_done() || !segment.is_writable() || !self.found.iter().all(is_other_node) {
            return;
        }
        if let Some(space) = segment.allocate(self.wish.size) {
            let (offset, block) = (space.offset, space.block);
            self.found.push(Replica { id: 0, offset, block, segment: at, ready: false });
        }
    }
}
