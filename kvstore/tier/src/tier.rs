//! The tier: puts, gets and removes objects in a file.

use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::block::{AllocatedBlocks, BlockIndex, FreeBlocks, TierLayout};
use crate::block_io::{BlockWriter, BlocksReader, ObjectBlock, part_len};
use crate::buffer::{ALIGN, aligned};
use crate::engine::IoEngine;
use crate::file::{FileStart, lock, open_direct, read_start, reserve};
use crate::index::{TierIndex, TierObject};
use crate::io_chunk::{IoChunk, IoDirection};
use crate::page::{MAX_BLOCKS, MAX_KEY, ObjectPage, PageBlock, blocks_of};
use crate::ring_pool::has_in_flight_io;
use crate::scan::{TierScanResult, scan};
use crate::superblock::{Superblock, boot};
use crate::{TierError, TierOptions};

/// An object store in one file, shared by threads.
#[derive(Debug)]
pub struct FileTier {
    pub(crate) path: PathBuf,
    file: File,
    layout: TierLayout,
    superblock: Superblock,
    engine: IoEngine,
    pub(crate) index: Mutex<TierIndex>,
    pub(crate) free: Arc<FreeBlocks>,
    generation: AtomicU64,
    pub(crate) evicted: AtomicU64,
    pub(crate) damaged: AtomicU64,
    /// Keys of evicted or corrupt objects, until they are taken.
    pub(crate) evicted_keys: Mutex<Vec<Arc<[u8]>>>,
    /// Whether it was opened with existing content.
    is_restored: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierCounts {
    pub objects: u64,
    /// Total bytes of stored objects.
    pub bytes: u64,
    pub free: u64,
    /// Objects evicted since it was opened.
    pub evicted: u64,
    /// Corrupt objects dropped since it was opened, and corrupt pages found on opening: each may have held an object. A truncated file, or
    /// one with a corrupt first page, counts as one more, since the number of its lost objects is unknown.
    pub damaged: u64,
    pub io_uring: bool,
    /// Buffers quarantined after an io_uring failure, because the kernel may still use them.
    pub quarantined_buffers: u64,
}

impl FileTier {
    /// Opens a tier with its content, or starts empty: if there is no file, if its sizes differ, or if the machine lost power while it was
    /// open.
    ///
    /// # Errors
    /// [`TierError::Options`], [`TierError::InUse`], or errors of the file system.
    pub fn open(options: &TierOptions) -> Result<Self, TierError> {
        let layout = TierLayout::of(options)?;
        let failed = |problem| TierError::Io { path: options.path.clone(), problem };
        let file = open_direct(&options.path).map_err(failed)?;
        lock(&file, &options.path)?;
        let engine = IoEngine::new(layout.block_size as usize, options.io_uring);
        let path = options.path.display();
        let start = read_start(&file, &engine).map_err(failed)?;
        let usable = match start {
            FileStart::Superblock(found)
                if found.layout == layout && (found.clean || found.boot == boot()) =>
            {
                Some(found)
            }
            FileStart::Superblock(_) => {
                tracing::warn!(
                    "{path}: the sizes changed, or the tier was not closed before a reboot: starting empty"
                );
                None
            }
            FileStart::Damaged => {
                tracing::warn!(
                    "{path}: the first page is corrupt or not of a tier: starting empty, all objects are lost"
                );
                None
            }
            FileStart::Empty => None,
        };
        let instance = usable.map_or_else(|| fastrand::u64(..), |usable| usable.instance);
        let superblock = Superblock { layout, instance, boot: boot(), clean: false };
        let length = file.metadata().map_err(failed)?.len();
        let is_truncated = usable.is_some() && length < layout.end();
        if is_truncated {
            tracing::warn!(
                "{path}: truncated to {length} of {} bytes; objects beyond are lost",
                layout.end()
            );
        }
        if usable.is_none() {
            // Truncate, so that unwritten pages are zero, and any other content is corruption.
            file.set_len(0).map_err(failed)?;
        }
        if usable.is_none() || is_truncated {
            reserve(&file, layout.end()).map_err(failed)?;
        }
        let found = if usable.is_some() {
            scan(&file, &engine, layout, instance).map_err(failed)?
        } else {
            let free = FreeBlocks::new(layout.indices().rev().collect());
            TierScanResult {
                index: TierIndex::default(),
                free,
                generation: 0,
                stale: Vec::new(),
                damaged: Vec::new(),
            }
        };
        if !found.damaged.is_empty() {
            let (pages, objects) = (found.damaged.len(), found.index.len());
            tracing::warn!(pages, objects, "{path}: corrupt object pages; their objects are lost");
        }
        let damaged =
            found.damaged.len() + usize::from(is_truncated) + usize::from(start == FileStart::Damaged);
        let tier = Self {
            path: options.path.clone(),
            file,
            layout,
            superblock,
            engine,
            index: Mutex::new(found.index),
            free: found.free,
            generation: AtomicU64::new(found.generation),
            evicted: AtomicU64::new(0),
            damaged: AtomicU64::new(damaged as u64),
            evicted_keys: Mutex::default(),
            is_restored: usable.is_some(),
        };
        tier.wipe(&found.stale)?;
        tier.wipe(&found.damaged)?;
        tier.write_superblock(superblock)?;
        Ok(tier)
    }

    /// Whether it was opened with existing content.
    #[must_use]
    pub fn is_restored(&self) -> bool {
        self.is_restored
    }

    /// Closes the tier so that its content survives a reboot of the machine.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn close(self) -> Result<(), TierError> {
        self.sync()
    }

    /// As [`FileTier::close`], for a shared tier. Later puts and removals may be lost or found corrupt after a reboot.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn sync(&self) -> Result<(), TierError> {
        self.file.sync_data().map_err(|problem| self.failed(problem))?;
        self.write_superblock(Superblock { clean: true, ..self.superblock })?;
        self.file.sync_data().map_err(|problem| self.failed(problem))
    }

    /// Maximum object size in bytes.
    #[must_use]
    pub fn longest(&self) -> u64 {
        let blocks = (MAX_BLOCKS as u64).min(u64::from(self.layout.blocks));
        blocks * u64::from(self.layout.block_size)
    }

    /// Writes an object, replacing an older one of the same key.
    ///
    /// # Errors
    /// As [`FileTier::put_with`].
    pub fn put(&self, key: &[u8], bytes: &[u8]) -> Result<(), TierError> {
        self.put_with(key, bytes.len() as u64, |offset, into| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            if let Some(part) = bytes.get(start..).and_then(|rest| rest.get(..into.len())) {
                into.copy_from_slice(part);
            }
        })
    }

    /// Writes an object of `len` bytes. `fill` is called for its parts in order, each with its offset.
    ///
    /// # Errors
    /// When key or object have an invalid size, when all blocks are busy, or on disk errors. Then an older object of the key stays.
    pub fn put_with(&self, key: &[u8], len: u64, fill: impl FnMut(u64, &mut [u8])) -> Result<(), TierError> {
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(TierError::Key(key.len()));
        }
        if len == 0 || len > self.longest() {
            return Err(TierError::Length { len, max: self.longest() });
        }
        let mut allocated = self.reserve_blocks(blocks_of(len, self.layout.block_size))?;
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let crcs = self.write_blocks(&allocated, len, fill).inspect_err(|error| {
            if matches!(error, TierError::Io { problem, .. } if has_in_flight_io(problem)) {
                // A late write must not change the data of another object.
                allocated.retire();
            }
        })?;
        let blocks =
            allocated.blocks.iter().zip(&crcs).map(|(index, crc)| PageBlock { index: *index, crc: *crc });
        let page = ObjectPage { generation, key: key.to_vec(), len, blocks: blocks.collect() };
        // The page is written after all blocks: it makes the object exist.
        if let Err(problem) = self.write_page(&page) {
            // The page may or may not be written, so its blocks must not be reused.
            allocated.retire();
            return Err(problem);
        }
        let stored = Arc::new(TierObject { generation, len, crcs, blocks: allocated });
        let replaced = self.index.lock().insert(key, stored);
        self.drop_all(replaced.into_iter().collect())
    }

    /// Reads an object: `take` receives its parts in any order, each with its offset. The parts are valid only if the whole call succeeds.
    /// Returns `None` if there is no such object.
    ///
    /// # Errors
    /// [`TierError::Damaged`], or disk errors.
    pub fn get_with(&self, key: &[u8], mut take: impl FnMut(u64, &[u8])) -> Result<Option<u64>, TierError> {
        let mut outcomes = self.get_many(&[key], |_, offset, bytes| take(offset, bytes));
        outcomes.pop().unwrap_or(Ok(None))
    }

    /// Reads a whole object into memory.
    ///
    /// # Errors
    /// As [`FileTier::get_with`].
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, TierError> {
        let mut object = Vec::new();
        let found = self.get_with(key, |offset, bytes| {
            let start = usize::try_from(offset).unwrap_or(usize::MAX);
            // The length is known with the last part; most parts arrive in order.
            if object.len() < start + bytes.len() {
                object.resize(start + bytes.len(), 0);
            }
            if let Some(into) = object.get_mut(start..start + bytes.len()) {
                into.copy_from_slice(bytes);
            }
        })?;
        Ok(found.map(|_| object))
    }

    /// Reads several objects at once. `take` receives the index of the key, the offset, and the bytes. The results are as those of
    /// [`FileTier::get_with`], one per key.
    pub fn get_many(
        &self,
        keys: &[&[u8]],
        take: impl FnMut(usize, u64, &[u8]),
    ) -> Vec<Result<Option<u64>, TierError>> {
        let objects: Vec<Option<Arc<TierObject>>> = {
            let mut index = self.index.lock();
            keys.iter().map(|key| index.used(key)).collect()
        };
        let mut reading = BlocksReader {
            layout: self.layout,
            parts: Vec::new(),
            failures: Vec::new(),
            objects: &objects,
            take,
        };
        let mut chunks = Vec::new();
        for (object, stored) in objects.iter().enumerate() {
            for (number, block) in stored.iter().flat_map(|stored| stored.blocks.blocks.iter().enumerate()) {
                let len =
                    stored.as_ref().map_or(0, |stored| part_len(stored.len, number, self.layout.block_size));
                chunks.push(IoChunk { offset: self.layout.data(*block), len: aligned(len) as usize });
                reading.parts.push(ObjectBlock { object, number });
            }
        }
        let outcome = self.engine.transfer(&self.file, IoDirection::Read, &chunks, &mut reading);
        let mut failures: Vec<Option<TierError>> = keys.iter().map(|_| None).collect();
        for (object, failure) in reading.failures {
            if let Some(slot) = failures.get_mut(object) {
                *slot = Some(failure.into_error(&self.path));
            }
        }
        let results = keys.iter().zip(&objects).zip(failures).map(|((key, stored), failure)| {
            let Some(stored) = stored else { return Ok(None) };
            match (failure, &outcome) {
                (Some(failure), _) => {
                    self.drop_damaged(key, stored, &failure);
                    Err(failure)
                }
                (None, Err(problem)) => Err(self.failed(io::Error::new(problem.kind(), problem.to_string()))),
                (None, Ok(())) => Ok(Some(stored.len)),
            }
        });
        results.collect()
    }

    /// Whether the object exists; does not count as a use.
    #[must_use]
    pub fn contains(&self, key: &[u8]) -> bool {
        self.index.lock().contains(key)
    }

    /// Size of an object in bytes, `None` if there is none; does not count as a use.
    #[must_use]
    pub fn size(&self, key: &[u8]) -> Option<u64> {
        self.index.lock().size(key)
    }

    /// Removes an object. Returns whether it existed.
    ///
    /// # Errors
    /// Disk errors; the object may reappear when the tier is opened again.
    pub fn remove(&self, key: &[u8]) -> Result<bool, TierError> {
        let replaced = self.index.lock().remove(key);
        let existed = replaced.is_some();
        self.drop_all(replaced.into_iter().collect())?;
        Ok(existed)
    }

    /// All keys, the next to be evicted first.
    #[must_use]
    pub fn keys(&self) -> Vec<Arc<[u8]>> {
        self.index.lock().keys()
    }

    #[must_use]
    pub fn counts(&self) -> TierCounts {
        let index = self.index.lock();
        TierCounts {
            objects: index.len() as u64,
            bytes: index.bytes(),
            free: self.free.len() as u64 * u64::from(self.layout.block_size),
            evicted: self.evicted.load(Ordering::Relaxed),
            damaged: self.damaged.load(Ordering::Relaxed),
            io_uring: self.engine.is_ring(),
            quarantined_buffers: self.engine.quarantined_buffers() as u64,
        }
    }

    fn write_blocks(
        &self,
        allocated: &AllocatedBlocks,
        len: u64,
        fill: impl FnMut(u64, &mut [u8]),
    ) -> Result<Vec<u32>, TierError> {
        let block_size = self.layout.block_size;
        let chunks: Vec<IoChunk> = allocated
            .blocks
            .iter()
            .enumerate()
            .map(|(number, block)| IoChunk {
                offset: self.layout.data(*block),
                len: aligned(part_len(len, number, block_size)) as usize,
            })
            .collect();
        let mut writing =
            BlockWriter { len, block_size, crcs: Vec::with_capacity(chunks.len()), problem: None, fill };
        let outcome = self.engine.transfer(&self.file, IoDirection::Write, &chunks, &mut writing);
        match (outcome, writing.problem) {
            (Ok(()), None) => Ok(writing.crcs),
            (Err(problem), _) | (_, Some(problem)) => Err(self.failed(problem)),
        }
    }

    fn write_page(&self, page: &ObjectPage) -> Result<(), TierError> {
        let first = page.first().unwrap_or_default();
        self.write_pages(&[first], |bytes| page.encode(self.superblock.instance, bytes))
    }

    pub(crate) fn wipe(&self, blocks: &[BlockIndex]) -> Result<(), TierError> {
        self.write_pages(blocks, |bytes| bytes.fill(0))
    }

    fn write_pages(&self, blocks: &[BlockIndex], mut fill: impl FnMut(&mut [u8])) -> Result<(), TierError> {
        let chunks: Vec<IoChunk> =
            blocks.iter().map(|block| IoChunk { offset: self.layout.page(*block), len: ALIGN }).collect();
        self.write_whole(&chunks, |_, bytes| fill(bytes))
    }

    fn write_superblock(&self, superblock: Superblock) -> Result<(), TierError> {
        self.write_whole(&[IoChunk { offset: 0, len: ALIGN }], |_, bytes| superblock.encode(bytes))
    }

    fn write_whole(&self, chunks: &[IoChunk], fill: impl FnMut(u64, &mut [u8])) -> Result<(), TierError> {
        let len = (chunks.len() * ALIGN) as u64;
        let mut writing =
            BlockWriter { len, block_size: ALIGN as u32, crcs: Vec::new(), problem: None, fill };
        let outcome = self.engine.transfer(&self.file, IoDirection::Write, chunks, &mut writing);
        outcome.and_then(|()| writing.problem.map_or(Ok(()), Err)).map_err(|problem| self.failed(problem))
    }

    fn failed(&self, problem: io::Error) -> TierError {
        TierError::Io { path: self.path.clone(), problem }
    }
}
