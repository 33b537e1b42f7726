//! The mounted segments of a node, addressed as peers address them.

mod target;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use mooncake_wire::types::Uuid;
use moongate_memory::catalog::CatalogCounts;
use moongate_memory::ledger::{LedgerWrite, LedgerWriteOutcome};
use moongate_memory::{Ledger, MappedRegion, Scrubber, SegmentMemory};
use moongate_rdma::RegisteredMemory;
use moongate_transfer::SegmentBuffer;
use moongate_transfer::plane::MappingId;
use moongate_transfer::serve::AddressRange;
use moongate_transfer::shared::{SharedMemory, SharedSegment};
use parking_lot::Mutex;

/// Maximum number of damaged ranges tracked per segment. Beyond it, the whole segment is unreadable until it is written again.
const MAX_DAMAGED_RANGES: usize = 4096;

/// Number of ledger entries read under one lock.
const ENTRIES_PER_LOCK: usize = 4096;

/// A segment with its ledger and its damaged ranges.
#[derive(Debug)]
pub(crate) struct MountedSegment {
    /// Id under which the master mounts it.
    pub(crate) id: Uuid,
    /// Address that peers use for its first byte. After a restart the memory may be mapped elsewhere.
    pub(crate) base: u64,
    pub(crate) size: u64,
    region: Arc<MappedRegion>,
    /// Registration with RDMA devices, if it is served over RDMA too.
    registered: Option<RegisteredMemory>,
    ledger: Arc<Ledger>,
    /// The memory for processes of this host to map, if they can.
    shared: Option<(MappingId, Arc<OwnedFd>)>,
    /// Whether only ranges in the ledger are readable, because an earlier process may have ended during a write.
    needs_record: bool,
    /// Whether peers write over RDMA, of which the ledger has no record.
    has_direct_writes: bool,
    /// Whether it outlives the process.
    pub(crate) is_persistent: bool,
    /// Offsets and sizes of ranges that failed their checksum.
    damaged: Mutex<Vec<(u64, u64)>>,
    scrubber: Mutex<Scrubber>,
}

/// The range is damaged or incomplete, or outside the node's segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} are damaged or incompletely written")]
pub(crate) struct DamagedRangeError(pub(crate) AddressRange);

/// Bytes read and damaged ranges found in one scrub step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentScrubResult {
    pub(crate) bytes: u64,
    pub(crate) damaged: u64,
}

impl MountedSegment {
    /// A segment under an id, without RDMA.
    pub(crate) fn new(segment: SegmentMemory, id: Uuid, base: u64, is_persistent: bool) -> Self {
        let has_direct_writes = segment.ledger.has_direct_writes();
        Self {
            id,
            base,
            size: segment.region.len(),
            region: segment.region,
            registered: None,
            ledger: segment.ledger,
            shared: segment.fd.map(|fd| (MappingId::new(fastrand::u64(..)), Arc::new(fd))),
            needs_record: segment.is_restored && !has_direct_writes,
            has_direct_writes,
            is_persistent,
            damaged: Mutex::default(),
            scrubber: Mutex::new(Scrubber::new()),
        }
    }

    /// Merged ranges, as ascending start and end offsets, that an earlier process wrote completely. None if there was no earlier
    /// process, or if the master alone can say which ranges are complete.
    pub(crate) fn intact_ranges(&self) -> Option<Vec<(u64, u64)>> {
        if !self.needs_record {
            return None;
        }
        let (mut intact, mut from): (Vec<(u64, u64)>, u64) = (Vec::new(), 0);
        loop {
            let entries = self.ledger.entries(from, ENTRIES_PER_LOCK);
            let Some(last) = entries.last() else { return Some(intact) };
            from = last.offset + 1;
            for entry in entries {
                match intact.last_mut() {
                    Some((_, end)) if *end == entry.offset => *end += entry.len,
                    _ => intact.push((entry.offset, entry.offset + entry.len)),
                }
            }
        }
    }

    /// Adds a registration with RDMA devices.
    pub(crate) fn with_rdma(self, registered: Option<RegisteredMemory>) -> Self {
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
        let is_complete = !self.needs_record || self.ledger.covers(offset, size);
        is_complete
            && self
                .damaged
                .lock()
                .iter()
                .all(|(start, length)| start + length <= offset || offset + size <= *start)
    }

    /// Whether every write is recorded with a checksum, not only transfers that carry one.
    fn needs_checksums(&self) -> bool {
        self.is_persistent && !self.has_direct_writes
    }

    /// Records a complete write. False if the content of its range is undefined, because another write touched it meanwhile.
    fn record(&self, writing: LedgerWrite<'_>, crc: u32) -> bool {
        if self.has_direct_writes {
            // A record would become wrong when a peer overwrites the range over RDMA.
            return writing.end_unrecorded();
        }
        // A write that the full ledger could not record is complete too; only a later process will not serve it.
        writing.finish(crc) != LedgerWriteOutcome::Overlapped
    }

    fn clear_damage(&self, offset: u64, size: u64) {
        // Partially covered ranges are removed too: the rest of such a range belonged to an object that no longer exists.
        self.damaged.lock().retain(|(start, length)| start + length <= offset || offset + size <= *start);
    }

    fn mark_damaged(&self, offset: u64, size: u64) {
        let mut damaged = self.damaged.lock();
        if damaged.len() < MAX_DAMAGED_RANGES {
            damaged.push((offset, size));
        } else {
            *damaged = vec![(0, self.size)];
        }
    }

    /// Re-reads up to `budget` bytes, and marks ranges that fail their checksum as damaged.
    pub(crate) fn scrub(&self, budget: u64) -> SegmentScrubResult {
        let scrubbed = self.scrubber.lock().step(&self.ledger, &self.region, budget);
        for entry in &scrubbed.damaged {
            self.mark_damaged(entry.offset, entry.len);
            let span = AddressRange { start: self.base + entry.offset, size: entry.len };
            tracing::error!(segment = %self.id, "{span} failed their checksum; reads of them are refused");
        }
        SegmentScrubResult { bytes: scrubbed.bytes, damaged: scrubbed.damaged.len() as u64 }
    }
}

/// Which memory of the node an address range belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RangeLocation {
    Segment(Uuid),
    /// The staging buffer for objects on disk.
    Staging,
}

/// All mounted segments of a node, plus the staging buffer.
#[derive(Debug, Default)]
pub(crate) struct SegmentPool {
    segments: ArcSwap<Vec<Arc<MountedSegment>>>,
    /// The staging buffer for objects on disk, which peers only read.
    staging: OnceLock<(Arc<MappedRegion>, Option<RegisteredMemory>)>,
}

impl SegmentPool {
    pub(crate) fn segments(&self) -> Arc<Vec<Arc<MountedSegment>>> {
        self.segments.load_full()
    }

    /// Adds a segment. False if its addresses overlap those of another.
    pub(crate) fn add(&self, segment: Arc<MountedSegment>) -> bool {
        let mut added = false;
        self.segments.rcu(|all| {
            let is_apart = |other: &Arc<MountedSegment>| {
                other.base + other.size <= segment.base || segment.base + segment.size <= other.base
            };
            added = all.iter().all(is_apart)
                && self.staging.get().is_none_or(|(buffer, _)| is_disjoint(&segment, buffer));
            let new = added.then(|| Arc::clone(&segment));
            all.iter().cloned().chain(new).collect::<Vec<_>>()
        });
        added
    }

    /// Sets the staging buffer, once. False if its addresses overlap those of a segment.
    pub(crate) fn add_buffer(
        &self,
        region: &Arc<MappedRegion>,
        registered: Option<RegisteredMemory>,
    ) -> bool {
        self.segments.load().iter().all(|segment| is_disjoint(segment, region))
            && self.staging.set((Arc::clone(region), registered)).is_ok()
    }

    /// Removes a segment. Transfers in progress complete.
    pub(crate) fn remove(&self, id: Uuid) {
        self.segments.rcu(|all| all.iter().filter(|segment| segment.id != id).cloned().collect::<Vec<_>>());
    }

    /// Sums of the catalog counters of all segments.
    pub(crate) fn catalog_counts(&self) -> CatalogCounts {
        let each = self.segments.load();
        let counts = each.iter().filter_map(|segment| segment.ledger.catalog_counts());
        counts.fold(CatalogCounts::default(), |sum, it| CatalogCounts {
            objects: sum.objects + it.objects,
            damaged: sum.damaged + it.damaged,
            stale: sum.stale + it.stale,
            unrecorded: sum.unrecorded + it.unrecorded,
        })
    }

    /// Bytes of complete objects, if all segments record them. Evicted ones count until their space is written again.
    pub(crate) fn object_bytes(&self) -> Option<u64> {
        let segments = self.segments.load();
        let bytes =
            segments.iter().map(|segment| segment.needs_checksums().then(|| segment.ledger.counts().bytes));
        bytes.sum()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.segments.load().iter().map(|segment| segment.size).sum()
    }

    /// Buffers for the node's descriptor: the segments and the staging buffer.
    pub(crate) fn buffers(&self, name: &str) -> Vec<SegmentBuffer> {
        let described = |addr: u64, length: u64, registered: Option<&RegisteredMemory>| {
            let mut buffer =
                SegmentBuffer { name: name.to_owned(), addr, length, ..SegmentBuffer::default() };
            if let Some(registered) = registered {
                registered.describe(&mut buffer);
            }
            buffer
        };
        let mounted = self.segments.load();
        let segments = mounted.iter().map(|it| described(it.base, it.size, it.registered.as_ref()));
        let staged = self.staging.get();
        let staged = staged.map(|(it, registered)| described(it.base(), it.len(), registered.as_ref()));
        segments.chain(staged).collect()
    }

    /// Writes bytes like a peer's transfer. `copy` passes each part with its offset, in any order, and fails unless it has
    /// passed all of them.
    pub(crate) fn fill<E: From<DamagedRangeError>>(
        &self,
        span: AddressRange,
        copy: impl FnOnce(&mut dyn FnMut(u64, &[u8])) -> Result<(), E>,
    ) -> Result<(), E> {
        let (segment, offset) = self.find(span).ok_or(DamagedRangeError(span))?;
        let writing = segment.ledger.begin(offset, span.size).map_err(|_| DamagedRangeError(span))?;
        segment.clear_damage(offset, span.size);
        let mut all_written = true;
        copy(&mut |part_offset, part| {
            let is_inside = part_offset.checked_add(part.len() as u64).is_some_and(|end| end <= span.size);
            all_written &= is_inside && segment.region.write_at(offset + part_offset, part).is_ok();
        })?;
        if !all_written {
            return Err(DamagedRangeError(span).into());
        }
        if segment.needs_checksums() {
            let crc = segment.region.crc32c(offset, span.size).map_err(|_| DamagedRangeError(span))?;
            if !segment.record(writing, crc) {
                return Err(DamagedRangeError(span).into());
            }
        }
        Ok(())
    }

    /// Resolves a range in the staging buffer to region and offset.
    fn buffered(&self, span: AddressRange) -> Option<(&MappedRegion, u64)> {
        let (region, _) = self.staging.get()?;
        let offset = span.start.checked_sub(region.base())?;
        region.check(offset, span.size).ok()?;
        Some((region, offset))
    }

    /// Copies a readable range into a buffer.
    pub(crate) fn read(&self, span: AddressRange, into: &mut [u8]) -> Result<(), DamagedRangeError> {
        let (segment, offset) = self.find(span).ok_or(DamagedRangeError(span))?;
        if !segment.is_readable(offset, span.size) {
            return Err(DamagedRangeError(span));
        }
        segment.region.read_at(offset, into).map_err(|_| DamagedRangeError(span))
    }

    /// Checks that a range is readable, and matches its checksum if the ledger has one for exactly this range.
    pub(crate) fn verify(&self, span: AddressRange) -> Result<(), DamagedRangeError> {
        let (segment, offset) = self.find(span).ok_or(DamagedRangeError(span))?;
        let entry = segment.ledger.find(offset, span.size);
        let is_same = |crc| segment.region.crc32c(offset, span.size).is_ok_and(|now| now == crc);
        let is_intact =
            segment.is_readable(offset, span.size) && entry.is_none_or(|entry| is_same(entry.crc));
        if is_intact { Ok(()) } else { Err(DamagedRangeError(span)) }
    }

    /// Which segment, or the staging buffer, contains a range.
    pub(crate) fn locate(&self, span: AddressRange) -> Option<RangeLocation> {
        if self.buffered(span).is_some() {
            return Some(RangeLocation::Staging);
        }
        self.find(span).map(|(segment, _)| RangeLocation::Segment(segment.id))
    }

    fn find(&self, span: AddressRange) -> Option<(Arc<MountedSegment>, u64)> {
        let all = self.segments.load();
        all.iter().find_map(|segment| segment.offset(span).map(|offset| (Arc::clone(segment), offset)))
    }

    fn find_or_not_found(&self, span: AddressRange) -> io::Result<(Arc<MountedSegment>, u64)> {
        // The segment may have been unmounted since the transfer started.
        self.find(span).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

impl SharedMemory for SegmentPool {
    fn shared_segment(&self, address: u64) -> Option<SharedSegment> {
        let (segment, _) = self.find(AddressRange { start: address, size: 1 })?;
        let (id, fd) = segment.shared.as_ref()?;
        Some(SharedSegment { id: *id, base: segment.base, size: segment.size, fd: Arc::clone(fd) })
    }
}

fn is_disjoint(segment: &MountedSegment, region: &MappedRegion) -> bool {
    region.base() + region.len() <= segment.base || segment.base + segment.size <= region.base()
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

    /// A pool with one persistent segment, which has an earlier process's writes if it is restored.
    fn pool(direct_writes: bool, is_restored: bool) -> SegmentPool {
        let options = SegmentOptions {
            backing: SegmentBacking::Process,
            label: "pool".to_owned(),
            size: SIZE,
            pages: PageMode::Normal,
            placement: NumaPlacement::default(),
            direct_writes,
        };
        let identity = |base| SegmentIdentity {
            segment: [1, 2],
            client: [3, 4],
            name: "node".to_owned(),
            base,
            size: SIZE,
        };
        let segment = SegmentMemory { is_restored, ..SegmentMemory::open(&options, identity).unwrap() };
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
        for direct_writes in [false, true] {
            overlapped_transfer_is_reported(&pool(direct_writes, false), !direct_writes);
        }
    }

    fn overlapped_transfer_is_reported(pool: &SegmentPool, is_recorded: bool) {
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
        // Without a record, only transfers with a checksum notice another write.
        assert_eq!(filled.is_err(), is_recorded);
        assert!(pool.receive(&socket, span(0, 100), true, &mut |_| Ok(true)).unwrap());
        assert_eq!(pool.verify(span(0, 100)), Ok(()));
        assert_eq!(pool.checksum(span(0, 100)).is_some(), is_recorded);
    }

    #[test]
    fn restored_ranges_need_a_record_unless_peers_write_directly() {
        for direct_writes in [false, true] {
            let pool = pool(direct_writes, true);
            assert_eq!(pool.is_readable(span(0, 100)), direct_writes);
            let intact = pool.segments()[0].intact_ranges();
            assert_eq!(intact, (!direct_writes).then(Vec::new));

            let (mut peer, socket) = sockets();
            for needs_checksum in [false, true] {
                peer.write_all(&[7; 100]).unwrap();
                assert!(pool.receive(&socket, span(0, 100), needs_checksum, &mut |_| Ok(true)).unwrap());
            }
            let filled = pool.fill(span(100, 50), |put| {
                put(0, &[8; 50]);
                Ok::<_, DamagedRangeError>(())
            });
            assert_eq!(filled, Ok(()));
            // A record would become wrong when a peer overwrites the range.
            let counts = pool.segments()[0].ledger().counts();
            assert_eq!(counts.entries, if direct_writes { 0 } else { 2 });
            assert!(pool.is_readable(span(0, 150)));
            assert_eq!(pool.verify(span(0, 100)), Ok(()));
        }
    }
}
