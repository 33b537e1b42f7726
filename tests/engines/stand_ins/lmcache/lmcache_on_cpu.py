"""vLLM's LMCacheConnectorV1 for a machine without an accelerator; named in --kv-transfer-config as kv_connector_module_path.

Connector, cache engine, hashes and events are the real ones. LMCache copies between device and host for accelerators only. Here
both are host memory, and whole blocks are copied as they are, since vLLM's layout inside a block depends on the CPU.
"""

import lmcache.v1.gpu_connector as gpu_connector
import torch
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1

# [blocks, heads, tokens of a block, key and value].
TOKENS_DIMENSION = 2


class HostConnector(GPUConnectorInterface):
    def __init__(self, metadata):
        self.layers, self.planes, _, heads, head_size = metadata.kv_shape
        self.hidden = heads * head_size

    def get_shape(self, num_tokens):
        return torch.Size([self.planes, self.layers, num_tokens, self.hidden])

    def from_gpu(self, memory_obj, start, end, **kwargs):
        for part, layer, blocks in self._parts(memory_obj, start, end, **kwargs):
            part.copy_(layer[blocks].reshape(-1))

    def to_gpu(self, memory_obj, start, end, **kwargs):
        for part, layer, blocks in self._parts(memory_obj, start, end, **kwargs):
            layer[blocks] = part.view(len(blocks), *layer.shape[1:])

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(self, memory_objs=None, starts=None, ends=None, **kwargs):
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)

    def _parts(self, memory_obj, start, end, *, slot_mapping, **kwargs):
        """Of each layer: its part of the memory object, its cache, and the numbers of the blocks."""
        self.initialize_kvcaches_ptr(**kwargs)
        caches = list(self.kvcaches.values()) if isinstance(self.kvcaches, dict) else list(self.kvcaches)
        size = caches[0].shape[TOKENS_DIMENSION]
        assert start % size == 0 and end % size == 0, f"tokens {start} to {end} are not whole blocks"
        blocks = slot_mapping[start:end:size] // size
        parts = memory_obj.tensor.view(-1).chunk(self.layers)
        return zip(parts, caches, [blocks] * self.layers, strict=True)


def _create(_config, metadata, _engine, layout_hints=None):
    return HostConnector(metadata)


gpu_connector.CreateGPUConnector = _create

__all__ = ["LMCacheConnectorV1"]
