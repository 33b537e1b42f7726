//! The table of RPCs: what each takes, what it answers, and since which release it exists.

/// Hands the table to another macro. The types in it are in scope in [`super::method`] and [`super::request`].
macro_rules! rpcs {
    ($macro:ident) => {
        $macro! {
            /// Whether there is an object. Leases it.
            ExistKey(KeyArguments<S>) -> Outcome<bool>;
            /// Whether there are objects. Leases them.
            BatchExistKey(KeysArguments<S>) -> Vec<Outcome<bool>>;
            /// The addresses of clients.
            BatchQueryIp(ClientsArguments) -> Outcome<BTreeMap<Uuid, Vec<S>>>;
            /// Removes replicas from a segment, and answers with the keys that it removed.
            BatchReplicaClear(ReplicaClearArguments<S>) -> Outcome<Vec<S>>;
            /// The replicas of all objects whose key matches. Leases them.
            GetReplicaListByRegex(KeyArguments<S>) -> Outcome<BTreeMap<S, Vec<Replica<S>>>>;
            /// The replicas of an object. Leases it.
            GetReplicaList(KeyArguments<S>) -> Outcome<ReplicaList<S>>;
            /// The replicas of objects. Leases them.
            BatchGetReplicaList(KeysArguments<S>) -> Vec<Outcome<ReplicaList<S>>>;
            /// Makes room for an object.
            PutStart(PutStartArguments<S>) -> Outcome<Vec<Replica<S>>>;
            /// Makes an object visible.
            PutEnd(PutEndArguments<S>) -> Outcome<()>;
            /// Gives up an object before it is visible.
            PutRevoke(PutRevokeArguments<S>) -> Outcome<()>;
            /// As `PutStart`, for several.
            BatchPutStart(BatchPutStartArguments<S>) -> Vec<Outcome<Vec<Replica<S>>>>;
            /// As `PutEnd`, for several.
            BatchPutEnd(BatchPutEndArguments<S>) -> Vec<Outcome<()>>;
            /// As `PutRevoke`, for several.
            BatchPutRevoke(BatchPutRevokeArguments<S>) -> Vec<Outcome<()>>;
            /// Makes room for an object that may exist.
            UpsertStart(PutStartArguments<S>) -> Outcome<Vec<Replica<S>>>, since V0_3_10_post2;
            /// Makes the new content visible.
            UpsertEnd(PutEndArguments<S>) -> Outcome<()>, since V0_3_10_post2;
            /// Gives up the new content.
            UpsertRevoke(PutRevokeArguments<S>) -> Outcome<()>, since V0_3_10_post2;
            /// As `UpsertStart`, for several.
            BatchUpsertStart(BatchPutStartArguments<S>) -> Vec<Outcome<Vec<Replica<S>>>>, since V0_3_10_post2;
            /// As `UpsertEnd`, for several.
            BatchUpsertEnd(BatchUpsertEndArguments<S>) -> Vec<Outcome<()>>, since V0_3_10_post2;
            /// As `UpsertRevoke`, for several.
            BatchUpsertRevoke(BatchUpsertRevokeArguments<S>) -> Vec<Outcome<()>>, since V0_3_10_post2;
            /// Removes an object.
            Remove(RemoveArguments<S>) -> Outcome<()>;
            /// Removes all objects whose key matches, and answers with their number.
            RemoveByRegex(RemoveArguments<S>) -> Outcome<i64>;
            /// Removes all objects of a tenant, and answers with their number.
            RemoveAll(RemoveAllArguments<S>) -> i64;
            /// As `Remove`, for several.
            BatchRemove(BatchRemoveArguments<S>) -> Vec<Outcome<()>>, since V0_3_10_post2;
            /// Adds a segment to the pool.
            MountSegment(MountArguments<S>) -> Outcome<()>;
            /// Adds an NVMe-oF segment to the pool.
            MountNoFSegment(MountNofArguments<S>) -> Outcome<()>, since V0_3_11;
            /// Adds all segments of a client whom the master had forgotten.
            ReMountSegment(RemountArguments<S>) -> Outcome<()>;
            /// As `ReMountSegment`, for NVMe-oF segments.
            ReMountNoFSegment(RemountNofArguments<S>) -> Outcome<()>, since V0_3_11;
            /// Takes a segment out of the pool.
            UnmountSegment(UnmountArguments) -> Outcome<()>;
            /// Takes a segment out of the pool after a while.
            GracefulUnmountSegment(GracefulUnmountArguments) -> Outcome<()>, since V0_3_11;
            /// Takes an NVMe-oF segment out of the pool.
            UnmountNoFSegment(UnmountArguments) -> Outcome<()>, since V0_3_11;
            /// All NVMe-oF segments.
            GetAllNoFSegments(NoArguments) -> Outcome<Vec<NofSegment<S>>>, since V0_3_11;
            /// The NVMe-oF segments of a name.
            GetNoFSegmentsByName(SegmentNameArguments<S>) -> Outcome<Vec<NofSegmentOwner>>, since V0_3_11;
            /// A heartbeat.
            Ping(ClientArguments) -> Outcome<PingReply>;
            /// The folder of a shared file system.
            GetFsdir(NoArguments) -> Outcome<S>;
            /// What becomes of the segment of a name.
            QuerySegmentStatus(SegmentNameArguments<S>) -> Outcome<SegmentStatus>, since V0_3_11;
            /// What becomes of a segment.
            QuerySegmentStatusById(SegmentIdArguments) -> Outcome<SegmentStatus>, since V0_3_11;
            /// Where and how to keep objects on disk.
            GetStorageConfig(NoArguments) -> Outcome<StorageConfig<S>>;
            /// Whether client and master fit together. Answers with a version that tells little.
            ServiceReady(NoArguments) -> Outcome<S>;
            /// Tells that a client has a disk.
            MountLocalDiskSegment(OffloadingArguments) -> Outcome<()>;
            /// Tells that a client's disk is gone.
            UnmountLocalDiskSegment(ClientArguments) -> Outcome<()>, since V0_3_13;
            /// Asks for objects to be put on disk.
            OffloadObjectHeartbeat(OffloadingArguments) -> Outcome<OffloadTasks<S>>;
            /// Tells how large a client's disk is.
            ReportSsdCapacity(SsdCapacityArguments) -> Outcome<()>, since V0_3_11;
            /// Tells what a client has put on its disk.
            NotifyOffloadSuccess(OffloadedArguments<S>) -> Outcome<()>;
            /// Asks for objects to be brought back into memory.
            PromotionObjectHeartbeat(ClientArguments) -> Outcome<OffloadTasks<S>>, since V0_3_11;
            /// Makes room for an object that is on disk.
            PromotionAllocStart(PromotionArguments<S>) -> Outcome<PromotionAllocation<S>>, since V0_3_11;
            /// Tells that an object is in memory again.
            NotifyPromotionSuccess(ClientKeyArguments<S>) -> Outcome<()>, since V0_3_11;
            /// Tells that an object could not be brought back.
            NotifyPromotionFailure(ClientKeyArguments<S>) -> Outcome<()>, since V0_3_11;
            /// Makes room for copies.
            CopyStart(CopyStartArguments<S>) -> Outcome<CopyPlan<S>>;
            /// As `CopyStart`, for a copy that the master made up because of load.
            DynamicReplicaCopyStart(DynamicCopyStartArguments<S>) -> Outcome<CopyPlan<S>>, since V0_3_13;
            /// Makes copies visible.
            CopyEnd(ClientKeyArguments<S>) -> Outcome<()>;
            /// As `CopyEnd`, for a copy that the master made up because of load.
            DynamicReplicaCopyEnd(DynamicCopyEndArguments<S>) -> Outcome<()>, since V0_3_13;
            /// Gives up copies.
            CopyRevoke(ClientKeyArguments<S>) -> Outcome<()>;
            /// As `CopyRevoke`, for a copy that the master made up because of load.
            DynamicReplicaCopyRevoke(DynamicCopyEndArguments<S>) -> Outcome<()>, since V0_3_13;
            /// Makes room for a replica that moves.
            MoveStart(MoveStartArguments<S>) -> Outcome<MovePlan<S>>;
            /// Makes a moved replica visible in its new place.
            MoveEnd(ClientKeyArguments<S>) -> Outcome<()>;
            /// Gives up a move.
            MoveRevoke(ClientKeyArguments<S>) -> Outcome<()>;
            /// Tells that a replica on disk is gone.
            EvictDiskReplica(EvictDiskArguments<S>) -> Outcome<()>, since V0_3_10;
            /// As `EvictDiskReplica`, for several.
            BatchEvictDiskReplica(BatchEvictDiskArguments<S>) -> Vec<Outcome<()>>, since V0_3_10_post2;
            /// Whether all objects were removed since the last time.
            PollRemoveAll(ClientArguments) -> Outcome<bool>, since V0_3_12;
            /// Asks for copies of an object.
            CreateCopyTask(CopyTaskArguments<S>) -> Outcome<Uuid>;
            /// Asks for a replica to be moved.
            CreateMoveTask(MoveTaskArguments<S>) -> Outcome<Uuid>;
            /// How far a task is.
            QueryTask(TaskArguments) -> Outcome<TaskReport<S>>;
            /// Takes tasks.
            FetchTasks(FetchTasksArguments) -> Outcome<Vec<TaskAssignment<S>>>;
            /// Tells that a task has ended.
            MarkTaskToComplete(CompleteTaskArguments<S>) -> Outcome<()>;
        }
    };
}

pub(crate) use rpcs;
