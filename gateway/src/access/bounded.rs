//! Small files that must not be large.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// The text of a file of at most `most` bytes. A larger one is refused before it is read.
pub(super) fn read_limited(path: &Path, most: u64) -> Result<String, String> {
    let too_large = || format!("it has more than {most} bytes");
    let file = File::open(path).map_err(|error| error.to_string())?;
    if file.metadata().map_err(|error| error.to_string())?.len() > most {
        return Err(too_large());
    }
    // It may grow meanwhile, and a pipe tells no length.
    let mut text = String::new();
    let read = file.take(most + 1).read_to_string(&mut text).map_err(|error| error.to_string())?;
    if read as u64 > most { Err(too_large()) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_large_is_not_read() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "12345").unwrap();
        assert_eq!(read_limited(file.path(), 5).as_deref(), Ok("12345"));
        assert!(read_limited(file.path(), 4).unwrap_err().contains("more than 4 bytes"));
        // A file of 4 GiB that takes no room.
        file.as_file().set_len(1 << 32).unwrap();
        assert!(read_limited(file.path(), 16 << 20).unwrap_err().contains("more than"));
        let endless = read_limited(Path::new("/dev/zero"), 1 << 10);
        assert!(endless.unwrap_err().contains("more than"), "a device tells no length");
        assert!(read_limited(Path::new("/no/such/file"), 1).is_err());
    }
}
