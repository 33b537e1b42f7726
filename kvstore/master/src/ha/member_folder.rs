//! The folder of a master among others: its state on disk while it stands by, and who it is.
//!
//! - `member`: the member's incarnation, and the number of the folder below that counts.
//! - `state-N/`: a log and its snapshots. A whole copy of a leader's state gets a new folder, which counts once it is whole; then the one
//!   before is removed.
//!
//! - `damaged/`: the last state whose files were damaged.
//!
//! As long as the state is there, the master is the same [`HaMember`](super::Member) after each start. When the state cannot be trusted
//! it begins empty, and as another one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use moongate_master_core::MasterCoreOptions;
use moongate_oplog::{LogDirectory, OplogError, OplogOptions, snapshot};

use super::standby_snapshot::StandbySnapshotter;
use crate::durable::{
    DurableJournal, LoadedState, PersistenceSchedule, RecoveryOutcome, RestoreReport, StateDamage,
};
use crate::state::MasterState;

/// The file that tells who the master is.
pub(crate) const MEMBER: &str = "member";
const PREFIX: &str = "state-";
/// The folder for the last state that was damaged.
const DAMAGED: &str = "damaged";

/// How a state is kept.
#[derive(Clone, Debug)]
pub struct MemberFolderOptions {
    /// The folder.
    pub folder: PathBuf,
    /// How its log is kept.
    pub log: OplogOptions,
    /// How often snapshots are written.
    pub schedule: PersistenceSchedule,
}

/// A folder that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MemberFolderError {
    /// What the file system or the log says.
    #[error(transparent)]
    Log(#[from] OplogError),
    /// It is a single master's.
    #[error(
        "{0} has the state of a master that was the only one; give it another folder, or start it without --enable_ha"
    )]
    StandaloneState(PathBuf),
    /// It is not known who it belongs to.
    #[error("{0} is not what was written; move the folder away to begin anew")]
    UnreadableIdentity(PathBuf),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemberIdentity {
    incarnation: u64,
    /// The number of the folder that counts.
    state: u64,
}

impl MemberIdentity {
    fn write(self, folder: &LogDirectory) -> io::Result<()> {
        folder
            .put(MEMBER, format!("incarnation {:016x}\nstate {}\n", self.incarnation, self.state).as_bytes())
    }

    fn read(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let incarnation = u64::from_str_radix(lines.next()?.strip_prefix("incarnation ")?, 16).ok()?;
        Some(Self { incarnation, state: lines.next()?.strip_prefix("state ")?.parse().ok()? })
    }
}

/// A member's folder.
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

impl MemberFolder {
    /// Takes a folder, which is made if it is not there, and reads its state.
    ///
    /// # Errors
    /// [`MemberFolderError`]. Damaged files are no error: then the state is empty, and [`RestoreReport`] tells why.
    pub fn open(
        options: MemberFolderOptions,
        settings: &MasterCoreOptions,
    ) -> Result<(Self, MasterState, RestoreReport), MemberFolderError> {
        let folder = LogDirectory::lock(&options.folder)?;
        let path = options.folder.join(MEMBER);
        let known = match fs::read_to_string(&path) {
            Ok(text) => Some(
                MemberIdentity::read(&text)
                    .ok_or_else(|| MemberFolderError::UnreadableIdentity(path.clone()))?,
            ),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(file_error(&path)(error).into()),
        };
        if known.is_none() && is_standalone(&options.folder).map_err(file_error(&options.folder))? {
            return Err(MemberFolderError::StandaloneState(options.folder));
        }
        let (mut found, mut recovery) = (None, RecoveryOutcome::Intact);
        if let Some(known) = known {
            let path = state_at(&options.folder, known.state);
            // A log that is not there would look like one without records.
            let loaded = match path.is_dir() {
                true => Some(DurableJournal::load(&path, options.log.clone(), settings)?),
                false => None,
            };
            match loaded {
                Some(LoadedState::Complete(loaded)) => found = Some((known, *loaded)),
                // A leader has it all: what could be proven here alone is less than what it will send.
                Some(LoadedState::Partial(loaded)) => recovery = loaded.2.recovery,
                Some(LoadedState::MachineDied(None)) => recovery = RecoveryOutcome::MachineDied,
                Some(LoadedState::MachineDied(Some(damage))) => recovery = RecoveryOutcome::Damaged(damage),
                None => {
                    let what = format!("{} is gone", path.display());
                    recovery =
                        RecoveryOutcome::Damaged(StateDamage { description: what, ..StateDamage::default() });
                }
            }
        }
        let (identity, (mut durable, state, restored)) = match found {
            Some(found) => found,
            None => {
                let number = known.map_or(1, |it| it.state.saturating_add(1));
                let identity = MemberIdentity { incarnation: fastrand::u64(..), state: number };
                if let (Some(known), RecoveryOutcome::Damaged(damage)) = (known, &mut recovery) {
                    damage.preserved_at = preserve_damaged(&options.folder, known.state);
                }
                let path = state_at(&options.folder, number);
                let durable = DurableJournal::begin(&path, options.log.clone(), 1)?;
                identity.write(&folder).map_err(file_error(&options.folder))?;
                let restored = RestoreReport { recovery, ..RestoreReport::default() };
                (identity, (durable, MasterState::empty(settings), restored))
            }
        };
        restored.log_losses(&options.folder);
        durable.set_recovery(restored.recovery.clone());
        let tending = StandbySnapshotter::new(durable.log().oldest());
        let disk = Self { options, folder, identity, durable: Arc::new(durable), snapshotter: tending };
        disk.remove_stale_states();
        Ok((disk, state, restored))
    }

    /// Tells this member's lives apart: another one when the state was lost.
    pub fn incarnation(&self) -> u64 {
        self.identity.incarnation
    }

    /// The log that counts.
    pub fn durable(&self) -> &Arc<DurableJournal> {
        &self.durable
    }

    /// How it is kept.
    pub fn options(&self) -> &MemberFolderOptions {
        &self.options
    }

    /// Begins a whole copy, which will have all records up to `number`.
    ///
    /// # Errors
    /// What the file system says.
    pub fn begin_copy(&self, number: u64) -> io::Result<StateCopyWriter> {
        let generation = self.identity.state.saturating_add(1);
        let path = state_at(&self.options.folder, generation);
        if path.exists() {
            // A copy that was broken off.
            fs::remove_dir_all(&path)?;
        }
        let durable = DurableJournal::begin(&path, self.options.log.clone(), number.saturating_add(1));
        let durable = durable.map_err(to_io_error)?;
        let writer =
            snapshot::SnapshotWriter::begin(Arc::clone(durable.folder()), number).map_err(to_io_error)?;
        Ok(StateCopyWriter { durable, writer, generation })
    }

    /// A whole copy is what counts from now on.
    ///
    /// # Errors
    /// What the file system says. Then the state before still counts.
    pub fn finish_copy(&mut self, copying: StateCopyWriter) -> io::Result<()> {
        let StateCopyWriter { durable, writer, generation } = copying;
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

    /// Looks after snapshots; a little is done each time.
    pub fn poll_snapshot(&mut self, state: &MasterState) {
        self.snapshotter.poll(&self.durable, state, self.options.schedule);
    }

    /// Gives up the snapshot that is being written. Another may write them afterwards.
    pub fn abort_snapshot(&mut self) {
        self.snapshotter.abort();
    }

    /// Writes all that is left, so that nothing is doubted at the next start.
    ///
    /// # Errors
    /// What the file system says.
    pub fn close(&mut self) -> Result<(), OplogError> {
        self.abort_snapshot();
        self.durable.log().close()
    }

    /// Copies that were broken off, and what has been replaced.
    fn remove_stale_states(&self) {
        let counts = state_at(&self.options.folder, self.identity.state);
        let Ok(entries) = fs::read_dir(&self.options.folder) else { return };
        for path in entries.flatten().map(|entry| entry.path()) {
            let is_state =
                path.file_name().and_then(|name| name.to_str()).is_some_and(|it| it.starts_with(PREFIX));
            if is_state
                && path != counts
                && let Err(error) = fs::remove_dir_all(&path)
            {
                tracing::warn!(%error, path = %path.display(), "a state that is not needed any more stays");
            }
        }
    }
}

/// A whole copy on its way to the disk.
#[derive(Debug)]
pub struct StateCopyWriter {
    durable: DurableJournal,
    writer: snapshot::SnapshotWriter,
    generation: u64,
}

impl StateCopyWriter {
    /// A part of the state.
    ///
    /// # Errors
    /// What the file system says.
    pub fn part(&mut self, record: &[u8]) -> io::Result<()> {
        self.writer.write(record).map_err(to_io_error)
    }

    /// A record after it.
    pub fn record(&self, record: &[u8]) {
        self.durable.log().append(record);
    }
}

fn state_at(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("{PREFIX}{number}"))
}

/// Puts a damaged state aside, in place of the one that was put aside before. Returns where it is.
fn preserve_damaged(folder: &Path, number: u64) -> Option<PathBuf> {
    let kept = folder.join(DAMAGED);
    let from = state_at(folder, number);
    if !from.is_dir() {
        return None;
    }
    let replaced = match fs::remove_dir_all(&kept) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => fs::rename(&from, &kept),
    };
    match replaced {
        Ok(()) => Some(kept),
        Err(error) => {
            tracing::warn!(%error, path = %from.display(), "a damaged state cannot be put aside");
            None
        }
    }
}

/// Whether a master without others has its log here.
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
        MemberFolder::open(options(folder, boot), &MasterCoreOptions::default()).unwrap()
    }

    fn folders(path: &Path) -> usize {
        let names = fs::read_dir(path).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
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
    fn a_member_stays_itself_as_long_as_its_state_is_there() {
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
        assert_eq!((disk.incarnation(), state.position()), (incarnation, Some((5, 2))), "{restored:?}");
        drop(disk);
        // The machine has died.
        let (disk, state, restored) = open(folder.path(), "b");
        assert!(disk.incarnation() != incarnation && state.position().is_none(), "{restored:?}");
        let incarnation = disk.incarnation();
        drop(disk);
        fs::remove_dir_all(folder.path().join("state-2")).unwrap();
        assert_ne!(open(folder.path(), "b").0.incarnation(), incarnation, "its state is gone");
        fs::write(folder.path().join(MEMBER), "x").unwrap();
        let refused = MemberFolder::open(options(folder.path(), "b"), &MasterCoreOptions::default());
        assert!(matches!(refused, Err(MemberFolderError::UnreadableIdentity(_))));
    }

    #[test]
    fn a_member_whose_log_is_damaged_begins_empty_and_as_another() {
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
        assert!(matches!(&restored.recovery, RecoveryOutcome::Damaged(it) if it.missing_records > 0));
        assert_eq!(disk.durable().recovery(), &restored.recovery);
        // The damaged files are preserved.
        let kept = folder.path().join("damaged/log-00000000000000000001.log");
        assert_eq!(fs::read(kept).unwrap(), bytes);
    }

    #[test]
    fn a_copy_counts_when_it_is_whole() {
        let folder = TempDir::new().unwrap();
        let (disk, ..) = open(folder.path(), "a");
        disk.durable().log().append(&record::epoch(5));
        disk.durable().log().commit(1).unwrap();
        let copy = |disk: &MemberFolder| {
            let mut copying = disk.begin_copy(700).unwrap();
            let epochs = [(5, 1), (6, 90)].into_iter().collect();
            copying.part(&record::epochs(&epochs)).unwrap();
            copying.record(&quota(7));
            copying
        };
        drop(copy(&disk));
        drop(disk);
        let (mut disk, state, _) = open(folder.path(), "a");
        assert_eq!((state.position(), folders(folder.path())), (Some((5, 1)), 1));
        let (incarnation, copying) = (disk.incarnation(), copy(&disk));
        disk.finish_copy(copying).unwrap();
        assert_eq!(disk.durable().log().append(&quota(8)), 702);
        disk.close().unwrap();
        drop(disk);
        let (disk, state, _) = open(folder.path(), "b");
        assert_eq!((disk.incarnation(), state.position()), (incarnation, Some((6, 702))));
        assert_eq!(folders(folder.path()), 1);
    }

    #[test]
    fn snapshots_keep_the_log_short() {
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
        assert_eq!(state.position(), Some((5, 1000)));
        assert!(restored.snapshot.is_some() && restored.replayed_facts < 1000, "{restored:?}");
    }

    #[test]
    fn a_single_masters_folder_is_refused() {
        let folder = TempDir::new().unwrap();
        drop(
            DurableJournal::load(folder.path(), OplogOptions::default(), &MasterCoreOptions::default())
                .unwrap(),
        );
        let refused = MemberFolder::open(options(folder.path(), "a"), &MasterCoreOptions::default());
        assert!(matches!(refused, Err(MemberFolderError::StandaloneState(_))));
    }
}
