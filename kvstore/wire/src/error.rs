//! What Mooncake's master and its clients answer when a call fails.

use crate::pack::wire_code;

wire_code! {
    /// Mooncake's own error code, as replies of the master carry it. Numbers that are not listed here survive.
    pub struct ErrorCode(i32) {
        /// No error.
        OK = 0,
        /// Something that should not happen inside Mooncake.
        INTERNAL_ERROR = -1,
        /// A buffer is too small.
        BUFFER_OVERFLOW = -10,
        /// A shard of the metadata that does not exist.
        SHARD_INDEX_OUT_OF_RANGE = -100,
        /// No segment of that name or id.
        SEGMENT_NOT_FOUND = -101,
        /// The segment is mounted already.
        SEGMENT_ALREADY_EXISTS = -102,
        /// No client of that id.
        CLIENT_NOT_FOUND = -103,
        /// No room for the object.
        NO_AVAILABLE_HANDLE = -200,
        /// Client and master do not fit together.
        INVALID_VERSION = -300,
        /// Not a usable key.
        INVALID_KEY = -400,
        /// A write failed.
        WRITE_FAIL = -500,
        /// An argument makes no sense.
        INVALID_PARAMS = -600,
        /// The object belongs to another client.
        ILLEGAL_CLIENT = -601,
        /// The object is not in a state to be written.
        INVALID_WRITE = -700,
        /// The object is not in a state to be read.
        INVALID_READ = -701,
        /// The replica does not fit the operation.
        INVALID_REPLICA = -702,
        /// The object is still being written.
        REPLICA_IS_NOT_READY = -703,
        /// No object of that key.
        OBJECT_NOT_FOUND = -704,
        /// There is an object of that key.
        OBJECT_ALREADY_EXISTS = -705,
        /// The object is leased to a reader.
        OBJECT_HAS_LEASE = -706,
        /// The lease ran out before the data had arrived.
        LEASE_EXPIRED = -707,
        /// The object is being copied or moved.
        OBJECT_HAS_REPLICATION_TASK = -708,
        /// The object is not being copied or moved.
        OBJECT_NO_REPLICATION_TASK = -709,
        /// The object has no such replica.
        REPLICA_NOT_FOUND = -710,
        /// The object has such a replica already.
        REPLICA_ALREADY_EXISTS = -711,
        /// The replica existed and is gone.
        REPLICA_IS_GONE = -712,
        /// The replica is not in this node's memory.
        REPLICA_NOT_IN_LOCAL_MEMORY = -713,
        /// The object's replicas are in use.
        OBJECT_REPLICA_BUSY = -714,
        /// The data could not be transferred.
        TRANSFER_FAIL = -800,
        /// The data is not what was written.
        CHECKSUM_MISMATCH = -801,
        /// The call itself failed.
        RPC_FAIL = -900,
        /// The call was not answered in time.
        RPC_TIMEOUT = -901,
        /// etcd refused.
        ETCD_OPERATION_ERROR = -1000,
        /// No such key in etcd.
        ETCD_KEY_NOT_EXIST = -1001,
        /// etcd's transaction failed.
        ETCD_TRANSACTION_FAIL = -1002,
        /// The call to etcd was given up.
        ETCD_CTX_CANCELLED = -1003,
        /// The operation log lacks the entry.
        OPLOG_ENTRY_NOT_FOUND = -1004,
        /// The Kubernetes lease could not be changed.
        K8S_LEASE_OPERATION_ERROR = -1005,
        /// There is no such Kubernetes lease.
        K8S_LEASE_NOT_FOUND = -1006,
        /// A standby has not read the whole operation log.
        INCOMPLETE_OPLOG_CATCH_UP = -1007,
        /// Not now.
        UNAVAILABLE_IN_CURRENT_STATUS = -1010,
        /// Not with these settings.
        UNAVAILABLE_IN_CURRENT_MODE = -1011,
        /// Not at all.
        NOT_SUPPORTED = -1012,
        /// No such file.
        FILE_NOT_FOUND = -1100,
        /// The file could not be opened.
        FILE_OPEN_FAIL = -1101,
        /// The file could not be read.
        FILE_READ_FAIL = -1102,
        /// The file could not be written.
        FILE_WRITE_FAIL = -1103,
        /// The buffer for a file operation is unusable.
        FILE_INVALID_BUFFER = -1104,
        /// The file could not be locked.
        FILE_LOCK_FAIL = -1105,
        /// The file is not open.
        FILE_INVALID_HANDLE = -1106,
        /// No such bucket of offloaded objects.
        BUCKET_NOT_FOUND = -1200,
        /// The bucket exists already.
        BUCKET_ALREADY_EXISTS = -1201,
        /// More keys than a bucket takes.
        KEYS_EXCEED_BUCKET_LIMIT = -1202,
        /// More keys than all buckets take.
        KEYS_ULTRA_LIMIT = -1203,
        /// Offloading is switched off.
        UNABLE_OFFLOAD = -1300,
        /// Offloading is not possible now.
        UNABLE_OFFLOADING = -1301,
        /// No task of that id.
        TASK_NOT_FOUND = -1400,
        /// Too many tasks wait.
        TASK_PENDING_LIMIT_EXCEEDED = -1401,
        /// No drain job of that id.
        JOB_NOT_FOUND = -1402,
        /// Something that cannot be serialised.
        SERIALIZE_UNSUPPORTED = -1500,
        /// Serialising failed.
        SERIALIZE_FAIL = -1501,
        /// Deserialising failed.
        DESERIALIZE_FAIL = -1502,
        /// State could not be kept.
        PERSISTENT_FAIL = -1503,
        /// The distributed file system did not answer in time.
        DFS_NETWORK_TIMEOUT = -1600,
        /// The distributed file system is down.
        DFS_SERVICE_UNAVAILABLE = -1601,
        /// The distributed file system's quota is used up.
        DFS_QUOTA_EXCEEDED = -1602,
        /// The distributed file system denied access.
        DFS_PERMISSION_DENIED = -1603,
        /// The distributed file system's handle has expired.
        DFS_STALE_HANDLE = -1604,
        /// The distributed file system wrote only a part.
        DFS_PARTIAL_WRITE = -1605,
        /// The tenant's quota is used up.
        TENANT_QUOTA_EXCEEDED = -1700,
        /// The tenant has no quota.
        TENANT_NOT_REGISTERED = -1701,
        /// The tenant still owns objects or quota.
        TENANT_NOT_EMPTY = -1702,
    }
}

impl std::error::Error for ErrorCode {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_codes_have_names_and_unknown_ones_survive() {
        assert_eq!(ErrorCode::OBJECT_NOT_FOUND.name(), Some("OBJECT_NOT_FOUND"));
        assert_eq!(ErrorCode(-704).to_string(), "OBJECT_NOT_FOUND (-704)");
        assert_eq!(ErrorCode(-4242).name(), None);
        assert_eq!(ErrorCode(-4242).to_string(), "-4242");
        assert_eq!(ErrorCode::from_name("RPC_FAIL"), Some(ErrorCode::RPC_FAIL));
        assert_eq!(ErrorCode::from_name("RPC"), None);
    }
}
