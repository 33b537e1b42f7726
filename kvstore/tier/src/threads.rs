//! Reads and writes where io_uring is not permitted: with some threads, as long as a transfer takes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread;

use crate::buffer::Buffer;
use crate::engine::{Direction, Piece, Visit};

/// Threads of one transfer.
const THREADS: usize = 8;

pub(crate) fn transfer(
    file: &File,
    direction: Direction,
    pieces: &[Piece],
    bytes: usize,
    visit: &mut dyn Visit,
) {
    match direction {
        Direction::Read => read(file, pieces, bytes, visit),
        Direction::Write => write(file, pieces, bytes, visit),
    }
}

fn read(file: &File, pieces: &[Piece], bytes: usize, visit: &mut dyn Visit) {
    let next = AtomicUsize::new(0);
    // As many buffers as results that wait, and one in each thread's hands.
    let (send, receive) = sync_channel::<(usize, io::Result<()>, Buffer)>(THREADS);
    thread::scope(|scope| {
        for _ in 0..THREADS.min(pieces.len()) {
            let (send, next) = (send.clone(), &next);
            scope.spawn(move || {
                loop {
                    let which = next.fetch_add(1, Ordering::Relaxed);
                    let Some(piece) = pieces.get(which) else { return };
                    let mut buffer = Buffer::new(bytes);
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
            visit.over(which, outcome.map(|()| buffer.get().get(..len).unwrap_or_default()));
        }
    });
}

/// Written one after the other: the system's own cache, or the disk's queue, takes them quickly.
fn write(file: &File, pieces: &[Piece], bytes: usize, visit: &mut dyn Visit) {
    let mut buffer = Buffer::new(bytes);
    for (which, piece) in pieces.iter().enumerate() {
        let from = buffer.get_mut().get_mut(..piece.len).unwrap_or_default();
        visit.fill(which, from);
        let outcome = file.write_all_at(from, piece.offset);
        visit.over(which, outcome.map(|()| &*from));
    }
}
