//! The store's authenticated mode, through the binary: certificates on all ports, and capabilities for all transfers.

use std::time::Duration;

use mooncake_wire::capability::{AccessGrant, AccessRights, Capability, CapabilityError, SegmentKey};
use mooncake_wire::rpc::{CopyTaskArguments, CreateCopyTask};
use mooncake_wire::types::{BufferDescriptor, ReplicaMedium, Uuid};
use moongate_master_client::admin::{self, AdminClient};
use moongate_master_client::rpc::StoreCredentials;
use moongate_runtime::{PeerTls, PeerTlsFiles, Supervisor};
use moongate_store_client::{KvClient, KvClientOptions, PutOptions};
use moongate_testkit::TestAuthority;
use moongate_transfer::{
    DescriptorDirectory, MetadataSource, TransferConnection, TransferError, TransferLimits, TransferProtocol,
};
use tempfile::TempDir;

use crate::harness::polling::poll_until;
use crate::harness::process::{MoongateProcess, ProcessOutput};

/// Time limit of a transfer, long enough for a busy machine, and short enough to wait for its expiry.
const LEASE: &str = "--default_kv_lease_ttl=3000";

/// The certificates of programs on loopback.
struct AuthenticationCertificates(TestAuthority);

impl AuthenticationCertificates {
    fn new() -> Self {
        Self(TestAuthority::new().unwrap())
    }

    fn files(&self, who: &str) -> PeerTlsFiles {
        let files = self.0.issue_files(who, &["127.0.0.1"]).unwrap();
        PeerTlsFiles { certificate: files.certificate, key: files.key, ca: files.ca, name: None }
    }

    /// TLS flags of a program, with `dash` between the words of their names.
    fn flags(&self, who: &str, dash: char) -> Vec<String> {
        let files = self.files(who);
        [("cert", files.certificate), ("key", files.key), ("ca", files.ca)]
            .map(|(name, path)| format!("--store{dash}tls{dash}{name}={}", path.display()))
            .to_vec()
    }

    fn program(&self, who: &str) -> StoreCredentials {
        StoreCredentials::new(PeerTls::load(self.files(who)).unwrap())
    }
}

fn field<'l>(line: &'l str, name: &str) -> &'l str {
    line.split_whitespace().find_map(|word| word.strip_prefix(name)).unwrap()
}

struct AuthenticatedMaster {
    _binary: MoongateProcess,
    rpc: String,
    admin: String,
}

impl AuthenticatedMaster {
    async fn start(rpc_port: &str, flags: &[String]) -> Self {
        let port = format!("--rpc_port={rpc_port}");
        let fixed = [
            "master",
            "--rpc_address=127.0.0.1",
            &port,
            "--metrics_host=127.0.0.1",
            "--metrics_port=0",
            LEASE,
        ];
        let arguments: Vec<&str> = fixed.into_iter().chain(flags.iter().map(String::as_str)).collect();
        let mut binary = MoongateProcess::start(&arguments);
        let push_target_line = binary.wait_for_line("serving Mooncake clients").await;
        let rpc = field(&push_target_line, "rpc=").to_owned();
        let admin = field(&binary.wait_for_line("serving the admin interface").await, "admin=").to_owned();
        Self { _binary: binary, rpc, admin }
    }
}

struct AuthenticatedNode {
    _binary: MoongateProcess,
    name: String,
    data: u16,
    http: String,
}

impl AuthenticatedNode {
    async fn start(master: &str, flags: &[String]) -> Self {
        let at = format!("-Dmaster_server_address={master}");
        let fixed = [
            "store",
            "--port=0",
            &at,
            "-Dlocal_hostname=127.0.0.1",
            "-Dmetadata_server=P2PHANDSHAKE",
            "-Dglobal_segment_size=32mb",
        ];
        let arguments: Vec<&str> = fixed.into_iter().chain(flags.iter().map(String::as_str)).collect();
        let mut binary = MoongateProcess::start(&arguments);
        let push_target_line = binary.wait_for_line("store node ready").await;
        let (name, http) =
            (field(&push_target_line, "name=").to_owned(), field(&push_target_line, "http=").to_owned());
        Self { name, data: field(&push_target_line, "data_port=").parse().unwrap(), http, _binary: binary }
    }
}

/// A master and two nodes.
struct AuthenticatedStore {
    certificates: AuthenticationCertificates,
    master: AuthenticatedMaster,
    nodes: [AuthenticatedNode; 2],
    supervisor: Supervisor,
}

impl AuthenticatedStore {
    async fn start() -> Self {
        let certificates = AuthenticationCertificates::new();
        let master = AuthenticatedMaster::start("0", &certificates.flags("master", '_')).await;
        let first = AuthenticatedNode::start(&master.rpc, &certificates.flags("first", '-')).await;
        let second = AuthenticatedNode::start(&master.rpc, &certificates.flags("second", '-')).await;
        Self { certificates, master, nodes: [first, second], supervisor: Supervisor::new() }
    }

    fn client(&self, authentication: &StoreCredentials) -> KvClient {
        let options =
            KvClientOptions { authentication: Some(authentication.clone()), ..KvClientOptions::default() };
        KvClient::new(&self.master.rpc, options, &self.supervisor).unwrap()
    }

    async fn kv(&self, arguments: &[&str], flags: &[String]) -> ProcessOutput {
        let master = format!("--master={}", self.master.rpc);
        let fixed = ["kv"].into_iter().chain(arguments.iter().copied()).chain([master.as_str()]);
        MoongateProcess::run(&fixed.chain(flags.iter().map(String::as_str)).collect::<Vec<_>>()).await
    }

    /// The locations of an object's replicas.
    async fn replicas(&self, client: &KvClient, key: &str) -> Vec<BufferDescriptor<String>> {
        let list = client.objects().replicas(key).await.unwrap();
        let memory = |medium| match medium {
            ReplicaMedium::Memory(buffer) => Some(buffer),
            _ => None,
        };
        list.replicas.into_iter().filter_map(|replica| memory(replica.medium)).collect()
    }

    fn data_port(&self, endpoint: &str) -> u16 {
        self.nodes.iter().find(|node| node.name == endpoint).unwrap().data
    }

    async fn dial(
        &self,
        endpoint: &str,
        as_peer: &StoreCredentials,
    ) -> Result<TransferConnection, TransferError> {
        let port = self.data_port(endpoint);
        TransferConnection::open_secured("127.0.0.1", port, TransferLimits::default(), &as_peer.tls).await
    }
}

impl Drop for AuthenticatedStore {
    fn drop(&mut self) {
        self.supervisor.token().cancel();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_with_certificates_store_copy_and_list_objects() {
    let store = AuthenticatedStore::start().await;
    let flags = store.certificates.flags("client", '-');
    let folder = TempDir::new().unwrap();
    let bytes: Vec<u8> = (0..9_000_000_u32).map(|at| (at % 251) as u8).collect();
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    std::fs::write(&from, &bytes).unwrap();
    for arguments in
        [&["put", "file", from.to_str().unwrap(), "--replicas=2"][..], &["get", "file", to.to_str().unwrap()]]
    {
        let ran = store.kv(arguments, &flags).await;
        assert!(ran.status.success(), "{arguments:?}: {}", ran.stderr);
    }
    assert!(std::fs::read(&to).unwrap() == bytes);
    let admin = format!("--admin={}", store.master.admin);
    let listed = store.kv(&["ls", &admin], &flags).await;
    assert_eq!(listed.stdout, "file\n", "{}", listed.stderr);

    // A copy task of the master, from one node to the other.
    let authentication = store.certificates.program("client");
    let client = store.client(&authentication);
    let first = PutOptions { preferred_segments: vec![store.nodes[0].name.clone()], ..PutOptions::default() };
    client.put("copied", &bytes[..100_000], &first).await.unwrap();
    let [from, to] = [0, 1].map(|at: usize| store.nodes[at].name.as_str());
    assert_eq!(store.replicas(&client, "copied").await[0].endpoint, from);
    let task = CopyTaskArguments { key: "copied", tenant: "default", targets: vec![to] };
    client.objects().master().call::<CreateCopyTask, &str>(&task).await.unwrap().unwrap();
    poll_until("the object is on both nodes", async || store.replicas(&client, "copied").await.len() == 2)
        .await;
    assert!(client.get("copied").await.unwrap() == bytes[..100_000]);
}

#[tokio::test(flavor = "multi_thread")]
async fn segment_keys_survive_restarts_of_master_and_node() {
    let mut store = AuthenticatedStore::start().await;
    let client = store.client(&store.certificates.program("client"));
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    client.put("before", b"both nodes", &options).await.unwrap();

    let (_, port) = store.master.rpc.rsplit_once(':').unwrap();
    let (port, flags) = (port.to_owned(), store.certificates.flags("master", '_'));
    store.master._binary.signal("KILL").await;
    store.master = AuthenticatedMaster::start(&port, &flags).await;
    poll_until("the nodes are back", async || client.put("after", b"both nodes", &options).await.is_ok())
        .await;
    assert_eq!(client.get("after").await.unwrap(), &b"both nodes"[..]);

    store.nodes[1]._binary.signal("KILL").await;
    store.nodes[1] =
        AuthenticatedNode::start(&store.master.rpc, &store.certificates.flags("second", '-')).await;
    let there = PutOptions { preferred_segments: vec![store.nodes[1].name.clone()], ..PutOptions::default() };
    client.put("again", b"the new node", &there).await.unwrap();
    assert_eq!(client.get("again").await.unwrap(), &b"the new node"[..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_certificate_is_used_for_new_calls_and_transfers() {
    let store = AuthenticatedStore::start().await;
    let authentication = store.certificates.program("client");
    authentication.tls.reload_on_change(&store.supervisor);
    let client = store.client(&authentication);
    client.put("before", b"old", &PutOptions::default()).await.unwrap();
    assert_eq!(client.get("before").await.unwrap(), &b"old"[..]);

    let shown = authentication.tls.own_fingerprint();
    store.certificates.files("client");
    poll_until("the files are read again", async || authentication.tls.own_fingerprint() != shown).await;
    client.put("after", b"new", &PutOptions::default()).await.unwrap();
    assert_eq!(client.get("after").await.unwrap(), &b"new"[..]);
    assert_eq!(client.get("before").await.unwrap(), &b"old"[..]);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_port_rejects_clients_without_a_ca_certificate() {
    let store = AuthenticatedStore::start().await;
    let foreign = AuthenticationCertificates::new();
    let flags = |who| {
        let mut flags = foreign.flags(who, '-');
        flags[2] = format!("--store-tls-ca={}", store.certificates.0.ca_file().display());
        flags
    };
    let none = store.kv(&["get", "k"], &[]).await;
    assert!(
        none.stderr.contains("it requires TLS with a certificate: set --store-tls-cert"),
        "{}",
        none.stderr
    );
    let stranger = store.kv(&["get", "k"], &flags("client")).await;
    assert!(stranger.stderr.contains("from a CA that it trusts"), "{}", stranger.stderr);
    assert_eq!((none.status.code(), stranger.status.code()), (Some(1), Some(1)));
    let untrusted = store.kv(&["get", "k"], &foreign.flags("client", '-')).await;
    assert!(untrusted.stderr.contains("configure the CA that signed"), "{}", untrusted.stderr);

    // Admin ports: only probes need no certificate.
    let ca = std::fs::read(store.certificates.0.ca_file()).unwrap();
    let ca = reqwest::Certificate::from_pem(&ca).unwrap();
    let bare = reqwest::Client::builder().no_proxy().tls_certs_only([ca]).build().unwrap();
    for (address, closed) in [
        (&store.master.admin, &["/metrics", "/get_all_keys", "/role/x"][..]),
        (&store.nodes[0].http, &["/metrics", "/settled", "/api/get/k"]),
    ] {
        let status =
            async |path: &str| bare.get(format!("https://{address}{path}")).send().await.unwrap().status();
        assert_eq!(status("/health").await, 200, "{address}");
        for path in closed {
            assert_eq!(status(path).await, 403, "{address}{path}");
        }
        let plain = moongate_runtime::plain_http_client().build().unwrap();
        assert!(plain.get(format!("http://{address}/health")).send().await.is_err());
    }
    let mine = store.certificates.program("me");
    let admin = AdminClient::authenticated(
        &store.master.admin,
        admin::AdminClientOptions::default(),
        Some(&mine.tls),
    )
    .unwrap();
    assert_eq!(admin.segments().await.unwrap().len(), 2);
    let stranger =
        PeerTls::load(PeerTlsFiles { ca: store.certificates.0.ca_file(), ..foreign.files("x") }).unwrap();
    let admin = AdminClient::authenticated(
        &store.master.admin,
        admin::AdminClientOptions::default(),
        Some(&stranger),
    )
    .unwrap();
    assert!(admin.health().await.is_err());

    // Handshakes and the data plane.
    let node = &store.nodes[0];
    let plain = DescriptorDirectory::new(&MetadataSource::Handshake).unwrap();
    let refused = plain.descriptor(&node.name).await.unwrap_err().to_string();
    assert!(refused.contains("set --store-tls-cert"), "{refused}");
    let secured = DescriptorDirectory::authenticated(&MetadataSource::Handshake, Some(&stranger)).unwrap();
    assert!(secured.descriptor(&node.name).await.is_err());
    let secured = DescriptorDirectory::authenticated(&MetadataSource::Handshake, Some(&mine.tls)).unwrap();
    let buffer = secured.descriptor(&node.name).await.unwrap().buffers[0].addr;
    for protocol in [TransferProtocol::V2, TransferProtocol::Checked] {
        let mut plain = TransferConnection::open("127.0.0.1", node.data, protocol, TransferLimits::default())
            .await
            .unwrap();
        assert!(plain.read(buffer, &mut [0; 8]).await.is_err());
        assert!(plain.write(buffer, &[0; 8]).await.is_err());
    }
    let stranger =
        TransferConnection::open_secured("127.0.0.1", node.data, TransferLimits::default(), &stranger).await;
    if let Ok(mut stranger) = stranger {
        stranger.set_capability(Some(forged()));
        assert!(stranger.read(buffer, &mut [0; 8]).await.is_err());
    }
}

/// A capability that is not signed with the segment's key.
fn forged() -> Capability {
    let grant = AccessGrant { rights: AccessRights::Read, start: 0, size: u64::MAX, expires_ms: u64::MAX };
    SegmentKey::new([0; 32]).sign(Uuid::default(), grant, &[0; 32])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_alone_reads_and_writes_nothing() {
    let store = AuthenticatedStore::start().await;
    let (owner, other) = (store.certificates.program("owner"), store.certificates.program("other"));
    let client = store.client(&owner);
    client.put("mine", &[7; 4096], &PutOptions::default()).await.unwrap();
    client.put("next", &[8; 4096], &PutOptions::default()).await.unwrap();
    let BufferDescriptor { endpoint, address, size, .. } = store.replicas(&client, "mine").await.remove(0);
    let read = owner.grants.find(&endpoint, AccessRights::Read, address, size).unwrap();
    let refused = async |peer: &StoreCredentials, capability, start, writes| {
        let mut connection = store.dial(&endpoint, peer).await.unwrap();
        connection.set_capability(capability);
        let mut bytes = [0; 4096];
        let moved = match writes {
            true => connection.write(start, &bytes).await,
            false => connection.read(start, &mut bytes).await,
        };
        match moved {
            Ok(()) => None,
            Err(TransferError::Refused { refusal, .. }) => Some(Ok(refusal)),
            Err(error) => Some(Err(error.to_string())),
        }
    };
    assert_eq!(refused(&owner, Some(read), address, false).await, None, "a granted range can be read");
    assert_eq!(
        refused(&owner, Some(read), address + 4096, false).await,
        Some(Ok(CapabilityError::OutOfRange))
    );
    assert_eq!(refused(&owner, Some(read), address, true).await, Some(Ok(CapabilityError::WrongOperation)));
    assert_eq!(
        refused(&other, Some(read), address, false).await,
        Some(Ok(CapabilityError::InvalidSignature))
    );
    assert_eq!(
        refused(&other, Some(forged()), address, false).await,
        Some(Ok(CapabilityError::InvalidSignature))
    );
    let none = refused(&other, None, address, false).await.unwrap().unwrap_err();
    assert!(none.contains("the master has granted no access"), "{none}");

    tokio::time::sleep(Duration::from_millis(3000)).await;
    assert_eq!(refused(&owner, Some(read), address, false).await, Some(Ok(CapabilityError::Expired)));
    assert!(owner.grants.find(&endpoint, AccessRights::Read, address, size).is_none());
    assert!(client.get("mine").await.unwrap() == vec![7; 4096], "nothing was written");

    let http = owner.tls.http_client().build().unwrap();
    let mut counted = String::new();
    for node in &store.nodes {
        counted +=
            &http.get(format!("https://{}/metrics", node.http)).send().await.unwrap().text().await.unwrap();
    }
    for reason in ["out_of_range", "wrong_operation", "expired", "invalid_signature"] {
        let name = format!("moongate_store_transfer_failures_total{{reason=\"{reason}\"}} ");
        let counts = counted.lines().filter_map(|line| line.strip_prefix(&name));
        assert!(counts.map(|count| count.parse::<f64>().unwrap()).sum::<f64>() >= 1.0, "{reason}: {counted}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_and_plaintext_mismatch_is_explained_on_both_sides() {
    let certificates = AuthenticationCertificates::new();
    let master = AuthenticatedMaster::start("0", &[]).await;
    let flags = certificates.flags("client", '-');
    let at = format!("--master={}", master.rpc);
    let arguments = ["kv", "get", "k", &at].into_iter().chain(flags.iter().map(String::as_str));
    let ran = MoongateProcess::run(&arguments.collect::<Vec<_>>()).await;
    assert_eq!(ran.status.code(), Some(1), "{}", ran.stderr);
    assert!(ran.stderr.contains("if it does not use TLS, set --store-tls-cert"), "{}", ran.stderr);
}

#[tokio::test]
async fn settings_are_checked_at_start() {
    let certificates = AuthenticationCertificates::new();
    let [cert, key, ca] = <[String; 3]>::try_from(certificates.flags("x", '-')).unwrap();
    let master = certificates.flags("x", '_');
    for (arguments, expected) in [
        (vec!["master", &master[0], &master[1]], "--store_tls_cert needs --store_tls_ca"),
        (vec!["master", "--store_tls_cert=/none", &master[1], &master[2]], "--store_tls_cert /none"),
        (vec!["store", "-Dmaster_server_address=h:1", &cert, &ca], "--store-tls-cert needs --store-tls-key"),
        (
            vec!["store", "-Dmaster_server_address=h:1", "-Dprotocol=rdma", &cert, &key, &ca],
            "cannot be used with the protocol rdma",
        ),
        (
            vec![
                "store",
                "-Dmaster_server_address=h:1",
                "-Dmetadata_server=http://h:1/metadata",
                &cert,
                &key,
                &ca,
            ],
            "write https://",
        ),
        (vec!["kv", "get", "k", &key, &ca], "--store-tls-key needs --store-tls-cert"),
        (
            vec![
                "gateway",
                "--listen=127.0.0.1:0",
                "--admin-listen=127.0.0.1:0",
                "--mooncake-admin=h:1",
                "--worker=http://h:1",
                &ca,
            ],
            "--store-tls-ca needs --store-tls-cert",
        ),
    ] {
        let ran = MoongateProcess::run(&arguments).await;
        assert_eq!(ran.status.code(), Some(2), "{arguments:?}: {}", ran.stderr);
        assert!(ran.stderr.contains(expected), "{arguments:?}: {}", ran.stderr);
    }
}
