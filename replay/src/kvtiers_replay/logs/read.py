"""A request log read as a workload: one line after the other, each prompt hashed at once and dropped.

Hashes are keyed with random bytes that are not kept either, so that nothing of a prompt can be found in what is left.
A line that cannot be used is counted by its kind of mistake, with the number of the first one, and the rest is read.
"""

import gzip
import hashlib
import json
import os
import secrets
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvtiers.api import ConfigError
from kvtiers_replay.logs.prompts import LineError, Prompt, prompts_of, request_of, time_of, usage_of
from kvtiers_replay.logs.vllm import HOW_TO_LOG, VllmLines
from kvtiers_replay.trace import GZIP_MAGIC, TRACE_TOKENS_PER_BLOCK, trace_request
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["LogKind", "ReadLog", "Reading", "read_log"]

LogKind: TypeAlias = Literal["log", "vllm", "openai"]

_REPORT_EVERY = 256  # lines
_TRUNCATED_SHARE = 0.05
_FEW = 5
_NO_JSON = "are no JSON"
_OTHER_KIND = "are of another kind than the first request (a log is of prompts, or a trace of block hashes)"
_TRACE_LINE = "are no line of a trace with block hashes, as the first request is"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a log is read. ``chars_per_token``: letters that a token of a text is taken to have."""

    kind: LogKind = "log"
    tokens_per_chunk: int = 64
    chars_per_token: float = 4.0
    limit: int | None = None


@dataclass(slots=True)
class ReadLog:
    """A log's workload, one block of it a chunk, and what was seen on the way.

    ``problems``: by kind of mistake, as ``(lines, first line)``. ``seconds``: from the first request to the last; None:
    the log has no times, or one time only. ``texts``: requests whose tokens were estimated from their letters.
    """

    workload: Workload
    lines: int = 0
    problems: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: int = 0
    seconds: float | None = None

    def problem_lines(self) -> list[str]:
        """Return one line for each kind of mistake: how many lines have it, and which is the first."""
        found = sorted(self.problems.items(), key=lambda item: item[1][1])
        return [
            f"{count:,} line{'s' * (count > 1)} {kind if count > 1 else _singular(kind)}; the first is line {first:,}"
            for kind, (count, first) in found
        ]


def _singular(kind: str) -> str:
    verb, _, rest = kind.partition(" ")
    return f"{ {'are': 'is', 'have': 'has', 'begin': 'begins'}.get(verb, verb) } {rest}"


def read_log(
    path: str | os.PathLike[str],
    reading: Reading,
    progress: Callable[[int, float], None] = lambda _requests, _share: None,
) -> ReadLog:
    """Read a log, plain or gzipped. ConfigError, one line, if it cannot be read or has no request that can be used.

    ``progress`` is called now and then with the requests and the share of the file read so far; its exceptions end it.
    """
    reader = _Reader(os.fspath(path), reading)
    try:
        with Path(path).open("rb") as raw:
            size = max(1, os.fstat(raw.fileno()).st_size)
            zipped = raw.peek(2)[:2] == GZIP_MAGIC
            lines: Iterable[bytes] = gzip.GzipFile(fileobj=raw) if zipped else raw
            for number, line in enumerate(lines, 1):
                reader.take(number, line)
                if not number % _REPORT_EVERY:
                    progress(len(reader.requests), min(1.0, raw.seek(0, os.SEEK_CUR) / size))
                if reading.limit and len(reader.requests) >= reading.limit:
                    break
    except (OSError, EOFError, zlib.error) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{os.fspath(path)}: cannot read the log: {reason}") from None
    return reader.result()


class _Hasher:
    """Chained hashes of a prompt's full chunks, under a key that ends with it. Equal hashes are one object."""

    def __init__(self, reading: Reading) -> None:
        self._key = secrets.token_bytes(32)
        self._tokens = reading.tokens_per_chunk
        self._letters = max(1, round(reading.tokens_per_chunk * reading.chars_per_token))
        self._seen: dict[bytes, bytes] = {}

    def __call__(self, prompt: Prompt) -> tuple[int, list[bytes]]:
        """Return a prompt's tokens, of a text about, and its hashes. LineError: it has ids that are none."""
        if isinstance(prompt, str):
            full, rest = divmod(len(prompt), self._letters)
            starts = range(0, full * self._letters, self._letters)
            parts = (prompt[at : at + self._letters].encode("utf-8", "surrogatepass") for at in starts)
            # Of a chunk that is not full less than a chunk's tokens, however they are rounded: it has no hash.
            return full * self._tokens + rest * self._tokens // self._letters, self._chain(parts)
        try:
            ids = array("I", prompt)
        except (OverflowError, TypeError):
            raise LineError("have token ids that are no numbers from 0 to 4,294,967,295") from None
        step = self._tokens
        full = len(ids) // step * step
        return len(ids), self._chain(ids[at : at + step].tobytes() for at in range(0, full, step))

    def _chain(self, parts: Iterator[bytes]) -> list[bytes]:
        found, before = [], b""
        for part in parts:
            hashed = hashlib.blake2b(before + part, key=self._key, digest_size=32).digest()
            before = self._seen.setdefault(hashed, hashed)
            found.append(before)
        return found


class _Reader:
    """What a log has had so far."""

    def __init__(self, where: str, reading: Reading) -> None:
        self.requests: list[ReplayRequest] = []
        self._where = where
        self._reading = reading
        self._hash = _Hasher(reading)
        self._vllm = VllmLines()
        self._trace_tokens: int | None = None  # of a block, where the log is a trace
        self._problems: dict[str, tuple[int, int]] = {}
        self._times: list[float | None] = []
        self._lines = self._texts = self._letters = self._tokens_of_letters = 0

    def take(self, number: int, raw: bytes) -> None:
        """Read one line."""
        self._lines = number
        if not raw.strip():
            return
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError:
            self._problem("are no UTF-8", number)
            return
        try:
            if self._reading.kind == "vllm":
                if (found := self._vllm.read(line)) is not None:
                    self._add(number, [found[0]], found[1], 0, 0)
            else:
                self._object(number, self._json(raw, line))
        except LineError as error:
            self._problem(str(error), number)

    def _json(self, raw: bytes, line: str) -> dict[str, Any]:
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            cut = not raw.endswith(b"\n") and line.lstrip()[:1] == "{"
            raise LineError("are cut off at the end of the log" if cut else _NO_JSON) from None
        if not isinstance(fields, dict):
            raise LineError("are JSON and no object")
        return fields

    def _object(self, number: int, fields: dict[str, Any]) -> None:
        is_trace = self._reading.kind == "log" and "hash_ids" in fields
        if self.requests and is_trace != (self._trace_tokens is not None):
            raise LineError(_OTHER_KIND)
        if is_trace:
            self._trace_line(fields)
            return
        request = request_of(fields)
        prompts = prompts_of(request)
        usage = usage_of(fields)
        try:
            moment = time_of(fields)
        except LineError as error:
            self._problem(str(error), number)
            moment = None
        self._add(number, prompts, moment, usage.prompt if len(prompts) == 1 else 0, usage.output)

    def _trace_line(self, fields: dict[str, Any]) -> None:
        tokens = fields.get("tokens_per_block", TRACE_TOKENS_PER_BLOCK)
        if type(tokens) is not int or tokens < 1 or tokens != (self._trace_tokens or tokens):
            raise LineError(f"have other 'tokens_per_block' than the first request, {self._trace_tokens or 'a number'}")
        try:
            request = trace_request(fields, tokens)
        except ValueError:
            raise LineError(_TRACE_LINE) from None
        self._trace_tokens = tokens
        self.requests.append(request)
        self._times.append(request.arrival if "timestamp" in fields else None)

    def _add(self, number: int, prompts: list[Prompt], moment: float | None, tokens: int, output: int) -> None:
        """Add a line's requests. ``tokens``: what its answer says that the prompt had; 0: it does not say."""
        hashed = [self._hash(prompt) for prompt in prompts]
        for prompt, (count, hashes) in zip(prompts, hashed, strict=True):
            if not prompt:
                self._problem("have an empty prompt", number)
                continue
            if isinstance(prompt, str):
                self._texts += 1
                if tokens:
                    self._letters += len(prompt)
                    self._tokens_of_letters += tokens
            self.requests.append(ReplayRequest(count, hashes, 0.0, {}, output))
            self._times.append(moment)

    def _problem(self, kind: str, number: int) -> None:
        count, first = self._problems.get(kind, (0, number))
        self._problems[kind] = count + 1, first

    def result(self) -> ReadLog:
        """Return all of it, the requests in the order of their arrival. ConfigError: there is none to use."""
        tokens = self._trace_tokens or self._reading.tokens_per_chunk
        workload = Workload(Path(self._where).name, tokens, self._arrivals())
        times = [time for time in self._times if time is not None]
        seconds = max(times) - min(times) if times and max(times) > min(times) else None
        found = ReadLog(workload, self._lines, self._problems, self._notes(tokens), self._texts, seconds)
        if not any(request.block_hashes for request in self.requests):
            short = f"none of its {len(self.requests):,} requests has {tokens} tokens"
            if len(self.requests) == 1:
                short = f"its one request has fewer than {tokens} tokens"
            why = [short] if self.requests else found.problem_lines() or [self._no_request()]
            raise ConfigError(f"{self._where}: no request that can be used: {'; '.join(why)}{self._hint()}")
        return found

    def _no_request(self) -> str:
        return f"it has no request{f' ({HOW_TO_LOG})' if self._reading.kind == 'vllm' else ''}"

    def _hint(self) -> str:
        no_objects = self._reading.kind != "vllm" and not self.requests and _NO_JSON in self._problems
        return ". The log of a vLLM server is read with --vllm-log" if no_objects else ""

    def _arrivals(self) -> list[ReplayRequest]:
        """Return the requests with their times from 0 on; one a second where the log has none."""
        first = min((time for time in self._times if time is not None), default=None)
        timed, now = [], 0.0
        for number, (request, time) in enumerate(zip(self.requests, self._times, strict=True)):
            now = (now if time is None else time - first) if first is not None else float(number)
            parts = (request.num_tokens, request.block_hashes, now, request.params, request.output_tokens)
            timed.append(ReplayRequest(*parts))
        return sorted(timed, key=lambda request: request.arrival)

    def _notes(self, tokens_per_chunk: int) -> list[str]:
        notes = []
        if self._texts:
            are = "prompts are texts" if self._texts > 1 else "prompt is a text"
            notes.append(
                f"{self._texts:,} {are}, taken as {self._reading.chars_per_token:g} letters a token (--chars-per-token)"
            )
        if self._tokens_of_letters:
            measured = self._letters / self._tokens_of_letters
            if abs(measured - self._reading.chars_per_token) > 0.1 * self._reading.chars_per_token:
                notes.append(
                    f"the log's own counts say {measured:.2g} letters a token: --chars-per-token {measured:.2g}"
                )
        if self._trace_tokens is None:
            lengths = Counter(request.num_tokens for request in self.requests)
            longest = max(lengths, default=0)
            alike = lengths[longest]
            if alike >= _FEW and alike > _TRUNCATED_SHARE * len(self.requests) and len(lengths) > 1:
                notes.append(
                    f"{alike:,} prompts have {longest:,} tokens, and none has more: was the log cut off there?"
                )
        short = sum(not request.block_hashes for request in self.requests)
        if short:
            are, is_stored = ("prompts are", "none is stored") if short > 1 else ("prompt is", "it is not stored")
            notes.append(f"{short:,} {are} shorter than one chunk of {tokens_per_chunk} tokens: {is_stored}")
        return notes
