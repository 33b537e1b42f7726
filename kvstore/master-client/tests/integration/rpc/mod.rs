//! The RPC client against servers implemented from the protocol's specification, and against servers of other protocols.

mod etcd;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use futures_util::future::join_all;
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader, RpcFault, RpcFrame};
use mooncake_wire::rpc::{
    ExistKey, GetReplicaList, KeyArguments, NoArguments, PutStart, PutStartArguments, Request, RpcMethod,
    ServiceReady, encode_reply,
};
use mooncake_wire::types::{DEFAULT_TENANT, ReplicateConfig, Uuid};
use mooncake_wire::{Dialect, ErrorCode};
use moongate_master_client::rpc::{MasterClient, MasterClientOptions, RpcError};
use moongate_runtime::{BackoffPolicy, Supervisor};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

type RpcRequestFrame = RpcFrame<RequestHeader, bytes::Bytes>;

/// Generous, because it only detects tests that hang.
const LIMIT: Duration = Duration::from_secs(30);
const MAX_REQUEST: usize = 1 << 20;

fn options() -> MasterClientOptions {
    let retry = BackoffPolicy { initial: Duration::from_millis(1), max: Duration::from_millis(1) };
    MasterClientOptions { connections: 1, timeout: LIMIT, retry, ..MasterClientOptions::default() }
}

/// A server that runs `serve` for each connection.
async fn server<F>(supervisor: &Supervisor, serve: impl Fn(TcpStream) -> F + Send + 'static) -> String
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let tasks = supervisor.clone();
    supervisor.spawn("server", async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tasks.spawn("connection", serve(stream));
        }
    });
    address
}

/// The next request, or `None` at the end of the stream.
async fn request(stream: &mut TcpStream, buffer: &mut BytesMut) -> Option<RpcRequestFrame> {
    loop {
        if let FrameParseResult::Frame(request) = frame::take::<RequestHeader>(buffer, MAX_REQUEST).unwrap() {
            return Some(request);
        }
        match stream.read_buf(buffer).await {
            Ok(0) | Err(_) => return None,
            Ok(_) => {}
        }
    }
}

/// The response of a master of release `dialect`.
fn respond(dialect: Dialect, request: &RpcRequestFrame) -> BytesMut {
    let (sequence, mut out) = (request.header.sequence, BytesMut::new());
    let method = RpcMethod::from_function_id(request.header.function_id).unwrap();
    if !method.request_dialects(&request.body).contains(dialect) {
        RpcFault::invalid_argument().write(sequence, &mut out).unwrap();
        return out;
    }
    match Request::<&str>::decode(method, dialect, &request.body).unwrap() {
        Request::ServiceReady(_) => {
            encode_reply::<ServiceReady, _>(sequence, dialect, &Ok("2.0.0"), &mut out)
        }
        Request::ExistKey(it) => {
            encode_reply::<ExistKey, &str>(sequence, dialect, &Ok(it.key.ends_with('7')), &mut out)
        }
        Request::GetReplicaList(_) => {
            let reply = Err(ErrorCode::OBJECT_NOT_FOUND);
            encode_reply::<GetReplicaList, &str>(sequence, dialect, &reply, &mut out)
        }
        Request::PutStart(_) => {
            let reply = Err(ErrorCode::NO_AVAILABLE_HANDLE);
            encode_reply::<PutStart, &str>(sequence, dialect, &reply, &mut out)
        }
        other => panic!("{other:?}"),
    }
    .unwrap();
    out
}

/// A fake master whose release can be changed while it runs.
async fn master_of(supervisor: &Supervisor, release: Arc<Mutex<Dialect>>) -> String {
    server(supervisor, move |mut stream| {
        let release = Arc::clone(&release);
        async move {
            let mut buffer = BytesMut::new();
            while let Some(request) = request(&mut stream, &mut buffer).await {
                let dialect = *release.lock();
                stream.write_all(&respond(dialect, &request)).await.unwrap();
            }
        }
    })
    .await
}

fn key(key: &str) -> KeyArguments<&str> {
    KeyArguments { key, tenant: DEFAULT_TENANT }
}

async fn exists(master: &MasterClient, name: &str) -> Result<bool, RpcError> {
    Ok(master.call::<ExistKey, &str>(&key(name)).await??)
}

#[tokio::test]
async fn pipelined_calls_match_responses_in_any_order() {
    const CALLS: usize = 100;
    let supervisor = Supervisor::new();
    let address = server(&supervisor, |mut stream| async move {
        let (mut buffer, mut requests) = (BytesMut::new(), Vec::new());
        while let Some(request) = request(&mut stream, &mut buffer).await {
            requests.push(request);
            // No response before all requests have arrived: without pipelining, this would deadlock.
            if requests.len() == CALLS {
                for request in requests.drain(..).rev() {
                    stream.write_all(&respond(Dialect::NEWEST, &request)).await.unwrap();
                }
            }
        }
    })
    .await;
    let master = MasterClient::new(&address, options(), &supervisor);
    let calls = (0..CALLS).map(|n| {
        let master = master.clone();
        async move { (n, exists(&master, &format!("key{n}")).await.unwrap()) }
    });
    let results = tokio::time::timeout(LIMIT, join_all(calls)).await.unwrap();
    assert!(results.iter().all(|(n, exists)| *exists == (n % 10 == 7)), "{results:?}");
}

#[tokio::test]
async fn dialect_is_detected_and_follows_an_upgrade() {
    let supervisor = Supervisor::new();
    for dialect in Dialect::ALL {
        let release = Arc::new(Mutex::new(dialect));
        let address = master_of(&supervisor, Arc::clone(&release)).await;
        let master = MasterClient::new(&address, options(), &supervisor);
        assert_eq!(master.dialect(), Dialect::NEWEST);
        assert_eq!(master.call::<ServiceReady, &str>(&NoArguments).await.unwrap().as_deref(), Ok("2.0.0"));
        for round in 0..2 {
            assert!(exists(&master, "17").await.unwrap(), "{dialect}, round {round}");
            let found = master.call::<GetReplicaList, &str>(&key("k")).await.unwrap();
            assert_eq!(found, Err(ErrorCode::OBJECT_NOT_FOUND), "{dialect}, round {round}");
            let put = PutStartArguments {
                client_id: Uuid { first: 1, second: 2 },
                key: "k",
                size: 3,
                config: ReplicateConfig::default(),
                tenant: DEFAULT_TENANT,
            };
            let started = master.call::<PutStart, &str>(&put).await.unwrap();
            assert_eq!(started, Err(ErrorCode::NO_AVAILABLE_HANDLE), "{dialect}, round {round}");
        }
        let put_as = |dialect| RpcMethod::PutStart.arguments_signature(dialect).hash();
        assert_eq!(put_as(master.dialect()), put_as(dialect), "{dialect}");
        // The master is upgraded to the newest release.
        *release.lock() = Dialect::NEWEST;
        assert!(exists(&master, "7").await.unwrap());
        let found = master.call::<GetReplicaList, &str>(&key("k")).await.unwrap();
        assert_eq!(found, Err(ErrorCode::OBJECT_NOT_FOUND));
        assert_eq!(master.dialect(), Dialect::NEWEST);
    }
}

#[tokio::test]
async fn arguments_refused_in_all_dialects_report_the_release() {
    let supervisor = Supervisor::new();
    let address = server(&supervisor, |mut stream| async move {
        let mut buffer = BytesMut::new();
        while let Some(request) = request(&mut stream, &mut buffer).await {
            let mut out = BytesMut::new();
            RpcFault::invalid_argument().write(request.header.sequence, &mut out).unwrap();
            stream.write_all(&out).await.unwrap();
        }
    })
    .await;
    let error = exists(&MasterClient::new(&address, options(), &supervisor), "k").await.unwrap_err();
    assert!(matches!(error, RpcError::UnknownRelease { method: "ExistKey", .. }), "{error}");
    assert!(error.to_string().contains("0.3.9") && error.to_string().contains(&address), "{error}");
}

#[tokio::test]
async fn client_reconnects_after_a_broken_connection() {
    let supervisor = Supervisor::new();
    // Responds to one call on each connection, then closes it.
    let address = server(&supervisor, |mut stream| async move {
        let request = request(&mut stream, &mut BytesMut::new()).await.unwrap();
        stream.write_all(&respond(Dialect::NEWEST, &request)).await.unwrap();
    })
    .await;
    let master = MasterClient::new(&address, options(), &supervisor);
    let mut succeeded = 0;
    let attempts = async {
        while succeeded < 10 {
            match exists(&master, "7").await {
                Ok(found) => succeeded += usize::from(found),
                // The server closed the connection before it read the call.
                Err(RpcError::Lost { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
    };
    tokio::time::timeout(LIMIT, attempts).await.unwrap();
}

#[tokio::test]
async fn servers_of_other_protocols_are_distinguished() {
    let supervisor = Supervisor::new();
    let http = server(&supervisor, |mut stream| async move {
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.unwrap();
    })
    .await;
    let error = exists(&MasterClient::new(&http, options(), &supervisor), "k").await.unwrap_err();
    assert!(matches!(error, RpcError::NotMaster { .. }), "{error}");
    assert!(error.to_string().contains("RPC port, 50051"), "{error}");

    let short = MasterClientOptions { timeout: Duration::from_millis(50), ..options() };
    let silent = server(&supervisor, |mut stream| async move {
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
    .await;
    let error = exists(&MasterClient::new(&silent, short, &supervisor), "k").await.unwrap_err();
    assert!(matches!(error, RpcError::TimedOut { .. }), "{error}");

    let huge = server(&supervisor, |mut stream| async move {
        request(&mut stream, &mut BytesMut::new()).await.unwrap();
        let header = [[0x15, 0, 0, 0], [0; 4], [0xff; 4], [0; 4]].concat();
        stream.write_all(&header).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
    .await;
    let error = exists(&MasterClient::new(&huge, options(), &supervisor), "k").await.unwrap_err();
    assert!(error.to_string().contains("the limit is 67108864"), "{error}");
}

#[tokio::test]
async fn calls_to_an_unreachable_master_fail_at_once() {
    let supervisor = Supervisor::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let hour = Duration::from_secs(3600);
    let retry = BackoffPolicy { initial: hour, max: hour };
    let master = MasterClient::new(&address, MasterClientOptions { retry, ..options() }, &supervisor);
    for _ in 0..3 {
        let error = tokio::time::timeout(LIMIT, exists(&master, "k")).await.unwrap().unwrap_err();
        assert!(matches!(error, RpcError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains(&address), "{error}");
    }
}

#[tokio::test]
async fn full_queues_reject_calls_and_shutdown_fails_waiting_ones() {
    let supervisor = Supervisor::new();
    let silent = server(&supervisor, |mut stream| async move {
        let _ = stream.read_to_end(&mut Vec::new()).await;
    })
    .await;
    let clients = Supervisor::new();
    let bounded = MasterClientOptions { in_flight: 2, queue: 3, ..options() };
    let master = MasterClient::new(&silent, bounded, &clients);
    let calls: Vec<_> = (0..10).map(|_| master.clone()).collect();
    let all = join_all(calls.iter().map(|master| async move { exists(master, "k").await.unwrap_err() }));
    let shutdown = async {
        while clients.running_tasks() > 0 {
            tokio::task::yield_now().await;
            clients.token().cancel();
        }
    };
    let (errors, ()) = tokio::time::timeout(LIMIT, futures_util::future::join(all, shutdown)).await.unwrap();
    let kinds: BTreeSet<_> = errors.iter().map(ToString::to_string).collect();
    // The queue holds three calls before the connection's task runs, and the task takes at most two of them.
    let busy = errors.iter().filter(|error| matches!(error, RpcError::Busy { .. })).count();
    let closed = errors.iter().filter(|error| matches!(error, RpcError::Closed)).count();
    assert_eq!((busy, closed), (7, 3), "{kinds:?}");
}
