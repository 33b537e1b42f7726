//! Reads small files with an upper limit of their size.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

/// Why a small file was not read.
#[derive(Debug, thiserror::Error)]
pub enum BoundedReadError {
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file exceeds this limit.
    #[error("it has more than {0} bytes")]
    TooLarge(u64),
}

/// Reads a file of at most `max_bytes` bytes. A larger one is rejected before it is read.
pub(crate) fn read_limited(path: &Path, max_bytes: u64) -> Result<String, BoundedReadError> {
    let file = File::open(path)?;
    if file.metadata()?.len() > max_bytes {
        return Err(BoundedReadError::TooLarge(max_bytes));
    }
    // The file may grow in the meantime, and a pipe reports length 0.
    let mut text = String::new();
    let read = file.take(max_bytes + 1).read_to_string(&mut text)?;
    if read as u64 > max_bytes { Err(BoundedReadError::TooLarge(max_bytes)) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_over_the_limit_are_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "12345").unwrap();
        assert_eq!(read_limited(file.path(), 5).unwrap(), "12345");
        assert_eq!(read_limited(file.path(), 4).unwrap_err().to_string(), "it has more than 4 bytes");
        // A sparse file of 4 GiB, which occupies no disk blocks.
        file.as_file().set_len(1 << 32).unwrap();
        assert!(matches!(read_limited(file.path(), 16 << 20), Err(BoundedReadError::TooLarge(_))));
        let endless = read_limited(Path::new("/dev/zero"), 1 << 10);
        assert!(matches!(endless, Err(BoundedReadError::TooLarge(_))), "a device reports no length");
        assert!(matches!(read_limited(Path::new("/no/such/file"), 1), Err(BoundedReadError::Io(_))));
    }
}
