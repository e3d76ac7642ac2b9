"""The YAML reader: plain values only, no duplicate keys, and every problem with its line and column."""

import re
from typing import Any

import yaml

from kvtiers.api import ConfigError
from kvtiers.plugins import shown_name

__all__ = ["parse_yaml"]

_QUOTED = re.compile(r"\b(alias|anchor|tag|handle) '(?!tag:yaml\.org,)([^']*)'")
_MOST_NODES = 100_000  # values in a document, each as often as aliases repeat it


def parse_yaml(content: bytes) -> Any:
    """Return the one document in ``content``. ConfigError with one line, not naming the file, if that is impossible."""
    try:
        return yaml.load(content, _StrictLoader)  # noqa: S506 -- a SafeLoader, only stricter
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_marked(error)) from None
    except yaml.YAMLError as error:
        reason = getattr(error, "reason", None) or error
        place = f" (at {error.position})" if isinstance(error, yaml.reader.ReaderError) else ""
        raise ConfigError(f"not valid YAML: {reason}{place}; expected UTF-8 text") from None
    except RecursionError:
        raise ConfigError("not valid YAML: it is nested too deeply") from None


def _marked(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    if isinstance(error, _RefusedError):
        return f"{place}{error.problem}"
    context = f"{error.context}, " if error.context and str(error.problem).startswith("but ") else ""
    # '{' begins a mapping where another is open, so that a variable there takes quotes.
    is_variable = mark is not None and mark.buffer and mark.buffer[max(0, mark.pointer - 1) :].startswith("${")
    fix = '; within { } write a variable in quotes: "${NAME}"' if is_variable else ""
    problem = _QUOTED.sub(lambda quoted: f"{quoted[1]} {shown_name(quoted[2])}", error.problem or "it cannot be read")
    return f"{place}not valid YAML: {context}{problem}{fix}"


class _RefusedError(yaml.MarkedYAMLError):
    """Valid YAML that this project refuses."""


class _StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys, and turns a bad scalar (``2024-13-40``) into an error with its place."""

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            _count(node, {})
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Here, before merge keys ('<<') are resolved: overriding a merged key is what they are for.
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if first := lines.get((key.tag, key.value)):
                raise _RefusedError(
                    problem=f"key {shown_name(key.value)} is already on line {first}; remove one of the two",
                    problem_mark=key.start_mark,
                )
            lines[key.tag, key.value] = key.start_mark.line + 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError, TypeError, OverflowError):
            raise _RefusedError(
                problem=f"this value cannot be read as {node.tag.rpartition(':')[2]}; put it in quotes",
                problem_mark=node.start_mark,
            ) from None


def _count(node: Any, counted: dict[int, int]) -> int:
    """Return how many values a node stands for once aliases are followed; refuse one that stands for too many."""
    if id(node) in counted:
        return counted[id(node)]
    counted[id(node)] = total = 1  # also of an alias within its own anchor, which is refused later
    if isinstance(node, yaml.MappingNode):
        total += sum([_count(child, counted) for pair in node.value for child in pair])
    elif isinstance(node, yaml.SequenceNode):
        total += sum([_count(child, counted) for child in node.value])
    if total > _MOST_NODES:
        problem = f"it stands for more than {_MOST_NODES:,} values, by its aliases; write out what is meant"
        raise _RefusedError(problem=problem, problem_mark=node.start_mark)
    counted[id(node)] = total
    return total
