"""The states of a model that has a draft, on a CPU: what vLLM does to them by kernels of Triton's, in Python.

vLLM computes with such states on a CPU, too, but moves them from block to block by ``precopy_mamba_align_fused_kernel``
and ``postprocess_mamba_fused_kernel`` alone, of ``vllm/v1/worker/mamba_utils.py``.
"""

import ctypes
from typing import Any

__all__ = ["move_in_python"]


def move_in_python() -> None:
    """Have vLLM move the states without Triton."""
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

    MambaSpecDecodeGPUContext.run_fused_precopy = _before_a_step
    MambaSpecDecodeGPUContext.run_fused_postprocess = _after_a_step


def _before_a_step(
    states: Any, num_reqs: int, state_idx_gpu: Any, src_col_gpu: Any, token_bias_gpu: Any, idx_mapping: None
) -> None:
    for request in range(num_reqs if states.is_initialized else 0):
        source, target = int(src_col_gpu[request]), int(state_idx_gpu[request])
        if 0 <= source != target:
            _copy(states, request, source, target, int(token_bias_gpu[request]))


def _after_a_step(
    states: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any,
    num_computed_tokens_gpu: Any,
    num_draft_tokens_gpu: Any,
) -> None:
    states.num_accepted_tokens_out[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    for request in range(num_reqs if states.is_initialized else 0):
        computed = num_computed_tokens_gpu[request] + num_scheduled_tokens_gpu[request] - num_draft_tokens_gpu[request]
        proven = int(computed + num_accepted_tokens_gpu[request]) - 1
        boundary = proven // states.block_size * states.block_size
        skipped = boundary - int(computed)
        if skipped < 0:
            continue
        source, target = int(mamba_state_idx_gpu[request]), boundary // states.block_size - 1
        if source == target:
            states.num_accepted_tokens_out[request] = 1
        if source != target or skipped:
            _copy(states, request, source, target, skipped)


def _copy(states: Any, request: int, source: int, target: int, skipped: int) -> None:
    """Copy a request's states from one place in its table of blocks to another, without so many draft tokens."""
    for state in range(states.num_states):
        table = int(states.block_table_ptrs[states.state_group_indices[state]])
        row = (ctypes.c_int32 * states.block_table_stride_req).from_address(
            table + 4 * request * states.block_table_stride_req
        )
        begin, stride = int(states.state_base_addrs[state]), int(states.state_block_strides[state])
        nbytes = int(states.state_inner_sizes[state] * states.state_elem_sizes[state])
        if width := int(states.state_conv_widths[state]):  # of the last tokens: those that are not skipped
            place = begin + row[source] * stride + skipped * nbytes
            nbytes *= width - skipped
        else:  # one for each draft token
            place = begin + row[source + skipped] * stride
        ctypes.memmove(begin + row[target] * stride, place, nbytes)
