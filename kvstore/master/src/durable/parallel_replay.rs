//! Replays records on all cores.
//!
//! One thread finds the records in the files and sends each to the worker of its lane ([`ReplayLane`]), which verifies and applies it.
//! A snapshot has its shards one after the other, so workers are only busy at the same time if records of several shards are in flight.

use std::num::NonZero;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use moongate_master_core::{JobRunner, ReplayLane};
use moongate_oplog::{OplogError, RecordBlock};
use parking_lot::{Condvar, Mutex};

use crate::record;
use crate::state::MasterState;

/// Maximum number of threads.
const MAX_THREADS: usize = 16;
/// Maximum size of the records that wait for a worker, in bytes: those of two shards of ten million keys.
const MAX_IN_FLIGHT: usize = 48 << 20;
/// Number of records that are sent to a worker at once.
const BATCH: usize = 2048;

/// Runs jobs on this many threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReplayThreads(usize);

impl Default for ReplayThreads {
    /// A thread for each core; in a simulation a single one.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self(if cfg!(feature = "simulation") { 1 } else { cores.min(MAX_THREADS) })
    }
}

impl JobRunner for ReplayThreads {
    fn width(&self) -> usize {
        self.0
    }

    fn run<'j>(&self, jobs: Vec<Box<dyn FnOnce() + Send + 'j>>) {
        if self.0 == 1 {
            return jobs.into_iter().for_each(|job| job());
        }
        let threads = self.0.min(jobs.len());
        let jobs = Mutex::new(jobs.into_iter());
        let next = || jobs.lock().next();
        let run = || {
            while let Some(job) = next() {
                job();
            }
        };
        std::thread::scope(|scope| (0..threads).for_each(|_| _ = scope.spawn(run)));
    }
}

/// Counts of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplayCounts {
    pub(super) records: u64,
    /// Number of records that could not be applied because what they refer to is gone.
    pub(super) skipped: u64,
}

/// Applies the records of all blocks that `next_block` returns, up to and including the one with the number `through`, to a state in a
/// bulk replay. Those outside the state machine are passed to `apply_aux` with their numbers, in order.
pub(super) fn replay(
    state: &MasterState,
    threads: ReplayThreads,
    through: u64,
    mut next_block: impl FnMut(Vec<u8>) -> Result<Option<RecordBlock>, OplogError>,
    mut apply_aux: impl FnMut(&[u8], u64) -> bool,
) -> Result<ReplayCounts, OplogError> {
    let shared = &SharedReplay::default();
    let read = std::thread::scope(|scope| {
        let workers = (0..if threads.0 > 1 { threads.0 } else { 0 }).map(|_| {
            let (sender, batches) = channel();
            scope.spawn(move || shared.apply_all(state, &batches));
            ReplayWorker { sender, records: Vec::new() }
        });
        let workers = workers.collect();
        let mut distributor = ReplayDistributor { state, shared, workers, records: 0, next: 0 };
        while distributor.next <= through {
            let buffer = shared.buffers.lock().pop().unwrap_or_default();
            let Some(block) = next_block(buffer)? else { break };
            distributor.distribute(block, through, &mut apply_aux)?;
        }
        Ok(distributor.records)
    });
    // Damage that a worker found precedes what the reader found.
    match shared.damage.lock().take() {
        Some(damage) => Err(damage),
        None => Ok(ReplayCounts { records: read?, skipped: *shared.skipped.lock() }),
    }
}

/// What the threads of a replay share.
#[derive(Default)]
struct SharedReplay {
    /// Size of the records that wait for a worker, in bytes.
    in_flight: Mutex<usize>,
    applied: Condvar,
    /// Memory of applied blocks.
    buffers: Mutex<Vec<Vec<u8>>>,
    skipped: Mutex<u64>,
    /// The first damage in the file.
    damage: Mutex<Option<OplogError>>,
}

impl SharedReplay {
    fn apply_all(&self, state: &MasterState, batches: &Receiver<ReplayBatch<'_>>) {
        let mut skipped = 0;
        while let Ok(mut batch) = batches.recv() {
            let Some(block) = batch.block.take() else { continue };
            for nth in &batch.records {
                match block.record(*nth) {
                    Ok(record) => skipped += u64::from(!state.apply_fact(record)),
                    Err(damage) => self.add_damage(damage),
                }
            }
            if let Some(block) = Arc::into_inner(block) {
                self.buffers.lock().push(block.into_buffer());
            }
        }
        *self.skipped.lock() += skipped;
    }

    fn add_damage(&self, damage: OplogError) {
        let offset = |error: &OplogError| match error {
            OplogError::Damaged { offset, .. } => *offset,
            _ => u64::MAX,
        };
        let mut first = self.damage.lock();
        if first.as_ref().is_none_or(|first| offset(&damage) < offset(first)) {
            *first = Some(damage);
        }
    }

    /// Waits until at most this many bytes are in flight.
    fn wait(&self, bytes: usize) {
        let mut in_flight = self.in_flight.lock();
        while *in_flight > bytes {
            self.applied.wait(&mut in_flight);
        }
    }
}

/// Records of a block for one worker. They are in flight until this is dropped, also by a panic.
struct ReplayBatch<'a> {
    shared: &'a SharedReplay,
    block: Option<Arc<RecordBlock>>,
    /// Positions in the block.
    records: Vec<usize>,
    bytes: usize,
}

impl Drop for ReplayBatch<'_> {
    fn drop(&mut self) {
        *self.shared.in_flight.lock() -= self.bytes;
        self.shared.applied.notify_one();
    }
}

struct ReplayWorker<'a> {
    sender: Sender<ReplayBatch<'a>>,
    /// Positions of its next records in the current block.
    records: Vec<usize>,
}

/// Sends records to the workers of their lanes. Without workers, it applies them itself.
struct ReplayDistributor<'a> {
    state: &'a MasterState,
    shared: &'a SharedReplay,
    workers: Vec<ReplayWorker<'a>>,
    records: u64,
    /// Number of the record after the last one.
    next: u64,
}

impl ReplayDistributor<'_> {
    fn distribute(
        &mut self,
        block: RecordBlock,
        through: u64,
        apply_aux: &mut impl FnMut(&[u8], u64) -> bool,
    ) -> Result<(), OplogError> {
        let block = Arc::new(block);
        let fits = usize::try_from(through.saturating_add(1).saturating_sub(block.first()));
        let count = block.count().min(fits.unwrap_or(usize::MAX));
        for nth in 0..count {
            let unverified = block.unverified(nth);
            if record::is_aux(unverified) {
                let was_applied = apply_aux(block.record(nth)?, block.first() + nth as u64);
                *self.shared.skipped.lock() += u64::from(!was_applied);
                continue;
            }
            match self.state.master.replay_lane(unverified) {
                ReplayLane::Shard(shard) if !self.workers.is_empty() => {
                    let worker = shard % self.workers.len();
                    self.workers[worker].records.push(nth);
                    if self.workers[worker].records.len() == BATCH {
                        self.send(worker, &block);
                    }
                }
                ReplayLane::Shard(_) | ReplayLane::Exclusive => {
                    self.send_all(&block);
                    self.shared.wait(0);
                    let was_applied = self.state.apply_fact(block.record(nth)?);
                    *self.shared.skipped.lock() += u64::from(!was_applied);
                }
            }
        }
        self.records += count as u64;
        self.next = block.first() + count as u64;
        self.send_all(&block);
        self.shared.wait(MAX_IN_FLIGHT);
        if let Some(block) = Arc::into_inner(block) {
            self.shared.buffers.lock().push(block.into_buffer());
        }
        Ok(())
    }

    fn send_all(&mut self, block: &Arc<RecordBlock>) {
        (0..self.workers.len()).for_each(|worker| self.send(worker, block));
    }

    fn send(&mut self, worker: usize, block: &Arc<RecordBlock>) {
        let ReplayWorker { sender, records } = &mut self.workers[worker];
        if records.is_empty() {
            return;
        }
        let records = std::mem::take(records);
        let bytes = records.iter().map(|nth| block.unverified(*nth).len()).sum();
        *self.shared.in_flight.lock() += bytes;
        // Fails only after the worker's panic, which ends the replay.
        let _ =
            sender.send(ReplayBatch { shared: self.shared, block: Some(Arc::clone(block)), records, bytes });
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use mooncake_wire::types::{ObjectMeta, ReplicaType, ReplicateConfig, Segment, Uuid};
    use moongate_master_core::{
        CallContext, MasterCore, MasterCoreOptions, PutStartRequest, RemoveContext, SnapshotCursor,
        StateChange, StateChangeSink, encode,
    };
    use moongate_oplog::snapshot::{self, SnapshotReader, SnapshotWriter};
    use moongate_oplog::{LogDirectory, OplogOptions};

    use super::*;
    use crate::durable::DurableJournal;
    use crate::recorder::FactRecorder;

    const CLIENT: Uuid = Uuid { first: 1, second: 1 };

    /// Encoded objects of a master.
    #[derive(Default)]
    struct Objects(Vec<Vec<u8>>);

    impl StateChangeSink for Objects {
        fn record(&mut self, change: StateChange<'_>) {
            if matches!(change, StateChange::ObjectStored { .. } | StateChange::ObjectStarted(_)) {
                let mut bytes = Vec::new();
                encode(&change, &mut bytes);
                self.0.push(bytes);
            }
        }
    }

    fn objects(master: &MasterCore) -> Vec<Vec<u8>> {
        let (mut all, mut cursor) = (Objects::default(), Some(SnapshotCursor::default()));
        while let Some(from) = cursor {
            cursor = master.snapshot(from, 64, &mut all);
        }
        all.0.sort();
        all.0
    }

    /// Puts, ends most of the puts and removes some of the objects, so that ranges are used again.
    fn change(master: &MasterCore, recorder: &mut FactRecorder) {
        let segment =
            Segment { id: CLIENT, name: "a".to_owned(), size: 1 << 22, ..Segment::<String>::default() };
        master.mount(0, &segment, CLIENT, recorder).unwrap();
        let config = ReplicateConfig::<String>::default();
        for number in 0..9000_u64 {
            let context = CallContext { now_ms: number, client: CLIENT, tenant: "default" };
            let key = format!("key{}", number % 5000);
            let request = PutStartRequest { key: &key, size: 500 + number % 300, config: &config };
            if master.put_start(context, &request, recorder).is_ok() && number % 7 != 0 {
                let meta = ObjectMeta { key: key.as_str(), object_checksum: None };
                master.put_end(context, &meta, ReplicaType::ALL, recorder).unwrap();
            }
            if number % 3 == 0 {
                let remove = RemoveContext { now_ms: number, tenant: "default", force: true };
                let _ = master.remove(remove, &format!("key{}", number / 2), recorder);
            }
        }
    }

    #[test]
    fn any_number_of_threads_restores_the_state() {
        let folder = tempfile::tempdir().unwrap();
        let settings = MasterCoreOptions::default();
        let journal = DurableJournal::begin(folder.path(), OplogOptions::default(), 1).unwrap();
        let journal = Arc::new(journal);
        let master = MasterCore::new(settings.clone());
        let mut recorder = FactRecorder::new(journal.clone());
        change(&master, &mut recorder);
        recorder.commit().unwrap();
        for threads in [1, 2, 5].map(ReplayThreads) {
            let state = MasterState::empty(&settings);
            state.master.begin_bulk_replay();
            let mut reader = journal.log().block_reader(1).unwrap();
            let counts = replay(&state, threads, u64::MAX, |buffer| reader.next_block(buffer), |_, _| true);
            assert_eq!(counts.unwrap(), ReplayCounts { records: journal.log().next() - 1, skipped: 0 });
            state.master.finish_replay(9000, &threads);
            assert_eq!(objects(&state.master), objects(&master));
            let usage = |master: &MasterCore| master.segments_detail().segments[0].allocator_used_bytes;
            assert_eq!(usage(&state.master), usage(&master));
        }
    }

    #[test]
    fn the_first_damage_is_reported() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Arc::new(LogDirectory::lock(folder.path()).unwrap());
        let mut writer = SnapshotWriter::begin(Arc::clone(&directory), 7).unwrap();
        let mut record = Vec::new();
        for number in 0..20_000 {
            let (tenant, key) = ("default".into(), format!("key{number}").into());
            record.clear();
            encode(&StateChange::TransferEnded { tenant, key }, &mut record);
            writer.write(&record).unwrap();
        }
        writer.finish().unwrap();
        let (_, path) = snapshot::list(&directory).unwrap().remove(0);
        let complete = fs::read(&path).unwrap();
        for damaged in [[100, 300_000], [310_000, 310_050], [400_000, complete.len() - 20]] {
            let mut bytes = complete.clone();
            damaged.iter().for_each(|offset| bytes[*offset] ^= 4);
            fs::write(&path, bytes).unwrap();
            let expected = snapshot::read(&directory, &path, |_| {}).unwrap_err().to_string();
            for threads in [1, 3].map(ReplayThreads) {
                let state = MasterState::empty(&MasterCoreOptions::default());
                state.master.begin_bulk_replay();
                let mut reader = SnapshotReader::open(&directory, &path).unwrap();
                let next_block = |buffer| reader.next_block(buffer);
                let error = replay(&state, threads, u64::MAX, next_block, |_, _| true).unwrap_err();
                assert_eq!(error.to_string(), expected);
            }
        }
    }
}
