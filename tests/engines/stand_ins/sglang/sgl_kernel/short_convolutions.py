"""The short causal convolutions of LFM2 with torch alone; SGLang has them for CPUs only as Triton kernels, which need a GPU."""

import sys
import types

import torch
import torch.nn.functional as F

PAD_SLOT_ID = -1
ABSENT_OPERATORS = ("fused_sigmoid_gating_delta_rule_update_cpu", "fused_gdn_gating_cpu")
TRITON_MODULE = "sglang.kernels.ops.mamba.causal_conv1d_triton"


def _convolved(inputs: torch.Tensor, weight: torch.Tensor, bias, activation) -> torch.Tensor:
    """`inputs` has width - 1 earlier columns."""
    out = F.conv1d(inputs[None], weight[:, None], bias, groups=weight.shape[0])[0]
    return F.silu(out) if activation in ("silu", "swish", True) else out


def causal_conv1d_fn(
    x, weight, bias, conv_states=None, query_start_loc=None, cache_indices=None, has_initial_state=None,
    activation="silu", pad_slot_id=PAD_SLOT_ID, **_more,
):  # fmt: skip
    """Whole prompts, one after the other in `x` of (channels, tokens); the last columns of each become its state."""
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    ends = query_start_loc.tolist()
    for number, (start, end) in enumerate(zip(ends, ends[1:])):
        slot = number if cache_indices is None else int(cache_indices[number])
        if slot == pad_slot_id or start == end:
            continue
        state = x.new_zeros(x.shape[0], kept)
        if has_initial_state is not None and bool(has_initial_state[number]):
            state = conv_states[slot, :, -kept:].to(x.dtype)
        inputs = torch.cat([state, x[:, start:end]], dim=1)
        out[:, start:end] = _convolved(inputs, weight, bias, activation)
        if conv_states is not None:
            conv_states[slot, :, -kept:] = inputs[:, -kept:].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None,
    pad_slot_id=PAD_SLOT_ID, **_more,
):  # fmt: skip
    """One more token for each row of `x`, of (requests, channels)."""
    out, kept = torch.empty_like(x), weight.shape[1] - 1
    for number in range(x.shape[0]):
        slot = number if conv_state_indices is None else int(conv_state_indices[number])
        if slot == pad_slot_id:
            continue
        inputs = torch.cat([conv_state[slot, :, -kept:].to(x.dtype), x[number, :, None]], dim=1)
        out[number] = _convolved(inputs, weight, bias, activation)[:, 0]
        conv_state[slot, :, -kept:] = inputs[:, -kept:].to(conv_state.dtype)
    return out


def install() -> None:
    if torch.cuda.is_available():
        return
    module = types.ModuleType(TRITON_MODULE)
    module.PAD_SLOT_ID = PAD_SLOT_ID
    module.causal_conv1d_fn, module.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
    module.__getattr__ = sys.modules["sgl_kernel"].__getattr__
    sys.modules[TRITON_MODULE] = module
    # Looked up with other models' kernels, and not called.
    for name in ABSENT_OPERATORS:
        setattr(torch.ops.sgl_kernel, name, module.__getattr__(name))
