"""Validation of the values that a store's methods return, the same for every caller of a store."""

from collections.abc import Iterable, Sequence

from kvtiers.api.errors import NotKept, StoreContractError

__all__ = ["kept_each", "length_of", "lengths_each", "present_each"]


def length_of(store: object, method: str, room: int, answer: object) -> int:
    """Return the answer of a read; StoreContractError if it is no length of 0 to ``room`` bytes."""
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer <= room:
        text = f"answered {answer!r:.80} for a value; expected its length in bytes, 0 to {room}, 0 for no such value"
        raise StoreContractError(store, method, text)
    return answer


def lengths_each(store: object, method: str, rooms: Sequence[int], answers: object) -> list[int]:
    """Return the answers of a batch of reads, one a room; StoreContractError if one is no length, or not one each."""
    each = _one_each(store, method, len(rooms), answers)
    return [length_of(store, method, room, answer) for room, answer in zip(rooms, each, strict=True)]


def kept_each(store: object, names: Sequence[str], answers: object) -> list[NotKept | None]:
    """Return the answers of ``write_many``, one a name; StoreContractError if one is neither None nor ``NotKept``."""
    kept = list[NotKept | None]()
    for answer in _one_each(store, "write_many", len(names), answers):
        if answer is not None and not isinstance(answer, NotKept):
            text = f"answered {answer!r:.80} for a value; expected None for one that is kept, else a NotKept"
            raise StoreContractError(store, "write_many", text)
        if answer is not None:  # one that was caught holds, by its frames, the views of the call
            answer.__traceback__ = answer.__cause__ = answer.__context__ = None
        kept.append(answer)
    return kept


def present_each(store: object, names: Sequence[str], answers: object) -> list[bool]:
    """Return the answers of ``exists``, one a name; StoreContractError if there are more or fewer."""
    return [bool(answer) for answer in _one_each(store, "exists", len(names), answers)]


def _one_each(store: object, method: str, count: int, answers: object) -> list[object]:
    if not isinstance(answers, Iterable):
        text = f"returned {answers!r:.80} for {count} names; it must return one answer for each, in order"
        raise StoreContractError(store, method, text)
    each = list(answers)
    if len(each) != count:
        text = f"gave {len(each)} answers to {count} names; it must give one for each, in order"
        raise StoreContractError(store, method, text)
    return each
