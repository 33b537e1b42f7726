//! The memory that a node lends, as its peers see it.

use std::io;
use std::sync::{Arc, OnceLock};

use arc_swap::ArcSwap;
use mooncake_wire::types::Uuid;
use moongate_memory::catalog::CatalogCounts;
use moongate_memory::ledger::Finished;
use moongate_memory::{Ledger, Region, Scrubber, Segment};
use moongate_rdma::Lent as Registered;
use moongate_transfer::Buffer;
use moongate_transfer::serve::{DataSocket, Span, Target};
use parking_lot::Mutex;

use crate::region_socket::{receive, receive_summed, send, send_summed};

/// Damaged ranges that are remembered. When there are more, whole segments count as damaged until they are written.
const MOST_DAMAGED: usize = 4096;

/// Entries of a ledger that are looked at under one lock.
const ENTRIES: usize = 4096;

/// A segment that is lent.
#[derive(Debug)]
pub(crate) struct Lent {
    /// As the master knows it.
    pub(crate) id: Uuid,
    /// The address by which peers name its first byte. The memory may lie elsewhere since a restart.
    pub(crate) base: u64,
    /// Bytes.
    pub(crate) size: u64,
    region: Arc<Region>,
    /// If it is served over RDMA too.
    registered: Option<Registered>,
    ledger: Arc<Ledger>,
    /// Whether it holds what an earlier process has written: then only what was written to its end is read.
    kept: bool,
    /// Whether it outlives the process. Then checksums of all that is written are made, and not only of what comes with one.
    pub(crate) lasts: bool,
    /// Offsets and sizes of what is no longer what was written.
    damaged: Mutex<Vec<(u64, u64)>>,
    scrubber: Mutex<Scrubber>,
}

/// Bytes are not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0} are damaged, or were never written to their end")]
pub(crate) struct Damaged(pub(crate) Span);

/// What a look at the memory has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) bytes: u64,
    pub(crate) damaged: u64,
}

impl Lent {
    /// Lends a segment under an id. Memory that outlives the process has checksums of all that is written.
    pub(crate) fn new(segment: Segment, id: Uuid, base: u64, lasts: bool) -> Self {
        Self {
            id,
            base,
            size: segment.region.len(),
            region: segment.region,
            registered: None,
            ledger: segment.ledger,
            kept: segment.kept,
            lasts,
            damaged: Mutex::default(),
            scrubber: Mutex::new(Scrubber::new()),
        }
    }

    /// Offsets of what an earlier process has written to its end, from the first to after the last byte, in their order
    /// and as far as they reach. None if there was no such process.
    pub(crate) fn whole(&self) -> Option<Vec<(u64, u64)>> {
        if !self.kept {
            return None;
        }
        let (mut whole, mut from): (Vec<(u64, u64)>, u64) = (Vec::new(), 0);
        loop {
            let entries = self.ledger.entries(from, ENTRIES);
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
    pub(crate) fn over(self, registered: Option<Registered>) -> Self {
        Self { registered, ..self }
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    fn offset(&self, span: Span) -> Option<u64> {
        let offset = span.start.checked_sub(self.base)?;
        let end = offset.checked_add(span.size)?;
        (end <= self.size).then_some(offset)
    }

    fn is_readable(&self, offset: u64, size: u64) -> bool {
        let whole = !self.kept || self.ledger.covers(offset, size);
        whole
            && self.damaged.lock().iter().all(|(start, bad)| start + bad <= offset || offset + size <= *start)
    }

    fn begin(&self, offset: u64, size: u64) {
        // What is half covered is forgotten too: the rest of it belongs to an object that is gone.
        self.damaged.lock().retain(|(start, bad)| start + bad <= offset || offset + size <= *start);
    }

    fn mark(&self, offset: u64, size: u64) {
        let mut damaged = self.damaged.lock();
        if damaged.len() < MOST_DAMAGED {
            damaged.push((offset, size));
        } else {
            *damaged = vec![(0, self.size)];
        }
    }

    /// Reads some of what was written again, and finds what has changed since.
    pub(crate) fn scrub(&self, budget: u64) -> Found {
        let scrubbed = self.scrubber.lock().step(&self.ledger, &self.region, budget);
        for entry in &scrubbed.damaged {
            self.mark(entry.offset, entry.len);
            let span = Span { start: self.base + entry.offset, size: entry.len };
            tracing::error!(segment = %self.id, "{span} have changed since they were written; they are not read any more");
        }
        Found { bytes: scrubbed.bytes, damaged: scrubbed.damaged.len() as u64 }
    }
}

/// All segments that a node lends.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    lent: ArcSwap<Vec<Arc<Lent>>>,
    /// What peers read from without having written to it: objects from the disk.
    buffer: OnceLock<(Arc<Region>, Option<Registered>)>,
}

impl Pool {
    pub(crate) fn lent(&self) -> Arc<Vec<Arc<Lent>>> {
        self.lent.load_full()
    }

    /// Adds a segment, unless its addresses are those of another.
    pub(crate) fn add(&self, lent: Arc<Lent>) -> bool {
        let mut added = false;
        self.lent.rcu(|all| {
            let apart = |other: &Arc<Lent>| {
                other.base + other.size <= lent.base || lent.base + lent.size <= other.base
            };
            added =
                all.iter().all(apart) && self.buffer.get().is_none_or(|(buffer, _)| is_apart(&lent, buffer));
            let new = added.then(|| Arc::clone(&lent));
            all.iter().cloned().chain(new).collect::<Vec<_>>()
        });
        added
    }

    /// Adds the buffer for objects from the disk, once. False if its addresses are those of a segment.
    pub(crate) fn add_buffer(&self, region: &Arc<Region>, registered: Option<Registered>) -> bool {
        self.lent.load().iter().all(|lent| is_apart(lent, region))
            && self.buffer.set((Arc::clone(region), registered)).is_ok()
    }

    /// Takes a segment out. Transfers in progress end well.
    pub(crate) fn remove(&self, id: Uuid) {
        self.lent.rcu(|all| all.iter().filter(|lent| lent.id != id).cloned().collect::<Vec<_>>());
    }

    /// Numbers about the catalogs of all segments.
    pub(crate) fn catalog_counts(&self) -> CatalogCounts {
        let each = self.lent.load();
        let counts = each.iter().filter_map(|lent| lent.ledger.catalog_counts());
        counts.fold(CatalogCounts::default(), |sum, it| CatalogCounts {
            objects: sum.objects + it.objects,
            damaged: sum.damaged + it.damaged,
            stale: sum.stale + it.stale,
            unrecorded: sum.unrecorded + it.unrecorded,
        })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.lent.load().iter().map(|lent| lent.size).sum()
    }

    /// What goes into the node's descriptor.
    pub(crate) fn buffers(&self, name: &str) -> Vec<Buffer> {
        let described = |addr: u64, length: u64, registered: Option<&Registered>| {
            let mut buffer = Buffer { name: name.to_owned(), addr, length, ..Buffer::default() };
            if let Some(registered) = registered {
                registered.describe(&mut buffer);
            }
            buffer
        };
        let lent = self.lent.load();
        let segments = lent.iter().map(|lent| described(lent.base, lent.size, lent.registered.as_ref()));
        let staged = self.buffer.get();
        let staged = staged.map(|(it, registered)| described(it.base(), it.len(), registered.as_ref()));
        segments.chain(staged).collect()
    }

    /// Copies bytes in, as if a peer had written them: `bring` gives each part with its offset, in any order, and fails
    /// unless it has given all of them.
    pub(crate) fn fill<E: From<Damaged>>(
        &self,
        span: Span,
        bring: impl FnOnce(&mut dyn FnMut(u64, &[u8])) -> Result<(), E>,
    ) -> Result<(), E> {
        let (lent, offset) = self.find(span).ok_or(Damaged(span))?;
        let writing = lent.ledger.begin(offset, span.size).map_err(|_| Damaged(span))?;
        lent.begin(offset, span.size);
        let mut fits = true;
        bring(&mut |at, part| {
            let is_inside = at.checked_add(part.len() as u64).is_some_and(|end| end <= span.size);
            fits &= is_inside && lent.region.write_at(offset + at, part).is_ok();
        })?;
        if !fits {
            return Err(Damaged(span).into());
        }
        if lent.lasts {
            let crc = lent.region.crc32c(offset, span.size).map_err(|_| Damaged(span))?;
            if writing.finish(crc) == Finished::Overlapped {
                return Err(Damaged(span).into());
            }
        }
        Ok(())
    }

    /// A part of the buffer.
    fn buffered(&self, span: Span) -> Option<(&Region, u64)> {
        let (region, _) = self.buffer.get()?;
        let offset = span.start.checked_sub(region.base())?;
        region.check(offset, span.size).ok()?;
        Some((region, offset))
    }

    /// Copies bytes out.
    pub(crate) fn read(&self, span: Span, into: &mut [u8]) -> Result<(), Damaged> {
        let (lent, offset) = self.find(span).ok_or(Damaged(span))?;
        if !lent.is_readable(offset, span.size) {
            return Err(Damaged(span));
        }
        lent.region.read_at(offset, into).map_err(|_| Damaged(span))
    }

    /// Whether a range is what was written, as far as this is known.
    pub(crate) fn verify(&self, span: Span) -> Result<(), Damaged> {
        let (lent, offset) = self.find(span).ok_or(Damaged(span))?;
        let known = lent.ledger.find(offset, span.size);
        let is_same = |crc| lent.region.crc32c(offset, span.size).is_ok_and(|now| now == crc);
        let fine = lent.is_readable(offset, span.size) && known.is_none_or(|entry| is_same(entry.crc));
        if fine { Ok(()) } else { Err(Damaged(span)) }
    }

    fn find(&self, span: Span) -> Option<(Arc<Lent>, u64)> {
        let all = self.lent.load();
        all.iter().find_map(|lent| lent.offset(span).map(|offset| (Arc::clone(lent), offset)))
    }

    fn found(&self, span: Span) -> io::Result<(Arc<Lent>, u64)> {
        // Unmounted in this moment.
        self.find(span).ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}

fn is_apart(lent: &Lent, region: &Region) -> bool {
    region.base() + region.len() <= lent.base || lent.base + lent.size <= region.base()
}

impl Target for Pool {
    fn contains(&self, span: Span) -> bool {
        self.find(span).is_some() || self.buffered(span).is_some()
    }

    fn readable(&self, span: Span) -> bool {
        self.buffered(span).is_some()
            || self.find(span).is_some_and(|(lent, offset)| lent.is_readable(offset, span.size))
    }

    fn receive(
        &self,
        socket: &DataSocket,
        span: Span,
        summed: bool,
        whole: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let (lent, offset) = self.found(span)?;
        let writing = lent.ledger.begin(offset, span.size)?;
        lent.begin(offset, span.size);
        if !summed && !lent.lasts {
            receive(&lent.region, socket, offset, span.size)?;
            return whole(None);
        }
        let crc = receive_summed(&lent.region, socket, offset, span.size)?;
        // What there is no room to record is whole all the same: only a later process will not know.
        Ok(whole(Some(crc))? && writing.finish(crc) != Finished::Overlapped)
    }

    fn send(&self, socket: &DataSocket, span: Span) -> io::Result<()> {
        if let Some((region, offset)) = self.buffered(span) {
            return send(region, socket, offset, span.size);
        }
        let (lent, offset) = self.found(span)?;
        send(&lent.region, socket, offset, span.size)
    }

    fn send_summed(&self, socket: &DataSocket, span: Span) -> io::Result<u32> {
        if let Some((region, offset)) = self.buffered(span) {
            return send_summed(region, socket, offset, span.size);
        }
        let (lent, offset) = self.found(span)?;
        send_summed(&lent.region, socket, offset, span.size)
    }

    fn checksum(&self, span: Span) -> Option<u32> {
        let (lent, offset) = self.find(span)?;
        lent.ledger.find(offset, span.size).map(|entry| entry.crc)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::{TcpListener, TcpStream};

    use moongate_memory::ledger::Identity;
    use moongate_memory::numa::Placement;
    use moongate_memory::{Keep, Pages, Wanted};

    use super::*;

    const SIZE: u64 = 1 << 20;
    const BASE: u64 = 1 << 40;

    /// A pool with memory that outlives the process.
    fn pool() -> Pool {
        let wanted = Wanted {
            keep: Keep::Process,
            label: "pool".to_owned(),
            size: SIZE,
            pages: Pages::Normal,
            placement: Placement::default(),
        };
        let identity =
            |base| Identity { segment: [1, 2], client: [3, 4], name: "node".to_owned(), base, size: SIZE };
        let segment = Segment::open(&wanted, identity).unwrap();
        let pool = Pool::default();
        assert!(pool.add(Arc::new(Lent::new(segment, Uuid { first: 1, second: 2 }, BASE, true))));
        pool
    }

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (peer, listener.accept().unwrap().0)
    }

    fn span(from: u64, size: u64) -> Span {
        Span { start: BASE + from, size }
    }

    #[test]
    fn who_is_overlapped_by_another_is_told_so_and_who_comes_after_is_well() {
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
            Ok::<_, Damaged>(())
        });
        assert_eq!(filled, Err(Damaged(span(0, 100))));
        assert!(pool.receive(&socket, span(0, 100), true, &mut |_| Ok(true)).unwrap());
        assert_eq!(pool.verify(span(0, 100)), Ok(()));
        assert!(pool.checksum(span(0, 100)).is_some());
    }
}
