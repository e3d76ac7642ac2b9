"""A request log read as a workload: one line after the other, each prompt hashed at once and dropped.

Hashes are keyed with random bytes that are not kept either, so that nothing of a prompt can be found in what is left.
A line that cannot be used is counted by its kind of mistake, with the number of the first one, and the rest is read.
"""

import gzip
import hashlib
import json
import os
import re
import secrets
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kvtiers.api import ConfigError
from kvtiers_replay.logs.prompts import (
    LineError,
    Mixed,
    Prompt,
    Scope,
    prompts_of,
    request_of,
    scope_of,
    time_of,
    usage_of,
)
from kvtiers_replay.logs.vllm import HOW_TO_LOG, VllmAdapter, VllmLines
from kvtiers_replay.trace import GZIP_MAGIC, BlockSizeError, tokens_of_block, trace_request
from kvtiers_replay.workload import ReplayRequest, Workload

__all__ = ["LogKind", "ReadLog", "Reading", "read_log"]

LogKind: TypeAlias = Literal["log", "vllm", "openai"]

_REPORT_EVERY = 256  # lines
_TRUNCATED_SHARE = 0.05
_FEW = 5
_NO_JSON = "are no JSON"
_MEDIA_TOKENS = 1024  # of an image: between 256 (Gemma 3) and 1,600 (Llama 3.2) for one of a megapixel
_NAMED = 3  # models, in a line about them
_PARAMETERS = re.compile(r"(?<![a-z0-9.])(\d+(?:\.\d+)?)b(?![a-z0-9])", re.IGNORECASE)
_OTHER_KIND = "are of another kind than the first request (a log is of prompts, or a trace of block hashes)"
_TRACE_LINE = "are no line of a trace with block hashes, as the first request is"


@dataclass(frozen=True, slots=True)
class Reading:
    """How a log is read. ``chars_per_token``: letters that a token of a text is taken to have.

    ``tokens_per_block``: of a trace's blocks; None: what its lines say, or else 512. ``media_tokens``: of an image or
    another part of a message that is no text; None: what the request's ``usage`` leaves for it, or else 1,024.
    ``only_model``: requests of others are left out.
    """

    kind: LogKind = "log"
    tokens_per_chunk: int = 64
    chars_per_token: float = 4.0
    limit: int | None = None
    tokens_per_block: int | None = None
    media_tokens: int | None = None
    only_model: str | None = None


@dataclass(slots=True)
class ReadLog:
    """A log's workload, one block of it a chunk, and what was seen on the way.

    ``problems``: by kind of mistake, as ``(lines, first line)``. ``seconds``: from the first request to the last; None:
    the log has no times, or one time only. ``texts``: requests whose tokens were estimated from their letters.
    ``models``: requests by the name of their model or adapter, "" where lines do not say; none of a trace.
    """

    workload: Workload
    lines: int = 0
    problems: dict[str, tuple[int, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: int = 0
    seconds: float | None = None
    models: Counter[str] = field(default_factory=Counter)

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
    """Chained hashes of a prompt's full chunks, under a key that ends with it. Equal hashes are one object.

    The chain begins with the prompt's scope, as those of engines do: equal hashes are of one model, salt and tenant.
    """

    def __init__(self, reading: Reading) -> None:
        self._key = secrets.token_bytes(32)
        self._tokens = reading.tokens_per_chunk
        self._letters = max(1, round(reading.tokens_per_chunk * reading.chars_per_token))
        self._seen: dict[bytes, bytes] = {}

    def __call__(self, prompt: str | list[int], scope: Scope) -> tuple[int, list[bytes]]:
        """Return a prompt's tokens, of a text about, and its hashes. LineError: it has ids that are none."""
        start = self._digest(json.dumps(scope).encode()) if any(scope) else b""
        if isinstance(prompt, str):
            full, rest = divmod(len(prompt), self._letters)
            starts = range(0, full * self._letters, self._letters)
            parts = (prompt[at : at + self._letters].encode("utf-8", "surrogatepass") for at in starts)
            # Of a chunk that is not full less than a chunk's tokens, however they are rounded: it has no hash.
            return full * self._tokens + rest * self._tokens // self._letters, self._chain(start, parts)
        try:
            ids = array("I", prompt)
        except (OverflowError, TypeError):
            raise LineError("have token ids that are no numbers from 0 to 4,294,967,295") from None
        step = self._tokens
        full = len(ids) // step * step
        return len(ids), self._chain(start, (ids[at : at + step].tobytes() for at in range(0, full, step)))

    def apart(self, hashes: Sequence[bytes], adapter: str) -> list[bytes]:
        """Return the hashes that the same prompt has with an adapter, which a later line has named."""
        return [self._kept(self._digest(adapter.encode("utf-8", "surrogatepass") + each)) for each in hashes]

    def _chain(self, before: bytes, parts: Iterator[bytes]) -> list[bytes]:
        found = []
        for part in parts:
            before = self._kept(self._digest(before + part))
            found.append(before)
        return found

    def _digest(self, content: bytes) -> bytes:
        return hashlib.blake2b(content, key=self._key, digest_size=32).digest()

    def _kept(self, hashed: bytes) -> bytes:
        return self._seen.setdefault(hashed, hashed)


class _Media:
    """Parts of messages that are no text, in the place of which stands a text of as many letters as their tokens have.

    A part keeps the length that it had first: conversations that go on after it must not differ because of that.
    """

    def __init__(self, reading: Reading) -> None:
        self.parts = 0
        self._reading = reading
        self._tokens: dict[bytes, int] = {}

    def text(self, prompt: Mixed, tokens: int) -> str:
        """Return a prompt as a text. ``tokens``: of all of it, as its answer says; 0: it does not."""
        reading = self._reading
        digests = [part for part in prompt.parts if isinstance(part, bytes)]
        self.parts += len(digests)
        each = reading.media_tokens or _MEDIA_TOKENS
        new = [digest for digest in digests if digest not in self._tokens]
        if new and tokens and reading.media_tokens is None:
            letters = sum(len(part) for part in prompt.parts if isinstance(part, str))
            known = sum(self._tokens.get(digest, 0) for digest in digests)
            each = max(1, round((tokens - known - letters / reading.chars_per_token) / len(new)))
        self._tokens.update(dict.fromkeys(new, each))
        return "".join(part if isinstance(part, str) else self._stand_in(part) for part in prompt.parts)

    def _stand_in(self, digest: bytes) -> str:
        letters = round(self._tokens[digest] * self._reading.chars_per_token)
        return (digest.hex() * (letters // (2 * len(digest)) + 1))[:letters]


class _Reader:
    """What a log has had so far."""

    def __init__(self, where: str, reading: Reading) -> None:
        self.requests: list[ReplayRequest] = []
        self._where = where
        self._reading = reading
        self._hash = _Hasher(reading)
        self._media = _Media(reading)
        self._models: Counter[str] = Counter()
        self._salts: set[bytes] = set()
        self._tenants: set[str] = set()
        self._others = 0  # requests of other models than the one that is wanted
        self._awaited: dict[str, int] = {}  # requests of vLLM whose adapter a later line names
        self._vllm = VllmLines()
        self._trace_tokens: int | None = None  # of a block, where the log is a trace
        self._trace_error = ""  # of the first line that is none of the trace
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
                self._of_vllm(number, line)
            else:
                self._object(number, self._json(raw, line))
        except LineError as error:
            self._problem(str(error), number)

    def _of_vllm(self, number: int, line: str) -> None:
        found = self._vllm.read(line)
        if isinstance(found, VllmAdapter):
            self._adapt(self._awaited.pop(found.request_id, None), found.adapter)
        elif found is not None:
            before = len(self.requests)
            self._add(number, [found.prompt], found.moment, 0, 0)
            if len(self.requests) == before:  # an empty prompt
                return
            if found.adapter is None:
                self._awaited[found.request_id] = before
            else:
                self._adapt(before, found.adapter)

    def _adapt(self, at: int | None, adapter: str) -> None:
        """Move a request of vLLM to its adapter's scope."""
        if at is None or not adapter:
            return
        request = self.requests[at]
        self.requests[at] = replace(request, block_hashes=self._hash.apart(request.block_hashes, adapter))
        self._models[""] -= 1
        self._models[adapter] += 1

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
            self._trace_line(number, fields)
            return
        request = request_of(fields)
        prompts = prompts_of(request)
        usage = usage_of(fields)
        try:
            moment = time_of(fields)
        except LineError as error:
            self._problem(str(error), number)
            moment = None
        scope = scope_of(fields, request)
        if self._reading.only_model not in (None, scope.model):
            self._others += 1
            return
        self._add(number, prompts, moment, usage.prompt if len(prompts) == 1 else 0, usage.output, scope)

    def _trace_line(self, number: int, fields: dict[str, Any]) -> None:
        try:
            tokens = tokens_of_block(fields, self._reading.tokens_per_block, self._trace_tokens)
            request = trace_request(fields, tokens)
        except BlockSizeError as error:
            # Not counted as a bad line: the others are then read wrongly, too, and every figure would be false.
            raise ConfigError(f"{self._where}:{number}: {error}") from None
        except ValueError as error:
            self._trace_error = self._trace_error or str(error)  # one text, so that these lines are one kind
            raise LineError(f"{_TRACE_LINE} ({self._trace_error})") from None
        self._trace_tokens = tokens
        self.requests.append(request)
        self._times.append(request.arrival if "timestamp" in fields else None)

    def _add(
        self,
        number: int,
        prompts: list[Prompt],
        moment: float | None,
        tokens: int,
        output: int,
        scope: Scope = Scope(),  # noqa: B008 -- it cannot change
    ) -> None:
        """Add a line's requests. ``tokens``: what its answer says that the prompt had; 0: it does not say."""
        plain = [self._media.text(each, tokens) if isinstance(each, Mixed) else each for each in prompts]
        hashed = [self._hash(prompt, scope) for prompt in plain]
        for prompt, given, (count, hashes) in zip(plain, prompts, hashed, strict=True):
            if not prompt:
                self._problem("have an empty prompt", number)
                continue
            if isinstance(prompt, str):
                self._texts += 1
                if tokens and prompt is given:
                    self._letters += len(prompt)
                    self._tokens_of_letters += tokens
            self._models[scope.model] += 1
            self._salts.add(hashlib.blake2b(scope.salt.encode("utf-8", "surrogatepass"), digest_size=16).digest())
            self._tenants.add(scope.tenant)
            self.requests.append(ReplayRequest(count, hashes, 0.0, {}, output))
            self._times.append(moment)

    def _problem(self, kind: str, number: int) -> None:
        count, first = self._problems.get(kind, (0, number))
        self._problems[kind] = count + 1, first

    def result(self) -> ReadLog:
        """Return all of it, the requests in the order of their arrival. ConfigError: there is none to use."""
        self._refuse_several_bases()
        if self._trace_tokens is not None and self._reading.only_model is not None:
            raise ConfigError(f"{self._where}: a trace names no models, so --only-model cannot choose one")
        tokens = self._trace_tokens or self._reading.tokens_per_chunk
        workload = Workload(Path(self._where).name, tokens, self._arrivals())
        times = [time for time in self._times if time is not None]
        seconds = max(times) - min(times) if times and max(times) > min(times) else None
        notes = [*self._notes_of_scopes(), *self._notes(tokens)]
        models = +self._models  # vLLM's adapters may have left nothing without one
        found = ReadLog(workload, self._lines, self._problems, notes, self._texts, seconds, models)
        if not any(request.block_hashes for request in self.requests):
            short = f"none of its {len(self.requests):,} requests has {tokens} tokens"
            if len(self.requests) == 1:
                short = f"its one request has fewer than {tokens} tokens"
            why = [short] if self.requests else found.problem_lines() or [self._no_request()]
            raise ConfigError(f"{self._where}: no request that can be used: {'; '.join(why)}{self._hint()}")
        return found

    def _refuse_several_bases(self) -> None:
        """Raise ConfigError if models of several sizes are in the log: adapters of one model have one size."""
        bases = {size: name for name in self._models for size in _PARAMETERS.findall(name)[:1]}
        if len(bases) > 1:
            raise ConfigError(
                f"{self._where}: its models are of several sizes ({', '.join(sorted(bases.values())[:_NAMED])}), whose "
                "KV and speed differ: evaluate one after the other with --only-model NAME"
            )

    def _notes_of_scopes(self) -> list[str]:
        notes = []
        if len(models := +self._models) > 1:
            named = [repr(name) if name else "none named" for name, _ in models.most_common(_NAMED)]
            more = ", ..." if len(models) > _NAMED else ""
            notes.append(
                f"{len(models):,} models or adapters ({', '.join(named)}{more}): no KV of one is a hit of another. "
                "They are taken as adapters of one model; evaluate different models one by one with --only-model NAME"
            )
        if len(self._salts) > 1:
            notes.append(f"{len(self._salts):,} cache salts: no KV of one is a hit of another")
        if len(self._tenants) > 1:
            notes.append(f"{len(self._tenants):,} tenants: no KV of one is a hit of another")
        if self._others:
            notes.append(f"{self._others:,} requests of other models than {self._reading.only_model!r} are left out")
        if self._media.parts:
            tokens = self._reading.media_tokens
            counted = f"{tokens or _MEDIA_TOKENS:,} tokens each"
            if tokens is None:
                counted = f"what 'usage' leaves for them, or {counted}"
            notes.append(f"{self._media.parts:,} parts of messages are no text, taken as {counted} (--media-tokens)")
        return notes

    def _no_request(self) -> str:
        if self._others:
            return f"none of its {self._others:,} requests is of the model {self._reading.only_model!r}"
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
