//! Layouts and bytes of the real Mooncake: `golden.tsv` was generated with the C++ library that Mooncake is built with, or recorded
//! from 0.3.14; `releases.txt` was extracted from the requests and replies of its published releases.

use bytes::BytesMut;
use mooncake_wire::frame::{self, FrameParseResult, RequestHeader, ResponseHeader, RpcFault, RpcFrame};
use mooncake_wire::rpc::{self, MasterResult, Request, RpcDefinition, RpcMethod};
use mooncake_wire::types::{
    BufferDescriptor, ClientStatus, DiskReplica, GrantLeasePolicy, LocalDiskReplica, ObjectMeta, PingReply,
    ProbePolicy, ReplicaDescriptor, ReplicaList, ReplicaMedium, ReplicaStatus, ReplicaType, ReplicateConfig,
    Segment, SegmentLocality, Uuid,
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
    assert_eq!(rows.len(), 70);
    assert_eq!(RpcMethod::ALL.len(), 70);
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
    assert_eq!(dialects, [Dialect::V0_3_12, Dialect::V0_3_13, Dialect::V0_3_14]);
    // Their hashes are equal.
    for (name, dialect) in [("PutStart args", Dialect::V0_3_13), ("0.3.14 PutStart args", Dialect::V0_3_14)] {
        let put: Vec<_> = RpcMethod::PutStart.request_dialects(&vector(name)).iter().collect();
        assert_eq!(put, [dialect]);
    }
    assert_eq!(RpcMethod::ServiceReady.request_dialects(&[]).iter().count(), Dialect::ALL.len());
    assert!(RpcMethod::ServiceReady.request_dialects(&exist).is_empty());
    assert!(RpcMethod::ExistKey.request_dialects(&[]).is_empty());
    assert!(RpcMethod::PutStart.request_dialects(&exist).is_empty());
}

/// The newest dialect without compatible members, in which the vectors without release are.
const WITHOUT_COMPATIBLE: Dialect = Dialect::V0_3_13;

/// Compares encoded arguments with a vector, and decodes them again.
fn check_request(name: &str, request: &Request<&str>) {
    let expected = vector(name);
    let mut out = BytesMut::new();
    request.encode(7, WITHOUT_COMPATIBLE, &mut out).unwrap();
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
    for dialect in [WITHOUT_COMPATIBLE, Dialect::NEWEST] {
        let decoded = Request::<&str>::decode(request.method(), dialect, &expected).unwrap();
        assert_eq!(&decoded, request, "{name}");
    }
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
        locality: None,
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
        rpc::encode_reply::<rpc::$method, &str>(7, WITHOUT_COMPATIBLE, &reply, &mut out).unwrap();
        let FrameParseResult::Frame(frame) = frame::parse::<ResponseHeader>(&out, LIMIT).unwrap() else {
            panic!("not a whole frame")
        };
        assert_eq!(frame.header, ResponseHeader { sequence: 7, error: 0 });
        assert_eq!(frame.body, expected, "{name}");
        let (decoded, dialects) = rpc::decode_reply::<rpc::$method, &str>(&expected).unwrap();
        assert_eq!(decoded, reply, "{name}");
        assert!(dialects.contains(WITHOUT_COMPATIBLE));
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
        locality: None,
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
    let list = ReplicaList {
        replicas,
        lease_ttl_ms: 10_000,
        object_checksum: Some(0x1122_3344_5566_7788),
        resolved_tenant_id: None,
    };
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

/// The value as this library writes it: without type literal, and without the sender's memory between fields.
fn without_literal(packed: &[u8], literal: &[u8]) -> Vec<u8> {
    const META: usize = 4;
    const LITERAL: u8 = 1 << 2;
    let mut plain = packed.to_vec();
    plain[META] &= !LITERAL;
    let has_size = plain[META] & 0b11 != 0;
    let start = META + 1 + if has_size { size_of::<u16>() } else { 0 };
    plain.drain(start..=start + literal.len());
    if has_size {
        let size = u16::try_from(plain.len()).unwrap();
        plain[META + 1..start].copy_from_slice(&size.to_le_bytes());
    } else if plain[META] == 0 {
        plain[0] &= !1;
        plain.remove(META);
    }
    plain
}

/// Decodes recorded arguments, and encodes them again.
fn check_recorded_request(name: &str, request: &Request<&str>) {
    let (method, recorded) = (request.method(), vector(name));
    let dialects: Vec<_> = method.request_dialects(&recorded).iter().collect();
    assert_eq!(dialects, [Dialect::V0_3_14], "{name}");
    assert_eq!(Request::decode(method, Dialect::V0_3_14, &recorded).as_ref(), Ok(request), "{name}");
    let mut out = BytesMut::new();
    request.encode(7, Dialect::V0_3_14, &mut out).unwrap();
    let FrameParseResult::Frame(frame) = frame::parse::<RequestHeader>(&out, LIMIT).unwrap() else {
        panic!("not a whole frame")
    };
    let mut expected = without_literal(&recorded, method.arguments_signature(Dialect::V0_3_14).literal());
    if method == RpcMethod::BatchProbeKey {
        // Between the policy and the group's size.
        expected[5..12].fill(0);
    }
    assert_eq!(frame.body, expected, "{name}");
}

fn recorded_id(hex: &str) -> Uuid {
    let bytes = from_hex(hex);
    let number = |range: std::ops::Range<usize>| u64::from_le_bytes(bytes[range].try_into().unwrap());
    Uuid { first: number(0..8), second: number(8..16) }
}

#[test]
fn recorded_arguments_of_0_3_14_round_trip() {
    let client_id = recorded_id("73f3b6afb65f415e95d32e232623f0b4");
    let put = |config| rpc::PutStartArguments { client_id, key: "k1", size: 1000, config, tenant: "default" };
    check_recorded_request("0.3.14 PutStart args", &Request::PutStart(put(ReplicateConfig::default())));
    let config = ReplicateConfig {
        session_ids: Some(vec!["s1", "s2"]),
        preferred_hca_names: Some(vec!["dd", "ee"]),
        per_key_preferred_hca_names: Some(vec![vec!["aa", "bb"], vec!["cc"]]),
        residency_affinity_ids: Some(vec!["r1", "r2"]),
        ..ReplicateConfig::default()
    };
    check_recorded_request(
        "0.3.14 BatchPutStart args",
        &Request::BatchPutStart(rpc::BatchPutStartArguments {
            client_id,
            keys: vec!["b1", "b2"],
            sizes: vec![1, 2],
            config,
            tenant: "default",
        }),
    );
    let segment = Segment {
        id: recorded_id("c2cd0abf2a1b44cd8a69ceabf3131377"),
        name: "127.0.0.1:14293",
        base: 0x7fc6_5b00_0000,
        size: 64 << 20,
        te_endpoint: "127.0.0.1:16137",
        protocol: "tcp",
        host_id: "",
        locality: None,
    };
    check_recorded_request(
        "0.3.14 MountSegment args",
        &Request::MountSegment(rpc::MountArguments { segment, client_id }),
    );
    check_recorded_request(
        "0.3.14 BatchProbeKey args",
        &Request::BatchProbeKey(rpc::BatchProbeArguments {
            policy: GrantLeasePolicy { policy: ProbePolicy::LAST_HIT_ONLY, candidate_size: 2 },
            keys: vec!["b1", "b2"],
            tenant: "default",
        }),
    );
    check_recorded_request(
        "0.3.14 BatchReplicaClear args",
        &Request::BatchReplicaClear(rpc::ReplicaClearArguments {
            keys: vec!["nope"],
            client_id,
            segment: "",
            tenant: "default",
        }),
    );
}

/// Decodes a recorded reply, and encodes it again.
macro_rules! check_recorded_reply {
    ($name:literal, $method:ident, $reply:expr) => {{
        let (reply, recorded): (<rpc::$method as RpcDefinition>::Reply<&str>, _) = ($reply, vector($name));
        let (decoded, dialects) = rpc::decode_reply::<rpc::$method, &str>(&recorded).unwrap();
        assert_eq!(decoded, reply);
        assert_eq!(dialects.iter().collect::<Vec<_>>(), [Dialect::V0_3_14]);
        let mut out = BytesMut::new();
        rpc::encode_reply::<rpc::$method, &str>(7, Dialect::V0_3_14, &reply, &mut out).unwrap();
        let FrameParseResult::Frame(frame) = frame::parse::<ResponseHeader>(&out, LIMIT).unwrap() else {
            panic!("not a whole frame")
        };
        let literal = RpcMethod::$method.reply_signature(Dialect::V0_3_14).literal();
        assert_eq!(frame.body, without_literal(&recorded, literal));
    }};
}

#[test]
fn recorded_replies_of_0_3_14_round_trip() {
    let replica = |id, status, (size, address), endpoint, locality| {
        let buffer = BufferDescriptor { size, address, protocol: "tcp", endpoint, locality };
        ReplicaDescriptor { id, medium: ReplicaMedium::Memory(buffer), status }
    };
    let locality = SegmentLocality { numa_node: 3, hca_names: vec!["mlx5_0", "mlx5_1"] };
    let started = replica(4, ReplicaStatus::PROCESSING, (10, 0x7f00_0000_0000), "h:1", Some(locality));
    check_recorded_reply!("0.3.14 expected<PutStart result>", PutStart, Ok(vec![started]));
    let endpoint = "127.0.0.1:16137";
    let found = replica(1, ReplicaStatus::COMPLETE, (1, 0x7fc6_5b00_0000), endpoint, None);
    let found = ReplicaList {
        replicas: vec![found],
        lease_ttl_ms: 10_000,
        object_checksum: None,
        resolved_tenant_id: Some("default"),
    };
    check_recorded_reply!(
        "0.3.14 vector<expected<GetReplicaListResponse>>",
        BatchGetReplicaList,
        vec![Ok(found), Err(ErrorCode::OBJECT_NOT_FOUND)]
    );
    // Only buffers have a locality.
    let memory = replica(1, ReplicaStatus::COMPLETE, (10, 0x7f00_0400_0000), "h:1", None);
    let disk = LocalDiskReplica {
        client_id: Uuid { first: 9, second: 1 },
        object_size: 10,
        transport_endpoint: "h:1",
    };
    let disk =
        ReplicaDescriptor { id: 5, medium: ReplicaMedium::LocalDisk(disk), status: ReplicaStatus::COMPLETE };
    let found = ReplicaList {
        replicas: vec![memory, disk],
        lease_ttl_ms: 10_000,
        object_checksum: None,
        resolved_tenant_id: Some("default"),
    };
    check_recorded_reply!(
        "0.3.14 expected<GetReplicaListResponse> with a disk replica",
        GetReplicaList,
        Ok(found)
    );
}
