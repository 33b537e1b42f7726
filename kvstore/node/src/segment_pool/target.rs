//! Transfers of peers into the memory and out of it.

use std::io::{self, Read, Write};

use moongate_memory::ledger::LedgerWriteOutcome;
use moongate_transfer::serve::{AddressRange, DataSocket, TransferTarget};

use super::SegmentPool;
use crate::region_socket::{receive, receive_summed, send, send_summed};

/// Bytes that are encrypted or decrypted at a time: few enough to stay in the processor's cache.
const PIECE: usize = 256 << 10;

fn piece_length(size: u64) -> usize {
    usize::try_from(size).unwrap_or(PIECE).min(PIECE)
}

fn part_of(piece: &mut [u8], left: u64) -> &mut [u8] {
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
    &mut piece[..length]
}

impl TransferTarget for SegmentPool {
    fn contains(&self, span: AddressRange) -> bool {
        self.find(span).is_some() || self.buffered(span).is_some()
    }

    fn is_readable(&self, span: AddressRange) -> bool {
        self.buffered(span).is_some()
            || self.find(span).is_some_and(|(lent, offset)| lent.is_readable(offset, span.size))
    }

    fn receive(
        &self,
        socket: &DataSocket,
        span: AddressRange,
        summed: bool,
        whole: &mut dyn FnMut(Option<u32>) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let (lent, offset) = self.find_or_not_found(span)?;
        let writing = lent.ledger.begin(offset, span.size)?;
        lent.clear_damage(offset, span.size);
        if !summed && !lent.is_persistent {
            receive(&lent.region, socket, offset, span.size)?;
            return whole(None);
        }
        let crc = receive_summed(&lent.region, socket, offset, span.size)?;
        // What there is no room to record is whole all the same: only a later process will not know.
        Ok(whole(Some(crc))? && writing.finish(crc) != LedgerWriteOutcome::Overlapped)
    }

    fn send(&self, socket: &DataSocket, span: AddressRange) -> io::Result<()> {
        if let Some((region, offset)) = self.buffered(span) {
            return send(region, socket, offset, span.size);
        }
        let (lent, offset) = self.find_or_not_found(span)?;
        send(&lent.region, socket, offset, span.size)
    }

    fn send_summed(&self, socket: &DataSocket, span: AddressRange) -> io::Result<u32> {
        if let Some((region, offset)) = self.buffered(span) {
            return send_summed(region, socket, offset, span.size);
        }
        let (lent, offset) = self.find_or_not_found(span)?;
        send_summed(&lent.region, socket, offset, span.size)
    }

    fn receive_from(
        &self,
        source: &mut dyn Read,
        span: AddressRange,
        whole: &mut dyn FnMut(&mut dyn Read, u32) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let (lent, offset) = self.find_or_not_found(span)?;
        let writing = lent.ledger.begin(offset, span.size)?;
        lent.clear_damage(offset, span.size);
        let mut piece = vec![0; piece_length(span.size)];
        let mut done = 0;
        while done < span.size {
            let part = part_of(&mut piece, span.size - done);
            source.read_exact(part)?;
            lent.region.write_at(offset + done, part)?;
            done += part.len() as u64;
        }
        // Of what lies there then: another peer may have written meanwhile.
        let crc = lent.region.crc32c(offset, span.size)?;
        Ok(whole(source, crc)? && writing.finish(crc) != LedgerWriteOutcome::Overlapped)
    }

    fn send_to(&self, sink: &mut dyn Write, span: AddressRange) -> io::Result<u32> {
        let found;
        let (region, offset) = match self.buffered(span) {
            Some(buffered) => buffered,
            None => {
                found = self.find_or_not_found(span)?;
                (&*found.0.region, found.1)
            }
        };
        let crc = region.crc32c(offset, span.size)?;
        let mut piece = vec![0; piece_length(span.size)];
        let mut done = 0;
        while done < span.size {
            let part = part_of(&mut piece, span.size - done);
            region.read_at(offset + done, part)?;
            sink.write_all(part)?;
            done += part.len() as u64;
        }
        Ok(crc)
    }

    fn checksum(&self, span: AddressRange) -> Option<u32> {
        let (lent, offset) = self.find(span)?;
        lent.ledger.find(offset, span.size).map(|entry| entry.crc)
    }
}
