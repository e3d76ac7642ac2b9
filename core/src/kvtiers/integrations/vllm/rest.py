"""How long a step lasts at least that computes nothing and waits for loads.

vLLM steps as fast as it can while a request waits for its KV. On a machine with few processors that takes one of them
from the processes that load, and in one process it takes the interpreter from the thread that copies: each of its turns
comes after a switch interval, 5 ms, then.
"""

__all__ = ["REST_SECONDS"]

REST_SECONDS = 0.0002
"""Twice what such a step takes by itself (0.1 ms)."""
