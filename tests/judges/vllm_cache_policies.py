"""vLLM's tests of its primary (``cpu/test_manager.py``) with kvtiers' LRU in the place of its own.

The primary is vLLM's, as under its own tiering. Those of its ARC look at the two lists of vLLM's class, and keep it.
"""

from contextlib import nullcontext

from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

__all__ = ["call"]

CachePolicyFactory.register_cache_policy("judged-lru", "kvtiers_vllm.own_tiering.cache_policy", "lru")
_init = CPUOffloadingManager.__init__


def _with_ours(self, *args, cache_policy="lru", **options):
    _init(self, *args, cache_policy="judged-lru" if cache_policy == "lru" else cache_policy, **options)


CPUOffloadingManager.__init__ = _with_ours


def call(_item):
    return nullcontext()
