//! What several fuzz targets share.

use std::fs;
use std::path::PathBuf;

/// Puts a text into a file of this process, which the next text replaces, for what reads files only.
///
/// # Panics
/// When the folder for temporary files takes none.
#[must_use]
pub fn file_of(text: &[u8]) -> PathBuf {
    let path = std::env::temp_dir().join(format!("moongate-fuzz-{}", std::process::id()));
    fs::write(&path, text).expect("temporary files can be written");
    path
}
