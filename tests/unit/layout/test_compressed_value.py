"""The compressed form of a value: its bytes never change, damage is found, and nothing that is stored raises."""

import json
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.api import ConfigError
from kvtiers.layout.compressed_value import COMPRESSED_FORMAT, ValueCompressor, compressed_length, is_compressed
from kvtiers.layout.seal import SealVerdict, check_value, seal_value

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "compressed-value-1.json").read_text(encoding="utf-8"))
NAME, LAYOUT_ID = "prod/model-0123456789abcdef01234567/00ff", bytes(range(8))
OK, FOREIGN, CORRUPT = SealVerdict.OK, SealVerdict.FOREIGN, SealVerdict.CORRUPT
BLOCK = 128 << 10


@pytest.fixture(scope="module")
def compressor():
    return ValueCompressor()


def normal(nbytes, seed=0, itemsize=2):
    """What KV is closest to: normally distributed numbers in bf16 (2), fp32 (4), or bytes with few values (1)."""
    numbers = np.random.default_rng(seed).standard_normal(nbytes // itemsize, np.float32)
    if itemsize == 4:
        return bytearray(numbers.tobytes())
    if itemsize == 1:
        return bytearray((numbers * 8).astype(np.int8).tobytes())
    return bytearray((numbers.view(np.uint32) >> 16).astype("<u2").tobytes())


def sealed(nbytes, seed=0, itemsize=2):
    value = normal(nbytes, seed, itemsize)
    seal_value(memoryview(value), nbytes - 64, NAME, LAYOUT_ID)
    return value


def compressed(compressor, value):
    memory = memoryview(bytearray(len(value)))
    return bytearray(memory[: compressor.compress(memoryview(value), memory)])


def restored(compressor, stored, nbytes):
    value = bytearray(nbytes)
    return compressor.decompress(memoryview(stored), memoryview(value)), value


def with_digest(stored, data=None):
    """The same with a hash that fits, as of one who writes such values on purpose."""
    if data is not None:
        stored = stored[:24] + struct.pack("<Q", len(data)) + stored[32:64] + data
    [nbytes] = struct.unpack_from("<Q", stored, 24)
    digest = xxhash.xxh3_128_digest(bytes(stored[:32]) + bytes(stored[64 : 64 + nbytes]))
    return stored[:32] + digest + stored[48:]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_what_was_written_in_this_format_is_read_for_ever(compressor, case):
    assert COMPRESSED_FORMAT == 1, "another format needs a golden file of its own, beside this"
    stored = bytes.fromhex(case["stored_without_the_zeros_at_its_end"]).ljust(case["stored_bytes"], b"\0")
    verdict, value = restored(compressor, stored, case["value_bytes"])
    assert verdict is OK
    assert xxhash.xxh3_128_hexdigest(value) == case["value_xxh3_128"]


def test_the_header_is_as_written_down(compressor):
    stored = compressed(compressor, sealed(64 << 10))
    [data] = struct.unpack_from("<Q", stored, 24)
    head = b"kvtPACK\n" + struct.pack("<IBBHQQ", 1, 1, 2, 0, 64 << 10, data)
    digest = xxhash.xxh3_128_digest(head + bytes(stored[64 : 64 + data]))
    assert bytes(stored[:64]) == head + digest + bytes(16)
    assert not any(stored[64 + data :])
    assert len(stored) % 4096 == 0
    [length] = struct.unpack_from("<I", stored, 64)
    assert length == 32 << 10, "the lower bytes of bf16 are stored as they are"
    [frame] = struct.unpack_from("<I", stored, 68 + length)
    assert zstandard.frame_content_size(bytes(stored[72 + length : 72 + length + frame])) == 32 << 10
    assert is_compressed(memoryview(stored))
    assert compressed_length(memoryview(stored)) == 64 << 10


@pytest.mark.parametrize(("itemsize", "ratio"), [(1, 1.15), (2, 1.4), (4, 1.14)])
@pytest.mark.parametrize("nbytes", [32 << 10, BLOCK, BLOCK + 4096, 3 * BLOCK - 4096])
def test_a_value_comes_back_and_is_shorter(compressor, nbytes, itemsize, ratio):
    value = sealed(nbytes, itemsize=itemsize)
    stored = compressed(ValueCompressor(), value)
    assert stored[13] == itemsize, "the planes that make it shortest"
    assert nbytes / len(stored) > ratio * (0.9 if nbytes < BLOCK else 1)
    assert restored(compressor, stored, nbytes) == (OK, value)


def test_noise_and_what_is_no_values_length_are_not_compressed(compressor):
    assert not compressed(compressor, np.random.default_rng(1).bytes(BLOCK))
    assert not compressed(compressor, bytes(4096)), "a page cannot be a page shorter"
    assert not compressed(compressor, bytes(BLOCK - 2))


def test_zeros_become_a_page(compressor):
    assert len(compressed(compressor, bytes(8 * BLOCK))) == 4096


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 80), st.integers(0, 2**32), st.sampled_from([1, 2, 4]), st.floats(0, 1))
def test_any_value_comes_back(pages, seed, itemsize, zeros):
    value = normal(pages * 4096, seed, itemsize)
    end = int(len(value) * zeros)
    value[:end] = bytes(end)
    compressor = ValueCompressor()
    stored = compressed(compressor, value)
    if stored:
        assert restored(compressor, stored, len(value)) == (OK, value)


# -- what is not what was stored


def damaged(stored, random):
    """One corruption of a compressed value: bits, bytes, lengths, places."""
    changed = bytearray(stored)
    match random.randrange(7):
        case 0:
            changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        case 1:
            changed[random.randrange(64)] ^= 1 << random.randrange(8)
        case 2:
            at = random.randrange(len(changed))
            changed[at : at + 512] = random.randbytes(len(changed[at : at + 512]))
        case 3:
            del changed[random.randrange(len(changed)) :]
        case 4:
            changed[random.randrange(len(changed)) & ~4095 :] = bytes(4096)
        case 5:
            at, other = (random.randrange(64, len(changed) - 256) for _ in range(2))
            changed[at : at + 256], changed[other : other + 256] = stored[other : other + 256], stored[at : at + 256]
        case 6:
            changed = bytearray(random.randbytes(len(changed)))
    return changed


def is_refused(compressor, stored, value):
    """Whether these bytes are a miss: no compressed value, or one whose seal does not fit."""
    verdict, got = restored(compressor, stored, len(value))
    if verdict is not OK:
        return True
    if check_value(memoryview(got), len(value) - 64, NAME, LAYOUT_ID) is not OK:
        return True
    assert got == value, "wrong bytes"
    return False


def test_of_a_thousand_corruptions_none_brings_wrong_bytes_or_an_error(compressor):
    value, seeds = sealed(2 * BLOCK), random.Random(20)
    stored = compressed(compressor, value)
    refused = sum(is_refused(compressor, damaged(stored, seeds), value) for _ in range(1000))
    assert refused > 950, "what is left are changes of the zeros at the end"


def test_nor_do_corruptions_behind_a_hash_that_fits(compressor):
    """The decoder itself, of which the hash keeps accidents away."""
    value, seeds = sealed(2 * BLOCK), random.Random(21)
    stored = compressed(compressor, value)
    for _ in range(1000):
        changed = damaged(stored, seeds)
        if len(changed) < 64:
            continue
        changed[:24] = stored[:24]
        changed[24:32] = struct.pack("<Q", min(struct.unpack_from("<Q", stored, 24)[0], len(changed) - 64))
        is_refused(compressor, with_digest(changed), value)


def test_what_claims_another_length_is_not_read(compressor):
    stored = compressed(compressor, sealed(BLOCK))
    for length in (0, BLOCK - 4096, BLOCK + 4096, 1 << 40, 2**64 - 1):
        bomb = with_digest(stored[:16] + struct.pack("<Q", length) + stored[24:])
        assert restored(compressor, bomb, BLOCK)[0] is FOREIGN
    assert restored(compressor, stored, BLOCK + 4096)[0] is FOREIGN


def test_a_plane_that_claims_another_length_is_not_decoded(compressor):
    stored = compressed(compressor, sealed(BLOCK))
    low = struct.pack("<I", BLOCK // 2) + bytes(BLOCK // 2)
    for content in (bytes(BLOCK // 2 + 1), bytes(BLOCK // 2 - 1), bytes(1 << 26)):
        frame = zstandard.compress(content)
        assert (
            restored(compressor, with_digest(stored, low + struct.pack("<I", len(frame)) + frame), BLOCK)[0] is CORRUPT
        )
    stream = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 26))
    assert restored(compressor, with_digest(stored, low + struct.pack("<I", len(stream)) + stream), BLOCK)[0] is CORRUPT


def test_another_format_or_codec_is_foreign_and_other_planes_are_damage(compressor):
    stored = compressed(compressor, sealed(BLOCK))
    for at, new in ((0, b"K"), (8, b"\2"), (12, b"\2")):
        changed = with_digest(stored[:at] + new + stored[at + 1 :])
        assert restored(compressor, changed, BLOCK)[0] is FOREIGN
    for planes in (0, 3, 4, 255):
        assert restored(compressor, with_digest(stored[:13] + bytes([planes]) + stored[14:]), BLOCK)[0] is CORRUPT
    assert restored(compressor, b"", BLOCK)[0] is FOREIGN
    assert compressed_length(memoryview(b"")) is None


def test_a_missing_library_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"^'compression' needs the package zstandard.*pip install 'kvtiers\[comp"):
        ValueCompressor()
