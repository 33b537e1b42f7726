//! Peers' transfers into and out of the mounted segments.

use std::io::{self, Read, Write};

use moongate_transfer::plane::MappingId;
use moongate_transfer::serve::{AddressRange, DataSocket, TransferTarget};

use super::SegmentPool;
use crate::region_socket::{receive, receive_summed, send, send_summed};

/// Chunk size for TLS transfers in bytes: small enough for the processor's cache.
const CHUNK: usize = 256 << 10;

fn chunk_length(size: u64) -> usize {
    usize::try_from(size).unwrap_or(CHUNK).min(CHUNK)
}

fn first_bytes(chunk: &mut [u8], remaining: u64) -> &mut [u8] {
    let length = usize::try_from(remaining).unwrap_or(usize::MAX).min(chunk.len());
    &mut chunk[..length]
}

impl TransferTarget for SegmentPool {
    fn contains(&self, span: AddressRange) -> bool {
        self.find(span).is_some() || self.buffered(span).is_some()
    }

    fn is_readable(&self, span: AddressRange) -> bool {
        self.buffered(span).is_some()
            || self.find(span).is_some_and(|(segment, offset)| segment.is_readable(offset, span.size))
    }

    fn receive(
        &self,
        socket: &DataSocket,
        span: AddressRange,
        needs_checksum: bool,
        verify: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let (segment, offset) = self.find_or_not_found(span)?;
        let writing = segment.ledger.begin(offset, span.size)?;
        segment.clear_damage(offset, span.size);
        if !needs_checksum && !segment.needs_checksums() {
            receive(&segment.region, socket, offset, span.size)?;
            return verify(None);
        }
        let crc = receive_summed(&segment.region, socket, offset, span.size)?;
        Ok(verify(Some(crc))? && segment.record(writing, crc))
    }

    fn send(&self, socket: &DataSocket, span: AddressRange) -> io::Result<()> {
        if let Some((region, offset)) = self.buffered(span) {
            return send(region, socket, offset, span.size);
        }
        let (segment, offset) = self.find_or_not_found(span)?;
        send(&segment.region, socket, offset, span.size)
    }

    fn send_summed(&self, socket: &DataSocket, span: AddressRange) -> io::Result<u32> {
        if let Some((region, offset)) = self.buffered(span) {
            return send_summed(region, socket, offset, span.size);
        }
        let (segment, offset) = self.find_or_not_found(span)?;
        send_summed(&segment.region, socket, offset, span.size)
    }

    fn receive_from(
        &self,
        source: &mut dyn Read,
        span: AddressRange,
        verify: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let (segment, offset) = self.find_or_not_found(span)?;
        let writing = segment.ledger.begin(offset, span.size)?;
        segment.clear_damage(offset, span.size);
        let mut chunk = vec![0; chunk_length(span.size)];
        let mut done = 0;
        while done < span.size {
            let part = first_bytes(&mut chunk, span.size - done);
            source.read_exact(part)?;
            segment.region.write_at(offset + done, part)?;
            done += part.len() as u64;
        }
        // Computed from memory, not from the received bytes: another peer may have written to the range meanwhile.
        let crc = segment.region.crc32c(offset, span.size)?;
        Ok(verify(source, crc)? && segment.record(writing, crc))
    }

    fn send_to(&self, sink: &mut dyn Write, span: AddressRange) -> io::Result<u32> {
        let located;
        let (region, offset) = match self.buffered(span) {
            Some(buffered) => buffered,
            None => {
                located = self.find_or_not_found(span)?;
                (&*located.0.region, located.1)
            }
        };
        let crc = region.crc32c(offset, span.size)?;
        let mut chunk = vec![0; chunk_length(span.size)];
        let mut done = 0;
        while done < span.size {
            let part = first_bytes(&mut chunk, span.size - done);
            region.read_at(offset + done, part)?;
            sink.write_all(part)?;
            done += part.len() as u64;
        }
        Ok(crc)
    }

    fn admit_mapped(&self, span: AddressRange, mapping: MappingId) -> bool {
        let Some((segment, offset)) = self.find(span) else { return false };
        // The pages are allocated here, so that they belong to the node's container and not to that of its client.
        segment.shared.as_ref().is_some_and(|(id, _)| *id == mapping)
            && segment.region.populate(offset, span.size).is_ok()
    }

    fn needs_mapped_checksum(&self, span: AddressRange) -> bool {
        self.find(span).is_some_and(|(segment, _)| segment.needs_checksums())
    }

    fn receive_mapped(
        &self,
        span: AddressRange,
        wait: &mut dyn FnMut() -> io::Result<Option<u32>>,
    ) -> io::Result<bool> {
        let (segment, offset) = self.find_or_not_found(span)?;
        let writing = segment.ledger.begin(offset, span.size)?;
        segment.clear_damage(offset, span.size);
        let is_intact = match wait()? {
            Some(crc) => segment.record(writing, crc),
            None => writing.end_unrecorded(),
        };
        if !is_intact {
            // The peer may have reported its object as complete already.
            segment.mark_damaged(offset, span.size);
        }
        Ok(is_intact)
    }

    fn checksum(&self, span: AddressRange) -> Option<u32> {
        let (segment, offset) = self.find(span)?;
        segment.ledger.find(offset, span.size).map(|entry| entry.crc)
    }
}
