import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtiers.host import wire
from kvtiers.host.messages import JobDone, JobFailed, JobReleased, JobStarted, Limits, Opened, Probed, StoreJob
from kvtiers.host.wire import Frame, FrameReader, Kind, ProtocolError, frame
from kvtiers.layout.storage_name import StorageNames

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "host_protocol-6.json").read_text(encoding="utf-8"))

u64 = st.integers(0, 2**64 - 1)
rows = st.integers(-(2**31), 2**31 - 1)
texts = st.text(max_size=50)
keys = st.one_of(
    st.lists(st.binary(min_size=36, max_size=36), max_size=20),
    st.lists(st.binary(min_size=1, max_size=70), max_size=20),
)
jobs = st.builds(
    lambda job_id, kind, triples: StoreJob(
        job_id,
        kind == "load",
        [key for key, _, _ in triples],
        [row for _, row, _ in triples] if kind != "delete" else (),
        bytes(over for _, _, over in triples) if kind == "overwrites" else b"",
        kind == "delete",
    ),
    u64,
    st.sampled_from(["load", "store", "overwrites", "delete"]),
    st.one_of(
        st.lists(st.tuples(st.binary(min_size=36, max_size=36), rows, st.booleans()), max_size=20),
        st.lists(st.tuples(st.binary(min_size=1, max_size=70), rows, st.booleans()), max_size=20),
    ),
)
events = st.one_of(
    st.builds(Opened, texts, st.sampled_from(["", "0123456789abcdef"])),
    st.builds(JobStarted, u64),
    st.builds(JobReleased, u64),
    st.builds(JobFailed, u64, texts),
    st.builds(JobDone, u64, st.binary(max_size=100), u64, st.floats(0, 1e6), st.integers(0, 2**32 - 1), texts),
    st.builds(Probed, u64, st.binary(max_size=100), texts),
)
every = settings(deadline=None, max_examples=200)


def only_frame(message):
    reader = FrameReader()
    reader.feed(message)
    (read,) = reader.frames(10)
    return read


def hexed(values):
    return [value.hex() for value in values]


def unhexed(values):
    return [bytes.fromhex(value) for value in values]


def job_of(body):
    keys, overwrites = unhexed(body["keys"]), bytes(body["overwrites"])
    return StoreJob(body["job_id"], body["is_load"], keys, body["rows"], overwrites, body["is_delete"])


def fields_of_job(message):
    job = wire.decode_job(message.body)
    fields = {"job_id": job.job_id, "is_load": job.is_load, "overwrites": list(job.overwrites)}
    fields["is_delete"] = job.is_delete
    return fields | {"keys": hexed(job.keys), "rows": list(job.rows)}


def fields_of_probe(message):
    probe_id, asked, is_prefix = wire.decode_probe(message.body)
    return {"probe_id": probe_id, "keys": hexed(asked), "is_prefix": is_prefix}


def fields_of_names(message):
    names = wire.decode_names(message.body)
    return {"prefix": names.prefix, "layout_id": names.layout_id.hex()}


def fields_of_event(message):
    event = wire.decode_event(message)
    fields = {name: getattr(event, name) for name in event.__match_args__}
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()}


def encode_event(kind):
    return lambda tier, body: wire.encode_event(
        tier, kind(**{n: bytes.fromhex(v) if n in {"statuses", "answers"} else v for n, v in body.items()})
    )


ENCODERS = {
    "HELLO": lambda _, body: wire.encode_hello(body),
    "NAMES": lambda tier, body: wire.encode_names(tier, StorageNames(body["prefix"], bytes.fromhex(body["layout_id"]))),
    "JOB": lambda tier, body: wire.encode_job(tier, job_of(body)),
    "PROBE": lambda tier, body: wire.encode_probe(
        tier, body["probe_id"], unhexed(body["keys"]), is_prefix=body["is_prefix"]
    ),
    "RELEASE": lambda tier, body: wire.encode_release(tier, body["job_id"]),
    "RELEASED": encode_event(JobReleased),
    "ABANDON": lambda tier, body: wire.encode_abandon(tier, body["job_id"]),
    "LIMITS": lambda tier, body: wire.encode_limits(tier, Limits(**body)),
    "CLOSE": lambda tier, body: wire.encode_close(tier, body["seconds"]),
    "OPENED": encode_event(Opened),
    "STARTED": encode_event(JobStarted),
    "FAILED": encode_event(JobFailed),
    "DONE": encode_event(JobDone),
    "PROBED": encode_event(Probed),
    "STATS": lambda tier, body: wire.encode_stats(tier, body["figures"]),
    "LOG": lambda tier, body: wire.encode_log(tier, body["level"], body["text"]),
}
DECODERS = dict.fromkeys(("OPENED", "STARTED", "FAILED", "DONE", "PROBED", "RELEASED"), fields_of_event) | {
    "HELLO": lambda message: json.loads(bytes(message.body)),
    "NAMES": fields_of_names,
    "JOB": fields_of_job,
    "PROBE": fields_of_probe,
    "RELEASE": lambda message: {"job_id": wire.decode_id(message.body)},
    "ABANDON": lambda message: {"job_id": wire.decode_id(message.body)},
    "LIMITS": lambda message: wire.decode_limits(message.body)._asdict(),
    "CLOSE": lambda message: {"seconds": wire.decode_close(message.body)},
    "STATS": lambda message: {"figures": wire.decode_stats(message.body)},
    "LOG": lambda message: dict(zip(("level", "text"), wire.decode_log(message.body), strict=True)),
}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["title"])
def test_messages_of_this_format_never_change(case):
    assert wire.PROTOCOL_FORMAT == 6, "another format needs a golden file of its own, beside this"
    assert ENCODERS[case["kind"]](case["tier"], case["fields"]).hex() == case["message"]
    read = only_frame(bytes.fromhex(case["message"]))
    assert (Kind(read.kind).name, read.tier) == (case["kind"], case["tier"])
    assert DECODERS[case["kind"]](read) == case["fields"]


def test_there_is_a_golden_message_of_every_kind():
    assert {case["kind"] for case in GOLDEN} == {kind.name for kind in Kind}


@every
@given(jobs)
def test_a_job_comes_back_as_it_was_sent(job):
    assert wire.decode_job(only_frame(wire.encode_job(3, job)).body) == job


@every
@given(u64, keys, st.booleans())
def test_a_question_comes_back_as_it_was_sent(probe_id, key_list, is_prefix):
    message = only_frame(wire.encode_probe(0, probe_id, key_list, is_prefix=is_prefix))
    assert wire.decode_probe(message.body) == (probe_id, key_list, is_prefix)


@every
@given(events, st.integers(0, 2**16 - 1))
def test_an_event_comes_back_as_it_was_sent(event, tier):
    message = only_frame(wire.encode_event(tier, event))
    assert message.tier == tier
    assert wire.decode_event(message) == event


@settings(deadline=None, max_examples=50)
@given(st.lists(events, min_size=1, max_size=6), st.data())
def test_a_stream_may_be_cut_anywhere(sent, data):
    stream = b"".join(wire.encode_event(number, event) for number, event in enumerate(sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    reader, read = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        reader.feed(stream[start:end])
        read += reader.frames(1000)
    assert [(message.tier, wire.decode_event(message)) for message in read] == list(enumerate(sent))


def test_a_stream_may_come_byte_by_byte():
    sent = [JobDone(7, bytes([1, 0, 5]), 123, 0.5, 2, "why"), JobStarted(8), Probed(9, b"\x01", ""), Opened("")]
    reader, read = FrameReader(), []
    for byte in b"".join(wire.encode_event(0, event) for event in sent):
        reader.feed(bytes([byte]))
        read += reader.frames(1000)
    assert [wire.decode_event(message) for message in read] == sent


def test_no_more_frames_are_taken_than_asked_for_and_none_is_lost():
    reader = FrameReader()
    reader.feed(b"".join(wire.encode_event(0, JobStarted(number)) for number in range(10)))
    read = [[wire.decode_event(message).job_id for message in reader.frames(4)] for _ in range(4)]
    assert read == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], []]


@every
@given(st.sampled_from(list(Kind)), st.binary(max_size=80))
def test_garbage_is_a_protocol_error_and_nothing_else(kind, body):
    read = only_frame(frame(kind, 0, body))
    decoders = [wire.decode_job, wire.decode_probe, wire.decode_names, wire.decode_id, wire.decode_close]
    decoders += [wire.decode_stats, wire.decode_log]
    for decoder in (lambda _: wire.decode_event(read), *decoders):
        try:
            decoder(read.body)
        except ProtocolError as error:
            assert str(error)  # noqa: PT017 -- most garbage is an error, and some is not


@every
@given(jobs, st.data())
def test_a_job_that_was_cut_off_or_has_more_than_it_says_is_refused(job, data):
    body = bytes(only_frame(wire.encode_job(0, job)).body)
    end = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:end], body + b"\x00"):
        with pytest.raises(ProtocolError):
            wire.decode_job(memoryview(wrong))


@pytest.mark.parametrize("flags", [3, 5, 6, 7, 0x80])
def test_a_job_with_flags_that_are_not_known_is_refused(flags):
    body = bytearray(only_frame(wire.encode_job(0, StoreJob(1, True, [], []))).body)
    body[8] = flags
    with pytest.raises(ProtocolError, match=f"flags {flags}"):
        wire.decode_job(memoryview(bytes(body)))


def test_an_impossible_count_of_keys_is_refused_at_once():
    for length in (0, 1, 36, 2**16 - 1):
        body = bytes(9) + (2**32 - 1).to_bytes(4, "little") + length.to_bytes(2, "little") + bytes(100)
        with pytest.raises(ProtocolError, match="keys announced"):
            wire.decode_probe(memoryview(body))


@pytest.mark.parametrize("length", [0, 2, 2**20 + 1, 2**32 - 1])
def test_a_length_that_makes_no_sense_is_refused_before_its_bytes_come(length):
    reader = FrameReader(2**20)
    reader.feed(length.to_bytes(4, "little") + bytes(3))
    with pytest.raises(ProtocolError, match=f"a message of {length} bytes"):
        reader.frames(1)


@pytest.mark.parametrize("text", ["\udcff not in UTF-8", "Grüße \N{SNOWMAN}", "x" * 100_000])
def test_no_text_of_an_exception_can_stop_a_message(text):
    for event in (Opened(text), JobFailed(1, text), JobDone(1, b"\x03", 0, 0.0, 0, text), Probed(1, b"", text)):
        read = wire.decode_event(only_frame(wire.encode_event(0, event)))
        assert type(read) is type(event)
    assert wire.decode_log(only_frame(wire.encode_log(0, 30, text)).body)[0] == 30


@pytest.mark.parametrize("figures", ["[1]", "3", '{"a": "b"}', '{"a": [1]}', "{", "[" * 100_000, "\xff"])
def test_figures_that_are_none_are_a_protocol_error(figures):
    with pytest.raises(ProtocolError, match="figures"):
        wire.decode_stats(memoryview(figures.encode("latin-1")))


def test_a_message_of_the_engine_is_no_event():
    with pytest.raises(ProtocolError, match="no event"):
        wire.decode_event(Frame(Kind.JOB, 0, memoryview(b"")))
