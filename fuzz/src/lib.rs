//! Code shared by several fuzz targets.

use std::fs;
use std::path::PathBuf;

/// Writes a text to this process's temporary file, replacing the previous one, for code that only reads files.
///
/// # Panics
/// When the temporary folder is not writable.
#[must_use]
pub fn file_of(text: &[u8]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("moongate-fuzz-{}", std::process::id()));
    fs::write(&path, text).expect("temporary files can be written");
    path
}
