//! Error codes of Mooncake's master and clients.

use crate::pack::wire_code;

wire_code! {
    /// A Mooncake error code, as in replies of the master. Numbers not listed here are preserved.
    pub struct ErrorCode(i32) {
        OK = 0,
        /// An internal error of Mooncake.
        INTERNAL_ERROR = -1,
        /// A buffer is too small.
        BUFFER_OVERFLOW = -10,
        /// The metadata shard does not exist.
        SHARD_INDEX_OUT_OF_RANGE = -100,
        /// No segment has this name or id.
        SEGMENT_NOT_FOUND = -101,
        /// The segment is mounted already.
        SEGMENT_ALREADY_EXISTS = -102,
        /// No client has this id.
        CLIENT_NOT_FOUND = -103,
        /// No space for the object.
        NO_AVAILABLE_HANDLE = -200,
        /// Client and master have incompatible versions.
        INVALID_VERSION = -300,
        INVALID_KEY = -400,
        WRITE_FAIL = -500,
        INVALID_PARAMS = -600,
        /// The object belongs to another client.
        ILLEGAL_CLIENT = -601,
        /// The object's state does not permit writing.
        INVALID_WRITE = -700,
        /// The object's state does not permit reading.
        INVALID_READ = -701,
        /// The replica is not valid for the operation.
        INVALID_REPLICA = -702,
        /// The object is still being written.
        REPLICA_IS_NOT_READY = -703,
        /// No object has this key.
        OBJECT_NOT_FOUND = -704,
        /// An object with this key exists.
        OBJECT_ALREADY_EXISTS = -705,
        /// The object is leased to a reader.
        OBJECT_HAS_LEASE = -706,
        /// The lease expired before the transfer was complete.
        LEASE_EXPIRED = -707,
        /// The object is being copied or moved.
        OBJECT_HAS_REPLICATION_TASK = -708,
        /// The object is not being copied or moved.
        OBJECT_NO_REPLICATION_TASK = -709,
        /// The object has no such replica.
        REPLICA_NOT_FOUND = -710,
        /// The object has such a replica already.
        REPLICA_ALREADY_EXISTS = -711,
        /// The replica existed and was removed.
        REPLICA_IS_GONE = -712,
        /// The replica is not in this node's memory.
        REPLICA_NOT_IN_LOCAL_MEMORY = -713,
        /// The object's replicas are in use.
        OBJECT_REPLICA_BUSY = -714,
        /// The object is in memory, or is being copied there. Since 0.3.14, which does not publish its name.
        REPLICA_ALREADY_IN_MEMORY = -715,
        /// The data could not be transferred.
        TRANSFER_FAIL = -800,
        /// The data does not match its checksum.
        CHECKSUM_MISMATCH = -801,
        RPC_FAIL = -900,
        RPC_TIMEOUT = -901,
        ETCD_OPERATION_ERROR = -1000,
        /// The key does not exist in etcd.
        ETCD_KEY_NOT_EXIST = -1001,
        /// A transaction in etcd failed.
        ETCD_TRANSACTION_FAIL = -1002,
        /// The call to etcd was cancelled.
        ETCD_CTX_CANCELLED = -1003,
        /// The operation log lacks the entry.
        OPLOG_ENTRY_NOT_FOUND = -1004,
        /// The Kubernetes lease could not be changed.
        K8S_LEASE_OPERATION_ERROR = -1005,
        /// The Kubernetes lease does not exist.
        K8S_LEASE_NOT_FOUND = -1006,
        /// A standby has not applied the whole operation log.
        INCOMPLETE_OPLOG_CATCH_UP = -1007,
        /// Not possible in the current state.
        UNAVAILABLE_IN_CURRENT_STATUS = -1010,
        /// Not possible with the current settings.
        UNAVAILABLE_IN_CURRENT_MODE = -1011,
        /// The operation is not supported.
        NOT_SUPPORTED = -1012,
        /// The file does not exist.
        FILE_NOT_FOUND = -1100,
        /// The file could not be opened.
        FILE_OPEN_FAIL = -1101,
        /// The file could not be read.
        FILE_READ_FAIL = -1102,
        /// The file could not be written.
        FILE_WRITE_FAIL = -1103,
        /// The buffer for a file operation is invalid.
        FILE_INVALID_BUFFER = -1104,
        /// The file could not be locked.
        FILE_LOCK_FAIL = -1105,
        /// The file is not open.
        FILE_INVALID_HANDLE = -1106,
        /// The bucket of offloaded objects does not exist.
        BUCKET_NOT_FOUND = -1200,
        BUCKET_ALREADY_EXISTS = -1201,
        /// More keys than a bucket may contain.
        KEYS_EXCEED_BUCKET_LIMIT = -1202,
        /// More keys than all buckets may contain.
        KEYS_ULTRA_LIMIT = -1203,
        UNABLE_OFFLOAD = -1300,
        /// Offloading is not possible at present.
        UNABLE_OFFLOADING = -1301,
        /// No task has this id.
        TASK_NOT_FOUND = -1400,
        /// Too many tasks are pending.
        TASK_PENDING_LIMIT_EXCEEDED = -1401,
        /// No drain job has this id.
        JOB_NOT_FOUND = -1402,
        /// The value cannot be serialised.
        SERIALIZE_UNSUPPORTED = -1500,
        SERIALIZE_FAIL = -1501,
        DESERIALIZE_FAIL = -1502,
        /// The state could not be persisted.
        PERSISTENT_FAIL = -1503,
        /// The distributed file system timed out.
        DFS_NETWORK_TIMEOUT = -1600,
        /// The distributed file system is unavailable.
        DFS_SERVICE_UNAVAILABLE = -1601,
        /// The distributed file system's quota is exhausted.
        DFS_QUOTA_EXCEEDED = -1602,
        /// The distributed file system denied access.
        DFS_PERMISSION_DENIED = -1603,
        /// The distributed file system's handle has expired.
        DFS_STALE_HANDLE = -1604,
        /// The distributed file system wrote only a part of the data.
        DFS_PARTIAL_WRITE = -1605,
        /// The tenant's quota is exhausted.
        TENANT_QUOTA_EXCEEDED = -1700,
        /// The tenant has no quota.
        TENANT_NOT_REGISTERED = -1701,
        /// The tenant still has objects or a quota.
        TENANT_NOT_EMPTY = -1702,
    }
}

impl std::error::Error for ErrorCode {}

impl ErrorCode {
    /// Whether there is no response of the master that has the object: a router could not call it. It may have executed the call.
    #[must_use]
    pub fn is_no_response(self) -> bool {
        matches!(self, Self::RPC_FAIL | Self::RPC_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes_have_names_and_unknown_ones_are_preserved() {
        assert_eq!(ErrorCode::OBJECT_NOT_FOUND.name(), Some("OBJECT_NOT_FOUND"));
        assert_eq!(ErrorCode(-704).to_string(), "OBJECT_NOT_FOUND (-704)");
        assert_eq!(ErrorCode(-4242).name(), None);
        assert_eq!(ErrorCode(-4242).to_string(), "-4242");
        assert_eq!(ErrorCode::from_name("RPC_FAIL"), Some(ErrorCode::RPC_FAIL));
        assert_eq!(ErrorCode::from_name("RPC"), None);
    }
}
