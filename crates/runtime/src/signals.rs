//! Termination signals.

use tokio::signal::ctrl_c;
use tokio::signal::unix::{SignalKind, signal};

/// Resolves on the first SIGTERM (Kubernetes, systemd) or Ctrl-C.
///
/// From the first call on, neither signal ends the process by itself any more: the caller drains and returns from `main`. A second call
/// waits for the next signal, such as a second Ctrl-C.
///
/// Must be called inside a tokio runtime with I/O enabled.
pub async fn terminated() {
    let sigterm = async {
        match signal(SignalKind::terminate()) {
            Ok(mut sigterm) => {
                sigterm.recv().await;
            }
            Err(error) => report_failed_handler("SIGTERM", &error).await,
        }
    };
    let interrupt = async {
        if let Err(error) = ctrl_c().await {
            report_failed_handler("Ctrl-C", &error).await;
        }
    };
    let name = tokio::select! {
        () = sigterm => "SIGTERM",
        () = interrupt => "Ctrl-C",
    };
    tracing::info!(signal = name, "stop requested");
}

/// A signal without a handler still ends the process by default, so keep waiting for the other one.
async fn report_failed_handler(name: &'static str, error: &std::io::Error) {
    tracing::warn!(signal = name, %error, "cannot install a signal handler: the signal will end the process without a drain");
    std::future::pending::<()>().await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn sigterm_resolves() {
        let mut waiting = Box::pin(terminated());
        // The handler is installed at the first poll; only then may the signal be sent.
        assert!(futures_util::poll!(waiting.as_mut()).is_pending());
        let sent = std::process::Command::new("kill")
            .args(["-TERM", &std::process::id().to_string()])
            .status()
            .unwrap();
        assert!(sent.success());
        tokio::time::timeout(Duration::from_secs(30), waiting).await.unwrap();
    }
}
