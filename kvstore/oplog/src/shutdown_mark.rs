//! The file `closed`, which marks a clean shutdown. It contains the number of the last record.

use crate::directory::LogDirectory;
use crate::{OplogError, io_error};

pub(crate) const NAME: &str = "closed";

/// The last record of a log that was closed; `None` if it was not closed.
pub(crate) fn read(folder: &LogDirectory) -> Result<Option<u64>, OplogError> {
    let bytes = folder.get(NAME).map_err(io_error(folder.path().join(NAME)))?;
    Ok(bytes.and_then(|bytes| String::from_utf8(bytes).ok()?.trim().parse().ok()))
}

pub(crate) fn write(folder: &LogDirectory, last: u64) -> Result<(), OplogError> {
    folder.put(NAME, last.to_string().as_bytes()).map_err(io_error(folder.path()))
}

/// Removes the file, which must exist.
pub(crate) fn remove(folder: &LogDirectory) -> Result<(), OplogError> {
    let path = folder.path().join(NAME);
    folder.disk().remove(&path).map_err(io_error(path))
}
