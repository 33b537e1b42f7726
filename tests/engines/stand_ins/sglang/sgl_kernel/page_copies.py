"""HiCache's copies between the device's KV pool, one tensor per layer, and the host's, one tensor of whole pages, with torch alone.

SGLang imports these kernels only where it sees a GPU. As builtins their names are found elsewhere too.
"""

import builtins


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size) -> None:
    """To the host: `src_ptrs` has each layer's keys and then each layer's values, `dst_ptrs` the host's keys and values."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for which, layer_slots in enumerate(src_ptrs):
        host, layer = dst_ptrs[which // layers], which % layers
        for slot, page in _pages(src_indices, dst_indices, page_size):
            host[page // page_size, layer].copy_(layer_slots[slot : slot + page_size])


def transfer_kv_per_layer_direct_pf_lf(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size) -> None:
    """Back to one layer of the device."""
    for host, layer_slots in zip(src_ptrs, dst_ptrs):
        for page, slot in _pages(src_indices, dst_indices, page_size):
            layer_slots[slot : slot + page_size].copy_(host[page // page_size, layer_id])


def _pages(sources, targets, page_size):
    """First indices of the pages. Within a page, indices follow each other."""
    return zip(sources[::page_size].tolist(), targets[::page_size].tolist())


def install() -> None:
    for kernel in (transfer_kv_all_layer_direct_lf_pf, transfer_kv_per_layer_direct_pf_lf):
        setattr(builtins, kernel.__name__, kernel)
