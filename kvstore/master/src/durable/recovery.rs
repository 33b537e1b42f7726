//! What a start found of the state before it.

use std::fmt;
use std::path::PathBuf;

use moongate_oplog::LogDamage;

/// What became of the state that a folder had.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RecoveryOutcome {
    /// All that was answered for is there.
    #[default]
    Intact,
    /// Complete. The torn tail of an unanswered change was truncated.
    TornTail {
        /// The bytes of it.
        bytes: u64,
    },
    /// The same, although files are damaged: others had all that was needed.
    IntactDespiteDamage(StateDamage),
    /// Answered changes cannot be read. Only objects are restored that were written after the damage, with an unbroken log
    /// since; the others are absent.
    Damaged(StateDamage),
    /// The machine has died, and the last changes may not have reached its disk. No objects are there.
    MachineDied,
}

impl RecoveryOutcome {
    /// Whether all objects are there that were answered for.
    pub fn is_complete(&self) -> bool {
        matches!(self, Self::Intact | Self::TornTail { .. } | Self::IntactDespiteDamage(_))
    }

    /// The damage to files, whatever came of it.
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
            Self::TornTail { bytes } => write!(f, "complete; {bytes} bytes of an unanswered change were cut off"),
            Self::IntactDespiteDamage(damage) => write!(f, "complete, although files were damaged: {damage}"),
            Self::Damaged(damage) => {
                write!(f, "only objects that are proven: changes were lost: {damage}")
            }
            Self::MachineDied => f.write_str(
                "without objects: the machine has died since, and the last changes may not have reached its disk: an object's \
                 memory may hold another by now",
            ),
        }
    }
}

/// Damage to the files of a state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateDamage {
    /// What is wrong, and where.
    pub description: String,
    /// Bytes of the log that are no readable records.
    pub unreadable_bytes: u64,
    /// Missing changes, at least.
    pub missing_records: u64,
    /// Snapshots that cannot be read.
    pub damaged_snapshots: u64,
    /// Objects that were there before the damage, and are not proven.
    pub unproven_keys: u64,
    /// Where the damaged files are kept.
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
            description: what,
            unreadable_bytes,
            missing_records,
            damaged_snapshots,
            unproven_keys,
            preserved_at: kept,
        } = self;
        write!(
            f,
            "{what}; {unreadable_bytes} bytes unreadable, at least {missing_records} changes missing, {damaged_snapshots} snapshots \
             damaged, {unproven_keys} earlier objects not proven"
        )?;
        match kept {
            Some(kept) => write!(f, "; the damaged files are kept in {}", kept.display()),
            None => Ok(()),
        }
    }
}
