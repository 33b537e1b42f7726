//! The memory that a node lends, as its peers see it.

mod target;

use std::io;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use mooncake_wire::types::Uuid;
use moongate_memory::catalog::CatalogCounts;
use moongate_memory::ledger::LedgerWriteOutcome;
use moongate_memory::{Ledger, MappedRegion, Scrubber, SegmentMemory};
use moongate_rdma::RegisteredMemory as Registered;
use moongate_transfer::SegmentBuffer;
use moongate_transfer::serve::AddressRange;
use parking_lot::Mutex;

/// Damaged ranges that are remembered. When there are more, whole segments count as damaged until they are written.
const MAX_DAMAGED_RANGES: usize = 4096;

/// Entries of a ledger that are looked at under one lock.
const ENTRIES_PER_LOCK: usize = 4096;

/// A segment that is lent.
#[derive(Debug)]
pub(crate) struct MountedSegment {
    /// As the master knows it.
    pub(crate) id: Uuid,
    /// The address by which peers name its first byte. The memory may lie elsewhere since a restart.
    pub(crate) base: u64,
    /// Bytes.
    pub(crate) size: u64,
    region: Arc<MappedRegion>,
    /// If it is served over RDMA too.
    registered: Option<Registered>,
    ledger: Arc<Ledger>,
    /// Whether it holds what an earlier process has written: then only what was written to its end is read.
    is_restored: bool,
    /// Whether it outlives the process. Then checksums of all that is written are made, and not only of what comes with one.
    pub(crate) is_persistent: bool,
    /// Offsets and sizes of what is no longer what was written.
    damaged: Mutex<Vec<(u64, u64)>>,
    scrubber: Mutex<Scrubber>,
}

/// Bytes are not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} are damaged, or were never written to their end")]
pub(crate) struct DamagedRangeError(pub(crate) AddressRange);

/// What a look at the memory has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentScrubResult {
    pub(crate) bytes: u64,
    pub(crate) damaged: u64,
}

impl MountedSegment {
    /// Lends a segment under an id. Memory that outlives the process has checksums of all that is written.
    pub(crate) fn new(segment: SegmentMemory, id: Uuid, base: u64, is_persistent: bool) -> Self {
        Self {
            id,
            base,
            size: segment.region.len(),
            region: segment.region,
            registered: None,
            ledger: segment.ledger,
            is_restored: segment.is_restored,
            is_persistent,
            damaged: Mutex::default(),
            scrubber: Mutex::new(Scrubber::new()),
        }
    }

    /// Offsets of what an earlier process has written to its end, from the first to after the last byte, in their order
    /// and as far as they reach. None if there was no such process.
    pub(crate) fn intact_ranges(&self) -> Option<Vec<(u64, u64)>> {
        if !self.is_restored {
            return None;
        }
        let (mut whole, mut from): (Vec<(u64, u64)>, u64) = (Vec::new(), 0);
        loop {
            let entries = self.ledger.entries(from, ENTRIES_PER_LOCK);
            let Some(last) = entries.last() else { return Some(whole) };
            from = last.offset + 1;
            for entry in entries {
                match whole.last_mut() {
                    Some((_, end)) if *end == entry.offset => *end += entry.len,
                    _ => whole.push((entry.offset, entry.offset + entry.len)),
                }
            }
        }
    }

    /// The same, served over RDMA too.
    pub(crate) fn with_rdma(self, registered: Option<Registered>) -> Self {
        Self { registered, ..self }
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn offset(&self, span: AddressRange) -> Option<u64> {
        let offset = span.start.checked_sub(self.base)?;
        let end = offset.checked_add(span.size)?;
        (end <= self.size).then_some(offset)
    }

    fn is_readable(&self, offset: u64, size: u64) -> bool {
        let whole = !self.is_restored || self.ledger.covers(offset, size);
        whole
            && self.damaged.lock().iter().all(|(start, bad)| start + bad <= offset || offset + size <= *start)
    }

    fn clear_damage(&self, offset: u64, size: u64) {
        // What is half covered is forgotten too: the rest of it belongs to an object that is gone.
        self.damaged.lock().retain(|(start, bad)| start + bad <= offset || offset + size <= *start);
    }

    fn mark_damaged(&self, offset: u64, size: u64) {
        let mut damaged = self.damaged.lock();
        if damaged.len() < MAX_DAMAGED_RANGES {
            damaged.push((offset, size));
        } else {
            *damaged = vec![(0, self.size)];
        }
    }

    /// Reads some of what was written again, and finds what has changed since.
    pub(crate) fn scrub(&self, budget: u64) -> SegmentScrubResult {
        let scrubbed = self.scrubber.lock().step(&self.ledger, &self.region, budget);
        for entry in &scrubbed.damaged {
            self.mark_damaged(entry.offset, entry.len);
            let span = AddressRange { start: self.base + entry.offset, size: entry.len };
            tracing::error!(segment = %self.id, "{span} have changed since they were written; they are not read any more");
        }
        SegmentScrubResult { bytes: scrubbed.bytes, damaged: scrubbed.damaged.len() as u64 }
    }
}

/// A part of a node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeLocation {
    /// This segment.
    Segment(Uuid),
    /// The buffer for objects from the disk.
    Staging,
}

/// All segments that a node lends.
#[derive(Debug, Default)]
pub(crate) struct SegmentPool {
    segments: ArcSwap<Vec<Arc<MountedSegment>>>,
    /// What peers read from without having written to it: objects from the disk.
    staging: OnceLock<(Arc<MappedRegion>, Option<Registered>)>,
}

impl SegmentPool {
    pub(crate) fn segments(&self) -> Arc<Vec<Arc<MountedSegment>>> {
        self.segments.load_full()
    }

    /// Adds a segment, unless its addresses are those of another.
    pub(crate) fn add(&self, lent: Arc<MountedSegment>) -> bool {
        let mut added = false;
        self.segments.rcu(|all| {
            let apart = |other: &Arc<MountedSegment>| {
                other.base + other.size <= lent.base || lent.base + lent.size <= other.base
            };
            added = all.iter().all(apart)
                && self.staging.get().is_none_or(|(buffer, _)| is_disjoint(&lent, buffer));
            let new = added.then(|| Arc::clone(&lent));
            all.iter().cloned().chain(new).collect::<Vec<_>>()
        });
        added
    }

    /// Adds the buffer for objects from the disk, once. False if its addresses are those of a segment.
    pub(crate) fn add_buffer(&self, region: &Arc<MappedRegion>, registered: Option<Registered>) -> bool {
        self.segments.load().iter().all(|lent| is_disjoint(lent, region))
            && self.staging.set((Arc::clone(region), registered)).is_ok()
    }

    /// Takes a segment out. Transfers in progress end well.
    pub(crate) fn remove(&self, id: Uuid) {
        self.segments.rcu(|all| all.iter().filter(|lent| lent.id != id).cloned().collect::<Vec<_>>());
    }

    /// Numbers about the catalogs of all segments.
    pub(crate) fn catalog_counts(&self) -> CatalogCounts {
        let each = self.segments.load();
        let counts = each.iter().filter_map(|lent| lent.ledger.catalog_counts());
        counts.fold(CatalogCounts::default(), |sum, it| CatalogCounts {
            objects: sum.objects + it.objects,
            damaged: sum.damaged + it.damaged,
            stale: sum.stale + it.stale,
            unrecorded: sum.unrecorded + it.unrecorded,
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.segments.load().iter().map(|lent| lent.size).sum()
    }

    /// What goes into the node's descriptor.
    pub(crate) fn buffers(&self, name: &str) -> Vec<SegmentBuffer> {
        let described = |addr: u64, length: u64, registered: Option<&Registered>| {
            let mut buffer =
                SegmentBuffer { name: name.to_owned(), addr, length, ..SegmentBuffer::default() };
            if let Some(registered) = registered {
                registered.describe(&mut buffer);
            }
            buffer
        };
        let lent = self.segments.load();
        let segments = lent.iter().map(|lent| described(lent.base, lent.size, lent.registered.as_ref()));
        let staged = self.staging.get();
        let staged = staged.map(|(it, registered)| described(it.base(), it.len(), registered.as_ref()));
        segments.chain(staged).collect()
    }

    /// Copies bytes in, as if a peer had written them: `bring` gives each part with its offset, in any order, and fails
    /// unless it has given all of them.
    pub(crate) fn fill<E: From<DamagedRangeError>>(
        &self,
        span: AddressRange,
        bring: impl FnOnce(&mut dyn FnMut(u64, &[u8])) -> Result<(), E>,
    ) -> Result<(), E> {
        let (lent, offset) = self.find(span).ok_or(DamagedRangeError(span))?;
        let writing = lent.ledger.begin(offset, span.size).map_err(|_| DamagedRangeError(span))?;
        lent.clear_damage(offset, span.size);
        let mut fits = true;
        bring(&mut |at, part| {
            let is_inside = at.checked_add(part.len() as u64).is_some_and(|end| end <= span.size);
            fits &= is_inside && lent.region.write_at(offset + at, part).is_ok();
        })?;
        if !fits {
            return Err(DamagedRangeError(span).into());
        }
        if lent.is_persistent {
            let crc = lent.region.crc32c(offset, span.size).map_err(|_| DamagedRangeError(span))?;
            if writing.finish(crc) == LedgerWriteOutcome::Overlapped {
                return Err(DamagedRangeError(span).into());
            }
        }
        Ok(())
    }

    /// A part of the buffer.
    fn buffered(&self, span: AddressRange) -> Option<(&MappedRegion, u64)> {
        let (region, _) = self.staging.get()?;
        let offset = span.start.checked_sub(region.base())?;
        region.check(offset, span.size).ok()?;
        Some((region, offset))
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, span: AddressRange, into: &mut [u8]) -> Result<(), DamagedRangeError> {
        let (lent, offset) = self.find(span).ok_or(DamagedRangeError(span))?;
        if !lent.is_readable(offset, span.size) {
            return Err(DamagedRangeError(span));
        }
        lent.region.read_at(offset, into).map_err(|_| DamagedRangeError(span))
    }

    /// Whether a range is what was written, as far as this is known.
    pub(crate) fn verify(&self, span: AddressRange) -> Result<(), DamagedRangeError> {
        let (lent, offset) = self.find(span).ok_or(DamagedRangeError(span))?;
        let known = lent.ledger.find(offset, span.size);
        let is_same = |crc| lent.region.crc32c(offset, span.size).is_ok_and(|now| now == crc);
        let fine = lent.is_readable(offset, span.size) && known.is_none_or(|entry| is_same(entry.crc));
        if fine { Ok(()) } else { Err(DamagedRangeError(span)) }
    }

    /// In which part of the memory a range lies.
    pub(crate) fn locate(&self, span: AddressRange) -> Option<RangeLocation> {
        if self.buffered(span).is_some() {
            return Some(RangeLocation::Staging);
        }
        self.find(span).map(|(lent, _)| RangeLocation::Segment(lent.id))
    }

    fn find(&self, span: AddressRange) -> Option<(Arc<MountedSegment>, u64)> {
        let all = self.segments.load();
        all.iter().find_map(|lent| lent.offset(span).map(|offset| (Arc::clone(lent), offset)))
    }

    fn find_or_not_found(&self, span: AddressRange) -> io::Result<(Arc<MountedSegment>, u64)> {
        // Unmounted in this moment.
        self.find(span).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn is_disjoint(lent: &MountedSegment, region: &MappedRegion) -> bool {
    region.base() + region.len() <= lent.base || lent.base + lent.size <= region.base()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

    use moongate_memory::ledger::SegmentIdentity;
    use moongate_memory::numa::NumaPlacement;
    use moongate_memory::{PageMode, SegmentBacking, SegmentOptions};
    use moongate_transfer::serve::TransferTarget as _;

    use super::*;

    const SIZE: u64 = 1 << 20;
    const BASE: u64 = 1 << 40;

    /// A pool with memory that outlives the process.
    fn pool() -> SegmentPool {
        let wanted = SegmentOptions {
            backing: SegmentBacking::Process,
            label: "pool".to_owned(),
            size: SIZE,
            pages: PageMode::Normal,
            placement: NumaPlacement::default(),
        };
        let identity = |base| SegmentIdentity {
            segment: [1, 2],
            client: [3, 4],
            name: "node".to_owned(),
            base,
            size: SIZE,
        };
        let segment = SegmentMemory::open(&wanted, identity).unwrap();
        let pool = SegmentPool::default();
        assert!(pool.add(Arc::new(MountedSegment::new(segment, Uuid { first: 1, second: 2 }, BASE, true))));
        pool
    }

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (peer, listener.accept().unwrap().0)
    }

    fn span(from: u64, size: u64) -> AddressRange {
        AddressRange { start: BASE + from, size }
    }

    #[test]
    fn overlapped_transfer_is_reported_and_the_next_succeeds() {
        let pool = pool();
        let (mut peer, socket) = sockets();
        peer.write_all(&[7; 300]).unwrap();
        let mut other = |_| {
            let (mut peer, socket) = sockets();
            peer.write_all(&[8; 100]).unwrap();
            assert!(!pool.receive(&socket, span(50, 100), true, &mut |_| Ok(true)).unwrap());
            Ok(true)
        };
        assert!(!pool.receive(&socket, span(0, 100), true, &mut other).unwrap());
        assert_eq!((pool.checksum(span(0, 100)), pool.checksum(span(50, 100))), (None, None));
        let filled = pool.fill(span(0, 100), |put| {
            put(0, &[9; 100]);
            assert!(!pool.receive(&socket, span(99, 100), true, &mut |_| Ok(true)).unwrap());
            Ok::<_, DamagedRangeError>(())
        });
        assert_eq!(filled, Err(DamagedRangeError(span(0, 100))));
        assert!(pool.receive(&socket, span(0, 100), true, &mut |_| Ok(true)).unwrap());
        assert_eq!(pool.verify(span(0, 100)), Ok(()));
        assert!(pool.checksum(span(0, 100)).is_some());
    }
}
