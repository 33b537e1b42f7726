//! The table of RPCs: what each takes, what it answers, and since which release it exists.

/// Hands the table to another macro. The types in it are in scope in [`super::method`] and [`super::request`].
macro_rules! rpcs {
    ($macro:ident) => {
        $macro! {
            /// Whether there is an object. Leases it.
            ExistKey(KeyArguments<S>) -> MasterResult<bool>;
            /// Whether there are objects. Leases them.
            BatchExistKey(KeysArguments<S>) -> Vec<MasterResult<bool>>;
            /// The addresses of clients.
            BatchQueryIp(ClientsArguments) -> MasterResult<BTreeMap<Uuid, Vec<S>>>;
            /// Removes replicas from a segment, and answers with the keys that it removed.
            BatchReplicaClear(ReplicaClearArguments<S>) -> MasterResult<Vec<S>>;
            /// The replicas of all objects whose key matches. Leases them.
            GetReplicaListByRegex(KeyArguments<S>) -> MasterResult<BTreeMap<S, Vec<ReplicaDescriptor<S>>>>;
            /// The replicas of an object. Leases it.
            GetReplicaList(KeyArguments<S>) -> MasterResult<ReplicaList<S>>;
            /// The replicas of objects. Leases them.
            BatchGetReplicaList(KeysArguments<S>) -> Vec<MasterResult<ReplicaList<S>>>;
            /// Makes room for an object.
            PutStart(PutStartArguments<S>) -> MasterResult<Vec<ReplicaDescriptor<S>>>;
            /// Makes an object visible.
            PutEnd(PutEndArguments<S>) -> MasterResult<()>;
            /// Gives up an object before it is visible.
            PutRevoke(PutRevokeArguments<S>) -> MasterResult<()>;
            /// As `PutStart`, for several.
            BatchPutStart(BatchPutStartArguments<S>) -> Vec<MasterResult<Vec<ReplicaDescriptor<S>>>>;
            /// As `PutEnd`, for several.
            BatchPutEnd(BatchPutEndArguments<S>) -> Vec<MasterResult<()>>;
            /// As `PutRevoke`, for several.
            BatchPutRevoke(BatchPutRevokeArguments<S>) -> Vec<MasterResult<()>>;
            /// Makes room for an object that may exist.
            UpsertStart(PutStartArguments<S>) -> MasterResult<Vec<ReplicaDescriptor<S>>>, since V0_3_10_post2;
            /// Makes the new content visible.
            UpsertEnd(PutEndArguments<S>) -> MasterResult<()>, since V0_3_10_post2;
            /// Gives up the new content.
            UpsertRevoke(PutRevokeArguments<S>) -> MasterResult<()>, since V0_3_10_post2;
            /// As `UpsertStart`, for several.
            BatchUpsertStart(BatchPutStartArguments<S>) -> Vec<MasterResult<Vec<ReplicaDescriptor<S>>>>, since V0_3_10_post2;
            /// As `UpsertEnd`, for several.
            BatchUpsertEnd(BatchUpsertEndArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// As `UpsertRevoke`, for several.
            BatchUpsertRevoke(BatchUpsertRevokeArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// Removes an object.
            Remove(RemoveArguments<S>) -> MasterResult<()>;
            /// Removes all objects whose key matches, and answers with their number.
            RemoveByRegex(RemoveArguments<S>) -> MasterResult<i64>;
            /// Removes all objects of a tenant, and answers with their number.
            RemoveAll(RemoveAllArguments<S>) -> i64;
            /// As `Remove`, for several.
            BatchRemove(BatchRemoveArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// Adds a segment to the pool.
            MountSegment(MountArguments<S>) -> MasterResult<()>;
            /// Adds an NVMe-oF segment to the pool.
            MountNoFSegment(MountNofArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Adds all segments of a client whom the master had forgotten.
            ReMountSegment(RemountArguments<S>) -> MasterResult<()>;
            /// As `ReMountSegment`, for NVMe-oF segments.
            ReMountNoFSegment(RemountNofArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Takes a segment out of the pool.
            UnmountSegment(UnmountArguments) -> MasterResult<()>;
            /// Takes a segment out of the pool after a while.
            GracefulUnmountSegment(GracefulUnmountArguments) -> MasterResult<()>, since V0_3_11;
            /// Takes an NVMe-oF segment out of the pool.
            UnmountNoFSegment(UnmountArguments) -> MasterResult<()>, since V0_3_11;
            /// All NVMe-oF segments.
            GetAllNoFSegments(NoArguments) -> MasterResult<Vec<NofSegment<S>>>, since V0_3_11;
            /// The NVMe-oF segments of a name.
            GetNoFSegmentsByName(SegmentNameArguments<S>) -> MasterResult<Vec<NofSegmentOwner>>, since V0_3_11;
            /// A heartbeat.
            Ping(ClientArguments) -> MasterResult<PingReply>;
            /// The folder of a shared file system.
            GetFsdir(NoArguments) -> MasterResult<S>;
            /// What becomes of the segment of a name.
            QuerySegmentStatus(SegmentNameArguments<S>) -> MasterResult<SegmentStatus>, since V0_3_11;
            /// What becomes of a segment.
            QuerySegmentStatusById(SegmentIdArguments) -> MasterResult<SegmentStatus>, since V0_3_11;
            /// Where and how to keep objects on disk.
            GetStorageConfig(NoArguments) -> MasterResult<StorageConfig<S>>;
            /// Whether client and master fit together. Answers with a version that tells little.
            ServiceReady(NoArguments) -> MasterResult<S>;
            /// Tells that a client has a disk.
            MountLocalDiskSegment(OffloadingArguments) -> MasterResult<()>;
            /// Tells that a client's disk is gone.
            UnmountLocalDiskSegment(ClientArguments) -> MasterResult<()>, since V0_3_13;
            /// Asks for objects to be put on disk.
            OffloadObjectHeartbeat(OffloadingArguments) -> MasterResult<OffloadTasks<S>>;
            /// Tells how large a client's disk is.
            ReportSsdCapacity(SsdCapacityArguments) -> MasterResult<()>, since V0_3_11;
            /// Tells what a client has put on its disk.
            NotifyOffloadSuccess(OffloadedArguments<S>) -> MasterResult<()>;
            /// Asks for objects to be brought back into memory.
            PromotionObjectHeartbeat(ClientArguments) -> MasterResult<OffloadTasks<S>>, since V0_3_11;
            /// Makes room for an object that is on disk.
            PromotionAllocStart(PromotionArguments<S>) -> MasterResult<PromotionAllocation<S>>, since V0_3_11;
            /// Tells that an object is in memory again.
            NotifyPromotionSuccess(ClientKeyArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Tells that an object could not be brought back.
            NotifyPromotionFailure(ClientKeyArguments<S>) -> MasterResult<()>, since V0_3_11;
            /// Makes room for copies.
            CopyStart(CopyStartArguments<S>) -> MasterResult<CopyPlan<S>>;
            /// As `CopyStart`, for a copy that the master made up because of load.
            DynamicReplicaCopyStart(DynamicCopyStartArguments<S>) -> MasterResult<CopyPlan<S>>, since V0_3_13;
            /// Makes copies visible.
            CopyEnd(ClientKeyArguments<S>) -> MasterResult<()>;
            /// As `CopyEnd`, for a copy that the master made up because of load.
            DynamicReplicaCopyEnd(DynamicCopyEndArguments<S>) -> MasterResult<()>, since V0_3_13;
            /// Gives up copies.
            CopyRevoke(ClientKeyArguments<S>) -> MasterResult<()>;
            /// As `CopyRevoke`, for a copy that the master made up because of load.
            DynamicReplicaCopyRevoke(DynamicCopyEndArguments<S>) -> MasterResult<()>, since V0_3_13;
            /// Makes room for a replica that moves.
            MoveStart(MoveStartArguments<S>) -> MasterResult<MovePlan<S>>;
            /// Makes a moved replica visible in its new place.
            MoveEnd(ClientKeyArguments<S>) -> MasterResult<()>;
            /// Gives up a move.
            MoveRevoke(ClientKeyArguments<S>) -> MasterResult<()>;
            /// Tells that a replica on disk is gone.
            EvictDiskReplica(EvictDiskArguments<S>) -> MasterResult<()>, since V0_3_10;
            /// As `EvictDiskReplica`, for several.
            BatchEvictDiskReplica(BatchEvictDiskArguments<S>) -> Vec<MasterResult<()>>, since V0_3_10_post2;
            /// Whether all objects were removed since the last time.
            PollRemoveAll(ClientArguments) -> MasterResult<bool>, since V0_3_12;
            /// Asks for copies of an object.
            CreateCopyTask(CopyTaskArguments<S>) -> MasterResult<Uuid>;
            /// Asks for a replica to be moved.
            CreateMoveTask(MoveTaskArguments<S>) -> MasterResult<Uuid>;
            /// How far a task is.
            QueryTask(TaskArguments) -> MasterResult<TaskReport<S>>;
            /// Takes tasks.
            FetchTasks(FetchTasksArguments) -> MasterResult<Vec<TaskAssignment<S>>>;
            /// Tells that a task has ended.
            MarkTaskToComplete(CompleteTaskArguments<S>) -> MasterResult<()>;
        }
    };
}

pub(crate) use rpcs;
