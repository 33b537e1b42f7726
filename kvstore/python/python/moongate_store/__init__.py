"""Client and node of a Mooncake-compatible KV store in this process, with the calls and return codes of `mooncake.store`."""

import atexit
import ctypes

from moongate_store import _native
from moongate_store._native import (
    BufferDescriptor,
    DiskDescriptor,
    MemoryDescriptor,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    bind_to_numa_node,
    close_all,
)
from moongate_store.missing import MISSING_CALLS, MISSING_CLASSES, missing
from moongate_store.tensors import TensorCalls

__all__ = [
    "BufferDescriptor",
    "BufferHandle",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "bind_to_numa_node",
]


class BufferHandle(bytearray):
    """An object's content, from `get_buffer`. `memoryview` of it makes no copy."""

    # The stable ABI of Python 3.9 has no buffer protocol for native classes, so the memory is that of a bytearray.
    __slots__ = ()

    def ptr(self):
        """The address of the content, valid while this object lives."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def size(self):
        """The size of the content in bytes."""
        return len(self)


class MooncakeDistributedStore(TensorCalls, _native.MooncakeDistributedStore):
    """Client of a KV store, and a node of it if a segment is mounted. With the calls and return codes of Mooncake's class."""

    __slots__ = ()

    def __getattr__(self, name):
        raise missing(type(self).__name__, name, MISSING_CALLS)


def __getattr__(name):
    raise missing("moongate_store", name, MISSING_CLASSES)


# A segment that is not unmounted stays in the store until the master misses its heartbeats.
atexit.register(close_all)
