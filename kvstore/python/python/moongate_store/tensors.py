"""Calls of a store for PyTorch tensors.

A tensor is an object of a header and its elements in row-major order. The header was measured on Mooncake 0.3.14; all numbers in it are
little-endian:

| bytes | |
|---|---|
| 0–3 | `NOOM` |
| 4–7 | version 1 and size of the header, 304, two bytes each |
| 8–11 | element type, the index in `ELEMENT_TYPES` |
| 12–15 | number of dimensions, up to 8 |
| 16–23 | 1 for a shard of tensor parallelism, otherwise 0 |
| 24–39 | where the elements begin, and their size in bytes, eight bytes each |
| 40–167 | shape of the whole tensor, and of the elements here: eight numbers each, −1 beyond the dimensions |
| 168–207 | of a shard: 1, 0, 1, 0, rank, number of ranks, divided dimension, 0, four bytes each, and its length here in eight |
| 208–303 | 0 |
"""

import ctypes
import logging
import struct

LOGGER = logging.getLogger("moongate_store")
INVALID_PARAMS = -600
ELEMENT_TYPES = (
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
)
MAX_DIMENSIONS = 8
BEGIN = struct.Struct("<4sHHiiQQQ")
SHAPES = struct.Struct(f"<{2 * MAX_DIMENSIONS}q")
SHARD = struct.Struct("<8iQ")
MAGIC, VERSION, HEADER_BYTES = b"NOOM", 1, 304


def _padded(shape):
    return (*shape, *[-1] * (MAX_DIMENSIONS - len(shape)))


def _header(tensor, whole_shape, shard):
    """The header of a tensor with elements of a known type. `shard` is empty, or its rank, the number of ranks and the dimension."""
    element_type = ELEMENT_TYPES.index(str(tensor.dtype).removeprefix("torch."))
    size = tensor.numel() * tensor.element_size()
    begin = BEGIN.pack(MAGIC, VERSION, HEADER_BYTES, element_type, tensor.dim(), 1 if shard else 0, HEADER_BYTES, size)
    header = begin + SHAPES.pack(*_padded(whole_shape), *_padded(tensor.shape))
    if shard:
        header += SHARD.pack(1, 0, 1, 0, *shard, 0, tensor.shape[shard[2]])
    return header.ljust(HEADER_BYTES, b"\0")


def _can_be_stored(tensor):
    """Whether this is a tensor that the header can describe. Logs why not."""
    if not all(hasattr(tensor, name) for name in ("dtype", "dim", "numel", "detach", "data_ptr")):
        LOGGER.error("a value of type %s cannot be stored as a tensor", type(tensor).__name__)
        return False
    if str(tensor.dtype).removeprefix("torch.") not in ELEMENT_TYPES:
        LOGGER.error("a tensor of %s cannot be stored; convert it to one of %s", tensor.dtype, ", ".join(ELEMENT_TYPES))
        return False
    if tensor.dim() > MAX_DIMENSIONS:
        LOGGER.error("a tensor of %d dimensions cannot be stored; reshape it to at most %d", tensor.dim(), MAX_DIMENSIONS)
        return False
    return True


def _parts(tensor, whole_shape=None, shard=()):
    """Header and elements of a tensor, or of one shard of it. `None` for what cannot be stored."""
    if not _can_be_stored(tensor):
        return None
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    elements = ctypes.string_at(tensor.data_ptr(), size) if size else b""
    return _header(tensor, tensor.shape if whole_shape is None else whole_shape, shard), elements


def _tensor(key, content):
    """The tensor of an object, whose memory it uses. `None` without an object. Logs if the object is no tensor or not complete."""
    if content is None:
        return None
    tensor = _decoded(content)
    if tensor is None:
        LOGGER.error("the object %r of %d bytes is no complete tensor", key, len(content))
    return tensor


def _decoded(content):
    if len(content) < HEADER_BYTES:
        return None
    magic, version, header, element_type, dimensions, _, begin, size = BEGIN.unpack_from(content)
    if (magic, version, header, begin) != (MAGIC, VERSION, HEADER_BYTES, HEADER_BYTES) or size != len(content) - begin:
        return None
    if not 0 <= element_type < len(ELEMENT_TYPES) or not 0 <= dimensions <= MAX_DIMENSIONS:
        return None
    # A tensor without dimensions is returned with one, as Mooncake's module does.
    shape = SHAPES.unpack_from(content, BEGIN.size)[MAX_DIMENSIONS:][:dimensions] or (1,)
    import torch

    element_type = getattr(torch, ELEMENT_TYPES[element_type])
    count = 1
    for length in shape:
        count *= length
    if min(shape) < 0 or count * element_type.itemsize != size:
        return None
    if count == 0:
        return torch.empty(shape, dtype=element_type)
    return torch.frombuffer(content, dtype=torch.uint8, offset=begin).view(element_type).reshape(shape)


def _shards(key, tensor, ranks, dimension):
    """The objects of a tensor that is divided for tensor parallelism. `None` if it cannot be divided into equal parts."""
    if not _can_be_stored(tensor):
        return None
    if not 0 <= dimension < tensor.dim() or tensor.shape[dimension] % ranks != 0:
        LOGGER.error("a tensor of shape %s has no %d equal parts along dimension %d", tuple(tensor.shape), ranks, dimension)
        return None
    shards = enumerate(tensor.chunk(ranks, dimension))
    return [(_shard_key(key, rank), *_parts(shard, tensor.shape, (rank, ranks, dimension))) for rank, shard in shards]


def _shard_key(key, rank):
    return f"{key}_tp_{rank}"


class TensorCalls:
    """Calls with the arguments and results of Mooncake's module. A tensor that is read is on the CPU; one that cannot be read is `None`."""

    __slots__ = ()

    def put_tensor(self, key, tensor):
        """Puts a tensor. −600 for anything else, for more than eight dimensions, and for other types of elements than `ELEMENT_TYPES`."""
        return self.pub_tensor(key, tensor)

    def pub_tensor(self, key, tensor, config=None):
        """As `put_tensor`, with a configuration."""
        parts = _parts(tensor)
        return INVALID_PARAMS if parts is None else self.put_parts(key, *parts, config=config)

    def upsert_tensor(self, key, tensor):
        """As `put_tensor`, and replaces an object that exists."""
        return self.upsert_pub_tensor(key, tensor)

    def upsert_pub_tensor(self, key, tensor, config=None):
        """As `upsert_tensor`, with a configuration."""
        parts = _parts(tensor)
        return INVALID_PARAMS if parts is None else self.upsert_parts(key, *parts, config=config)

    def put_tensor_with_tp(self, key, tensor, tp_rank=0, tp_size=1, split_dim=0):
        """Divides a tensor into `tp_size` equal parts along a dimension and puts each as an object of its own. `tp_rank` has no effect."""
        return self.pub_tensor_with_tp(key, tensor, None, tp_rank, tp_size, split_dim)

    def pub_tensor_with_tp(self, key, tensor, config=None, tp_rank=0, tp_size=1, split_dim=0):
        """As `put_tensor_with_tp`, with a configuration."""
        del tp_rank
        if tp_size <= 1:
            return self.pub_tensor(key, tensor, config)
        shards = _shards(key, tensor, tp_size, split_dim)
        if shards is None:
            return INVALID_PARAMS
        codes = [self.put_parts(*shard, config=config) for shard in shards]
        return next((code for code in codes if code != 0), 0)

    def get_tensor(self, key):
        """A tensor that was put, or `None`."""
        return _tensor(key, self.get_buffer(key))

    def get_tensor_with_tp(self, key, tp_rank=0, tp_size=1, split_dim=0):
        """The part of one rank of a tensor that was divided into `tp_size` parts, or `None`."""
        del split_dim
        return self.get_tensor(key if tp_size <= 1 else _shard_key(key, tp_rank))

    def get_tensor_into(self, key, buffer_ptr, size):
        """Reads a tensor into registered memory, header included. The result uses that memory; `None` without such a tensor."""
        read = self.get_into(key, buffer_ptr, size)
        return _tensor(key, (ctypes.c_char * read).from_address(buffer_ptr)) if read > 0 else None

    def batch_put_tensor(self, keys, tensors_list):
        """One code for each key; see `put_tensor`."""
        return self._each(self.put_tensor, keys, tensors_list)

    def batch_pub_tensor(self, keys, tensors_list, config=None):
        """One code for each key; see `pub_tensor`."""
        return self._each(lambda key, tensor: self.pub_tensor(key, tensor, config), keys, tensors_list)

    def batch_upsert_tensor(self, keys, tensors_list):
        """One code for each key; see `upsert_tensor`."""
        return self._each(self.upsert_tensor, keys, tensors_list)

    def batch_upsert_pub_tensor(self, keys, tensors_list, config=None):
        """One code for each key; see `upsert_pub_tensor`."""
        return self._each(lambda key, tensor: self.upsert_pub_tensor(key, tensor, config), keys, tensors_list)

    def batch_put_tensor_with_tp(self, base_keys, tensors_list, tp_rank=0, tp_size=1, split_dim=0):
        """One code for each key; see `put_tensor_with_tp`."""
        return self.batch_pub_tensor_with_tp(base_keys, tensors_list, None, tp_rank, tp_size, split_dim)

    def batch_pub_tensor_with_tp(self, base_keys, tensors_list, config=None, tp_rank=0, tp_size=1, split_dim=0):
        """One code for each key; see `pub_tensor_with_tp`."""

        def put(key, tensor):
            return self.pub_tensor_with_tp(key, tensor, config, tp_rank, tp_size, split_dim)

        return self._each(put, base_keys, tensors_list)

    def batch_get_tensor(self, keys):
        """One tensor or `None` for each key."""
        return [_tensor(key, content) for key, content in zip(keys, self.batch_get_buffer(keys))]

    def batch_get_tensor_with_tp(self, base_keys, tp_rank=0, tp_size=1):
        """One part of a tensor or `None` for each key; see `get_tensor_with_tp`."""
        return self.batch_get_tensor([key if tp_size <= 1 else _shard_key(key, tp_rank) for key in base_keys])

    def batch_get_tensor_into(self, keys, buffer_ptrs, sizes):
        """One tensor or `None` for each key; see `get_tensor_into`."""
        read = self.batch_get_into(keys, buffer_ptrs, sizes)
        contents = [(ctypes.c_char * size).from_address(at) if size > 0 else None for at, size in zip(buffer_ptrs, read)]
        return [_tensor(key, content) for key, content in zip(keys, contents)]

    @staticmethod
    def _each(call, keys, tensors):
        if len(keys) != len(tensors):
            LOGGER.error("%d keys and %d tensors: pass as many of each", len(keys), len(tensors))
            return [INVALID_PARAMS] * len(keys)
        return [call(key, tensor) for key, tensor in zip(keys, tensors)]
