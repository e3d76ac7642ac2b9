"""Validation of the values that a store's methods return, the same for every caller of a store."""

from collections.abc import Iterable, Sequence

from kvtiers.api.errors import StoreContractError
from kvtiers.api.store import Refused

__all__ = ["found", "found_each", "kept_each", "lengths_each", "present_each"]


def found(store: object, method: str, answer: object) -> bool:
    """Return the answer of a ``read_into``; StoreContractError if it is None, which says neither yes nor no."""
    if answer is None:
        raise StoreContractError(store, method, "returned None; it must return True, or False for no such value")
    return bool(answer)


def found_each(store: object, method: str, names: Sequence[str], answers: object) -> list[bool]:
    """Return the answers of a batch, one a name; StoreContractError if there are more or fewer, or one is None."""
    each = _one_each(store, method, names, answers)
    if any(answer is None for answer in each):
        raise StoreContractError(store, method, "answered None for a value; each answer must be True or False")
    return [bool(answer) for answer in each]


def lengths_each(store: object, names: Sequence[str], most: Sequence[int], answers: object) -> list[int]:
    """Return the answers of ``read_any_into``, one a name; StoreContractError if one is no length up to its most."""
    method, lengths = "read_any_into", list[int]()
    for answer, longest in zip(_one_each(store, method, names, answers), most, strict=True):
        if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer <= longest:
            text = f"answered {answer!r:.80} for a value; each answer must be its length, 0 to {longest}"
            raise StoreContractError(store, method, text)
        lengths.append(answer)
    return lengths


def kept_each(store: object, names: Sequence[str], answers: object) -> "list[bool | Refused]":
    """Return the answers of ``write_many``, one a name; StoreContractError if there are more or fewer, or one is None.

    Nor may one be an exception, which would be true.
    """
    each = _one_each(store, "write_many", names, answers)
    for answer in each:
        if answer is None or isinstance(answer, BaseException):
            what = "None" if answer is None else f"a {type(answer).__name__}"
            text = f"answered {what} for a value; each answer must be True, False or a Refused"
            raise StoreContractError(store, "write_many", text)
    return [answer if isinstance(answer, Refused) else bool(answer) for answer in each]


def present_each(store: object, names: Sequence[str], answers: object) -> list[bool]:
    """Return the answers of ``exists``, one a name; StoreContractError if there are more or fewer."""
    return [bool(answer) for answer in _one_each(store, "exists", names, answers)]


def _one_each(store: object, method: str, names: Sequence[str], answers: object) -> list[object]:
    if not isinstance(answers, Iterable):
        text = f"returned {answers!r:.80} for {len(names)} names; it must return one answer for each, in order"
        raise StoreContractError(store, method, text)
    each = list(answers)
    if len(each) != len(names):
        text = f"gave {len(each)} answers to {len(names)} names; it must give one for each, in order"
        raise StoreContractError(store, method, text)
    return each
