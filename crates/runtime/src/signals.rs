//! Being asked to stop.

use tokio::signal::ctrl_c;
use tokio::signal::unix::{SignalKind, signal};

/// Resolves on the first SIGTERM (Kubernetes, systemd) or Ctrl-C (a person).
///
/// From the first call on, neither signal ends the process by itself any more: the caller drains and returns
/// from `main`. A second call waits for the next signal, which is how an impatient second Ctrl-C is heard.
///
/// Must be called inside a tokio runtime with I/O enabled.
pub async fn terminated() {
    let sigterm = async {
        match signal(SignalKind::terminate()) {
            Ok(mut sigterm) => {
                sigterm.recv().await;
            }
            Err(error) => cannot_watch("SIGTERM", &error).await,
        }
    };
    let interrupt = async {
        if let Err(error) = ctrl_c().await {
            cannot_watch("Ctrl-C", &error).await;
        }
    };
    let name = tokio::select! {
        () = sigterm => "SIGTERM",
        () = interrupt => "Ctrl-C",
    };
    tracing::info!(signal = name, "asked to stop");
}

/// Without its handler a signal ends the process as it always did, so the other one is still worth awaiting.
async fn cannot_watch(name: &'static str, error: &std::io::Error) {
    tracing::warn!(signal = name, %error, "cannot watch for the signal: it will end the process without a drain");
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
