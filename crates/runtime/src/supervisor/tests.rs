//! Tests of the supervisor.

use super::*;

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::test]
async fn shutdown_waits_for_tasks_that_watch_the_token() {
    let supervisor = Supervisor::new();
    for _ in 0..3 {
        let token = supervisor.token();
        supervisor.spawn("patient", async move { token.cancelled().await });
    }
    assert_eq!(supervisor.running_tasks(), 3);
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(supervisor.running_tasks(), 0);
}

#[tokio::test]
async fn shutdown_names_and_aborts_tasks_that_do_not_end() {
    struct DropCounter(Arc<AtomicUsize>);
    impl Drop for DropCounter {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let supervisor = Supervisor::new();
    let dropped = Arc::new(AtomicUsize::new(0));
    for _ in 0..2 {
        let counter = DropCounter(Arc::clone(&dropped));
        supervisor.spawn("unresponsive", async move {
            let _counter = counter;
            std::future::pending::<()>().await;
        });
    }
    let token = supervisor.token();
    supervisor.spawn("patient", async move { token.cancelled().await });

    let error = supervisor.shutdown(Duration::from_millis(50)).await.unwrap_err();
    assert_eq!(error.tasks, BTreeMap::from([("unresponsive", 2)]));
    assert_eq!(error.to_string(), "2 task(s) did not end within 50ms and were aborted: unresponsive (2×)");
    assert_eq!(dropped.load(Ordering::SeqCst), 2);
    assert_eq!(supervisor.running_tasks(), 0);

    let late = supervisor.spawn("late", std::future::pending());
    assert!(late.await.unwrap_err().is_cancelled());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_is_counted_and_reported_by_the_handle() {
    let supervisor = Supervisor::new();
    let handle = supervisor.spawn("clumsy", async { panic!("dropped it") });
    assert!(handle.await.unwrap_err().is_panic());
    assert_eq!(supervisor.panics(), 1);
    assert_eq!(supervisor.running_tasks(), 0);
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_an_essential_task_fails_the_process() {
    let supervisor = Supervisor::new();
    let before = task_panics();
    assert!(supervisor.spawn("connection", async { panic!("request 7") }).await.is_err());
    assert!(futures_util::poll!(std::pin::pin!(supervisor.failed())).is_pending());
    assert!(supervisor.spawn_essential("probe", async { panic!("no more probes") }).await.is_err());
    assert!(supervisor.spawn_essential("second", async { panic!("consequence") }).await.is_err());
    assert_eq!(tokio::time::timeout(TEST_TIMEOUT, supervisor.failed()).await.unwrap(), "probe");
    assert_eq!(supervisor.panics(), 3);
    assert!(task_panics() >= before + 3);
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn an_essential_task_of_a_child_fails_the_process() {
    let supervisor = Supervisor::new();
    let child = supervisor.child();
    assert!(child.spawn_essential("term", async { panic!("no leader") }).await.is_err());
    assert_eq!(tokio::time::timeout(TEST_TIMEOUT, supervisor.failed()).await.unwrap(), "term");
    assert!(!supervisor.token().is_cancelled());
}

#[tokio::test]
async fn an_essential_thread_fails_the_process() {
    let supervisor = Supervisor::new();
    assert_eq!(std::thread::spawn(supervisor.wrap_essential_thread("sum", || 2 + 2)).join().unwrap(), 4);
    let body: fn() = || panic!("no more snapshots");
    assert!(std::thread::spawn(supervisor.wrap_essential_thread("data", body)).join().is_err());
    assert_eq!(tokio::time::timeout(TEST_TIMEOUT, supervisor.failed()).await.unwrap(), "data");
}

#[tokio::test(start_paused = true)]
async fn a_restarted_task_starts_again_after_growing_pauses() {
    let supervisor = Supervisor::new();
    let (started, starts) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
    let recorded = Arc::clone(&starts);
    let handle = supervisor.spawn_restarted("poll", move || {
        let recorded = Arc::clone(&recorded);
        async move {
            recorded.lock().push(started.elapsed());
            assert!(recorded.lock().len() >= 4, "not yet");
        }
    });
    handle.await.unwrap();
    let expected = [0, 500, 1500, 3500].map(Duration::from_millis);
    let starts: Vec<u128> = starts.lock().iter().map(Duration::as_millis).collect();
    assert_eq!(starts, expected.map(|pause| pause.as_millis()));
    assert_eq!(supervisor.panics(), 3);
    assert!(futures_util::poll!(std::pin::pin!(supervisor.failed())).is_pending());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_a_task_that_waits_for_its_restart() {
    let supervisor = Supervisor::new();
    supervisor.spawn_restarted("poll", || async { panic!("always") });
    tokio::task::yield_now().await;
    supervisor.shutdown(RESTART_BACKOFF.initial / 2).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_short_tasks_leave_no_entries() {
    let supervisor = Supervisor::new();
    for _ in 0..10_000 {
        supervisor.spawn("short", async {});
    }
    supervisor.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(supervisor.running_tasks(), 0);
}

#[test]
fn a_runtime_that_ends_first_does_not_deadlock() {
    let supervisor = Supervisor::new();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let inner = supervisor.clone();
    runtime.block_on(async move {
        let outer = inner.clone();
        inner.spawn("outer", async move {
            struct SpawnOnDrop(Supervisor);
            impl Drop for SpawnOnDrop {
                fn drop(&mut self) {
                    self.0.spawn("after the end", async {});
                }
            }
            let _guard = SpawnOnDrop(outer);
            std::future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
    });
    drop(runtime);
    assert_eq!(supervisor.running_tasks(), 0);
}
