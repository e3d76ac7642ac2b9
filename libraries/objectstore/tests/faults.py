"""What an engine sees of an object store that goes wrong: the tests that S3, Google Cloud Storage and Azure share.

A subclass gives its ``differences`` and the fixtures ``proxied``: a tier in a host of its own with a time-out of two
seconds, and the proxy before its server; ``objects``, which writes (``put``) and reads (``get``) an object as another
program does; and ``config``, which makes the options of a tier.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries.objectstore.tests.differences import Suite
from libraries.objectstore.tests.service import NAMES, new_keys, service

from kvtiers_objectstore.testing.proxy import Fault

__all__ = ["COUNT", "POISON", "FaultTests", "fill", "load_again", "sound"]

COUNT = 3
POISON = 0xDB


def always(fault: Fault, method: str) -> Callable[[Any], Fault | None]:
    """Return a script by which every such request goes wrong."""
    return lambda request: fault if request.method == method else None


def fill(tier: Any, keys: Any) -> Any:
    """Store values that say whose they are; return them."""
    for row, key in zip(tier.payload, keys, strict=False):
        row[:] = np.resize(np.frombuffer(key, np.uint8), len(row))
    expected = tier.payload[: len(keys)].copy()
    result = tier.store(keys)
    assert result.success, result
    return expected


def load_again(tier: Any, keys: Any) -> Any:
    """Load into rows that hold something else."""
    tier.rows[:] = POISON
    return tier.load(keys)


def sound(tier: Any, expected: Any) -> bool:
    """Return whether the rows hold what was stored."""
    return bool((tier.payload[: len(expected)] == expected).all())


class FaultTests(Suite):
    """The tests."""

    @pytest.fixture
    def stored(self, proxied):
        tier, proxy = proxied
        proxy.script = lambda _request: None
        keys = new_keys(COUNT)
        expected = fill(tier, keys)
        proxy.log.clear()
        yield tier, proxy, keys, expected
        proxy.script = lambda _request: None

    def test_a_load_that_fails_is_a_miss_and_counted_and_the_next_one_is_right(self, stored, any_fault):
        tier, proxy, keys, expected = stored
        errors = tier.figure("errors")
        proxy.script = always(any_fault, "GET")
        result = load_again(tier, keys)
        assert not result.success
        assert not result.successful_keys
        assert tier.figure("errors") == errors + 1
        if any_fault in self.differences.lasting.values():
            assert proxy.methods().count("GET") <= COUNT, "what will not pass was tried again"
        proxy.script = lambda _request: None
        assert load_again(tier, keys).success
        assert sound(tier, expected)

    def test_a_load_is_tried_again_after_what_passes(self, stored, passing):
        tier, proxy, keys, expected = stored
        retries = tier.figure("retries")
        failed_once = set()

        def script(request):
            if request.method == "GET" and request.path not in failed_once:
                failed_once.add(request.path)
                return passing
            return None

        proxy.script = script
        assert load_again(tier, keys).success
        assert sound(tier, expected)
        assert tier.figure("retries") == retries + COUNT

    def test_a_store_that_fails_is_counted_and_leaves_what_is_there(self, stored, any_fault):
        tier, proxy, keys, expected = stored
        errors = tier.figure("errors")
        more = new_keys(COUNT)
        proxy.script = always(any_fault, "PUT")
        tier.rows[:] = POISON
        result = tier.store(more)
        proxy.script = lambda _request: None
        if any_fault.answer:  # else the object is written, and the answer lost
            assert not result.success
            assert tier.figure("errors") == errors + 1
            assert tier.hits(more) == 0
        assert load_again(tier, keys).success
        assert sound(tier, expected)

    def test_a_question_that_fails_is_a_miss_and_counted(self, stored, head_fault):
        tier, proxy, keys, _ = stored
        tier.tier.set_names(NAMES)  # forget what is known
        errors = tier.figure("errors")
        proxy.script = always(head_fault, "HEAD")
        assert tier.hits(keys) == 0
        # What has no body cannot say that it is the bucket which is missing.
        assert tier.figure("errors") == errors + (not head_fault.answer.startswith(b"HTTP/1.1 404 "))
        proxy.script = lambda _request: None
        assert load_again(tier, keys).success

    @pytest.mark.parametrize("change", [-4096, -1, 1, 4096])
    def test_an_object_of_another_size_is_a_miss_before_a_byte_of_it_reaches_the_row(self, stored, objects, change):
        tier, _, keys, _ = stored
        missing = tier.figure("missing")
        name = f"{tier.config.prefix}/{NAMES.names(keys[:1])[0]}"
        objects.put(name, bytes(tier.rows.shape[1] + change))
        result = load_again(tier, keys[:1])
        assert not result.success
        assert (tier.rows == POISON).all()
        assert tier.figure("missing") == missing + 1

    def test_wrong_bytes_are_a_miss_and_deleted(self, stored, objects):
        tier, _, keys, _ = stored
        damaged = tier.figure("seal_failures")
        name = f"{tier.config.prefix}/{NAMES.names(keys[1:2])[0]}"
        value = bytearray(objects.get(name))
        value[77] ^= 1
        objects.put(name, bytes(value))
        result = load_again(tier, keys)
        assert list(result.successful_keys) == [keys[0], *keys[2:]]
        assert tier.figure("seal_failures") == damaged + 1
        assert tier.hits(keys) == 1

    def test_a_chunk_that_is_absent_is_a_miss_and_the_others_land(self, stored):
        tier, _, keys, expected = stored
        result = load_again(tier, [keys[0], new_keys(1)[0], keys[2]])
        assert list(result.successful_keys) == [keys[0], keys[2]]
        assert (tier.payload[0] == expected[0]).all()
        assert (tier.payload[2] == expected[2]).all()

    def test_a_prefix_of_200_chunks_is_located_in_nine_requests(self, stored):
        tier, proxy, _, _ = stored
        chunks = new_keys(200)
        for start in range(0, 137, COUNT):
            fill(tier, chunks[start : min(start + COUNT, 137)])
        proxy.log.clear()
        tier.tier.set_names(NAMES)  # forget what is known
        assert tier.hits(chunks) == 137
        assert len(proxy.log) <= 9, proxy.methods()

    def test_two_engines_share_the_values(self, config):
        options = config()
        with service(options, 65536, COUNT) as one, service(options, 65536, COUNT) as other:
            keys = new_keys(COUNT)
            expected = fill(one, keys)
            assert other.hits(keys) == COUNT
            assert load_again(other, keys).success
            assert sound(other, expected)
