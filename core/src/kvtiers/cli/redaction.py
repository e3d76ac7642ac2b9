"""The removal of secrets from a config and from all that stands beside it in a report.

A secret is what an option of type ``Secret`` has, what an option has whose name says so or which its tier type does not
have (a typo may hide such a name), and the password in a URL. Where a variable or a file is named instead of it, the
name stays, but its value is taken out of the log and all else. In doubt more is taken out: a host rather goes with a
password than that a part of the password stays.

Whatever is hidden in the config is remembered, by whichever rule it was found, since the log may have it without the
name beside it. A config that is no YAML is left out, but what may be a secret in it is remembered all the same.
"""

import base64
import bisect
import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, get_args
from urllib.parse import quote, unquote

import yaml
from pydantic import BaseModel

from kvtiers.api import ConfigError, Secret, TierConfig, TierPluginError
from kvtiers.api.config import expand_variables
from kvtiers.api.files import read_file
from kvtiers.config import OffloadConfig
from kvtiers.config.options import models_in
from kvtiers.config.yaml_text import parse_yaml
from kvtiers.encryption.config import may_be_a_key
from kvtiers.plugins import load_tier

__all__ = ["Redaction"]

_Models: TypeAlias = Sequence[type[BaseModel]]
_Remember: TypeAlias = Callable[[str], None]

_HIDDEN = "***"
_SHORTEST = 4  # what is shorter stands in many other places, too
_SHORTEST_WORD = 6  # of several in a hidden text: what is shorter may be any word
_LONG = 12  # a user's name may be a token; a shorter one may be a word such as "default"
_NAME = re.compile(
    r"passw|passphrase|(?<!by)(?<!com)pass$|(^|_)pass_|pwd|secret|token(?!i[sz])|credential|cookie|signature$"
    r"|auth(?!or(?!i[sz]ation))|(api|access|account|private|signing|encryption|session|master)_?key"
    r"|connection_?str|(^|_)(sas|dsn|jwt)$",
    re.IGNORECASE,
)
_NOT = re.compile(r"tokens_per_block|authority|\w+_file")
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_USER = re.compile(r"(?<!\S)((?:(?!://)\S)*://)(\S+)(?=@)")  # from the start of a word: linear in its length
# Where the whole text is one URL, or several: its password may have a space, and there may be no scheme.
_USER_OF_ALL = re.compile(r"(?:(?<=://)|\A(?!.*://)(?=[^/@\s]*:)).+(?=@)", re.DOTALL)
_QUERY = re.compile(
    r"(?i)(?:(?<=[?&#;])|(?<=u0026))"
    r"([\w.-]*(?:sig|signature|token|pass|passwd|pwd|password|secret|key|key-?id|credentials?)=|x-amz-[\w-]+=)"
    r"([^&\s\"']+)"
)
_WORD = re.compile(r"[^\s\"'<>]+")
_QUERY_START = re.compile(r"[?#]")
_QUERY_PART = re.compile(r"(\\?u0026|[?&#;])")
# What stands in the queries of URLs and is no secret; a value of any other name is hidden.
_HARMLESS = frozenset(
    {
        "acl", "alt", "api-version", "bucket", "comp", "db", "decode_responses", "delete", "delimiter", "endpoint",
        "fields", "format", "health_check_interval", "limit", "list-type", "location", "max-keys", "max_connections",
        "maxresults", "offset", "page", "partnumber", "policy", "prefix", "protocol", "region", "restype",
        "retry_on_timeout", "se", "socket_connect_timeout", "socket_timeout", "sp", "spr", "sr", "srt", "ss", "ssl",
        "ssl_ca_certs", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile", "ssl_check_hostname", "ssl_keyfile",
        "ssl_min_version", "sslmode", "st", "sv", "tagging", "timeout", "tls", "uploads", "uploadtype", "verify",
        "versionid", "versioning",
    }
)  # fmt: skip
_HEADER = re.compile(
    r"(?i)(?<![a-z])(authorization|cookie)(\\*['\"])?([ \t]*[:=][ \t]*|(?(2)[ \t]*,[ \t]*|(?!)))"
    r"(b?(\\*['\"]).*?(?:\5|$)|[^\s'\"].*)",
    re.MULTILINE,
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+(\S+)")
_NAMED = re.compile(
    r"(?<![\w-])(?:((?:(?:api|access|secret|account|private) )?[\w-]+)(?:\\*['\"])?[ \t]*[:=]+>?"
    r"|(--[\w-]+)['\"]?,?(?=[ \t]))[ \t]*|<([\w-]+)>(?!\s)"
)
_ITS_VALUE = re.compile(
    r"[\[{(].*"  # to the end of the line: brackets may be nested
    r"|[bru]?(?:\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?|(\\+['\"]).*?(?:\1|$))(?:[^\s,;)\]}]\S*)?"
    r"|(?:(?i:basic|bearer|digest|negotiate|token)[ \t]+)?\S+",
    re.MULTILINE,
)
_PLAIN = re.compile(r"[\d.]{1,5} ?[A-Za-z%]{0,3}|auto|none|all")  # of an option with a typo: it stands elsewhere, too
_NO_VALUE = re.compile(
    r"\$\{\w+\}['\"]?[ \t]*$|[\[{(][ \t]*$|(?i:null|none|true|false|''|\"\"|~|\*{3,})(?=[\s,;&)\]}'\"]|$)"
    r"|Secret\(from |environment variable '\w+' is not set|expected a text |cannot read the secret's file"
    r"|'\$\{' without its",
    re.MULTILINE,
)
_MAY_BE_A_KEY = re.compile(r"[A-Za-z0-9+/_-]{43}=?|[0-9A-Fa-f]{64}")
_PIECE = re.compile(r"[^\s,;&|()\[\]{}<>\"'\\]+")
_MOST_LINES = 100  # of a secret's value, in a config that is no YAML
_OF_KEYS = frozenset({"key", "encryption"})
_PLACE = re.compile(r"line \d+")
# In a config that is no YAML: an option's name, not the scheme of a URL.
_AN_OPTION = re.compile(r"([\w-]+)['\"]?[ \t]*[:=](?!//)")
_ITS_TYPE = re.compile(r"\btype['\"]?[ \t]*:[ \t]*['\"]?([\w.-]+)")
_SCHEMES = frozenset({"authorization", "bearer", "digest", "negotiate"})
_COUNT = re.compile(r"\d[\d.,]*(?=[\s;)\]}]|$)|\d[\d.]*,", re.MULTILINE)


class Redaction:
    """Takes secrets out of a config, remembers their values, and takes those out of any other text."""

    def __init__(self) -> None:
        self._values: set[str] = set()

    def config(self, text: str) -> list[str]:
        """Return the lines of a config without its secrets and comments; one line, if it cannot be read."""
        try:
            found = parse_yaml(text.encode("utf-8", "replace"))
        except ConfigError as error:
            self._remember_unread(text)
            place = _PLACE.match(error.problems[0])
            where = f" in {place[0]}" if place else ""
            return [f"it is no YAML{where}, and left out, since it may have secrets"]
        try:
            self._cleaned(found, (), frozenset())  # remembers all, also for what stands before it
            cleaned = self._cleaned(found, (), frozenset())
            return yaml.safe_dump(cleaned, sort_keys=False, allow_unicode=True, width=float("inf")).splitlines()
        except RecursionError:
            return ["it contains itself, by an alias, and is left out"]

    def apply(self, text: str) -> str:
        """Return the text without what any of its lines has that is a secret."""
        for value in sorted(self._values, key=len, reverse=True):
            text = text.replace(value, _HIDDEN)
        return _without_secrets(text, lambda _: None)

    def _cleaned(self, value: Any, models: _Models, secret_options: frozenset[str]) -> Any:
        match value:
            case Mapping():
                models = _models_of(value.get("type")) or models
                own = secret_options | _secret_options(models)
                return {name: self._option(str(name), part, models, own) for name, part in value.items()}
            case list():
                return [self._cleaned(part, models, secret_options) for part in value]
            case str():
                if user := _user_of_all(value):
                    self._remember_user(user[0])
                    value = _USER_OF_ALL.sub(_HIDDEN, value)
                _without_secrets(value, self._remember_hidden)
                return self.apply(value)
        return value

    def _remember_unread(self, text: str) -> None:
        """Remember what may be a secret in a config that is no YAML: by the names of options alone, line by line.

        What stands behind a secret's name, or behind one that is no option (it may have a typo), and users in URLs.
        """
        known = _option_names(_ITS_TYPE.findall(text))
        lines, block = text.splitlines(), 0  # where the last value of several lines ends
        for number, line in enumerate(lines):
            _without_secrets(line, self._remember_hidden)
            if "://" in line and (user := _user_of_all(line)):
                self._remember_user(user[0])
            options = list(_AN_OPTION.finditer(line))
            stops = [it.start() for it in options if it[1] in known or _may_be_secret(it[1])]
            done = 0
            for option in options:
                name, start, end = option[1], option.end(), len(line)
                if option.start() < done:  # in a value that has been dealt with
                    continue
                if name not in _OF_KEYS:  # whose value may be a mapping; that of others ends with the next option
                    following = bisect.bisect_left(stops, start)
                    end = stops[following] if following < len(stops) else end
                value, is_secret = line[start:end], _may_be_secret(name)
                if is_secret and number >= block and not _PIECE.search(value.strip("|>-+ \t")):
                    below = [*_indented_more(lines[number + 1 : number + _MOST_LINES], line)]
                    value, block = " ".join(below), number + len(below)
                if (is_secret or name not in known) and not _PLAIN.fullmatch(value.strip("'\" \t,]}")):
                    self._remember_hidden(value)
                    done = end

    def _remember_hidden(self, text: str) -> None:
        """Remember a text that was hidden, and each longer word in it: a header has a scheme, a list several values."""
        text = text.strip(" \t\r\n\\'\",;:[]{}()")
        if set(text) <= {"*"} or _VARIABLE.fullmatch(text):
            return
        self._remember(text)
        for piece in _PIECE.findall(text):
            _, equals, value = piece.partition("=")
            word = value if equals and value.strip("=") else piece.rstrip("=")
            if len(word) >= _SHORTEST_WORD and not word.endswith(":") and word.lower() not in _SCHEMES:
                self._remember(word)

    def _option(self, name: str, value: Any, models: _Models, secret_options: frozenset[str]) -> Any:
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        is_unknown = bool(models) and not fields
        if name == "encryption" and isinstance(value, Mapping):
            return self._key_sources(value)
        if isinstance(value, str) and _MAY_BE_A_KEY.fullmatch(value) and name == "encryption":
            return self._hidden(value)
        if name == "key" or name in secret_options or _is_secret(name):
            return self._hidden(value)
        if is_unknown:
            return _HIDDEN if _PLAIN.fullmatch(str(value)) else self._hidden(value)
        return self._cleaned(
            value, [model for field in fields for model in models_in(field.annotation)], secret_options
        )

    def _key_sources(self, value: Mapping[Any, Any]) -> dict[str, Any]:
        """Return where the keys of ``encryption``, or of one of its tenants, come from."""
        tenants = value.get("tenants")
        shown = {str(name): self._key_source(part) for name, part in value.items() if name != "tenants"}
        if isinstance(tenants, Mapping):
            shown["tenants"] = {
                self._hidden(name) if may_be_a_key(name) else name: (
                    self._key_sources(own) if isinstance(own, Mapping) else self._key_source(own)
                )
                for name, own in ((str(name), own) for name, own in tenants.items())
            }
        elif tenants is not None:
            shown["tenants"] = self._key_source(tenants)
        return shown

    def _key_source(self, value: Any) -> Any:
        """Return where a key of ``encryption`` comes from; what it is, and a command's arguments, are secrets."""
        match value:
            case {"file": str(path), **rest} if not rest and not _MAY_BE_A_KEY.fullmatch(path):
                with contextlib.suppress(OSError, ValueError):
                    self._remember_key(read_file(expand_variables(path)))
                return value
            case {"env": str(name), **rest} if not rest and not _MAY_BE_A_KEY.fullmatch(name):
                self._remember_key(os.environb.get(name.encode(), b""))
                return value
            case {"command": [str(program), *arguments], **rest}:
                for argument in arguments:
                    self._remember(str(argument))
                return {"command": [program, *([_HIDDEN] if arguments else [])]} | rest
        for part in _texts(value):
            self._remember(part)
        return _HIDDEN

    def _remember_key(self, content: bytes) -> None:
        """Remember a key as the bytes themselves and as text, in the forms that a log may have it in."""
        forms = {content, content.strip()}
        with contextlib.suppress(ValueError):
            forms.add(base64.b64decode(content.strip().replace(b"-", b"+").replace(b"_", b"/"), validate=True))
        for form in forms:
            texts = [
                base64.b64encode(form).decode(),
                base64.urlsafe_b64encode(form).decode(),
                form.hex(),
                repr(form)[2:-1],
            ]
            for text in [*texts, form.decode("utf-8", "replace"), texts[0].rstrip("=")]:
                self._remember(text)

    def _hidden(self, value: Any) -> Any:
        match value:
            case None | bool() | "":
                return value
            case {"file": str(path), **rest} if not rest:
                with contextlib.suppress(OSError, ValueError):  # then it is in no log either
                    self._remember(read_file(expand_variables(path)).decode("utf-8").strip())
                return value
            case str() if _VARIABLE.fullmatch(value):
                self._remember(value)
                return value
        for part in _texts(value):
            self._remember(part)
        return _HIDDEN

    def _remember_user(self, text: str) -> None:
        """Remember what stands before the last ``@`` of a URL, or of several with a comma between them."""
        self._remember(text.partition(":")[2] or text)
        *others, last = re.split(r",(?:[\w+.-]+://)?", text)
        for part in (*(other.rpartition("@")[0] for other in others), last):
            user, _, password = part.partition(":")
            self._remember(password)
            if len(user) >= _LONG:
                self._remember(user)

    def _remember(self, text: str) -> None:
        found = {os.environ.get(name, "") for name in _VARIABLE.findall(text)}
        with contextlib.suppress(ValueError):  # it is not set, and so it is in no log either
            found.add(expand_variables(text))
        if not _VARIABLE.fullmatch(text):  # the name of a variable is no secret
            found |= {text, *_VARIABLE.split(text)[::2]}
        self._values |= {form for value in found for form in _forms(value) if len(form) >= _SHORTEST}


def _forms(text: str) -> Iterator[str]:
    """Yield the text as it may stand in a URL, in JSON, in Python's own form, or decoded from a URL."""
    for plain in (text, unquote(text)):
        yield plain
        yield quote(plain, safe="")
        yield json.dumps(plain)[1:-1]
        yield json.dumps(plain, ensure_ascii=False)[1:-1]
        yield repr(plain)[1:-1]


def _without_secrets(text: str, remember: _Remember) -> str:
    """Return a text without what any of its lines has that is a secret, each of which is given to ``remember``."""

    def hide(match: re.Match[str], before: Sequence[int], secret: int, space: str = "") -> str:
        remember(match[secret])
        return "".join(match[group] or "" for group in before) + space + _HIDDEN

    text = _BEARER.sub(lambda match: hide(match, (1,), 2, " "), text)
    text = _HEADER.sub(lambda match: hide(match, (1, 2, 3), 4), text)
    text = _USER.sub(lambda match: hide(match, (1,), 2), text)
    text = _WORD.sub(lambda match: _without_query(match[0], remember), text)
    text = _QUERY.sub(lambda match: hide(match, (1,), 2), text)
    return _without_named(text, remember)


def _without_query(word: str, remember: _Remember) -> str:
    """Return a word of a text; if it is a URL or a path with a query, without what that has, but for harmless names."""
    start = _QUERY_START.search(word)
    if start is None or "/" not in word[: start.start()]:
        return word
    kept = [word[: start.start()]]
    for part in _QUERY_PART.split(word[start.start() :]):
        name, equals, value = part.partition("=")
        secret = (value if equals else name if kept[-1] == "?" else "").rstrip("\\")  # before a quote, which ends it
        if not secret or unquote(name).lower() in _HARMLESS or secret == _HIDDEN or _VARIABLE.fullmatch(secret):
            kept.append(part)
        else:
            remember(secret)
            kept += [name + equals if equals else "", _HIDDEN, part[part.rindex(secret) + len(secret) :]]
    return "".join(kept)


def _without_named(text: str, remember: _Remember) -> str:
    """Return the text without the value behind each name of a secret: ``NAME: it``, ``NAME=it`` or ``--NAME it``."""
    kept, end = [], 0
    for match in _NAMED.finditer(text):
        start, name = match.end(), match[1] or match[2] or match[3]
        if match.start() < end or not _is_secret(name) or _NO_VALUE.match(text, start):
            continue
        if "tokens" in name.lower() and _COUNT.match(text, start):
            continue
        if value := _ITS_VALUE.match(text, start):
            remember(value[0])
            kept += [text[end:start], _HIDDEN]
            end = value.end()
    return "".join([*kept, text[end:]])


def _indented_more(lines: Sequence[str], than: str) -> Iterator[str]:
    """Yield the lines that belong to an option, by their indentation, as far as they follow it without a break."""
    indent = len(than) - len(than.lstrip(" -"))
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip(" ")) <= indent and not line.lstrip().startswith("- "):
            return
        yield line


def _option_names(tier_types: Sequence[str]) -> frozenset[str]:
    """Return the names of all options of a config with tiers of these types."""
    names: set[str] = set()
    models: list[type[BaseModel]] = [OffloadConfig, TierConfig, *itertools.chain(*map(_models_of, tier_types))]
    while models:
        for name, field in models.pop().model_fields.items():
            names.add(name)
            models += models_in(field.annotation)
    return frozenset(names)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)
    else:
        yield str(value)


def _is_secret(name: str) -> bool:
    plain = re.sub(r"[- ]|(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-"))
    return not _NOT.fullmatch(plain) and bool(_NAME.search(plain))


def _user_of_all(text: str) -> re.Match[str] | None:
    return _USER_OF_ALL.search(text) if "@" in text else None  # else each "://" in it looks for one to its end


def _may_be_secret(name: str) -> bool:
    return name in _OF_KEYS or _is_secret(name)


def _models_of(tier_type: object) -> _Models:
    """Return the config model of this tier type; none where it cannot be loaded."""
    try:
        return (load_tier(tier_type).config,) if isinstance(tier_type, str) else ()
    except TierPluginError:
        return ()


def _secret_options(models: _Models) -> frozenset[str]:
    """Return the options of these models that are secrets by their type."""
    return frozenset(
        name for model in models for name, field in model.model_fields.items() if _has_secret(field.annotation)
    )


def _has_secret(annotation: object) -> bool:
    return annotation is Secret or any(map(_has_secret, get_args(annotation)))
