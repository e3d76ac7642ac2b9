import json
import struct
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.layout.seal import SEAL_FORMAT, SealVerdict, check_value, read_seal, seal_value

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "seal-1.json").read_text(encoding="utf-8"))
NAME = "prod/model-0123456789abcdef01234567/00ff"
LAYOUT_ID = bytes(range(8))
PAYLOAD = 4000


def sealed(payload=PAYLOAD, length=4096, name=NAME, layout_id=LAYOUT_ID, fill=b"\xa5"):
    value = bytearray(fill * length)
    value[:payload] = bytes(i * 7 % 256 for i in range(payload))
    seal_value(memoryview(value), payload, name, layout_id)
    return value


def check(value, payload=PAYLOAD, name=NAME, layout_id=LAYOUT_ID):
    return check_value(memoryview(value), payload, name, layout_id)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_seals_of_this_format_never_change(case):
    assert SEAL_FORMAT == 1, "another format needs a golden file of its own, beside this"
    value = sealed(case["payload_bytes"], case["value_bytes"], case["name"], bytes.fromhex(case["layout_id"]))
    assert value[-64:].hex() == case["seal"]
    assert check(value, case["payload_bytes"], case["name"], bytes.fromhex(case["layout_id"])) is SealVerdict.OK


def test_a_seal_is_as_written_down():
    value = sealed()
    digest = xxhash.xxh3_128_digest(NAME.encode() + bytes(value[:PAYLOAD]))
    assert value[-64:] == (b"kvtSEAL\n" + struct.pack("<IIQQ", 1, 0, 4096, PAYLOAD) + LAYOUT_ID + digest + bytes(8))
    assert read_seal(memoryview(value)) == (PAYLOAD, LAYOUT_ID)


def test_sealing_twice_or_over_other_rubbish_writes_the_same_value():
    once = sealed()
    again = bytearray(once)
    seal_value(memoryview(again), PAYLOAD, NAME, LAYOUT_ID)
    assert once == again == sealed(fill=b"\x00") == sealed(fill=b"\xff")


def test_the_gap_behind_the_payload_is_zeros():
    assert sealed()[PAYLOAD:-64] == bytes(32)


def test_a_payload_may_fill_all_but_the_seal():
    value = sealed(payload=4032)
    assert check(value, payload=4032) is SealVerdict.OK


@settings(deadline=None, max_examples=300)
@given(st.integers(0, PAYLOAD - 1), st.integers(1, 255))
def test_any_changed_byte_of_the_payload_is_found(position, flip):
    value = sealed()
    value[position] ^= flip
    assert check(value) is SealVerdict.CORRUPT


@pytest.mark.parametrize("position", [*range(12), *range(16, 56)])
def test_any_changed_byte_of_the_seal_is_no_valid_value(position):
    value = sealed()
    value[4032 + position] ^= 1
    assert check(value) is not SealVerdict.OK


def test_a_value_under_another_name_is_corrupt():
    assert check(sealed(name="prod/other"), name=NAME) is SealVerdict.CORRUPT


def test_a_value_of_another_layout_is_foreign_not_damaged():
    assert check(sealed(layout_id=b"another!")) is SealVerdict.FOREIGN


def test_a_value_of_another_format_is_foreign_not_damaged():
    value = sealed()
    struct.pack_into("<I", value, 4032 + 8, 2)
    assert check(value) is SealVerdict.FOREIGN


@pytest.mark.parametrize("length", [8192, 12288])
def test_a_value_of_another_length_is_never_valid(length):
    value = bytearray(length)
    value[: length - 64] = bytes(length - 64)
    value[-64:] = sealed()[-64:]
    assert check(value) is SealVerdict.CORRUPT
    assert check(sealed(payload=PAYLOAD - 1)) is SealVerdict.CORRUPT


@pytest.mark.parametrize("value", [bytes(4096), b"\xff" * 4096, bytes(range(256)) * 16])
def test_a_value_without_a_seal_is_corrupt(value):
    assert check(bytearray(value)) is SealVerdict.CORRUPT
    assert read_seal(memoryview(value)) is None


def test_half_a_value_is_never_valid():
    whole, old = sealed(), sealed(fill=b"\x00")
    old[:PAYLOAD] = bytes(PAYLOAD)
    seal_value(memoryview(old), PAYLOAD, NAME, LAYOUT_ID)
    for cut in range(64, 4096, 64):
        assert check(whole[:cut] + old[cut:]) is not SealVerdict.OK


@pytest.mark.parametrize("value", [b"", b"kvtSEAL\n", bytes(63)])
def test_what_is_too_short_for_a_seal_has_none(value):
    assert read_seal(memoryview(value)) is None
