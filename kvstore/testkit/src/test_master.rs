//! A master in this process, and RPC connections to masters.
#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use mooncake_wire::frame::{self, FrameParseResult, ResponseHeader};
use mooncake_wire::pack::{Pack, Unpack};
use mooncake_wire::rpc::{
    GetReplicaList, KeyArguments, MountArguments, MountSegment, PutEnd, PutEndArguments, PutStart,
    PutStartArguments, Request, RpcDefinition, RpcMethod, decode_reply, encode_request,
};
use mooncake_wire::types::{
    DEFAULT_TENANT, ObjectMeta, ReplicaList, ReplicaType, ReplicateConfig, Segment, Uuid,
};
use mooncake_wire::{Dialect, ErrorCode};
use moongate_master::journal::MemoryJournal;
use moongate_master::{
    AuxServiceAddresses, AuxServices, AuxServicesOptions, KvEventServiceOptions, LeadershipStatus,
    MasterServer, MasterServerOptions, MetadataServiceOptions, rpc,
};
use moongate_master_core::MasterCoreOptions;
use moongate_runtime::Supervisor;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::LIMIT;

const MAX_RESPONSE: usize = 256 << 20;

pub struct TestMaster {
    pub server: Arc<MasterServer>,
    pub journal: Arc<MemoryJournal>,
    pub rpc: rpc::RpcServer,
    pub supervisor: Supervisor,
}

pub fn start_master() -> TestMaster {
    start_master_with(MasterServerOptions { threads: 2, ..MasterServerOptions::default() })
}

pub fn start_master_with(options: MasterServerOptions) -> TestMaster {
    start_master_at("127.0.0.1:0".parse().unwrap(), options)
}

pub fn start_master_at(address: SocketAddr, options: MasterServerOptions) -> TestMaster {
    let (threads, journal) = (options.threads, Arc::new(MemoryJournal::new(1 << 20)));
    let server = Arc::new(MasterServer::new(options, Arc::clone(&journal) as Arc<_>));
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    let supervisor = Supervisor::new();
    let rpc = rpc::serve(&server, address, threads, &supervisor).unwrap();
    TestMaster { server, journal, rpc, supervisor }
}

/// A master with its HTTP ports.
pub struct TestHttpMaster {
    pub rpc: String,
    pub services: AuxServiceAddresses,
    pub server: Arc<MasterServer>,
    _supervisor: Supervisor,
}

pub async fn start_http_master(metadata: Option<MetadataServiceOptions>) -> TestHttpMaster {
    start_http_master_with(metadata, MasterCoreOptions::default()).await
}

pub async fn start_http_master_with(
    metadata: Option<MetadataServiceOptions>,
    core: MasterCoreOptions,
) -> TestHttpMaster {
    let options = MasterServerOptions { core, threads: 2, ..MasterServerOptions::default() };
    start_http_master_of(metadata, options).await
}

pub async fn start_http_master_of(
    metadata: Option<MetadataServiceOptions>,
    options: MasterServerOptions,
) -> TestHttpMaster {
    let loopback: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let events = KvEventServiceOptions {
        bind: "tcp://127.0.0.1:*".to_owned(),
        replay: None,
        backend: String::new(),
        labels: moongate_master::events::KvEventLabels::default(),
        queue: 100,
    };
    let mut services = AuxServices::new(AuxServicesOptions {
        admin: loopback,
        metadata,
        events: Some(events),
        quotas: None,
    });
    let journal = services.observe(Arc::new(MemoryJournal::new(1 << 20)), &Arc::default());
    let threads = options.threads;
    let server = Arc::new(MasterServer::new(options, journal));
    let supervisor = Supervisor::new();
    let rpc = rpc::serve(&server, loopback, threads, &supervisor).unwrap().address().to_string();
    let services = services.start(&server, &supervisor).await.unwrap();
    server.leadership.store(Arc::new(LeadershipStatus::standalone()));
    moongate_master::ticker::start(&server, &supervisor);
    TestHttpMaster { rpc, services, server, _supervisor: supervisor }
}

pub fn key(key: &str) -> KeyArguments<&str> {
    KeyArguments { key, tenant: DEFAULT_TENANT }
}

pub struct TestRpcConnection {
    pub stream: TcpStream,
    pub dialect: Dialect,
    pub attachment: &'static [u8],
    buffer: BytesMut,
}

impl TestRpcConnection {
    pub async fn connect_to(master: &TestMaster) -> Self {
        Self::connect(&master.rpc.address().to_string()).await
    }

    /// Retries: Mooncake's master logs that it is ready shortly before it listens.
    pub async fn connect(address: &str) -> Self {
        let connected = async {
            loop {
                match TcpStream::connect(address).await {
                    Ok(stream) => return stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        };
        let stream =
            tokio::time::timeout(LIMIT, connected).await.expect("the master listens within the limit");
        Self { stream, dialect: Dialect::NEWEST, attachment: &[], buffer: BytesMut::new() }
    }

    /// The next response, or `None` at the end of the stream.
    pub async fn response(&mut self) -> Option<(ResponseHeader, Bytes)> {
        let response = async {
            loop {
                match frame::take::<ResponseHeader>(&mut self.buffer, MAX_RESPONSE).unwrap() {
                    FrameParseResult::Frame(response) => return Some((response.header, response.body)),
                    FrameParseResult::Incomplete(_) => {}
                }
                match self.stream.read_buf(&mut self.buffer).await {
                    Ok(0) | Err(_) => return None,
                    Ok(_) => {}
                }
            }
        };
        tokio::time::timeout(LIMIT, response)
            .await
            .expect("a response or the end of the stream within the limit")
    }

    /// Makes a call and checks that the reply has the connection's dialect.
    pub async fn call<M: RpcDefinition>(&mut self, arguments: &M::Arguments<&str>) -> M::Reply<String>
    where
        for<'a> M::Arguments<&'a str>: Pack,
        for<'a> M::Reply<String>: Unpack<'a>,
    {
        let mut request = BytesMut::new();
        encode_request::<M, &str>(9, self.dialect, arguments, &mut request).unwrap();
        frame::attach(&mut request, self.attachment).unwrap();
        self.stream.write_all(&request).await.unwrap();
        let (header, body) = self.response().await.expect("a response");
        assert_eq!((header.sequence, header.error), (9, 0), "{:?}", M::METHOD);
        let (reply, dialects) = decode_reply::<M, String>(&body).unwrap();
        assert!(dialects.contains(self.dialect), "{:?}: {dialects:?}", M::METHOD);
        reply
    }

    pub async fn mount(&mut self, client: Uuid, size: u64) {
        let segment = Segment {
            id: client,
            name: "127.0.0.1:12345",
            base: 1 << 40,
            size,
            te_endpoint: "127.0.0.1:12345",
            protocol: "tcp",
            host_id: "",
            locality: None,
        };
        assert_eq!(self.call::<MountSegment>(&MountArguments { segment, client_id: client }).await, Ok(()));
    }

    /// Starts a put without finishing it.
    pub async fn begin(&mut self, client: Uuid, name: &str, size: u64) {
        assert_eq!(self.try_begin(client, name, size).await, Ok(()), "{name}");
    }

    pub async fn try_begin(&mut self, client: Uuid, name: &str, size: u64) -> Result<(), ErrorCode> {
        let (config, tenant) = (ReplicateConfig::default(), DEFAULT_TENANT);
        let start = PutStartArguments { client_id: client, key: name, size, config, tenant };
        self.call::<PutStart>(&start).await.map(drop)
    }

    pub async fn put(&mut self, client: Uuid, name: &str, size: u64) {
        self.begin(client, name, size).await;
        let tenant = DEFAULT_TENANT;
        let object = ObjectMeta { key: name, object_checksum: None };
        let end = PutEndArguments { client_id: client, object, replica_type: ReplicaType::ALL, tenant };
        assert_eq!(self.call::<PutEnd>(&end).await, Ok(()), "{name}");
    }

    pub async fn replicas(&mut self, name: &str) -> Result<ReplicaList<String>, ErrorCode> {
        self.call::<GetReplicaList>(&key(name)).await
    }
}

/// A request whose arguments are all zero: no keys, no segments, no clients.
pub fn minimal_request(method: RpcMethod, dialect: Dialect) -> BytesMut {
    let signature = method.arguments_signature(dialect);
    let mut body = Vec::new();
    if !signature.literal().is_empty() {
        body.extend_from_slice(&signature.hash().to_le_bytes());
    }
    // Zeros are the shortest encoding of every type, so the right number of them decodes.
    let request = (0..400).find_map(|_| {
        let decoded = Request::<&str>::decode(method, dialect, &body).ok().map(|request| {
            let mut out = BytesMut::new();
            request.encode(3, dialect, &mut out).unwrap();
            out
        });
        body.push(0);
        decoded
    });
    request.unwrap_or_else(|| panic!("{method:?} has no minimal request"))
}
