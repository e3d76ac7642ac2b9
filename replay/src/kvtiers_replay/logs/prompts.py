"""Prompts in JSON objects: those of OpenAI's requests, batches and answers, of vLLM and SGLang, and of gateways.

A prompt is a text or a list of token ids. Messages become one text, role by role, with the tools before them, as chat
templates have it: for a cache only equality matters, so that the template itself need not be the model's.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias

__all__ = ["LineError", "Prompt", "Usage", "prompts_of", "request_of", "time_of", "usage_of"]

Prompt: TypeAlias = str | list[int]

_ENVELOPES = ("body", "request", "request_body", "params", "kwargs")
_IDS = ("prompt_token_ids", "token_ids", "input_ids")
_PROMPTS = (*_IDS, "prompt", "messages", "input", "text")
_TIMES = ("timestamp", "@timestamp", "time", "ts", "created", "created_at", "arrival_time", "start_time", "startTime")
_MILLISECONDS = 1e11  # seconds since 1970 are fewer until the year 5138


class LineError(ValueError):
    """A line that cannot be used. Its text is the kind of the mistake, the same for all lines with it."""


class Usage(NamedTuple):
    """The tokens of a prompt and of its answer as the line counts them; 0: it does not say."""

    prompt: int = 0
    output: int = 0


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


def _chat(tools: object, instructions: object, messages: object) -> str:
    """Return messages as one text; equal beginnings of conversations are equal beginnings of texts."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise LineError("have 'messages' that are no list of objects")
    if not messages:
        raise LineError("have an empty prompt")
    parts = [f"<|tools|>{json.dumps(tools)}"] if tools else []
    parts += [f"<|system|>{instructions}"] if instructions else []
    parts += [f"<|{message.get('role', message.get('type', ''))}|>{''.join(_content(message))}" for message in messages]
    return "\n".join(parts)


def _content(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            # An image or a sound is one text of its own: equal ones are equal.
            yield text if isinstance(text, str) else json.dumps(part)
    for name in ("tool_calls", "function_call", "arguments", "output"):
        if message.get(name):
            yield json.dumps(message[name])


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

    Numbers are seconds, or milliseconds where they are too large for that; texts are ISO 8601. LineError: neither.
    """
    for place in _answers(fields):
        for name in _TIMES:
            if (value := place.get(name)) is not None:
                return _seconds(value)
    return None


def _seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e17:
        return value / 1000 if value >= _MILLISECONDS else float(value)
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    raise LineError("have a time that is neither a number nor ISO 8601 (taken at the time of the request before)")
