"""The messages between engines and keepers: their bytes, by the format's number."""

import json
from pathlib import Path

import msgspec
import pytest

from kvtiers.pool import messages
from kvtiers.pool.memory import Index, Plane, Shape

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "pool-3.json").read_text(encoding="utf-8"))


def of_case(case):
    """Return the message of a golden case, in which bytes are Base64."""
    return msgspec.convert(case["message"], messages.Request | messages.Report)


@pytest.mark.parametrize("case", GOLDEN["messages"], ids=lambda case: case["message"][0])
def test_messages_of_this_format_never_change(case):
    assert messages.POOL_FORMAT == 3, "another format needs a golden file of its own, in place of this"
    message = of_case(case)
    assert messages.encode(message).hex() == case["bytes"]
    is_report = isinstance(message, messages.Report)
    decode = messages.decode_report if is_report else messages.decode_request
    assert decode(bytes.fromhex(case["bytes"])) == message


def test_there_is_a_golden_message_of_every_type():
    every = set((messages.Request | messages.Report).__args__)
    assert {type(of_case(case)) for case in GOLDEN["messages"]} == every


def test_the_index_and_the_plane_of_this_format_never_change():
    shape = Shape(4 * 4096, 4096, 2)
    index, plane = Index.create(shape), Plane.create(shape)
    index.rename(1, "default/m-0123/")
    plane.renew([1, 2])
    plane.use([0, 1])
    plane.use([3])
    plane.pin([(2, 1)])
    index.write(2, 1, bytes(range(36)), bytes(range(16)))
    entries = 1 << 14
    assert bytes(index._view[:2100]).rstrip(b"\0").hex() == GOLDEN["head"]
    assert bytes(index._view[entries + 2 * 128 : entries + 3 * 128]).hex() == GOLDEN["entry"]
    assert len(index._view) == entries + 4 * 128
    assert bytes(plane._view).hex() == GOLDEN["plane"]
    index.close()
    plane.close()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\xa5hello", b"\x91\xa5other", b"\x92\xa5watch\xa1x"])
def test_what_is_no_message_is_an_error(data):
    for decode in (messages.decode_request, messages.decode_report):
        with pytest.raises(ValueError, match=r"."):
            decode(data)
