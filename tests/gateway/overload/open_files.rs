//! A gateway that may open few files serves as many clients as it can, and refuses the others.

use std::net::SocketAddr;
use std::process::Stdio;

use futures_util::future::join_all;
use tokio::process::Command;

use crate::harness::fleet::TestFleetBuilder;
use crate::harness::process::MoongateProcess;
use crate::harness::raw_http::{RawHttpConnection, RawHttpResponse, post};
use crate::harness::{client, openai_error};

const BODY: &str = r#"{"model":"sim","messages":[{"role":"user","content":"hi"}],"max_tokens":1}"#;

/// A client that keeps its connection.
async fn connect_and_send(address: SocketAddr) -> (RawHttpConnection, RawHttpResponse) {
    let mut connection = RawHttpConnection::open(address).await;
    connection.send(&post("/v1/chat/completions", BODY.as_bytes())).await;
    let response = connection.response().await;
    (connection, response)
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_beyond_the_open_file_limit_get_503_and_the_rest_200() {
    let engines = TestFleetBuilder::sglang().pairs(2).engines().await;
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"ulimit -n 256; exec "$0" "$@""#, env!("CARGO_BIN_EXE_moongate"), "gateway"]);
    shell.args(["--listen=127.0.0.1:0", "--admin-listen=127.0.0.1:0", "--health-interval=100ms"]);
    shell.args(engines.flags()).env_clear().stdin(Stdio::null());
    let mut gateway = MoongateProcess::spawn(&mut shell);
    let line = gateway.wait_for_line("gateway listening").await;
    let field =
        |name: &str| line.split_whitespace().find_map(|word| word.strip_prefix(name)).unwrap().to_owned();
    let (address, admin) = (field("address=").parse().unwrap(), field("admin="));
    while client().get(format!("http://{admin}/ready")).send().await.unwrap().status() != 200 {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }

    let clients = join_all((0..400).map(|_| connect_and_send(address))).await;
    let mut served = 0;
    for (_, response) in &clients {
        match response.status {
            200 => served += 1,
            503 => {
                assert_eq!(openai_error(&response.body)["code"], "gateway_overloaded", "{response:?}");
                assert!(response.head.to_ascii_lowercase().contains("retry-after: 1"), "{response:?}");
            }
            _ => panic!("{response:?}"),
        }
    }
    assert!((1..=128).contains(&served), "{served} of 400 were served\n{}", gateway.output_text());
    // The admin listener has descriptors of its own while clients hold all of theirs.
    let metrics = client().get(format!("http://{admin}/metrics")).send().await.unwrap().text().await.unwrap();
    let refused = metrics.lines().find_map(|line| {
        line.strip_prefix(r#"moongate_overload_rejections_total{reason="client_connections"} "#)
    });
    assert!(refused.unwrap().parse::<u64>().unwrap() >= 272, "{metrics}");
    assert!(!metrics.contains("model_not_found"), "{metrics}");

    // Connections that close make room, and no engine was blamed.
    drop(clients);
    while connect_and_send(address).await.1.status != 200 {}
}
