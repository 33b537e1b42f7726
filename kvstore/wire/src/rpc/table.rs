//! Table of all RPCs with arguments, reply and first release.

/// Passes the table to another macro. Arguments are types of [`super::arguments`]; types of replies are in scope in [`super::method`].
macro_rules! rpcs {
    ($macro:ident) => {
        $macro! {
            /// Whether an object exists. Leases it.
            ExistKey(KeyArguments<S>) -> MasterResult<bool>;
            /// Whether objects exist. Leases them.
            BatchExistKey(KeysArguments<S>) -> Vec<MasterResult<bool>>;
            /// As `ExistKey`, without a lease.
            ProbeKey(KeyArguments<S>) -> MasterResult<bool>, since V0_3_14;
            /// As `BatchExistKey`, with leases by a policy.
            BatchProbeKey(BatchProbeArguments<S>) -> Vec<MasterResult<bool>>, since V0_3_14;
            /// IP addresses of the given clients.
            BatchQueryIp(ClientsArguments) -> MasterResult<BTreeMap<Uuid, Vec<S>>>;
            /// Removes replicas from a segment, and returns the cleared keys.
            BatchReplicaClear(ReplicaClearArguments<S>) -> MasterResult<Vec<S>>;
            /// The replicas of all objects whose key matches. Leases them.
            GetReplicaListByRegex(KeyArguments<S>) -> MasterResult<BTreeMap<S, Vec<ReplicaDescriptor<S>>>>;
            /// The replicas of an object. Leases it.
            GetReplicaList(KeyArguments<S>) -> MasterResult<ReplicaList<S>>;
            /// The replicas of objects. Leases them.
            BatchGetReplicaList(KeysArguments<S>) -> Vec<MasterResult<ReplicaList<S>>>;
            /// As `GetReplicaList`, without a lease and without effect on statistics and promotion.
            GetReplicaListForAdmin(KeyArguments<S>) -> MasterResult<ReplicaList<S>>, since V0_3_14;
            /// As `BatchGetReplicaList`, without leases and without effect on statistics and promotion.
            BatchGetReplicaListForAdmin(KeysArguments<S>) -> Vec<MasterResult<ReplicaList<S>>>, since V0_3_14;
            /// Allocates space for an object.
            PutStart(PutStartArguments<S>) -> MasterResult<Vec<ReplicaDescriptor<S>>>;
            /// Ends a put: the object becomes readable.
            PutEnd(PutEndArguments<S>) -> MasterResult<()>;
            /// Revokes a put before its end.
            PutRevoke(PutRevokeArguments<S>) -> MasterResult<()>;
            /// As `PutStart`, for several objects.
            BatchPutStart(BatchPutStartArguments<S>) -> Vec<MasterResult<Vec<ReplicaDescriptor<S>>>>;
            /// As `PutEnd`, for several objects.
            BatchPutEnd(BatchPutEndArguments<S>) -> Vec<MasterResult<()>>;
            /// As `PutRevoke`, for several objects.
            BatchPutRevoke(BatchPutRevokeArguments<S>) -> Vec<MasterResult<()>>;
            /// Allocates space for a new version of an object, or for a new object.
            UpsertStart(PutStartArguments<S>) -> MasterResult<Vec<ReplicaDescriptor<S>>>, since V0_3_10_post2;
            /// Makes the new version readable.
            UpsertEnd(PutEndArguments<S>) -> MasterResult<()>, since V0_3_10_post2;
            /// Revokes the new version of an object.
            UpsertRevoke(PutRevokeArguments<S>) -> MasterResult<()>, since V0_3_10_post2;
            /// As `UpsertStart`, for several objects.
            BatchUpsertStart(BatchPutStartArguments<S>) -> Vec<MasterResult<Vec<ReplicaDescriptor<S>>>>, since V0_3_10_post2;
            /// As `UpsertEnd`, for several objects.
            BatchUpsertEnd(BatchUpsertEndArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// As `UpsertRevoke`, for several objects.
            BatchUpsertRevoke(BatchUpsertRevokeArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// Removes one object by its key.
            Remove(RemoveArguments<S>) -> MasterResult<()>;
            /// Removes all objects whose key matches, and returns their number.
            RemoveByRegex(RemoveArguments<S>) -> MasterResult<i64>;
            /// Removes all objects of a tenant, and returns their number.
            RemoveAll(RemoveAllArguments<S>) -> i64;
            /// As `Remove`, for several objects.
            BatchRemove(BatchRemoveArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// Adds a segment to the pool.
            MountSegment(MountArguments<S>) -> MasterResult<()>;
            /// Adds an NVMe-oF segment to the pool.
            MountNoFSegment(MountNofArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Mounts all segments of a client again, after its expiry.
            ReMountSegment(RemountArguments<S>) -> MasterResult<()>;
            /// As `ReMountSegment`, for NVMe-oF segments.
            ReMountNoFSegment(RemountNofArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Removes a segment from the pool.
            UnmountSegment(UnmountArguments) -> MasterResult<()>;
            /// Removes a segment from the pool after a grace period.
            GracefulUnmountSegment(GracefulUnmountArguments) -> MasterResult<()>, since V0_3_11;
            /// Removes an NVMe-oF segment from the pool.
            UnmountNoFSegment(UnmountArguments) -> MasterResult<()>, since V0_3_11;
            /// All NVMe-oF segments of the pool.
            GetAllNoFSegments(NoArguments) -> MasterResult<Vec<NofSegment<S>>>, since V0_3_11;
            /// The NVMe-oF segments with this name.
            GetNoFSegmentsByName(SegmentNameArguments<S>) -> MasterResult<Vec<NofSegmentOwner>>, since V0_3_11;
            /// Heartbeat of a client, with its status.
            Ping(ClientArguments) -> MasterResult<PingReply>;
            /// Directory of the shared file system.
            GetFsdir(NoArguments) -> MasterResult<S>;
            /// Status of the segment with this name.
            QuerySegmentStatus(SegmentNameArguments<S>) -> MasterResult<SegmentStatus>, since V0_3_11;
            /// Status of the segment with this id.
            QuerySegmentStatusById(SegmentIdArguments) -> MasterResult<SegmentStatus>, since V0_3_11;
            /// Settings for storing objects on disk.
            GetStorageConfig(NoArguments) -> MasterResult<StorageConfig<S>>;
            /// Version handshake. The returned version does not identify the wire layouts.
            ServiceReady(NoArguments) -> MasterResult<S>;
            /// Registers a client's disk for offloading.
            MountLocalDiskSegment(OffloadingArguments) -> MasterResult<()>;
            /// Unregisters a client's disk with its copies.
            UnmountLocalDiskSegment(ClientArguments) -> MasterResult<()>, since V0_3_13;
            /// Fetches objects to offload to disk.
            OffloadObjectHeartbeat(OffloadingArguments) -> MasterResult<OffloadTasks<S>>;
            /// Reports the capacity of a client's disk.
            ReportSsdCapacity(SsdCapacityArguments) -> MasterResult<()>, since V0_3_11;
            /// Reports objects that a client has stored on its disk.
            NotifyOffloadSuccess(OffloadedArguments<S>) -> MasterResult<()>;
            /// Fetches objects to promote to memory.
            PromotionObjectHeartbeat(ClientArguments) -> MasterResult<OffloadTasks<S>>, since V0_3_11;
            /// Registers the promotion of an object that the calling client has on its disk.
            RegisterPrefetchTask(ClientKeyArguments<S>) -> MasterResult<()>, since V0_3_14;
            /// Allocates memory for an object to promote.
            PromotionAllocStart(PromotionArguments<S>) -> MasterResult<PromotionAllocation<S>>, since V0_3_11;
            /// Reports that a promotion is complete.
            NotifyPromotionSuccess(ClientKeyArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Reports that a promotion has failed.
            NotifyPromotionFailure(ClientKeyArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Allocates space for copies of an object.
            CopyStart(CopyStartArguments<S>) -> MasterResult<CopyPlan<S>>;
            /// As `CopyStart`, for a copy planned by dynamic replication.
            DynamicReplicaCopyStart(DynamicCopyStartArguments<S>) -> MasterResult<CopyPlan<S>>, since V0_3_13;
            /// Ends a copy: the targets become readable.
            CopyEnd(ClientKeyArguments<S>) -> MasterResult<()>;
            /// As `CopyEnd`, for a copy planned by dynamic replication.
            DynamicReplicaCopyEnd(DynamicCopyEndArguments<S>) -> MasterResult<()>, since V0_3_13;
            /// Revokes a copy and frees its space.
            CopyRevoke(ClientKeyArguments<S>) -> MasterResult<()>;
            /// As `CopyRevoke`, for a copy planned by dynamic replication.
            DynamicReplicaCopyRevoke(DynamicCopyEndArguments<S>) -> MasterResult<()>, since V0_3_13;
            /// Allocates space for a move's target.
            MoveStart(MoveStartArguments<S>) -> MasterResult<MovePlan<S>>;
            /// Makes the target of a move readable and removes the source.
            MoveEnd(ClientKeyArguments<S>) -> MasterResult<()>;
            /// Revokes a move and frees its space.
            MoveRevoke(ClientKeyArguments<S>) -> MasterResult<()>;
            /// Reports that a disk replica was removed.
            EvictDiskReplica(EvictDiskArguments<S>) -> MasterResult<()>, since V0_3_10;
            /// As `EvictDiskReplica`, for several objects.
            BatchEvictDiskReplica(BatchEvictDiskArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// As `EvictDiskReplica`, if the replica is still the given one. Returns whether it was.
            EvictDiskReplicaIfCurrent(EvictDiskIfCurrentArguments<S>) -> MasterResult<bool>, since V0_3_14;
            /// Whether all objects were removed since the last poll.
            PollRemoveAll(ClientArguments) -> MasterResult<bool>, since V0_3_12;
            /// Creates a task to copy an object.
            CreateCopyTask(CopyTaskArguments<S>) -> MasterResult<Uuid>;
            /// Creates a task to move a replica.
            CreateMoveTask(MoveTaskArguments<S>) -> MasterResult<Uuid>;
            /// State of a task by its id.
            QueryTask(TaskArguments) -> MasterResult<TaskReport<S>>;
            /// Fetches tasks of a client.
            FetchTasks(FetchTasksArguments) -> MasterResult<Vec<TaskAssignment<S>>>;
            /// Reports the end of a task.
            MarkTaskToComplete(CompleteTaskArguments<S>) -> MasterResult<()>;
        }
    };
}

pub(crate) use rpcs;
