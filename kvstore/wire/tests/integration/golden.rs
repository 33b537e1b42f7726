//! Layouts and bytes of the real Mooncake: `golden.tsv` was generated with the C++ library that Mooncake is built with,
//! `releases.txt` was extracted from the requests and replies of its published releases.

use bytes::BytesMut;
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader, ResponseHeader, RpcFault, RpcFrame};
use mooncake_wire::rpc::{self, MasterResult, Request, RpcDefinition, RpcMethod};
use mooncake_wire::types::{
    BufferDescriptor, ClientStatus, DiskReplica, LocalDiskReplica, ObjectMeta, PingReply, ReplicaDescriptor,
    ReplicaList, ReplicaMedium, ReplicaStatus, ReplicaType, ReplicateConfig, Segment, Uuid,
};
use mooncake_wire::{Dialect, ErrorCode};

use super::from_hex;

const GOLDEN: &str = include_str!("../vectors/golden.tsv");
const RELEASES: &str = include_str!("../vectors/releases.txt");
const LIMIT: usize = 1 << 20;

fn hash(text: &str) -> u32 {
    u32::from_str_radix(text, 16).unwrap()
}

fn method(name: &str) -> RpcMethod {
    *RpcMethod::ALL.iter().find(|method| method.name() == name).unwrap()
}

/// The bytes of the vector with this name.
fn vector(name: &str) -> Vec<u8> {
    let mut lines = GOLDEN.lines().filter_map(|line| line.strip_prefix("VEC\t")?.split_once('\t'));
    from_hex(lines.find(|(known, _)| *known == name).unwrap_or_else(|| panic!("no vector {name:?}")).1)
}

#[test]
fn every_rpc_of_the_newest_release_has_its_ids_and_literals() {
    let rows: Vec<Vec<&str>> = GOLDEN
        .lines()
        .filter(|line| !line.starts_with("VEC"))
        .map(|line| line.split('\t').collect())
        .collect();
    assert_eq!(rows.len(), 64);
    assert_eq!(RpcMethod::ALL.len(), 64);
    for row in rows {
        let [name, function_id, arguments_hash, arguments, reply_hash, reply] = row[..] else {
            panic!("{row:?}")
        };
        let method = method(name);
        assert_eq!(method.function_id(), hash(function_id), "{name}");
        assert_eq!(RpcMethod::from_function_id(hash(function_id)), Some(method));
        let signature = method.arguments_signature(Dialect::NEWEST);
        assert_eq!(signature.literal(), from_hex(arguments), "arguments of {name}");
        if !arguments.is_empty() {
            assert_eq!(signature.hash(), hash(arguments_hash), "arguments of {name}");
        }
        let signature = method.reply_signature(Dialect::NEWEST);
        assert_eq!(signature.literal(), from_hex(reply), "reply of {name}");
        assert_eq!(signature.hash(), hash(reply_hash), "reply of {name}");
    }
    assert_eq!(RpcMethod::from_function_id(0), None);
}

/// The newest dialect that is not newer than `release`.
fn dialect_of(release: &str) -> Option<Dialect> {
    let number = |release: &str| -> Vec<u32> {
        release.replace("post", "").split('.').map(|part| part.parse().unwrap()).collect()
    };
    Dialect::ALL.into_iter().rev().find(|dialect| number(dialect.release()) <= number(release))
}

#[test]
fn hashes_of_older_releases_match() {
    // RPC name, dialect, arguments hash and reply hash; valid from this dialect until the next entry of the RPC.
    let mut entries: Vec<(&str, Option<Dialect>, &str, &str)> = Vec::new();
    let mut name = "";
    for line in RELEASES.lines() {
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["##", next] => name = next,
            [release, "args", hash, ..] => entries.push((name, dialect_of(release), hash, "")),
            ["res", hash, ..] => entries.last_mut().unwrap().3 = hash,
            _ => panic!("{line}"),
        }
    }
    let mut checked = 0;
    for method in RpcMethod::ALL {
        for dialect in Dialect::ALL {
            let mut of_method = entries.iter().filter(|(name, ..)| *name == method.name());
            let Some((.., arguments, reply)) = of_method.rfind(|(_, from, ..)| *from <= Some(dialect)) else {
                continue;
            };
            if *arguments != "-" {
                let expected = method.arguments_signature(dialect).hash();
                assert_eq!(expected, hash(arguments), "arguments of {} in {dialect}", method.name());
            }
            let expected = method.reply_signature(dialect).hash();
            assert_eq!(expected, hash(reply), "reply of {} in {dialect}", method.name());
            checked += 1;
        }
    }
    assert!(checked > 100, "{checked} checked");
}

#[test]
fn request_dialects_follow_from_the_body() {
    let exist = vector("ExistKey args (\"k1\",\"default\")");
    let dialects: Vec<_> = RpcMethod::ExistKey.request_dialects(&exist).iter().collect();
    assert_eq!(dialects, [Dialect::V0_3_12, Dialect::V0_3_13]);
    let put: Vec<_> = RpcMethod::PutStart.request_dialects(&vector("PutStart args")).iter().collect();
    assert_eq!(put, [Dialect::V0_3_13]);
    assert_eq!(RpcMethod::ServiceReady.request_dialects(&[]).iter().count(), Dialect::ALL.len());
    assert!(RpcMethod::ServiceReady.request_dialects(&exist).is_empty());
    assert!(RpcMethod::ExistKey.request_dialects(&[]).is_empty());
    assert!(RpcMethod::PutStart.request_dialects(&exist).is_empty());
}

/// Compares encoded arguments with a vector, and decodes them again.
fn check_request(name: &str, request: &Request<&str>) {
    let expected = vector(name);
    let mut out = BytesMut::new();
    request.encode(7, Dialect::NEWEST, &mut out).unwrap();
    let FrameParseResult::Frame(frame) = frame::parse::<RequestHeader>(&out, LIMIT).unwrap() else {
        panic!("not a whole frame")
    };
    let RpcFrame { header, body, attachment } = frame;
    assert_eq!(header, RequestHeader { sequence: 7, function_id: request.method().function_id() });
    assert!(attachment.is_empty());
    assert!(
        body == expected,
        "{name}: {} bytes, starting with {:02x?}",
        body.len(),
        &body[..body.len().min(200)]
    );
    let decoded = Request::<&str>::decode(request.method(), Dialect::NEWEST, &expected).unwrap();
    assert_eq!(&decoded, request, "{name}");
}

const ID: Uuid = Uuid { first: 3, second: 4 };

#[test]
fn arguments_match_the_vectors() {
    check_request(
        "ExistKey args (\"k1\",\"default\")",
        &Request::ExistKey(rpc::KeyArguments { key: "k1", tenant: "default" }),
    );
    let (long, longest) = ("x".repeat(300), "x".repeat(70_000));
    for (name, keys, tenant) in [
        ("BatchExistKey args ([k1,k2],default)", vec!["k1", "k2"], "default"),
        ("BatchExistKey args (300-byte key -> 2-byte lengths)", vec![&long], "default"),
        ("BatchExistKey args (70000-byte key -> 4-byte lengths)", vec![&longest], "d"),
    ] {
        check_request(name, &Request::BatchExistKey(rpc::KeysArguments { keys, tenant }));
    }
    let segment = Segment {
        id: Uuid { first: 0x1111, second: 0x2222 },
        name: "127.0.0.1:13286",
        base: 0x7f00_0000_0000,
        size: 0x100_0000,
        te_endpoint: "127.0.0.1:13286",
        protocol: "tcp",
        host_id: "h",
    };
    check_request(
        "MountSegment args",
        &Request::MountSegment(rpc::MountArguments { segment, client_id: ID }),
    );
    check_request(
        "PutStart args",
        &Request::PutStart(rpc::PutStartArguments {
            client_id: ID,
            key: "k1",
            size: 1000,
            config: ReplicateConfig::default(),
            tenant: "default",
        }),
    );
    check_request(
        "PutEnd args",
        &Request::PutEnd(rpc::PutEndArguments {
            client_id: ID,
            object: ObjectMeta { key: "k1", object_checksum: Some(0xabcd) },
            replica_type: ReplicaType::MEMORY,
            tenant: "default",
        }),
    );
    check_request("Ping args", &Request::Ping(rpc::ClientArguments { client_id: ID }));
    check_request(
        "RemoveAll args",
        &Request::RemoveAll(rpc::RemoveAllArguments { force: true, tenant: "default" }),
    );
}

/// Compares an encoded reply with a vector, and decodes it again.
macro_rules! check_reply {
    ($name:literal, $method:ident, $reply:expr) => {{
        let (name, reply, expected): (_, <rpc::$method as RpcDefinition>::Reply<&str>, _) =
            ($name, $reply, vector($name));
        let mut out = BytesMut::new();
        rpc::encode_reply::<rpc::$method, &str>(7, Dialect::NEWEST, &reply, &mut out).unwrap();
        let FrameParseResult::Frame(frame) = frame::parse::<ResponseHeader>(&out, LIMIT).unwrap() else {
            panic!("not a whole frame")
        };
        assert_eq!(frame.header, ResponseHeader { sequence: 7, error: 0 });
        assert_eq!(frame.body, expected, "{name}");
        let (decoded, dialects) = rpc::decode_reply::<rpc::$method, &str>(&expected).unwrap();
        assert_eq!(decoded, reply, "{name}");
        assert!(dialects.contains(Dialect::NEWEST));
    }};
}

#[test]
fn replies_match_the_vectors() {
    check_reply!("expected<bool> true", ExistKey, Ok(true));
    check_reply!("expected<bool> err -704", ExistKey, Err(ErrorCode::OBJECT_NOT_FOUND));
    let batch: Vec<MasterResult<bool>> = vec![Ok(true), Ok(false), Err(ErrorCode::INVALID_PARAMS)];
    check_reply!("vector<expected<bool>> [T,F,err]", BatchExistKey, batch);
    check_reply!("expected<void> ok", PutEnd, Ok(()));
    check_reply!("expected<void> err -705", PutEnd, Err(ErrorCode::OBJECT_ALREADY_EXISTS));
    check_reply!("RemoveAll result", RemoveAll, 5);
    let ping = PingReply { view_version_id: 5, client_status: ClientStatus::NEED_REMOUNT };
    check_reply!("expected<PingResponse>", Ping, Ok(ping));

    let replica = |id, status, medium| ReplicaDescriptor { id, medium, status };
    let memory = BufferDescriptor {
        size: 4096,
        address: 0x7f00_0000_1000,
        protocol: "tcp",
        endpoint: "127.0.0.1:12695",
    };
    let memory = ReplicaMedium::Memory(memory);
    let disk = ReplicaMedium::Disk(DiskReplica { file_path: "/a/b", object_size: 4096 });
    let local = LocalDiskReplica {
        client_id: Uuid { first: 1, second: 2 },
        object_size: 4096,
        transport_endpoint: "h:1",
    };
    let replicas = vec![
        replica(7, ReplicaStatus::COMPLETE, memory),
        replica(8, ReplicaStatus::COMPLETE, disk),
        replica(9, ReplicaStatus::COMPLETE, ReplicaMedium::LocalDisk(local)),
    ];
    let list = ReplicaList { replicas, lease_ttl_ms: 10_000, object_checksum: Some(0x1122_3344_5566_7788) };
    check_reply!("expected<GetReplicaListResponse>", GetReplicaList, Ok(list));
}

#[test]
fn faults_match_the_vectors() {
    let expected = vector("error msg (err_code<=254)");
    let mut out = BytesMut::new();
    RpcFault::invalid_argument().write(9, &mut out).unwrap();
    let FrameParseResult::Frame(frame) = frame::parse::<ResponseHeader>(&out, LIMIT).unwrap() else {
        panic!("not whole")
    };
    assert_eq!((frame.header, frame.body), (ResponseHeader { sequence: 9, error: 4 }, &expected[..]));
    assert_eq!(RpcFault::parse(4, &expected), Ok(RpcFault::invalid_argument()));
}

#[test]
fn type_literals_of_debug_builds_are_checked() {
    let plain = vector("Ping args");
    let signature = RpcMethod::Ping.arguments_signature(Dialect::NEWEST);
    let mut literal = (signature.hash() | 1).to_le_bytes().to_vec();
    literal.push(1 << 2);
    literal.extend(signature.literal());
    literal.push(0);
    literal.extend(&plain[4..]);
    let expected = Request::Ping(rpc::ClientArguments { client_id: ID });
    assert_eq!(Request::<&str>::decode(RpcMethod::Ping, Dialect::NEWEST, &literal), Ok(expected));
    assert_eq!(RpcMethod::Ping.request_dialects(&literal), RpcMethod::Ping.dialects());
    literal[6] ^= 1;
    let rejected = Request::<&str>::decode(RpcMethod::Ping, Dialect::NEWEST, &literal);
    assert_eq!(rejected, Err(mooncake_wire::pack::UnpackError::TypeLiteral));
}
