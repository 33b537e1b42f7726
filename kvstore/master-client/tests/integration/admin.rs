//! The admin client against servers that respond wrongly, slowly or not at all.

use std::time::Duration;

use moongate_master_client::admin::{AdminClient, AdminClientOptions, AdminError};
use moongate_master_client::snapshot;
use moongate_runtime::Supervisor;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

/// A server that responds to one request with `first`, and with `rest` after a signal.
async fn server(
    supervisor: &Supervisor,
    first: String,
    rest: &'static str,
) -> (AdminClient, oneshot::Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (go_on, signal) = oneshot::channel::<()>();
    supervisor.spawn("server", async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await.unwrap();
        stream.write_all(first.as_bytes()).await.unwrap();
        let _ = signal.await;
        stream.write_all(rest.as_bytes()).await.unwrap();
    });
    let options = AdminClientOptions {
        timeout: Duration::from_millis(200),
        max_body: 1000,
        ..AdminClientOptions::default()
    };
    (AdminClient::new(&address, options).unwrap(), go_on)
}

fn ok(length: usize, body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}")
}

#[tokio::test]
async fn key_stream_times_out_on_a_slow_server_only() {
    let supervisor = Supervisor::new();
    let (admin, go_on) = server(&supervisor, ok(8, "a\nb\nc"), "c\nd").await;
    let mut keys = admin.keys().await.unwrap();
    assert_eq!(keys.next().await.unwrap().unwrap().iter().collect::<Vec<_>>(), ["a", "b"]);
    // A pause of the caller does not count against the server's time limit.
    tokio::time::sleep(Duration::from_millis(500)).await;
    go_on.send(()).unwrap();
    assert_eq!(keys.next().await.unwrap().unwrap().iter().collect::<Vec<_>>(), ["cc"]);
    assert_eq!(keys.next().await.unwrap().unwrap().iter().collect::<Vec<_>>(), ["d"]);
    assert!(keys.next().await.unwrap().is_none());

    let (admin, _go_on) = server(&supervisor, ok(8, "a\nb"), "").await;
    let mut keys = admin.keys().await.unwrap();
    assert_eq!(keys.next().await.unwrap().unwrap().iter().collect::<Vec<_>>(), ["a"]);
    assert!(matches!(keys.next().await, Err(AdminError::TimedOut { .. })));
    assert!(keys.next().await.unwrap().is_none());

    let (admin, go_on) = server(&supervisor, ok(8, "a\nb"), "").await;
    let mut keys = admin.keys().await.unwrap();
    assert_eq!(keys.next().await.unwrap().unwrap().iter().collect::<Vec<_>>(), ["a"]);
    drop(go_on);
    assert!(matches!(keys.next().await, Err(AdminError::Failed { .. })), "a truncated list is an error");
}

#[tokio::test]
async fn invalid_responses_are_explained() {
    let supervisor = Supervisor::new();
    let status =
        |line: &str, body: &str| format!("HTTP/1.1 {line}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let large = "x".repeat(1001);
    let cases = [
        (status("404 Not Found", "404 Not Found"), "lacks it"),
        (status("503 Service Unavailable", ""), "is not serving"),
        (status("500 Internal Server Error", "no room"), "status 500: no room"),
        (status("302 Found", ""), "status 302"),
        (status("200 OK", "<html>"), "is it a Mooncake master's admin server?"),
        (status("200 OK", &large), "more than 1000 bytes"),
        ("SSH-2.0-OpenSSH_9.6\r\n".to_owned(), "check that the master runs"),
        (String::new(), "no response within 200ms"),
    ];
    for (response, expected) in cases {
        let (admin, _go_on) = server(&supervisor, response, "").await;
        let error = admin.health().await.unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("/health"), "{error}");
    }
}

#[tokio::test]
async fn request_is_retried_on_a_new_connection() {
    let supervisor = Supervisor::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    supervisor.spawn("server", async move {
        let (_silent, _) = listener.accept().await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await.unwrap();
        stream.write_all(ok(2, "OK").as_bytes()).await.unwrap();
        std::future::pending::<()>().await;
    });
    let admin = AdminClient::new(
        &address,
        AdminClientOptions { timeout: Duration::from_secs(2), ..AdminClientOptions::default() },
    )
    .unwrap();
    assert!(admin.health().await.unwrap().service_ready);
}

#[tokio::test]
async fn snapshot_survives_lookups_that_time_out() {
    let supervisor = Supervisor::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let key = format!("model_{:064x}_0_k", 7);
    let lookup = format!(r#"{{"success":true,"data":{{"{key}":{{"ok":true,"error":null,"values":[]}}}}}}"#);
    let list = format!("{key}\n");
    supervisor.spawn("server", async move {
        let responses = [ok(list.len(), &list), String::new(), String::new(), ok(lookup.len(), &lookup)];
        let mut open = Vec::new();
        for response in responses {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await.unwrap();
            stream
                .write_all(response.replace("200 OK\r\n", "200 OK\r\nConnection: close\r\n").as_bytes())
                .await
                .unwrap();
            open.push(stream);
        }
        std::future::pending::<()>().await;
    });
    let admin = AdminClient::new(
        &address,
        AdminClientOptions { timeout: Duration::from_millis(400), ..AdminClientOptions::default() },
    )
    .unwrap();
    let (options, order) = (snapshot::StoreSnapshotOptions::default(), Default::default());
    let summary = snapshot::read(&admin, &options, &order, |_| true, |_, _| {}).await.unwrap();
    assert_eq!((summary.listed, summary.located), (1, 1), "{summary:?}");
}
