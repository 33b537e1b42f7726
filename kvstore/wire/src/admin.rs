//! The JSON of the master's admin server (HTTP, port 9003 by default).
//!
//! Members that are added by later releases are ignored. Text and Prometheus endpoints have no types here.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::pack::wire_code;
use crate::types::{SegmentStatus, Uuid};

/// `GET /health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthResponse {
    /// `ok`; a master of ours whose disk is full or broken: `degraded`.
    pub status: String,
    /// `leader` or `standby`.
    pub role: String,
    /// `serving`, or what else a standby does.
    pub ha_state: String,
    /// Whether RPCs are answered.
    pub service_ready: bool,
    /// Where the leader is, if there are several masters.
    pub leader_address: Option<String>,
    /// Counts changes of the leader, if there are several masters.
    pub view_version: Option<i64>,
    /// What is wrong, in words. Masters of ours only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
}

/// `GET /kv_events/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEventsStatus {
    /// Whether events are published. Builds without ZeroMQ say no whatever the flag says.
    pub enabled: bool,
    /// Batches sent.
    pub published_batches: u64,
    /// Events sent.
    pub published_events: u64,
    /// Events that were not sent because the queue was full.
    pub dropped_events: u64,
    /// Keys that are not known to be pages.
    pub skipped_unparsed_keys: u64,
}

/// A range of a node's memory, in the names that the admin server gives its members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminBufferDescriptor<'a> {
    /// Bytes.
    #[serde(rename = "size_")]
    pub size: u64,
    /// Address in the node that has it.
    #[serde(rename = "buffer_address_")]
    pub address: u64,
    /// How to reach it, for example `tcp` or `rdma`.
    #[serde(rename = "protocol_", borrow)]
    pub protocol: Cow<'a, str>,
    /// The node's `host:port`, which is the name of its segment too.
    #[serde(rename = "transport_endpoint_", borrow)]
    pub endpoint: Cow<'a, str>,
}

/// What an endpoint answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AdminResponse<T> {
    /// It worked.
    Success(T),
    /// It failed. The HTTP status is not 200.
    Failure(AdminFailure),
}

/// The answer of endpoints that wrap what was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdminSuccess<T> {
    /// True.
    pub success: bool,
    /// What was asked for.
    pub data: T,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminFailure {
    /// False.
    pub success: bool,
    /// What is wrong.
    pub error_code: ErrorCode,
    /// Its name, or a sentence.
    pub error_message: String,
}

/// `GET /query_key?key=…`: the object's replicas in memory. Leases the object.
pub type QueryKeyResponse<'a> = AdminResponse<AdminSuccess<Vec<AdminBufferDescriptor<'a>>>>;

/// `GET /batch_query_keys?keys=…`: the only look-up that neither leases objects nor counts as use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BatchQueryKeysResponse<'a> {
    /// What is known about each key. A key that was asked for twice is there once.
    Found {
        /// True.
        success: bool,
        /// By key.
        #[serde(borrow)]
        data: BTreeMap<String, KeyReplicas<'a>>,
    },
    /// The query is malformed.
    InvalidQuery {
        /// False.
        success: bool,
        /// What is wrong with it.
        error: String,
    },
}

/// Where an object is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyReplicas<'a> {
    /// Whether it can be read.
    pub ok: bool,
    /// Why not: the name of an [`ErrorCode`].
    pub error: Option<String>,
    /// In memory.
    #[serde(borrow)]
    pub values: Option<Vec<AdminBufferDescriptor<'a>>>,
    /// In files of a shared file system.
    pub disk_values: Option<Vec<SharedDiskFile>>,
    /// On nodes' own disks.
    pub local_disk_values: Option<Vec<LocalDiskObject>>,
    /// On disks behind NVMe over fabrics.
    #[serde(borrow)]
    pub nof_values: Option<Vec<AdminBufferDescriptor<'a>>>,
}

/// A file of a shared file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDiskFile {
    /// The file's path.
    pub file_path: String,
    /// Bytes of the object.
    pub object_size: u64,
}

/// An object on a node's own disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalDiskObject {
    /// The client whose disk it is.
    pub client_id: Uuid,
    /// Bytes of the object.
    pub object_size: u64,
    /// The node's `host:port`.
    pub transport_endpoint: String,
}

/// `GET /get_segments_detail`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SegmentsDetail {
    /// How many there are.
    pub total_segments: u64,
    /// Each of them.
    pub segments: Vec<SegmentDetail>,
}

/// A segment and how full it is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentDetail {
    /// The node's `host:port`.
    pub segment_name: String,
    /// Its id.
    pub segment_id: Uuid,
    /// Whose it is.
    pub client_id: Uuid,
    /// Address of the first byte, as `0x…`.
    pub base_address: String,
    /// Bytes.
    pub size_bytes: u64,
    /// Bytes, for people.
    pub size_human: String,
    /// Where transfers go.
    pub te_endpoint: String,
    /// How transfers go.
    pub protocol: String,
    /// The name of a [`SegmentStatus`].
    pub status: String,
    /// Bytes in use.
    pub allocator_used_bytes: u64,
    /// Bytes that can be used.
    pub allocator_capacity_bytes: u64,
    /// The share in use, from 0 to 100.
    pub allocator_usage_percent: f64,
}

/// `GET /api/v1/segments/status?segment=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentStatusResponse {
    /// True.
    pub success: bool,
    /// The segment's name.
    pub segment: String,
    /// What becomes of it.
    pub status: SegmentStatus,
    /// The name of that.
    pub status_name: String,
    /// [`ErrorCode::OK`].
    pub error_code: ErrorCode,
    /// Empty.
    pub error_message: String,
}

wire_code! {
    /// How far a drain job is.
    pub struct JobStatus(i32) {
        /// It has been accepted.
        CREATED = 0,
        /// It looks for what has to be moved.
        PLANNING = 1,
        /// It moves.
        RUNNING = 2,
        /// All has been moved.
        SUCCEEDED = 3,
        /// Something could not be moved.
        FAILED = 4,
        /// It was called off.
        CANCELED = 5,
    }
}

/// The body of `POST /api/v1/drain_jobs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateDrainJobRequest {
    /// Names of segments to empty.
    pub segments: Vec<String>,
    /// Names of segments to move objects to; any if there are none.
    #[serde(default)]
    pub target_segments: Vec<String>,
    /// How many objects are moved at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrency: Option<u32>,
}

/// The answer to `POST /api/v1/drain_jobs` and `POST /api/v1/drain_jobs/cancel?job_id=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainJobChangeResponse {
    /// True.
    pub success: bool,
    /// The job.
    pub job_id: Uuid,
    /// The name of a [`JobStatus`].
    pub status: String,
    /// [`ErrorCode::OK`].
    pub error_code: ErrorCode,
    /// Empty.
    pub error_message: String,
}

/// `GET /api/v1/drain_jobs/query?job_id=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainJobResponse {
    /// True.
    pub success: bool,
    /// The job.
    pub job_id: Uuid,
    /// 0.
    #[serde(rename = "type")]
    pub job_type: i32,
    /// `DRAIN`.
    pub type_name: String,
    /// How far it is.
    pub status: JobStatus,
    /// The name of that.
    pub status_name: String,
    /// When it was made, in milliseconds of Unix time.
    pub created_at_ms_epoch: i64,
    /// When it last changed, in milliseconds of Unix time.
    pub last_updated_at_ms_epoch: i64,
    /// Names of the segments to empty.
    pub segments: Vec<String>,
    /// Objects that have been moved.
    pub succeeded_units: u64,
    /// Objects that could not be moved.
    pub failed_units: u64,
    /// Objects that cannot be moved now.
    pub blocked_units: u64,
    /// Objects that are being moved.
    pub active_units: u64,
    /// Bytes that have been moved.
    pub migrated_bytes: u64,
    /// How it stands, for people.
    pub message: String,
    /// [`ErrorCode::OK`].
    pub error_code: ErrorCode,
    /// Empty.
    pub error_message: String,
}

/// The body of `PUT /api/v1/tenant_quotas?tenant_id=…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantQuotaRequest {
    /// Bytes, at least 1 and less than 2^63.
    pub requested_quota_bytes: u64,
}

/// A tenant and its quota: one in the answer to `GET` with a tenant and to `PUT`, a list in that to `GET` without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantQuota {
    /// The tenant.
    pub tenant_id: String,
    /// Bytes that were asked for.
    pub requested_quota_bytes: u64,
    /// Bytes that it has: fewer if all tenants together asked for more than there is.
    pub effective_quota_bytes: u64,
    /// Bytes in use.
    pub charged_bytes: u64,
    /// Whether nothing more is taken.
    pub admission_closed: bool,
    /// Whether it uses more than it has.
    pub over_quota: bool,
    /// Whether somebody set its quota.
    pub has_explicit_policy: bool,
}

/// `POST /api/v1/remove_all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveAllResponse {
    /// True.
    pub success: bool,
    /// How many objects were removed.
    pub removed_count: i64,
}
