"""Where a hybrid model can resume: the prefixes of which every pool has what its hit policy asks for.

==================  ==========================================================================================
hit policy          a prefix of n pages can be restored if the pool has
==================  ==========================================================================================
``all_pages``       each of the n pages (an indexer)
``trailing_pages``  the last pages before n, as many as the transfer names (a sliding window, a recurrent state)
==================  ==========================================================================================

Such a set has gaps: with states at 512 and 1,024 tokens, nothing between them can be resumed. SGLang intersects the
sets of all ranks, so the set is reported, and not its largest member alone.
"""

from collections.abc import Sequence

__all__ = ["ALL", "TRAILING", "restorable"]

ALL, TRAILING = "all_pages", "trailing_pages"


def restorable(policy: str, there: Sequence[bool], trailing: int) -> set[int]:
    """Return the lengths, in pages, of the prefixes that a pool can serve. ``there[i]``: it has page i.

    None for a policy that is not of this table: then SGLang computes.
    """
    if policy == ALL:
        return set(range(1, _run(there) + 1))
    if policy == TRAILING:
        return {n for n in range(1, len(there) + 1) if all(there[max(0, n - trailing) : n])}
    return set()


def _run(there: Sequence[bool]) -> int:
    return next((place for place, answer in enumerate(there) if not answer), len(there))
