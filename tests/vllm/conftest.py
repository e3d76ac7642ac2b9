"""Models, engines and stores for tests with the real vLLM, in its own environment: ``make test-vllm``."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .engines import BLOCK, Engine, make_model, make_prompt

PROMPTS = [make_prompt(1, 700), make_prompt(2, 333)]
"""Two prompts that share nothing; both end inside a block."""
WHOLE = [len(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
"""Tokens of each prompt in whole blocks."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same name and shape, with other weights."""
    return make_model(tmp_path_factory.mktemp("other") / "tiny", seed=1)


@pytest.fixture(scope="session")
def start_any(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Start engines that live until the session's end, or until the test ends them."""
    engines: list[Engine] = []
    logs = tmp_path_factory.mktemp("logs")

    def start(model: Path, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        engines.append(Engine(model, logs / f"engine{len(engines)}.log", extra, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture
def start(start_any: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """Start engines that end with the test: two at a time are too many for a small machine."""
    engines: list[Engine] = []

    def start_one(*arguments: Any, **options: Any) -> Engine:
        engines.append(start_any(*arguments, **options))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def truth(model: Path, start_any: Callable[..., Engine]) -> dict[tuple[int, ...], list[int]]:
    """The tokens that an engine without any connector gives for each prompt."""
    return _truth(start_any(model))


@pytest.fixture(scope="session")
def other_truth(other_model: Path, start_any: Callable[..., Engine]) -> dict[tuple[int, ...], list[int]]:
    """The same with the other weights."""
    return _truth(start_any(other_model))


def _truth(engine: Engine) -> dict[tuple[int, ...], list[int]]:
    tokens, cached = engine.generate(*PROMPTS)
    assert cached == [0, 0]
    engine.shutdown()
    return {tuple(prompt): answer for prompt, answer in zip(PROMPTS, tokens, strict=True)}


@pytest.fixture(scope="session")
def right(truth: dict[tuple[int, ...], list[int]]) -> Callable[..., list[int]]:
    """Have an engine answer prompts, check every token, and return how many tokens of each prompt were cached."""

    def check(engine: Engine, *prompts: list[int], **more: Any) -> list[int]:
        tokens, cached = engine.generate(*prompts, **more)
        assert tokens == [truth[tuple(prompt)] for prompt in prompts]
        return cached

    return check
