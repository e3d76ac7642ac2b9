"""What differs between the services, for the tests that S3, Google Cloud Storage and Azure share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest

from kvtiers.api import TierConfig
from kvtiers_objectstore.store import ObjectStore
from kvtiers_objectstore.testing.proxy import Fault, refusal

__all__ = ["PASSING", "Cure", "Differences", "Suite"]

PASSING = {
    "internal errors": Fault(refusal(500, "InternalError")),
    "throttling": Fault(refusal(503, "SlowDown", "Retry-After: 1\r\n")),
    "too many requests": Fault(refusal(429, "TooManyRequests", "Retry-After: 1\r\n")),
    "a truncated body": Fault(cut=5000),
    "a body cut off by a reset": Fault(cut=5000, reset=True),
    "a reset before the answer": Fault(cut=0, reset=True),
    "a body that drips": Fault(drip=0.1),
    "what is no HTTP": Fault(b"hello\r\n\r\n"),
    "no answer": Fault(first_byte=4.0),
}
"""What may have passed at the next attempt, at every service."""


class Cure(NamedTuple):
    """A refusal, and what the check says of it."""

    status: int
    code: str
    said: str
    message: str = "no"


@dataclass(frozen=True)
class Differences:
    """One service.

    ``folder``: the plugin's. ``options``: the least that a tier of this type needs. ``part``: bytes of a part, the
    least that the service takes. ``delete_batch``: how many objects one request deletes. ``values``: how many are
    listed and deleted in a test of many. ``bucket``: the option that names the bucket, which is also what messages call
    it; ``no_bucket``: the code of a refusal where there is none. ``passing``, ``lasting``: how a request fails for now,
    and for good. ``wrong``: options that the service refuses, with what is said. ``unfit``: options that are refused
    before anything is opened, with what is said.
    """

    folder: Path
    config_class: type[TierConfig]
    store_class: type[ObjectStore]
    options: Mapping[str, Any]
    part: int
    delete_batch: int
    lasting: Mapping[str, Fault]
    cures: Sequence[Cure]
    wrong: tuple[Mapping[str, str], str]
    unfit: Sequence[tuple[Mapping[str, Any], str]]
    passing: Mapping[str, Fault] = field(default_factory=lambda: PASSING)
    values: int = 300
    bucket: str = "bucket"
    no_bucket: str = "NoSuchBucket"


class Suite:
    """Tests of which some have a parameter for each row of the table: ``any_fault``, ``cure`` and so on."""

    differences: ClassVar[Differences]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give the parameters."""
        this = self.differences
        faults = {**this.passing, **this.lasting}
        rows: dict[str, Mapping[str, Any]] = {
            "any_fault": faults,
            # What happens behind an answer's head does not matter to a question.
            "head_fault": {name: fault for name, fault in faults.items() if fault.cut is None and not fault.drip},
            "passing": this.passing,
            "cure": {f"{cure.status}-{cure.code}-{cure.message}": cure for cure in this.cures},
            "unfit": {"-".join(options): (options, said) for options, said in this.unfit},
        }
        for name in rows.keys() & set(metafunc.fixturenames):
            metafunc.parametrize(name, rows[name].values(), ids=rows[name].keys())
