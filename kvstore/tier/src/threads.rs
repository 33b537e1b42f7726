//! Reads and writes where io_uring is not permitted: with some threads, as long as a transfer takes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;

use crate::buffer::AlignedBuffer;
use crate::engine::{IoChunk, IoDirection, IoVisitor};

/// Threads of one transfer.
const THREADS: usize = 8;

pub(crate) fn transfer(
    file: &File,
    direction: IoDirection,
    pieces: &[IoChunk],
    bytes: usize,
    visit: &mut dyn IoVisitor,
) {
    match direction {
        IoDirection::Read => read(file, pieces, bytes, visit),
        IoDirection::Write => write(file, pieces, bytes, visit),
    }
}

fn read(file: &File, pieces: &[IoChunk], bytes: usize, visit: &mut dyn IoVisitor) {
    let next = AtomicUsize::new(0);
    // As many buffers as results that wait, and one in each thread's hands.
    let (send, receive) = sync_channel::<(usize, io::Result<()>, AlignedBuffer)>(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS.min(pieces.len()) {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                loop {
                    let which = next.fetch_add(1, Ordering::Relaxed);
                    let Some(piece) = pieces.get(which) else { return };
                    let mut buffer = AlignedBuffer::new(bytes);
                    let into = buffer.get_mut().get_mut(..piece.len).unwrap_or_default();
                    let outcome = file.read_exact_at(into, piece.offset);
                    if send.send((which, outcome, buffer)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(send);
        for (which, outcome, buffer) in receive {
            let len = pieces.get(which).map_or(0, |piece| piece.len);
            visit.complete(which, outcome.map(|()| buffer.get().get(..len).unwrap_or_default()));
        }
    });
}

/// Written one after the other: the system's own cache, or the disk's queue, takes them quickly.
fn write(file: &File, pieces: &[IoChunk], bytes: usize, visit: &mut dyn IoVisitor) {
    let mut buffer = AlignedBuffer::new(bytes);
    for (which, piece) in pieces.iter().enumerate() {
        let from = buffer.get_mut().get_mut(..piece.len).unwrap_or_default();
        visit.fill(which, from);
        let outcome = file.write_all_at(from, piece.offset);
        visit.complete(which, outcome.map(|()| &*from));
    }
}
