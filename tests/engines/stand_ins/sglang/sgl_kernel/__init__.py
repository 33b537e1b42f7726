"""Stands in for SGLang's compiled kernels, which no package index has for CPUs.

On a CPU SGLang computes with torch itself and needs two of the kernels, both of which only copy indices. It imports many more
without calling them; those are made up on demand and raise if they are called after all.
"""

from sgl_kernel import page_copies, short_convolutions, torch_without_gpu

__version__ = "0.0.0+cpu"

torch_without_gpu.install()
page_copies.install()


def assign_req_to_token_pool_cpu(rows, table, starts, ends, slots, _row_length) -> None:
    """Writes each request's new KV slots into its row of the table."""
    taken = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        table[row, start:end] = slots[taken : taken + end - start].to(table.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(rows, table, starts, ends, slots, _row_length) -> None:
    """The way back: gathers a range of each request's row."""
    filled = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist()):
        slots[filled : filled + end - start] = table[row, start:end].to(slots.dtype)
        filled += end - start


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in for CPUs")

    return absent


short_convolutions.install()
