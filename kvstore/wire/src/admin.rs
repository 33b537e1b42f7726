//! The JSON of the master's admin server (HTTP, port 9003 by default).
//!
//! Fields added by later releases are ignored. Text and Prometheus endpoints have no types here.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::ErrorCode;
use crate::pack::wire_code;
use crate::types::{SegmentStatus, Uuid};

/// Response body of `GET /health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthResponse {
    /// `ok`; or `degraded` for a Moongate master whose disk is full or failing.
    pub status: String,
    /// Role of the master: `leader` or `standby`.
    pub role: String,
    /// `serving`, or the state of a standby.
    pub ha_state: String,
    /// Whether the master serves RPCs.
    pub service_ready: bool,
    /// Address of the leader, with several masters.
    pub leader_address: Option<String>,
    /// Number of leader changes, with several masters.
    pub view_version: Option<i64>,
    /// Descriptions of current problems. Moongate masters only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<String>,
    /// Which shard of its store the master is, as `INDEX/COUNT`. Moongate masters of a store with several shards only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shard: Option<String>,
}

/// Response body of `GET /kv_events/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEventsStatus {
    /// Whether events are published. Always false in builds without ZeroMQ.
    pub enabled: bool,
    pub published_batches: u64,
    pub published_events: u64,
    /// Events dropped because the queue was full.
    pub dropped_events: u64,
    /// Keys that could not be parsed as blocks.
    #[serde(alias = "skipped_keyless_events")]
    pub skipped_unparsed_keys: u64,
}

/// A range of a node's memory, with the field names of the admin server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminBufferDescriptor<'a> {
    /// Size of the range in bytes.
    #[serde(rename = "size_")]
    pub size: u64,
    /// Address of the first byte in the node.
    #[serde(rename = "buffer_address_")]
    pub address: u64,
    /// Transfer protocol, for example `tcp` or `rdma`.
    #[serde(rename = "protocol_", borrow)]
    pub protocol: Cow<'a, str>,
    /// The node's `host:port`, which is also the name of its segment.
    #[serde(rename = "transport_endpoint_", borrow)]
    pub endpoint: Cow<'a, str>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum AdminResponse<T> {
    Success(T),
    /// The call failed. The HTTP status is not 200.
    Failure(AdminFailure),
}

/// Response of endpoints that wrap their data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdminSuccess<T> {
    /// Always true in this response.
    pub success: bool,
    pub data: T,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminFailure {
    /// Always false in this response.
    pub success: bool,
    pub error_code: ErrorCode,
    /// Name of the error code, or a description.
    pub error_message: String,
}

/// `GET /query_key?key=…`: memory replicas of an object. Leases the object.
pub type QueryKeyResponse<'a> = AdminResponse<AdminSuccess<Vec<AdminBufferDescriptor<'a>>>>;

/// `GET /batch_query_keys?keys=…`: the only query that neither leases objects nor counts as a read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BatchQueryKeysResponse<'a> {
    /// Replicas per key. Duplicate keys of the request appear once.
    Found {
        /// Always true in this response.
        success: bool,
        #[serde(borrow)]
        data: BTreeMap<String, KeyReplicas<'a>>,
    },
    InvalidQuery {
        /// Always false in this response.
        success: bool,
        error: String,
    },
}

/// Replicas of an object by storage medium.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyReplicas<'a> {
    /// Whether the object is readable.
    pub ok: bool,
    /// If not, the name of an [`ErrorCode`].
    pub error: Option<String>,
    #[serde(borrow)]
    pub values: Option<Vec<AdminBufferDescriptor<'a>>>,
    /// Replicas in a shared file system.
    pub disk_values: Option<Vec<SharedDiskFile>>,
    /// Replicas on nodes' local disks.
    pub local_disk_values: Option<Vec<LocalDiskObject>>,
    #[serde(borrow)]
    pub nof_values: Option<Vec<AdminBufferDescriptor<'a>>>,
}

/// A file of a shared file system.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedDiskFile {
    pub file_path: String,
    /// Size of the object in bytes.
    pub object_size: u64,
}

/// An object on a node's local disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalDiskObject {
    /// Client that owns the disk.
    pub client_id: Uuid,
    /// Size of the object in bytes.
    pub object_size: u64,
    /// Endpoint of the node as `host:port`.
    pub transport_endpoint: String,
}

/// Response body of `GET /get_segments_detail`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SegmentsDetail {
    pub total_segments: u64,
    pub segments: Vec<SegmentDetail>,
}

/// A segment and its usage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentDetail {
    /// Endpoint of the node as `host:port`.
    pub segment_name: String,
    pub segment_id: Uuid,
    pub client_id: Uuid,
    /// Address of the first byte, as `0x…`.
    pub base_address: String,
    /// Size of the segment in bytes.
    pub size_bytes: u64,
    /// Human-readable size of the segment.
    pub size_human: String,
    pub te_endpoint: String,
    pub protocol: String,
    /// The name of a [`SegmentStatus`].
    pub status: String,
    /// Allocated bytes of the segment.
    pub allocator_used_bytes: u64,
    /// Bytes that can be allocated.
    pub allocator_capacity_bytes: u64,
    /// Allocated share in percent, 0 to 100.
    pub allocator_usage_percent: f64,
}

/// Response body of `GET /api/v1/segments/status?segment=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentStatusResponse {
    /// Always true in this response.
    pub success: bool,
    pub segment: String,
    pub status: SegmentStatus,
    pub status_name: String,
    /// Always [`ErrorCode::OK`] in this response.
    pub error_code: ErrorCode,
    /// Always empty in this response.
    pub error_message: String,
}

wire_code! {
    /// State of a drain job.
    pub struct JobStatus(i32) {
        CREATED = 0,
        /// The job searches for objects to move.
        PLANNING = 1,
        /// The job is moving objects.
        RUNNING = 2,
        SUCCEEDED = 3,
        /// Some objects could not be moved.
        FAILED = 4,
        CANCELED = 5,
    }
}

/// The body of `POST /api/v1/drain_jobs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateDrainJobRequest {
    /// Names of segments to drain.
    pub segments: Vec<String>,
    /// Names of target segments; empty for any.
    #[serde(default)]
    pub target_segments: Vec<String>,
    /// Maximum number of objects moved at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_concurrency: Option<u32>,
}

/// Response to `POST /api/v1/drain_jobs` and `POST /api/v1/drain_jobs/cancel?job_id=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainJobChangeResponse {
    /// Always true in this response.
    pub success: bool,
    pub job_id: Uuid,
    /// The name of a [`JobStatus`].
    pub status: String,
    /// Always [`ErrorCode::OK`] in this response.
    pub error_code: ErrorCode,
    /// Always empty in this response.
    pub error_message: String,
}

/// Response body of `GET /api/v1/drain_jobs/query?job_id=…`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DrainJobResponse {
    /// Always true in this response.
    pub success: bool,
    pub job_id: Uuid,
    /// Always 0 for drain jobs.
    #[serde(rename = "type")]
    pub job_type: i32,
    /// Always `DRAIN` for drain jobs.
    pub type_name: String,
    pub status: JobStatus,
    pub status_name: String,
    /// Creation time, in milliseconds of Unix time.
    pub created_at_ms_epoch: i64,
    /// Time of the last change, in milliseconds of Unix time.
    pub last_updated_at_ms_epoch: i64,
    /// Names of the segments to drain.
    pub segments: Vec<String>,
    pub succeeded_units: u64,
    /// Number of objects that failed all attempts.
    pub failed_units: u64,
    /// Number of objects that cannot be moved at present.
    pub blocked_units: u64,
    /// Number of objects being moved.
    pub active_units: u64,
    /// Total bytes moved so far.
    pub migrated_bytes: u64,
    pub message: String,
    /// Always [`ErrorCode::OK`] in this response.
    pub error_code: ErrorCode,
    /// Always empty in this response.
    pub error_message: String,
}

/// The body of `PUT /api/v1/tenant_quotas?tenant_id=…`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantQuotaRequest {
    /// Quota in bytes, at least 1 and less than 2^63.
    pub requested_quota_bytes: u64,
}

/// A tenant's quota: a single one in responses to `PUT` and to `GET` with a tenant, a list in responses to `GET` without.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantQuota {
    pub tenant_id: String,
    pub requested_quota_bytes: u64,
    /// Effective quota in bytes: smaller if the sum of all quotas exceeds the capacity.
    pub effective_quota_bytes: u64,
    /// Bytes of all replicas of the tenant's objects.
    pub charged_bytes: u64,
    pub admission_closed: bool,
    /// Whether usage exceeds the effective quota.
    pub over_quota: bool,
    /// Whether a quota was set explicitly.
    pub has_explicit_policy: bool,
}

/// Response body of `POST /api/v1/remove_all`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoveAllResponse {
    /// Always true in this response.
    pub success: bool,
    pub removed_count: i64,
}

/// Whether the prefix of a prompt will be used again: a client's or a protocol's hint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReturnHint {
    #[default]
    Unknown,
    /// There will be no further request: a finished agent, a one-shot job, a closed session.
    Never,
    /// There will be one.
    Expected,
}

/// Number of buckets that gateways divide tenants into. Names of tenants are not sent.
pub const TENANT_BUCKETS: u8 = 7;

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde requires")]
fn is_zero(number: &u8) -> bool {
    *number == 0
}

/// The body of `POST /api/v1/describe_prompts`, an extension of Moongate's master: prompts that have been used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescribePromptsRequest<'a> {
    #[serde(borrow)]
    pub prompts: Vec<DescribedPrompt<'a>>,
}

/// One prompt and its objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescribedPrompt<'a> {
    /// Length in tokens.
    pub tokens: u64,
    /// Milliseconds since the request with the prompt arrived: what engines read or wrote since then belongs to it.
    pub elapsed_ms: u64,
    #[serde(default)]
    pub returns: ReturnHint,
    /// Which of [`TENANT_BUCKETS`] buckets the client's tenant belongs to, counted from 1; 0 without a tenant. Hints of one bucket do
    /// not devalue those of another.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub tenant_bucket: u8,
    /// The parts of every block: what the object's key has before and after the block's hash.
    #[serde(borrow)]
    pub parts: Vec<[Cow<'a, str>; 2]>,
    /// Hashes of the blocks as keys contain them, in the prompt's order.
    #[serde(borrow)]
    pub hashes: Vec<Cow<'a, str>>,
}

impl DescribedPrompt<'_> {
    /// The keys of all objects: the parts of the first block, then those of the second.
    pub fn keys(&self) -> impl Iterator<Item = String> {
        let of_block = |hash| self.parts.iter().map(move |[before, after]| format!("{before}{hash}{after}"));
        self.hashes.iter().flat_map(of_block)
    }

    /// Number of [`Self::keys`].
    #[must_use]
    pub fn key_count(&self) -> usize {
        self.parts.len().saturating_mul(self.hashes.len())
    }
}

/// Data of the response to [`DescribePromptsRequest`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DescribedObjects {
    /// Number of objects that exist.
    pub existing: u64,
    /// Number of objects that will be described when they are written.
    pub announced: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_without_tenant_is_that_of_older_releases() {
        let text = r#"{"tokens":9,"elapsed_ms":1,"returns":"never","parts":[["a","b"]],"hashes":["c"]}"#;
        let prompt: DescribedPrompt<'_> = serde_json::from_str(text).unwrap();
        assert_eq!(prompt.tenant_bucket, 0);
        assert_eq!(serde_json::to_string(&prompt).unwrap(), text);
        let of_tenant = DescribedPrompt { tenant_bucket: 3, ..prompt };
        let text = serde_json::to_string(&of_tenant).unwrap();
        assert!(text.contains(r#""tenant_bucket":3"#), "{text}");
        assert_eq!(serde_json::from_str::<DescribedPrompt<'_>>(&text).unwrap(), of_tenant);
    }
}
