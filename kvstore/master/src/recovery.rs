//! The result of restoring a state from its folder.

use std::fmt;
use std::path::PathBuf;

use moongate_oplog::LogDamage;

/// How much of the previous state was restored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RecoveryOutcome {
    /// All confirmed changes are present.
    #[default]
    Intact,
    /// Complete. A torn record at the end of the log, which was never confirmed, was truncated.
    TornTail {
        /// Number of truncated bytes.
        bytes: u64,
    },
    /// Complete although files are damaged: other files contain everything needed.
    IntactDespiteDamage(StateDamage),
    /// Confirmed changes are unreadable. Only objects written after the damage, in an unbroken part of the log, are restored; all others
    /// are dropped.
    Damaged(StateDamage),
    /// The machine has crashed, and the last changes may not have reached the disk. No object is restored.
    MachineDied,
}

impl RecoveryOutcome {
    /// Whether all confirmed objects are present.
    pub fn is_complete(&self) -> bool {
        matches!(self, Self::Intact | Self::TornTail { .. } | Self::IntactDespiteDamage(_))
    }

    /// The damage to files, whether it caused losses or not.
    pub fn damage(&self) -> Option<&StateDamage> {
        match self {
            Self::IntactDespiteDamage(damage) | Self::Damaged(damage) => Some(damage),
            Self::Intact | Self::TornTail { .. } | Self::MachineDied => None,
        }
    }
}

impl fmt::Display for RecoveryOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Intact => f.write_str("complete"),
            Self::TornTail { bytes } => write!(f, "complete; truncated a torn record of {bytes} bytes"),
            Self::IntactDespiteDamage(damage) => write!(f, "complete despite damaged files: {damage}"),
            Self::Damaged(damage) => {
                write!(f, "verified objects only; changes were lost: {damage}")
            }
            Self::MachineDied => f.write_str(
                "without objects: the machine has crashed and the last changes may not have reached its disk, so an object's \
                 memory may contain another object",
            ),
        }
    }
}

/// Damage to the files of a state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateDamage {
    /// Description of the damage, with its file.
    pub description: String,
    /// Bytes of the log that are not readable records.
    pub unreadable_bytes: u64,
    /// Minimum number of missing changes.
    pub missing_records: u64,
    pub damaged_snapshots: u64,
    /// Objects from before the damage that could not be verified.
    pub unverified_objects: u64,
    /// Folder to which the damaged files were moved.
    pub preserved_at: Option<PathBuf>,
}

impl From<&LogDamage> for StateDamage {
    fn from(damage: &LogDamage) -> Self {
        let &LogDamage { unreadable_bytes, missing_records, .. } = damage;
        Self { description: damage.to_string(), unreadable_bytes, missing_records, ..Self::default() }
    }
}

impl fmt::Display for StateDamage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            description,
            unreadable_bytes,
            missing_records,
            damaged_snapshots,
            unverified_objects,
            preserved_at,
        } = self;
        write!(
            f,
            "{description}; {unreadable_bytes} bytes unreadable, at least {missing_records} changes missing, {damaged_snapshots} snapshots \
             damaged, {unverified_objects} earlier objects unverified"
        )?;
        match preserved_at {
            Some(path) => write!(f, "; the damaged files are in {}", path.display()),
            None => Ok(()),
        }
    }
}
