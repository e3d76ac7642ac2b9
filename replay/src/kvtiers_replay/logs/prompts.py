"""Prompts in JSON objects: those of OpenAI's requests, batches and answers, of vLLM and SGLang, and of gateways.

A prompt is a text or a list of token ids. Messages become one text, role by role, with the tools before them, as chat
templates have it: for a cache only equality matters, so that the template itself need not be the model's. An image or
a sound among them is no text: its letters, of a URL or in base64, say nothing of its tokens.

Equal prompts share KV only within one ``Scope``: engines put the model or adapter, the salt and the tenant into keys.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

from kvtiers.types import TENANT_FIELD
from kvtiers_replay.trace import epoch_units

__all__ = [
    "LineError",
    "Mixed",
    "Prompt",
    "Scope",
    "Usage",
    "prompts_of",
    "request_of",
    "scope_of",
    "time_of",
    "usage_of",
]


class Mixed(NamedTuple):
    """A prompt of texts and of other parts, such as images, each of which is the digest of what it is."""

    parts: list[str | bytes]


Prompt: TypeAlias = str | list[int] | Mixed

_ENVELOPES = ("body", "request", "request_body", "params", "kwargs")
_IDS = ("prompt_token_ids", "token_ids", "input_ids")
_PROMPTS = (*_IDS, "prompt", "messages", "input", "text")
_TIMES = ("timestamp", "@timestamp", "time", "ts", "created", "created_at", "arrival_time", "start_time", "startTime")
_NUMBER = re.compile(r"\d{10,20}(?:\.\d+)?")  # shorter ones may be dates
_NO_TEXT = ("image", "audio", "video", "file", "media")  # a word of the type of a part begins so
_NO_TEXT_FIELDS = {"image", "image_url", "audio", "input_audio", "video", "video_url", "file", "inline_data"}
_MODELS = ("model", "lora_path", "lora_name", "adapter_id")
_SALTS = ("cache_salt", "extra_key")
_MOST_TIME = 1e20  # ns until the year 5138


class LineError(ValueError):
    """A line that cannot be used. Its text is the kind of the mistake, the same for all lines with it."""


class Usage(NamedTuple):
    """The tokens of a prompt and of its answer as the line counts them; 0: it does not say."""

    prompt: int = 0
    output: int = 0


class Scope(NamedTuple):
    """What engines put into keys beside the tokens: prompts of two scopes share nothing. "": the line does not say."""

    model: str = ""
    salt: str = ""
    tenant: str = ""


def scope_of(fields: Mapping[str, Any], request: Mapping[str, Any]) -> Scope:
    """Return the scope of a line's request: the model or adapter, the salt, the tenant. The request counts first."""
    params = request.get("kv_transfer_params")
    tenants = [params.get(TENANT_FIELD)] if isinstance(params, dict) else []
    tenants += [request.get("tenant"), fields.get("tenant")]
    models = [_text(request.get(name)) or _text(fields.get(name)) for name in _MODELS]
    return Scope(
        " with ".join(dict.fromkeys(filter(None, models))),
        next((found for name in _SALTS if (found := _text(request.get(name)) or _text(fields.get(name)))), ""),
        next(filter(None, map(_text, tenants)), ""),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def request_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a line that has the prompt: the object itself, or the body in it. LineError: there is none."""
    for name in _ENVELOPES:
        inner = fields.get(name)
        if isinstance(inner, str) and inner.lstrip()[:1] == "{":
            try:
                inner = json.loads(inner)
            except ValueError:
                raise LineError(f"have a {name!r} that is no JSON") from None
        if isinstance(inner, dict) and any(inner.get(each) is not None for each in _PROMPTS):
            return inner
    if any(fields.get(each) is not None for each in _PROMPTS):
        return fields
    if "response" in fields or "choices" in fields:
        raise LineError("have an answer and no request (a batch's output file? give its input file)")
    raise LineError("have no prompt (expected 'prompt_token_ids', 'prompt', 'messages' or 'input')")


def prompts_of(request: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of a request: one, or several where it has a list of them. LineError: they are no prompts."""
    name = next(name for name in _PROMPTS if request.get(name) is not None)
    given = request[name]
    before = request.get("tools"), request.get("instructions")
    if name == "input" and isinstance(given, str) and any(before):
        given = [{"role": "user", "content": given}]
    is_chat = name == "input" and isinstance(given, list) and any(isinstance(each, dict) for each in given)
    return [_chat(*before, given)] if is_chat or name == "messages" else _prompts(given)


def _prompts(given: object) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(each) is int for each in given):
            return [given]
        if all(isinstance(each, str | list) for each in given):
            return [prompt for each in given for prompt in _prompts(each)]
    if given == []:
        raise LineError("have an empty prompt")
    raise LineError("have a prompt that is neither a text nor a list of token ids")


def _chat(tools: object, instructions: object, messages: object) -> str | Mixed:
    """Return messages as one prompt; equal beginnings of conversations are equal beginnings of prompts."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise LineError("have 'messages' that are no list of objects")
    if not messages:
        raise LineError("have an empty prompt")
    parts: list[str | bytes] = [f"<|tools|>{json.dumps(tools)}\n"] if tools else []
    parts += [f"<|system|>{instructions}\n"] if instructions else []
    for number, message in enumerate(messages):
        parts.append(f"{chr(10) * bool(number)}<|{message.get('role', message.get('type', ''))}|>")
        parts += _content(message)
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else Mixed(parts)


def _content(message: Mapping[str, Any]) -> Iterator[str | bytes]:
    yield from _pieces(message.get("content"))
    for name in ("tool_calls", "function_call", "arguments", "output"):
        if message.get(name):
            yield from _pieces(message[name])


def _pieces(value: object) -> Iterator[str | bytes]:
    """Yield the texts of a content, and the digest of each part of it that is no text: equal ones are equal."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _pieces(each)
    elif isinstance(value, dict):
        words = re.split(r"[^a-z]+", str(value.get("type", "")).lower())
        is_named = "type" not in value and not _NO_TEXT_FIELDS.isdisjoint(value)
        if is_named or any(word.startswith(_NO_TEXT) for word in words) or isinstance(value.get("source"), dict):
            yield hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=32).digest()
        elif isinstance(text := value.get("text"), str):
            yield text
        elif "content" in value:
            yield from _pieces(value["content"])
        else:
            yield json.dumps(value)


def usage_of(fields: Mapping[str, Any]) -> Usage:
    """Return the counts of tokens that a line or the answer in it has."""
    for place in _answers(fields):
        usage = place.get("usage")
        counts = usage if isinstance(usage, dict) else place
        prompt = _count(counts, "prompt_tokens", "input_tokens", "input_length")
        output = _count(counts, "completion_tokens", "output_tokens", "output_length")
        if prompt or output:
            return Usage(prompt, output)
    return Usage()


def _answers(fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield fields
    response = fields.get("response")
    if isinstance(response, dict):
        yield response
        if isinstance(response.get("body"), dict):
            yield response["body"]


def _count(fields: Mapping[str, Any], *names: str) -> int:
    found = (fields.get(name) for name in names)
    return next((each for each in found if type(each) is int and each > 0), 0)


def time_of(fields: Mapping[str, Any]) -> float | None:
    """Return when a line's request was made, in seconds since some moment; None: the line does not say.

    Numbers are seconds, or milliseconds, microseconds or nanoseconds where they are too large for that; texts are such
    numbers or ISO 8601. LineError: neither.
    """
    for place in _answers(fields):
        for name in _TIMES:
            if (value := place.get(name)) is not None:
                return _seconds(value)
    return None


def _seconds(value: object) -> float:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST_TIME:
        return value / epoch_units(value)
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise LineError("have a time that is neither a number nor ISO 8601 (taken at the time of the request before)")
