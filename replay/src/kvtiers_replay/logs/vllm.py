"""Requests in the log of a vLLM server that was started with ``--enable-log-requests``.

vLLM writes the prompt at the level DEBUG, in a line before the request's own, and the token ids beside it::

    (APIServer pid=7) DEBUG 11-25 10:00:00 [...] Request ID details: prompt: '...', prompt_token_ids: [1, 2], prompt_...
    (APIServer pid=7) INFO 11-25 10:00:00 [...] Received request ID: params: ..., lora_request: None.

Older releases write one line, ``Received request ID: prompt: '...', params: ..., prompt_token_ids: [1, 2], ...``. The
adapter is in the request's own line, ``lora_request: LoRARequest(lora_name='...', ...)``; a salt is in neither.
All other lines are the server's own, or have what was generated (``--enable-log-outputs``), whatever that says. The
date has no year; where months go back, the next one has begun.
"""

import ast
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from kvtiers_replay.logs.prompts import LineError, Prompt

__all__ = ["HOW_TO_LOG", "VllmAdapter", "VllmLines", "VllmPrompt"]

HOW_TO_LOG = "start vLLM with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, and without --max-log-len"
_NO_PROMPT = f"have a request and not its prompt ({HOW_TO_LOG})"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TEXT = r"""'[^'\\]*(?:\\.[^'\\]*)*'|"[^"\\]*(?:\\.[^"\\]*)*\""""
_ID = r"(?:[^:]|:(?! )){1,200}?"  # a client may send any
_DETAILS = re.compile(
    rf"Request (?P<id>{_ID}) details: prompt: (?P<prompt>None|{_TEXT}), prompt_token_ids: (?P<ids>None|\[[\d, ]*\])"
)
_BOTH = re.compile(rf"Received request {_ID}: prompt: (?P<prompt>None|{_TEXT}), (?:params|sampling)")
_LATER_IDS = re.compile(r"prompt_token_ids: (None|\[[\d, ]*\])")
_ADAPTER = re.compile(rf"lora_request: (?:None|\w+\(lora_name=(?P<name>{_TEXT}))")
_RECEIVED = re.compile(rf"Received request (?P<id>{_ID}): ")
_STARTS = ("Received request ", " details: prompt: ")
_HEAD = re.compile(
    rf"Received request |Request {_ID} details: prompt: |(?P<other>Generated response |Request {_ID} JSON body: )"
)
_DATE = re.compile(r"\b(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)\b")
_YEAR = 2024  # a leap year, so that each day is one
_BACK = timedelta(days=180)


class VllmPrompt(NamedTuple):
    """The prompt of a request, when it came (seconds), and its adapter; None: a later line says which."""

    request_id: str
    prompt: Prompt
    moment: float | None
    adapter: str | None = None


class VllmAdapter(NamedTuple):
    """The adapter of a request whose prompt was in an earlier line; "": none."""

    request_id: str
    adapter: str


class VllmLines:
    """Reads one line after the other; ``other``: how many were not of a request."""

    def __init__(self) -> None:
        self.other = 0
        self._last: datetime | None = None
        self._year = _YEAR
        self._with_prompt: set[str] = set()  # requests whose details came, and whose own line did not

    def read(self, line: str) -> VllmPrompt | VllmAdapter | None:
        """Return what a line says of a request; None: nothing. LineError: it should have a prompt."""
        if not any(start in line for start in _STARTS):
            self.other += 1
            return None
        line, when = self._message(_COLOUR.sub("", line))
        head = _HEAD.search(line)  # the first one: what comes after it may be anyone's text
        if head is None or head["other"]:
            self.other += 1
            return None
        moment = self._moment(line[: head.start()] if when is None else when)
        if found := _DETAILS.match(line, head.start()):
            self._with_prompt.add(found["id"])
            return VllmPrompt(found["id"], self._prompt(found["prompt"], found["ids"]), moment)
        if found := _BOTH.match(line, head.start()):
            *_, ids = ["None", *_LATER_IDS.findall(line, found.end())]  # the last one: params may have anyone's text
            return VllmPrompt("", self._prompt(found["prompt"], ids), moment, self._adapter(line, found.end()))
        received = _RECEIVED.match(line, head.start())
        if received is None:
            raise LineError("begin as a request's and go on otherwise (cut off, or of another release of vLLM)")
        if received["id"] in self._with_prompt:
            self._with_prompt.discard(received["id"])
            return VllmAdapter(received["id"], self._adapter(line, received.end()))
        raise LineError(_NO_PROMPT)

    @staticmethod
    def _message(line: str) -> tuple[str, str | None]:
        """Return a line's message and its date, out of JSON if the log is that; else all of it, and None."""
        if line.startswith("{"):
            try:
                fields: dict[str, Any] = json.loads(line)
            except (ValueError, RecursionError):
                raise LineError("are no JSON, though they begin so") from None
            return str(fields.get("message", "")), str(fields.get("asctime", fields.get("timestamp", "")))
        return line, None

    def _moment(self, text: str) -> float | None:
        found = list(_DATE.finditer(text))
        if not found:
            return None
        month, day, hour, minute, second = map(int, found[-1].groups())
        try:
            moment = datetime(self._year, month, day, hour, minute, second, tzinfo=UTC)
            if self._last is not None and self._last - moment > _BACK:
                self._year += 1
                moment = moment.replace(year=self._year)
        except ValueError:
            return None
        self._last = moment
        return moment.timestamp()

    @staticmethod
    def _adapter(line: str, start: int) -> str:
        found = list(_ADAPTER.finditer(line, start))  # the last one: params may have anyone's text
        return str(ast.literal_eval(found[-1]["name"])) if found and found[-1]["name"] else ""

    @staticmethod
    def _prompt(text: str, ids: str) -> Prompt:
        if ids not in ("None", "[]"):
            try:
                found: list[int] = json.loads(ids)
            except ValueError:
                raise LineError("have token ids that cannot be read") from None
            return found
        if text == "None":
            raise LineError(_NO_PROMPT)
        try:
            prompt: str = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise LineError("have a prompt that cannot be read") from None
        return prompt
