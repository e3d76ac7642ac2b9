import json
import tracemalloc
from collections import deque
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.host import messages, wire
from kvtiers.host.messages import (
    Abandon,
    Close,
    Hello,
    JobDone,
    JobFailed,
    JobReleased,
    JobStarted,
    Limits,
    LogLine,
    Names,
    Opened,
    Probe,
    Probed,
    Release,
    Stats,
    StoreJob,
)
from kvtiers.host.wire import FrameReader, ProtocolError, decode_report, decode_request

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "host_protocol-10.json").read_text(encoding="utf-8"))

u64 = st.integers(0, 2**64 - 1)
rows = st.integers(-(2**31), 2**31 - 1)
texts = st.text(max_size=50)
keys = st.lists(st.binary(min_size=1, max_size=70), max_size=20)
jobs = st.builds(
    lambda job_id, kind, triples: StoreJob(
        job_id,
        kind in {"load", "keeps"},
        [key for key, _, _ in triples],
        [row for _, row, _ in triples] if kind != "delete" else [],
        bytes(over for _, _, over in triples) if kind == "overwrites" else b"",
        kind == "delete",
        [[(row % 7, 1 + row % 5)] * (row % 3) for _, row, _ in triples] if kind == "parts" else [],
        kind == "keeps",
    ),
    u64,
    st.sampled_from(["load", "store", "overwrites", "delete", "parts", "keeps"]),
    st.lists(st.tuples(st.binary(min_size=1, max_size=70), rows, st.booleans()), max_size=20),
)
requests = st.one_of(
    jobs,
    st.builds(Hello, texts),
    st.builds(Names, texts, st.binary(min_size=8, max_size=8)),
    st.builds(Probe, u64, keys, st.booleans()),
    st.builds(Abandon, u64),
    st.builds(Release, u64),
    st.builds(Close, st.floats(0, 1e6)),
    st.builds(Limits, st.integers(1, 99), st.none() | st.integers(1, 9), st.none() | u64, st.none() | st.floats(0, 9)),
)
reports = st.one_of(
    st.builds(Opened, texts, st.sampled_from(["", "0123456789abcdef"])),
    st.builds(JobStarted, u64),
    st.builds(JobReleased, u64, st.binary(max_size=100)),
    st.builds(JobFailed, u64, texts),
    st.builds(JobDone, u64, st.binary(max_size=100), u64, st.floats(0, 1e6), st.integers(0, 2**32 - 1), texts),
    st.builds(Probed, u64, st.binary(max_size=100), texts),
    st.builds(Stats, st.dictionaries(texts, st.floats(allow_nan=False), max_size=5)),
    st.builds(LogLine, st.integers(0, 255), texts),
)
every = settings(deadline=None, max_examples=200)


def message_of(case):
    """Return the message of a golden case, in which bytes are Base64."""
    return msgspec.convert(case["message"], messages.Request | messages.Report)


def body_of(message):
    """Return the message of its only frame."""
    reader = FrameReader()
    reader.feed(message)
    (read,) = reader.messages(10)
    return bytes(read)


def decode(message):
    return (decode_report if message[1] >= 64 else decode_request)(message)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_messages_of_this_format_never_change(case):
    assert wire.PROTOCOL_FORMAT == 10, "another format needs a golden file of its own, in place of this"
    message = message_of(case)
    assert wire.encode(message).hex() == case["frame"]
    reader = FrameReader()
    reader.feed(bytes.fromhex(case["frame"]))
    (read,) = reader.messages(10)
    assert decode(read) == message


def test_there_is_a_golden_message_of_every_type():
    assert {type(message_of(case)) for case in GOLDEN} == set(messages.Message.__subclasses__())


@every
@given(st.one_of(requests, reports))
def test_a_message_comes_back_as_it_was_sent(message):
    reader = FrameReader()
    reader.feed(wire.encode(message))
    (read,) = reader.messages(10)
    assert decode(read) == message


@settings(deadline=None, max_examples=50)
@given(st.lists(reports, min_size=1, max_size=6), st.data())
def test_a_stream_may_be_cut_anywhere(sent, data):
    stream = b"".join(map(wire.encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, read = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(stream[start:end])
        read += reader.messages(1000)
    assert list(map(decode_report, read)) == sent


def test_a_stream_may_come_byte_by_byte():
    sent = [JobDone(7, bytes([1, 0, 5]), 123, 0.5, 2, "why"), JobStarted(8), Probed(9, b"\x01", ""), Opened("")]
    reader, read = FrameReader(), []
    for byte in b"".join(wire.encode(event) for event in sent):
        reader.feed(bytes([byte]))
        read += reader.messages(1000)
    assert list(map(decode_report, read)) == sent


def test_no_more_messages_are_taken_than_asked_for_and_none_is_lost():
    reader = FrameReader()
    reader.feed(b"".join(wire.encode(JobStarted(number)) for number in range(10)))
    read = [[decode_report(message).job_id for message in reader.messages(4)] for _ in range(4)]
    assert read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]


@every
@given(
    st.one_of(
        st.binary(max_size=80), st.builds(lambda tag, rest: bytes([0x96, tag]) + rest, st.integers(0, 127), st.binary())
    )
)
def test_garbage_is_a_protocol_error_and_nothing_else(message):
    for read in (decode_report, decode_request):
        try:
            read(message)
        except ProtocolError as error:
            assert str(error)  # noqa: PT017 -- most garbage is an error, and some is not


@every
@given(st.one_of(requests, reports), st.data())
def test_a_message_of_which_a_byte_is_damaged_is_another_message_or_a_protocol_error(message, data):
    body = bytearray(body_of(wire.encode(message)))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    for read in (decode_report, decode_request):
        try:
            read(body)
        except ProtocolError as error:
            assert str(error)  # noqa: PT017 -- most damage is an error, and some is not


@every
@given(st.one_of(requests, reports), st.data())
def test_a_message_that_was_cut_off_or_has_more_than_it_says_is_refused(message, data):
    body = body_of(wire.encode(message))
    end = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:end], body + b"\x00"):
        with pytest.raises(ProtocolError):
            decode(wrong) if len(wrong) > 1 else decode_report(wrong)


def array(*fields):
    """Return a message of these fields, whatever its type would have."""
    return msgspec.msgpack.encode(fields)


IMPOSSIBLE = {
    "a load without rows": array(3, 1, True, [b"k"], []),
    "more rows than keys": array(3, 1, True, [b"k"], [1, 2]),
    "a removal with rows": array(3, 1, False, [b"k"], [1], b"", True),
    "a load that removes": array(3, 1, True, [b"k"], [], b"", True),
    "a load that overwrites": array(3, 1, True, [b"k"], [1], b"\x01"),
    "marks for some of the keys": array(3, 1, False, [b"k", b"l"], [1, 2], b"\x01"),
    "a row of 33 bits": array(3, 1, True, [b"k"], [2**31]),
    "a negative id": array(3, -1, True, [b"k"], [0]),
    "a text for a key": array(3, 1, True, ["k"], [0]),
    "no threads": array(8, 0),
    "a layout id of 7 bytes": array(2, "p/", bytes(7)),
    "a level that is none": array(70, 256, "text"),
    "bytes that are negative": array(67, 1, b"\x01", -1, 0.5),
    "a field too many": array(65, 1, 2),
    "a tag that is none": array(99, 1),
    "figures that are a list": array(69, [1.0]),
    "a figure that is a text": array(69, {"a": "b"}),
    "a text that is not UTF-8": b"\x93\x46\x1e\xa1\xff",
    "arrays in arrays": b"\x92\x45" + b"\x91" * 100_000,
    "no array": array(1)[1:],
    "nothing": b"",
}


@pytest.mark.parametrize("message", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_what_contradicts_its_type_or_itself_is_refused(message):
    for read in (decode_report, decode_request):
        with pytest.raises(ProtocolError):
            read(message)


@pytest.mark.parametrize(
    "message",
    [
        b"\x94\x03\x01\xc3\xdd" + b"\xff" * 4 + bytes(100),  # keys
        b"\x93\x43\x01\xc6" + b"\xff" * 4 + bytes(100),  # statuses
        b"\x92\x45\xdf" + b"\xff" * 4 + bytes(100),  # figures
        b"\xdd" + b"\xff" * 4 + bytes(100),  # fields
    ],
)
def test_a_length_that_cannot_be_is_refused_and_no_memory_taken_for_it(message):
    tracemalloc.start()
    for read in (decode_report, decode_request):
        with pytest.raises(ProtocolError):
            read(message)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


@pytest.mark.parametrize("length", [0, 2**20 + 1, 2**32 - 1])
def test_a_length_that_makes_no_sense_is_refused_before_its_bytes_come(length):
    reader = FrameReader(2**20)
    reader.feed(length.to_bytes(4, "little") + bytes(2))
    with pytest.raises(ProtocolError, match=f"a message of {length} bytes"):
        reader.messages(1)


@pytest.mark.parametrize("text", ["\udcff not in UTF-8", "Grüße \N{SNOWMAN}", "x" * 100_000])
def test_no_text_of_an_exception_can_stop_a_message(text):
    events = [Opened(text), JobFailed(1, text), JobDone(1, b"\x03", 0, 0.0, 0, text), Probed(1, b"", text)]
    for report in (*events, LogLine(30, text), Stats({text: 1.0})):
        read = decode_report(body_of(wire.encode(report)))
        assert type(read) is type(report)


def test_keys_and_figures_of_a_type_of_their_own_are_sent_as_what_they_are():
    class Key(bytes):
        pass

    class Figure(float):
        pass

    probe = decode_request(body_of(wire.encode(Probe(1, deque([Key(b"k")]), is_prefix=True))))
    assert probe == Probe(1, [b"k"], is_prefix=True)
    assert decode_report(body_of(wire.encode(Stats({"a": Figure(2)})))) == Stats({"a": 2.0})


def test_a_message_of_the_engine_is_no_report_and_the_other_way_round():
    with pytest.raises(ProtocolError):
        decode_report(body_of(wire.encode(Abandon(1))))
    with pytest.raises(ProtocolError):
        decode_request(body_of(wire.encode(JobStarted(1))))
