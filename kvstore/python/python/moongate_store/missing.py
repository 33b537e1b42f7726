"""What Mooncake's module has and this one does not, and what to use instead."""

_TENSORS = "put the tensor with put_tensor or batch_put_tensor, and read it with get_tensor or get_tensor_into"
_RANGES = "read whole objects with batch_get_into_multi_buffers, which takes several ranges of memory for each"
_SESSIONS = "batch_put_from_multi_buffers and batch_get_into_multi_buffers do in one call what a session does in three"
_SEGMENTS = "each set-up store has one segment; run `moongate store` for further ones"
_TASKS = "the master's HTTP API moves objects between nodes: POST /api/v1/drain_jobs"
_SAFETENSORS = "read the file with the package safetensors, and use put_tensor"
_WEIGHTS = "put weights as tensors, with put_tensor and a hard pin in the ReplicateConfig"
_POOLS = "allocate memory with MooncakeHostMemAllocator, and register it once with register_buffer"

MISSING_CALLS = {
    "alloc_from_mem_pool": "allocate memory with MooncakeHostMemAllocator",
    "allocate_and_mount_segment": _SEGMENTS,
    "batch_get_into_multi_buffer_ranges": _RANGES,
    "batch_get_session_end": _SESSIONS,
    "batch_get_session_start": _SESSIONS,
    "batch_get_tensor_into_cuda": _TENSORS,
    "batch_get_tensor_with_parallelism": "use batch_get_tensor_with_tp",
    "batch_get_tensor_with_parallelism_into": "use batch_get_tensor_with_tp",
    "batch_get_tensor_with_tp_into": "use batch_get_tensor_with_tp",
    "batch_probe_key": "use batch_is_exist, which also protects the objects from eviction for a few seconds",
    "batch_put_from_multi_buffer_ranges": "use batch_put_from_multi_buffers",
    "batch_put_session_end": _SESSIONS,
    "batch_put_session_revoke": _SESSIONS,
    "batch_put_session_start": _SESSIONS,
    "batch_put_tensor_from": _TENSORS,
    "batch_put_tensor_with_parallelism": "use batch_put_tensor_with_tp",
    "batch_put_tensor_with_parallelism_from": "use batch_put_tensor_with_tp",
    "batch_put_tensor_with_tp_from": "use batch_put_tensor_with_tp",
    "batch_replica_clear": "use batch_remove",
    "batch_upsert_tensor_from": _TENSORS,
    "batch_upsert_tensor_with_parallelism": "use batch_upsert_tensor",
    "batch_upsert_tensor_with_parallelism_from": "use batch_upsert_tensor",
    "begin_weight_snapshot": _WEIGHTS,
    "create_copy_task": _TASKS,
    "create_move_task": _TASKS,
    "get_into_ranges": _RANGES,
    "get_into_ranges_from_snapshot": _RANGES,
    "get_offload_rpc_read_count": "the metrics of `moongate store` have it",
    "get_tensor_into_cuda": _TENSORS,
    "get_tensor_with_parallelism": "use get_tensor_with_tp",
    "get_tensor_with_parallelism_into": "use get_tensor_with_tp",
    "get_tensor_with_tp_into": "use get_tensor_with_tp",
    "init_all": "use setup",
    "load_tensor_from_safetensor": _SAFETENSORS,
    "mount_segment": _SEGMENTS,
    "prepare_get_into_ranges_snapshot": _RANGES,
    "probe_key": "use is_exist, which also protects the object from eviction for a few seconds",
    "put_from_with_metadata": "put both with put_parts or batch_put_from_multi_buffers",
    "put_tensor_from": _TENSORS,
    "put_tensor_with_parallelism": "use put_tensor_with_tp",
    "put_tensor_with_parallelism_from": "use put_tensor_with_tp",
    "put_tensor_with_tp_from": "use put_tensor_with_tp",
    "query_task": _TASKS,
    "save_tensor_to_safetensor": _SAFETENSORS,
    "unmount_and_free_segment": _SEGMENTS,
    "unmount_local_disk_segment": _SEGMENTS,
    "unmount_segment": _SEGMENTS,
    "upsert_tensor_from": _TENSORS,
    "upsert_tensor_with_parallelism": "use upsert_tensor",
    "upsert_tensor_with_parallelism_from": "use upsert_tensor",
}

MISSING_CLASSES = {
    "BufferLease": _POOLS,
    "BufferLeaseView": _POOLS,
    "BufferPool": _POOLS,
    "Descriptor": "get_replica_desc returns ReplicaDescriptor",
    "EngramStore": "put the tables as tensors, with put_tensor",
    "EngramStoreConfig": "put the tables as tensors, with put_tensor",
    "ExistOptions": "call is_exist and batch_is_exist without options",
    "MooncakeDistributedNoFRegister": "run `moongate store` with disk space for objects that are offloaded from memory",
    "ParallelAxis": "use the calls for tensors that end with _with_tp",
    "QueryTaskResponse": _TASKS,
    "RangedReadSnapshot": _RANGES,
    "ReadTarget": "use the calls for tensors that end with _with_tp",
    "RegisteredBufferLease": _POOLS,
    "RegisteredBufferLeaseView": _POOLS,
    "RegisteredBufferPool": _POOLS,
    "TaskStatus": _TASKS,
    "TaskType": _TASKS,
    "TensorParallelism": "use the calls for tensors that end with _with_tp",
}


def missing(owner, name, alternatives):
    """The error for a name that `owner` does not have. It is an AttributeError, so that `hasattr` is false."""
    problem = f"{owner} has no {name!r}"
    alternative = alternatives.get(name)
    return AttributeError(problem if alternative is None else f"{problem}, which Mooncake's module has: {alternative}")
