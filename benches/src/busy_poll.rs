/// Prevents the runtime's thread from sleeping; it yields the core to other runnable processes.
pub(crate) async fn busy_poll() {
    loop {
        std::thread::yield_now();
        tokio::task::yield_now().await;
    }
}
