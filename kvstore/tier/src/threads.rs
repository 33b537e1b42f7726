//! Fallback without io_uring: each transfer reads with several threads.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;

use crate::buffer::AlignedBuffer;
use crate::io_chunk::{IoChunk, IoDirection, IoVisitor};

/// Number of threads per transfer.
const THREADS: usize = 8;

pub(crate) fn transfer(
    file: &File,
    direction: IoDirection,
    chunks: &[IoChunk],
    bytes: usize,
    visit: &mut dyn IoVisitor,
) {
    match direction {
        IoDirection::Read => read(file, chunks, bytes, visit),
        IoDirection::Write => write(file, chunks, bytes, visit),
    }
}

fn read(file: &File, chunks: &[IoChunk], bytes: usize, visit: &mut dyn IoVisitor) {
    let next = AtomicUsize::new(0);
    // Limits the buffers: one per waiting result, and one per thread.
    let (send, receive) = sync_channel::<(usize, io::Result<()>, AlignedBuffer)>(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS.min(chunks.len()) {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(chunk) = chunks.get(index) else { return };
                    let mut buffer = AlignedBuffer::new(bytes);
                    let into = buffer.get_mut().get_mut(..chunk.len).unwrap_or_default();
                    let outcome = file.read_exact_at(into, chunk.offset);
                    if send.send((index, outcome, buffer)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(send);
        for (index, outcome, buffer) in receive {
            let len = chunks.get(index).map_or(0, |chunk| chunk.len);
            visit.complete(index, outcome.map(|()| buffer.get().get(..len).unwrap_or_default()));
        }
    });
}

/// Writes one chunk after another: the system's cache, or the disk's queue, accepts them quickly.
fn write(file: &File, chunks: &[IoChunk], bytes: usize, visit: &mut dyn IoVisitor) {
    let mut buffer = AlignedBuffer::new(bytes);
    for (index, chunk) in chunks.iter().enumerate() {
        let from = buffer.get_mut().get_mut(..chunk.len).unwrap_or_default();
        visit.fill(index, from);
        let outcome = file.write_all_at(from, chunk.offset);
        visit.complete(index, outcome.map(|()| &*from));
    }
}
