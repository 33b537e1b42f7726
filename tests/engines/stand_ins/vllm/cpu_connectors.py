"""vLLM's MooncakeConnector for a machine without an accelerator; named in --kv-transfer-config as kv_connector_module_path.

The connector is vLLM's own. PyPI's torch is built for GPUs, and without one its questions about the current device raise;
with one engine per machine the answer is always "the first".
"""

import torch


def _first_device() -> int:
    return 0


def _nothing_to_do(*_args, **_kwargs) -> None:
    return None


torch.accelerator.current_device_index = _first_device
torch.accelerator.set_device_index = _nothing_to_do
torch.accelerator.synchronize = _nothing_to_do

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (  # noqa: E402
    MooncakeConnector,
)

__all__ = ["MooncakeConnector"]
