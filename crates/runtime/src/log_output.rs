//! Standard error as the destination of log lines.
//!
//! Logging must never end or stall the process. A line that cannot be written (no reader, disk full) is dropped and counted, and a pipe
//! whose reader has stopped delays the process once by [`WRITE_TIMEOUT`], not once per line.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

/// Maximum wait per line for the reader: longer than pauses of a busy log collector, shorter than a probe's timeout.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Bytes per write. A pipe that polls as writable takes a page without blocking (`PIPE_BUF` on Linux).
const CHUNK_BYTES: usize = 4096;

static LINES_DROPPED: AtomicU64 = AtomicU64::new(0);
static STDERR: Mutex<LogLineWriter> = Mutex::new(LogLineWriter::new());

/// Number of this process's log lines that could not be written to standard error.
#[must_use]
pub fn log_lines_dropped() -> u64 {
    LINES_DROPPED.load(Ordering::Relaxed)
}

/// Writes log lines to standard error. Each call of `write` is one line and always succeeds.
#[derive(Debug, Clone, Copy, Default)]
pub struct StderrLogOutput;

impl io::Write for StderrLogOutput {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let dropped = STDERR.lock().write(io::stderr().as_fd(), line);
        // After the lock is released, because this line is written here too.
        if let Some(DroppedLogLines { lines, cause }) = dropped {
            tracing::warn!(lines, %cause, "log lines could not be written to standard error");
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines dropped before the output worked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct DroppedLogLines {
    lines: u64,
    cause: Errno,
}

struct LogLineWriter {
    /// Whether the reader has not read for [`WRITE_TIMEOUT`].
    is_stalled: bool,
    /// Whether the last written line is incomplete.
    ends_mid_line: bool,
    dropped: Option<DroppedLogLines>,
}

impl LogLineWriter {
    const fn new() -> Self {
        Self { is_stalled: false, ends_mid_line: false, dropped: None }
    }

    /// Writes or drops the line. When the output works again, returns the earlier losses once.
    fn write(&mut self, output: BorrowedFd<'_>, line: &[u8]) -> Option<DroppedLogLines> {
        let Err(cause) = self.write_line(output, line) else {
            self.is_stalled = false;
            return self.dropped.take();
        };
        self.is_stalled = cause == Errno::TIMEDOUT;
        LINES_DROPPED.fetch_add(1, Ordering::Relaxed);
        let lines = self.dropped.map_or(0, |dropped| dropped.lines) + 1;
        self.dropped = Some(DroppedLogLines { lines, cause });
        None
    }

    fn write_line(&mut self, output: BorrowedFd<'_>, line: &[u8]) -> Result<(), Errno> {
        let timeout = if self.is_stalled { Duration::ZERO } else { WRITE_TIMEOUT };
        let deadline = Instant::now() + timeout;
        if self.ends_mid_line {
            write_chunk(output, b"\n", deadline)?;
            self.ends_mid_line = false;
        }
        let mut rest = line;
        while !rest.is_empty() {
            let chunk = &rest[..rest.len().min(CHUNK_BYTES)];
            match write_chunk(output, chunk, deadline) {
                Ok(written) => rest = &rest[written..],
                Err(cause) => {
                    self.ends_mid_line |= rest.len() < line.len();
                    return Err(cause);
                }
            }
        }
        Ok(())
    }
}

/// Writes part of the chunk as soon as the output is writable.
fn write_chunk(output: BorrowedFd<'_>, chunk: &[u8], deadline: Instant) -> Result<usize, Errno> {
    loop {
        wait_until_writable(output, deadline)?;
        match rustix::io::write(output, chunk) {
            Ok(0) => return Err(Errno::IO),
            Ok(written) => return Ok(written),
            Err(Errno::INTR) => {}
            // Another process that shares the descriptor may have made it non-blocking.
            Err(Errno::AGAIN) if Instant::now() >= deadline => return Err(Errno::TIMEDOUT),
            Err(Errno::AGAIN) => std::thread::yield_now(),
            Err(cause) => return Err(cause),
        }
    }
}

fn wait_until_writable(output: BorrowedFd<'_>, deadline: Instant) -> Result<(), Errno> {
    loop {
        let remaining = deadline.saturating_duration_since(Instant::now());
        // At most one second, which fits a Timespec.
        let timeout = Timespec::try_from(remaining).map_err(|_| Errno::INVAL)?;
        match poll(&mut [PollFd::from_borrowed_fd(output, PollFlags::OUT)], Some(&timeout)) {
            Ok(0) => return Err(Errno::TIMEDOUT),
            // An error or a hang-up is reported by the write.
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(cause) => return Err(cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Read as _};

    use super::*;

    fn write(writer: &mut LogLineWriter, output: &PipeWriter, line: &str) -> Option<DroppedLogLines> {
        writer.write(output.as_fd(), line.as_bytes())
    }

    /// Fills the pipe; returns the number of lines in it.
    fn fill(writer: &mut LogLineWriter, output: &PipeWriter, line: &str) -> u64 {
        let mut lines = 0;
        while !writer.is_stalled {
            assert_eq!(write(writer, output, line), None);
            lines += 1;
        }
        lines - 1
    }

    fn read(input: &mut PipeReader, bytes: usize) -> String {
        let mut text = vec![0; bytes];
        input.read_exact(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn lines_to_a_closed_pipe_are_dropped_and_counted() {
        let (input, output) = io::pipe().unwrap();
        drop(input);
        let (mut writer, before) = (LogLineWriter::new(), log_lines_dropped());
        for lines in 1..=3 {
            assert_eq!(write(&mut writer, &output, "line\n"), None);
            assert_eq!(writer.dropped, Some(DroppedLogLines { lines, cause: Errno::PIPE }));
        }
        assert!(log_lines_dropped() >= before + 3);
        assert!(!writer.is_stalled);
    }

    #[test]
    fn lines_to_a_full_device_are_dropped_until_it_recovers() {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let mut writer = LogLineWriter::new();
        assert_eq!(writer.write(full.as_fd(), b"line\n"), None);
        let (mut input, output) = io::pipe().unwrap();
        let dropped = write(&mut writer, &output, "again\n");
        assert_eq!(dropped, Some(DroppedLogLines { lines: 1, cause: Errno::NOSPC }));
        assert_eq!(write(&mut writer, &output, "more\n"), None, "a loss is reported once");
        assert_eq!(read(&mut input, 11), "again\nmore\n");
    }

    /// Holds for blocking and non-blocking descriptors.
    #[test]
    fn stalled_reader_delays_one_line_and_gets_whole_lines_after() {
        for non_blocking in [false, true] {
            let (mut input, output) = io::pipe().unwrap();
            rustix::io::ioctl_fionbio(&output, non_blocking).unwrap();
            let line = "x".repeat(9999) + "\n";
            let mut writer = LogLineWriter::new();
            let written = fill(&mut writer, &output, &line);
            assert!(written > 0);
            let started = Instant::now();
            for _ in 0..3 {
                assert_eq!(write(&mut writer, &output, &line), None);
            }
            assert!(started.elapsed() < WRITE_TIMEOUT, "only the first line waits");
            read(&mut input, usize::try_from(written).unwrap() * line.len());
            let dropped = write(&mut writer, &output, "after\n");
            assert_eq!(dropped, Some(DroppedLogLines { lines: 4, cause: Errno::TIMEDOUT }));
            drop(output);
            let mut rest = String::new();
            input.read_to_string(&mut rest).unwrap();
            let lines: Vec<&str> = rest.lines().collect();
            assert_eq!(lines.last(), Some(&"after"), "an incomplete line is terminated first");
            assert!(lines[0].bytes().all(|byte| byte == b'x') && lines.len() <= 2);
        }
    }
}
