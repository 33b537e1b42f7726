//! The file that says of which shard of a store a folder has the state. With another `--shard`, objects would be searched for where they are
//! not, and written a second time.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use mooncake_wire::shards::ShardIdentity;

use super::MEMBER_FILE;

const SHARD_FILE: &str = "shard";

/// A folder cannot be used by this shard.
#[derive(Debug, thiserror::Error)]
pub enum ShardMarkerError {
    #[error(
        "{} contains the state of {stored}, but this master is {given}; set the --shard that it had, or another --data_dir",
        folder.display()
    )]
    OtherShard { folder: PathBuf, stored: String, given: String },
    #[error("cannot access {}", path.display())]
    File { path: PathBuf, source: io::Error },
}

fn name(shard: Option<&str>) -> String {
    shard.map_or_else(|| "a master without --shard".to_owned(), |shard| format!("shard {shard}"))
}

/// Marks a folder as that of a shard, before it has any state. Nothing is written for the only master of a store.
///
/// # Errors
/// When it has the state of another shard, or cannot be accessed.
pub(crate) fn mark_folder(folder: &Path, shard: Option<ShardIdentity>) -> Result<(), ShardMarkerError> {
    let path = folder.join(SHARD_FILE);
    let stored = match fs::read_to_string(&path) {
        Ok(text) => Some(text.trim().to_owned()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(ShardMarkerError::File { path, source }),
    };
    let given = shard.map(|shard| shard.to_string());
    if stored == given {
        return Ok(());
    }
    let file_error = |source| ShardMarkerError::File { path: path.clone(), source };
    match &given {
        Some(given) if stored.is_none() && !has_state(folder).map_err(file_error)? => {
            write(&path, given).map_err(file_error)
        }
        _ => {
            let (stored, given) = (name(stored.as_deref()), name(given.as_deref()));
            Err(ShardMarkerError::OtherShard { folder: folder.to_owned(), stored, given })
        }
    }
}

/// Writes the file, which is complete or absent after a crash.
fn write(path: &Path, shard: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let unfinished = path.with_extension("new");
    let mut file = File::create(&unfinished)?;
    writeln!(file, "{shard}")?;
    file.sync_all()?;
    fs::rename(&unfinished, path)
}

/// Whether the folder contains the state of a master.
fn has_state(folder: &Path) -> io::Result<bool> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let is_state = path.extension().is_some_and(|suffix| suffix == "log" || suffix == "snap");
        if is_state || path.ends_with(MEMBER_FILE) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard(index: u64) -> Option<ShardIdentity> {
        Some(ShardIdentity { index, count: 4 })
    }

    #[test]
    fn a_folder_is_used_by_one_shard_only() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data");
        mark_folder(&path, shard(1)).unwrap();
        mark_folder(&path, shard(1)).unwrap();
        for other in [shard(2), None] {
            let refused = mark_folder(&path, other).unwrap_err().to_string();
            assert!(refused.contains("the state of shard 1/4, but this master is"), "{refused}");
        }
    }

    #[test]
    fn the_state_of_a_single_master_is_not_that_of_a_shard() {
        let folder = tempfile::tempdir().unwrap();
        for file in ["1.log", MEMBER_FILE] {
            let path = folder.path().join(file);
            fs::write(&path, "").unwrap();
            mark_folder(folder.path(), None).unwrap();
            let refused = mark_folder(folder.path(), shard(0)).unwrap_err().to_string();
            assert!(refused.contains("a master without --shard, but this master is shard 0/4"), "{refused}");
            fs::remove_file(&path).unwrap();
        }
        mark_folder(folder.path(), shard(0)).unwrap();
    }
}
