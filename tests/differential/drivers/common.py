"""The driver interface, and what engines of every integration share.

A driver is a module ``NAME_driver`` with ``release()``, the engine's release as people write it, and ``open(config,
weights)``, an engine over the tiers of this config. An engine has

* ``put(seed)``: store the values of a prompt; the number of values that were stored, where the integration says it;
* ``get(seed)``: look the prompt up and load it; a ``result``. Nothing may come from the engine's own memory;
* ``inside(what)``: ``inspected(what)`` of the process in which its tiers are open;
* ``close()``.

The bytes follow from seed and weights, so that every process has the same. An engine that computes on a miss stores
what it has computed in ``get``, too.
"""

import gc
import os

import numpy as np

MODEL = "differential"
PATIENCE = 60.0


def result(found, of, wrong):
    """Return how many of so many values were loaded, and how many of them, or of the tokens after them, were wrong."""
    return {"found": found, "of": of, "wrong": wrong}


def bytes_of(seed, weights, number, nbytes):
    """Return the bytes of a prompt's value with this number."""
    digits = [seed, number, *weights.encode()]
    return np.random.default_rng(digits).integers(0, 256, nbytes, np.uint8).tobytes()


def compared(got, right):
    """Return the result for values that were got, None for each miss, by those that are right."""
    found = [pair for pair in zip(got, right, strict=True) if pair[0] is not None]
    return result(len(found), len(right), sum(value != own for value, own in found))


def inspected(what):
    """Return what this process holds: "layouts" of its engines; the "count" of its values in memory; "damage" them,
    and return how many."""
    gc.unfreeze()  # vLLM freezes what it has at the end of its start, and that would not be listed
    return {"layouts": _layouts, "count": lambda: len(_held()), "damage": _damage}[what]()


def _layouts():
    from kvtiers.layout.cache_layout import CacheLayout

    return sorted({it.to_json() for it in gc.get_objects() if isinstance(it, CacheLayout)})


def _held():
    """Return the values that a tier of this very process holds: each by the dictionary that has it, and its name."""
    from kvtiers_example.example_tier import ExampleSecondaryTier
    from kvtiers_example.memory_store import MemoryStore

    stores = [it for it in gc.get_objects() if isinstance(it, MemoryStore | ExampleSecondaryTier)]
    return [(held._values, name) for held in stores for name in held._values if "/_layout/" not in str(name)]


def _damage():
    """Flip a bit in each value that a tier of this very process holds."""
    held = _held()
    for values, name in held:
        values[name] = flipped(values[name])
    return len(held)


def flipped(value):
    """Return a value with one bit flipped in every page."""
    value = bytearray(value)
    value[7::4096] = bytes(byte ^ 0x10 for byte in value[7::4096])
    return bytes(value)


def assert_mapped(tier, stats):
    """Assert that clients have moved their values in an engine's own memory, where tier hosts can map it.

    ``stats``: of each client. One that was asked for nothing has moved nothing.
    """
    if tier.get("io") == "thread" or tier["type"] == "memory-async":
        return
    for its in stats:
        assert its["direct_values"] or not (its["stored_values"] or its["found_values"]), its


class Here:
    """An engine whose tiers are open in this process."""

    def inside(self, what):
        return inspected(what)


os.environ.setdefault("HF_HUB_OFFLINE", "1")
