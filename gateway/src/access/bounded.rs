//! Reads small files with an upper limit of their size.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// Reads a file of at most `max_bytes` bytes. A larger one is rejected before it is read.
pub(super) fn read_limited(path: &Path, max_bytes: u64) -> Result<String, String> {
    let too_large = || format!("it has more than {max_bytes} bytes");
    let file = File::open(path).map_err(|error| error.to_string())?;
    if file.metadata().map_err(|error| error.to_string())?.len() > max_bytes {
        return Err(too_large());
    }
    // The file may grow in the meantime, and a pipe reports length 0.
    let mut text = String::new();
    let read = file.take(max_bytes + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if read as u64 > max_bytes { Err(too_large()) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_over_the_limit_are_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "12345").unwrap();
        assert_eq!(read_limited(file.path(), 5).as_deref(), Ok("12345"));
        assert!(read_limited(file.path(), 4).unwrap_err().contains("more than 4 bytes"));
        // A sparse file of 4 GiB, which occupies no disk blocks.
        file.as_file().set_len(1 << 32).unwrap();
        assert!(read_limited(file.path(), 16 << 20).unwrap_err().contains("more than"));
        let endless = read_limited(Path::new("/dev/zero"), 1 << 10);
        assert!(endless.unwrap_err().contains("more than"), "a device reports no length");
        assert!(read_limited(Path::new("/no/such/file"), 1).is_err());
    }
}
