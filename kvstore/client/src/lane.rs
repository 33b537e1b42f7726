//! One connection to a node's data port, which moves one range of memory at a time.
//!
//! A request is a header of 24 bytes: length, absolute address, opcode. In version 2 the node answers with a status
//! of 8 bytes, before the bytes of a READ and after those of a WRITE. In version 1 it never tells: it closes the
//! connection instead.

use std::io::{self, IoSlice};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::place::Version;

const READ: u8 = 0;
const WRITE: u8 = 1;
/// Set in the opcode by who speaks version 2.
const VERSION_2: u8 = 0x80;
const HEADER: usize = 24;
/// The upper half of a status.
const STATUS_MAGIC: u64 = 0x4D43_5456;

/// Why a transfer on a lane failed. The lane must not be used again.
#[derive(Debug)]
pub(crate) enum LaneError {
    /// The connection ended.
    Broken(io::Error),
    /// The node refused the range.
    Rejected,
    /// The answer makes no sense.
    Protocol,
    /// What was written does not read back.
    Damaged,
}

impl From<io::Error> for LaneError {
    fn from(error: io::Error) -> Self {
        Self::Broken(error)
    }
}

/// A connection on which nothing is under way.
#[derive(Debug)]
pub(crate) struct Lane {
    stream: TcpStream,
    version: Version,
}

impl Lane {
    pub(crate) async fn open(address: &(String, u16), version: Version) -> io::Result<Self> {
        let stream = TcpStream::connect((address.0.as_str(), address.1)).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, version })
    }

    /// Reads the memory at `address` into all of `into`.
    pub(crate) async fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), LaneError> {
        let header = self.header(READ, address, into.len());
        self.stream.write_all(&header).await?;
        if self.version == Version::V2 {
            self.status().await?;
        }
        self.stream.read_exact(into).await?;
        Ok(())
    }

    /// Writes all of `from` to the memory at `address`. When this returns, the node has applied it.
    pub(crate) async fn write(&mut self, address: u64, from: &[u8]) -> Result<(), LaneError> {
        let header = self.header(WRITE, address, from.len());
        if let Err(error) = self.send(&header, from).await {
            // A node that refuses a range closes without reading the rest; its reason may have arrived.
            let refused = self.version == Version::V2 && matches!(self.status().await, Err(LaneError::Rejected));
            return Err(if refused { LaneError::Rejected } else { error.into() });
        }
        match (self.version, from.last()) {
            (Version::V2, _) => self.status().await,
            // Version 1 does not tell when it has applied a write. It does one thing after the other, so reading
            // the end tells.
            (Version::V1, Some(last)) => {
                let mut end = [0];
                let offset = from.len() as u64 - 1;
                self.read(address.saturating_add(offset), &mut end).await?;
                if end == [*last] { Ok(()) } else { Err(LaneError::Damaged) }
            }
            (Version::V1, None) => Ok(()),
        }
    }

    fn header(&self, opcode: u8, address: u64, length: usize) -> [u8; HEADER] {
        let opcode = opcode | if self.version == Version::V2 { VERSION_2 } else { 0 };
        let mut header = [0; HEADER];
        let fields = (length as u64).to_le_bytes().into_iter().chain(address.to_le_bytes()).chain([opcode]);
        header.iter_mut().zip(fields).for_each(|(to, from)| *to = from);
        header
    }

    /// Sends header and content, the first of it together with the header.
    async fn send(&mut self, header: &[u8; HEADER], content: &[u8]) -> io::Result<()> {
        let sent = self.stream.write_vectored(&[IoSlice::new(header), IoSlice::new(content)]).await?;
        if let Some(rest) = header.get(sent..).filter(|rest| !rest.is_empty()) {
            self.stream.write_all(rest).await?;
        }
        self.stream.write_all(content.get(sent.saturating_sub(HEADER)..).unwrap_or_default()).await
    }

    async fn status(&mut self) -> Result<(), LaneError> {
        let status = self.stream.read_u64_le().await?;
        match (status >> 32, status & 0xFFFF_FFFF) {
            (STATUS_MAGIC, 0) => Ok(()),
            (STATUS_MAGIC, _) => Err(LaneError::Rejected),
            _ => Err(LaneError::Protocol),
        }
    }
}
