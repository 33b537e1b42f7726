//! The data folder of a master in HA mode: its identity and its state on disk.
//!
//! - `member`: the member's incarnation, and the number N of the valid state folder.
//! - `state-N/`: a log and its snapshots. A full copy of a leader's state gets a new folder, which becomes valid once it is complete;
//!   then the previous one is removed.
//!
//! - `damaged/`: the last state whose files were damaged.
//!
//! While its state is intact, the master is the same [`HaMember`](super::HaMember) after each start. If the state cannot be trusted, it
//! starts empty and as a new member.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::{LogDirectory, OplogError, OplogOptions, snapshot};

use super::standby_snapshot::StandbySnapshotter;
use crate::durable::{
    DurableJournal, LoadedState, MEMBER_FILE, PersistenceSchedule, RestoreReport, RestoredJournal,
};
use crate::recovery::{RecoveryOutcome, StateDamage};
use crate::state::MasterState;

const PREFIX: &str = "state-";
/// Folder for the last damaged state.
const DAMAGED: &str = "damaged";

/// Settings of a member's folder.
#[derive(Clone, Debug)]
pub struct MemberFolderOptions {
    pub folder: PathBuf,
    pub log: OplogOptions,
    /// How often snapshots are written.
    pub schedule: PersistenceSchedule,
}

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MemberFolderError {
    /// An error of the file system or of the log.
    #[error(transparent)]
    Log(#[from] OplogError),
    /// It contains the state of a standalone master.
    #[error(
        "{0} contains the state of a standalone master; set another --data_dir, or start without --enable_ha"
    )]
    StandaloneState(PathBuf),
    /// The identity file is corrupt.
    #[error("{0} is corrupt; move the folder away to start empty")]
    UnreadableIdentity(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemberIdentity {
    incarnation: u64,
    /// Number of the valid state folder.
    state: u64,
}

impl MemberIdentity {
    fn write(self, folder: &LogDirectory) -> io::Result<()> {
        folder.put(
            MEMBER_FILE,
            format!("incarnation {:016x}\nstate {}\n", self.incarnation, self.state).as_bytes(),
        )
    }

    fn read(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let incarnation = u64::from_str_radix(lines.next()?.strip_prefix("incarnation ")?, 16).ok()?;
        Some(Self { incarnation, state: lines.next()?.strip_prefix("state ")?.parse().ok()? })
    }
}

/// An open and locked data folder.
#[derive(Debug)]
pub struct MemberFolder {
    options: MemberFolderOptions,
    folder: LogDirectory,
    identity: MemberIdentity,
    durable: Arc<DurableJournal>,
    snapshotter: StandbySnapshotter,
}

fn file_error(path: &Path) -> impl FnOnce(io::Error) -> OplogError {
    let path = path.to_owned();
    move |problem| OplogError::Io { path, problem }
}

fn to_io_error(error: OplogError) -> io::Error {
    match error {
        OplogError::Io { problem, .. } => problem,
        other => io::Error::other(other),
    }
}

/// A folder, with the state that was restored from it.
pub struct RestoredFolder {
    pub folder: MemberFolder,
    pub state: MasterState,
    pub report: RestoreReport,
}

impl MemberFolder {
    /// Locks a folder, which is created if necessary, and reads its state.
    ///
    /// # Errors
    /// [`MemberFolderError`]. Damaged files are no error: the state is then empty, and [`RestoreReport`] names the reason.
    pub fn open(
        options: MemberFolderOptions,
        settings: &MasterCoreOptions,
    ) -> Result<RestoredFolder, MemberFolderError> {
        let folder = LogDirectory::lock(&options.folder)?;
        let path = options.folder.join(MEMBER_FILE);
        let stored = match fs::read_to_string(&path) {
            Ok(text) => Some(
                MemberIdentity::read(&text)
                    .ok_or_else(|| MemberFolderError::UnreadableIdentity(path.clone()))?,
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(file_error(&path)(error).into()),
        };
        if stored.is_none() && is_standalone(&options.folder).map_err(file_error(&options.folder))? {
            return Err(MemberFolderError::StandaloneState(options.folder));
        }
        let (mut found, mut recovery) = (None, RecoveryOutcome::Intact);
        if let Some(identity) = stored {
            let path = state_at(&options.folder, identity.state);
            // A missing log would look like an empty one.
            let loaded = match path.is_dir() {
                true => Some(DurableJournal::load(&path, options.log.clone(), settings)?),
                false => None,
            };
            match loaded {
                Some(LoadedState::Complete(loaded)) => found = Some((identity, *loaded)),
                // The leader has the complete state: the part that can be verified here would only be replaced.
                Some(LoadedState::Partial(loaded)) => recovery = loaded.report.recovery,
                Some(LoadedState::MachineDied(None)) => recovery = RecoveryOutcome::MachineDied,
                Some(LoadedState::MachineDied(Some(damage))) => recovery = RecoveryOutcome::Damaged(damage),
                None => {
                    let description = format!("{} is missing", path.display());
                    recovery =
                        RecoveryOutcome::Damaged(StateDamage { description, ..StateDamage::default() });
                }
            }
        }
        let (identity, restored) = match found {
            Some(found) => found,
            None => {
                let number = stored.map_or(1, |identity| identity.state.saturating_add(1));
                let identity = MemberIdentity { incarnation: fastrand::u64(..), state: number };
                if let (Some(stored), RecoveryOutcome::Damaged(damage)) = (stored, &mut recovery) {
                    damage.preserved_at = preserve_damaged(&options.folder, stored.state);
                }
                let path = state_at(&options.folder, number);
                let durable = DurableJournal::begin(&path, options.log.clone(), 1)?;
                identity.write(&folder).map_err(file_error(&options.folder))?;
                let restored = RestoredJournal {
                    journal: durable,
                    state: MasterState::empty(settings),
                    report: RestoreReport { recovery, ..RestoreReport::default() },
                };
                (identity, restored)
            }
        };
        let RestoredJournal { journal: mut durable, state, report } = restored;
        report.log_losses(&options.folder);
        durable.set_recovery(report.recovery.clone());
        let snapshotter = StandbySnapshotter::new(durable.log().oldest());
        let folder = Self { options, folder, identity, durable: Arc::new(durable), snapshotter };
        folder.remove_stale_states();
        Ok(RestoredFolder { folder, state, report })
    }

    /// This member's incarnation: a new random number whenever the state was lost.
    pub fn incarnation(&self) -> u64 {
        self.identity.incarnation
    }

    /// The log in the valid state folder.
    pub fn durable(&self) -> &Arc<DurableJournal> {
        &self.durable
    }

    /// The settings that the folder was opened with.
    pub fn options(&self) -> &MemberFolderOptions {
        &self.options
    }

    /// Starts a full copy, which will have all records up to `number`.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn begin_copy(&self, number: u64) -> io::Result<StateCopyWriter> {
        let generation = self.identity.state.saturating_add(1);
        let path = state_at(&self.options.folder, generation);
        if path.exists() {
            // An aborted copy.
            fs::remove_dir_all(&path)?;
        }
        let durable = DurableJournal::begin(&path, self.options.log.clone(), number.saturating_add(1));
        let durable = durable.map_err(to_io_error)?;
        let writer =
            snapshot::SnapshotWriter::begin(Arc::clone(durable.folder()), number).map_err(to_io_error)?;
        Ok(StateCopyWriter { durable, writer, generation })
    }

    /// Makes a completed copy the valid state.
    ///
    /// # Errors
    /// An error of the file system. The previous state stays valid.
    pub fn finish_copy(&mut self, copy_writer: StateCopyWriter) -> io::Result<()> {
        let StateCopyWriter { durable, writer, generation } = copy_writer;
        let last = durable.log().next() - 1;
        durable.log().commit(last).and_then(|()| durable.log().flush()).map_err(to_io_error)?;
        writer.finish().map_err(to_io_error)?;
        let identity = MemberIdentity { state: generation, ..self.identity };
        identity.write(&self.folder)?;
        self.abort_snapshot();
        self.identity = identity;
        self.durable = Arc::new(durable);
        self.snapshotter = StandbySnapshotter::new(last);
        self.remove_stale_states();
        Ok(())
    }

    /// Advances the snapshot in progress, or starts one when it is due.
    pub fn poll_snapshot(&mut self, state: &MasterState) {
        self.snapshotter.poll(&self.durable, state, self.options.schedule);
    }

    /// Aborts the snapshot in progress. Another thread may write snapshots afterwards.
    pub fn abort_snapshot(&mut self) {
        self.snapshotter.abort();
    }

    /// Writes and closes the log, so that the next start can trust it.
    ///
    /// # Errors
    /// An error of the file system or of the log.
    pub fn close(&mut self) -> Result<(), OplogError> {
        self.abort_snapshot();
        self.durable.log().close()
    }

    /// Removes aborted copies and replaced states.
    fn remove_stale_states(&self) {
        let valid = state_at(&self.options.folder, self.identity.state);
        let Ok(entries) = fs::read_dir(&self.options.folder) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let is_state =
                path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(PREFIX));
            if is_state
                && path != valid
                && let Err(error) = fs::remove_dir_all(&path)
            {
                tracing::warn!(%error, path = %path.display(), "cannot remove an obsolete state");
            }
        }
    }
}

/// Writes a full copy of a leader's state.
#[derive(Debug)]
pub struct StateCopyWriter {
    durable: DurableJournal,
    writer: snapshot::SnapshotWriter,
    generation: u64,
}

impl StateCopyWriter {
    /// Appends a record of the full state.
    ///
    /// # Errors
    /// An error of the file system.
    pub fn part(&mut self, record: &[u8]) -> io::Result<()> {
        self.writer.write(record).map_err(to_io_error)
    }

    /// Appends a log record that follows the full state.
    pub fn record(&self, record: &[u8]) {
        self.durable.log().append(record);
    }
}

fn state_at(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number}"))
}

/// Moves a damaged state to `damaged/`, replacing the previous one there. Returns its new path.
fn preserve_damaged(folder: &Path, number: u64) -> Option<PathBuf> {
    let preserved = folder.join(DAMAGED);
    let from = state_at(folder, number);
    if !from.is_dir() {
        return None;
    }
    let replaced = match fs::remove_dir_all(&preserved) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::rename(&from, &preserved),
    };
    match replaced {
        Ok(()) => Some(preserved),
        Err(error) => {
            tracing::warn!(%error, path = %from.display(), "cannot move the damaged state away");
            None
        }
    }
}

/// Whether the folder contains the log or a snapshot of a standalone master.
fn is_standalone(folder: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(folder)? {
        if entry?.path().extension().is_some_and(|suffix| suffix == "log" || suffix == "snap") {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::epochs::{LeaderEpoch, LogPosition};
    use crate::record;
    use tempfile::TempDir;

    fn options(folder: &Path, boot: &str) -> MemberFolderOptions {
        let log = OplogOptions { boot_id: boot.to_owned(), ..OplogOptions::default() };
        MemberFolderOptions {
            folder: folder.to_owned(),
            log,
            schedule: PersistenceSchedule { snapshot_after_records: 100, ..PersistenceSchedule::default() },
        }
    }

    fn open(folder: &Path, boot: &str) -> (MemberFolder, MasterState, RestoreReport) {
        let opened = MemberFolder::open(options(folder, boot), &MasterCoreOptions::default()).unwrap();
        (opened.folder, opened.state, opened.report)
    }

    fn at(epoch: u64, number: u64) -> Option<LogPosition> {
        Some(LogPosition { epoch, number })
    }

    fn folders(path: &Path) -> usize {
        let names =
            fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with(PREFIX)).count()
    }

    fn quota(bytes: u64) -> Vec<u8> {
        let fact =
            moongate_master_core::StateChange::TenantQuota { tenant: "a".into(), requested: Some(bytes) };
        let mut encoded = Vec::new();
        moongate_master_core::encode(&fact, &mut encoded);
        encoded
    }

    #[test]
    fn the_incarnation_changes_only_when_the_state_is_lost() {
        let folder = TempDir::new().unwrap();
        let (disk, state, _) = open(folder.path(), "a");
        let incarnation = disk.incarnation();
        assert_eq!((state.position(), state.last_record), (None, 0));
        disk.durable().log().append(&record::epoch(5));
        disk.durable().log().append(&quota(1));
        disk.durable().log().commit(2).unwrap();
        disk.durable().log().append(&quota(2));
        drop(disk);
        let (disk, state, restored) = open(folder.path(), "a");
        assert_eq!((disk.incarnation(), state.position()), (incarnation, at(5, 2)), "{restored:?}");
        drop(disk);
        // The machine has crashed.
        let (disk, state, restored) = open(folder.path(), "b");
        assert!(disk.incarnation() != incarnation && state.position().is_none(), "{restored:?}");
        let incarnation = disk.incarnation();
        drop(disk);
        fs::remove_dir_all(folder.path().join("state-2")).unwrap();
        assert_ne!(open(folder.path(), "b").0.incarnation(), incarnation, "its state is missing");
        fs::write(folder.path().join(MEMBER_FILE), "x").unwrap();
        let refused = MemberFolder::open(options(folder.path(), "b"), &MasterCoreOptions::default());
        assert!(matches!(refused, Err(MemberFolderError::UnreadableIdentity(_))));
    }

    #[test]
    fn a_damaged_log_starts_an_empty_new_member() {
        let folder = TempDir::new().unwrap();
        let (disk, ..) = open(folder.path(), "a");
        disk.durable().log().append(&record::epoch(5));
        (0..20).for_each(|number| _ = disk.durable().log().append(&quota(number)));
        disk.durable().log().commit(21).unwrap();
        let incarnation = disk.incarnation();
        drop(disk);
        let log = folder.path().join("state-1/log-00000000000000000001.log");
        let mut bytes = fs::read(&log).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&log, &bytes).unwrap();
        let (disk, state, restored) = open(folder.path(), "a");
        assert!(disk.incarnation() != incarnation && state.position().is_none(), "{restored:?}");
        assert!(matches!(&restored.recovery, RecoveryOutcome::Damaged(damage) if damage.missing_records > 0));
        assert_eq!(disk.durable().recovery(), &restored.recovery);
        // The damaged files are preserved.
        let preserved = folder.path().join("damaged/log-00000000000000000001.log");
        assert_eq!(fs::read(preserved).unwrap(), bytes);
    }

    #[test]
    fn a_copy_becomes_valid_when_complete() {
        let folder = TempDir::new().unwrap();
        let (disk, ..) = open(folder.path(), "a");
        disk.durable().log().append(&record::epoch(5));
        disk.durable().log().commit(1).unwrap();
        let copy = |disk: &MemberFolder| {
            let mut copy_writer = disk.begin_copy(700).unwrap();
            let epochs = [(5, 1), (6, 90)].map(|(id, first)| LeaderEpoch { id, first }).into_iter().collect();
            copy_writer.part(&record::epochs(&epochs)).unwrap();
            copy_writer.record(&quota(7));
            copy_writer
        };
        drop(copy(&disk));
        drop(disk);
        let (mut disk, state, _) = open(folder.path(), "a");
        assert_eq!((state.position(), folders(folder.path())), (at(5, 1), 1));
        let (incarnation, copy_writer) = (disk.incarnation(), copy(&disk));
        disk.finish_copy(copy_writer).unwrap();
        assert_eq!(disk.durable().log().append(&quota(8)), 702);
        disk.close().unwrap();
        drop(disk);
        let (disk, state, _) = open(folder.path(), "b");
        assert_eq!((disk.incarnation(), state.position()), (incarnation, at(6, 702)));
        assert_eq!(folders(folder.path()), 1);
    }

    #[test]
    fn snapshots_are_written_and_reduce_replay() {
        let folder = TempDir::new().unwrap();
        let (mut disk, mut state, _) = open(folder.path(), "a");
        let first = record::epoch(5);
        for number in 1..=1000 {
            let record = if number == 1 { first.clone() } else { quota(number) };
            disk.durable().log().append(&record);
            state.apply_next(&record);
            disk.durable().log().commit(number).unwrap();
            disk.poll_snapshot(&state);
        }
        disk.abort_snapshot();
        assert!(!snapshot::list(disk.durable().folder()).unwrap().is_empty());
        drop(disk);
        let (_, state, restored) = open(folder.path(), "a");
        assert_eq!(state.position(), at(5, 1000));
        assert!(restored.snapshot.is_some() && restored.replayed_facts < 1000, "{restored:?}");
    }

    #[test]
    fn the_folder_of_a_standalone_master_is_rejected() {
        let folder = TempDir::new().unwrap();
        drop(
            DurableJournal::load(folder.path(), OplogOptions::default(), &MasterCoreOptions::default())
                .unwrap(),
        );
        let refused = MemberFolder::open(options(folder.path(), "a"), &MasterCoreOptions::default());
        assert!(matches!(refused, Err(MemberFolderError::StandaloneState(_))));
    }
}
