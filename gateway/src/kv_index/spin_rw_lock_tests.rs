//! Tests of the lock with several threads. Not in its own file, which a benchmark of the index includes too.

use std::thread;

use super::spin_rw_lock::SpinRwLock;

#[test]
fn readers_wait_for_a_writer() {
    let lock = SpinRwLock::new((0, 0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    let mut pair = lock.write();
                    pair.0 += 1;
                    pair.1 += 1;
                }
            });
            scope.spawn(|| {
                for _ in 0..10_000 {
                    let pair = lock.read();
                    assert_eq!(pair.0, pair.1);
                }
            });
        }
    });
    assert_eq!(*lock.read(), (20_000, 20_000));
}

#[test]
fn a_waiter_gets_the_lock_when_it_is_free() {
    let lock = SpinRwLock::new(0);
    thread::scope(|scope| {
        let mut guard = lock.write();
        let reader = scope.spawn(|| *lock.read());
        let writer = scope.spawn(|| *lock.write() += 10);
        // Longer than any thread spins.
        thread::sleep(std::time::Duration::from_millis(20));
        assert!(!reader.is_finished() && !writer.is_finished());
        *guard += 1;
        drop(guard);
        writer.join().unwrap();
        assert!([1, 11].contains(&reader.join().unwrap()));
    });
    assert_eq!(*lock.read(), 11);
}
