"""Models, engines and stores for tests with the real vLLM, in its own environment: ``make test-vllm``."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from .engines import BLOCK, Engine, Interpreter
from .models import make_model, make_prompt
from .servers import Gateway, Redis
from .ways import fs, tiers, whole_stack

PROMPTS = [make_prompt(1, 700), make_prompt(2, 333)]
"""Two prompts that share nothing; both end inside a block."""
WHOLE = [len(prompt) // BLOCK * BLOCK for prompt in PROMPTS]
"""Tokens of each prompt in whole blocks."""
CHUNKS = sum(WHOLE) // BLOCK
"""Chunks of both prompts, where a chunk is a block."""
LONG = [make_prompt(3, 1300), make_prompt(4, 700)]
"""Two longer ones: a block of a model with states has 544 tokens."""
STATES = {
    "mamba_cache_mode": "align", "enable_prefix_caching": True, "dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32", "max_model_len": 4096,
}  # fmt: skip
"""What an engine needs for such a model. On some processors vLLM's kernels take states of 16 bits, too."""
AUTO = 2 * BLOCK
"""Tokens in a chunk of the whole stack whose config says nothing of ``blocks_per_chunk``."""


@pytest.fixture(scope="module", params=[tiers, whole_stack], ids=["tiers", "whole-stack"])
def way(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    """Each of the two ways in: from tiers, the config of an engine that has them."""
    chosen: Callable[..., dict[str, Any]] = request.param
    return chosen


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same name and shape, with other weights."""
    return make_model(tmp_path_factory.mktemp("other") / "tiny", seed=1)


@pytest.fixture(scope="session")
def start_any(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Engine]]:
    """Start engines that live until the session's end, or until the test ends them.

    ``own_python``: in a Python of its own, not in one that is forked from where other engines of its release come from.
    ``env``: what else stands in its environment.
    """
    engines: list[Engine] = []
    interpreters: dict[object, Interpreter] = {}
    logs = tmp_path_factory.mktemp("logs")

    def start(
        model: Path,
        extra: dict[str, Any] | None = None,
        *,
        release: str = "",
        own_python: bool = False,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Engine:
        key = len(interpreters) if own_python else release
        if key not in interpreters:
            interpreters[key] = Interpreter(logs / f"python{len(interpreters)}.log", release)
        engines.append(Engine(interpreters[key], model, logs / f"engine{len(engines)}.log", extra, env=env, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()
    for interpreter in interpreters.values():
        interpreter.close()


@pytest.fixture
def start(start_any: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """Start engines that end with the test."""
    engines: list[Engine] = []

    def start_one(*arguments: Any, **options: Any) -> Engine:
        engines.append(start_any(*arguments, **options))
        return engines[-1]

    yield start_one
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    server = Redis(tmp_path_factory.mktemp("redis"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def gateway() -> Iterator[Gateway]:
    server = Gateway()
    yield server
    server.close()


@pytest.fixture
def shared_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """From a tier's type, a tier over a new store that several engines can share."""

    def make(kind: str) -> dict[str, Any]:
        if kind == "fs":
            return fs(tmp_path / "store")
        tier: dict[str, Any] = request.getfixturevalue({"redis": "redis", "s3": "gateway"}[kind]).tier(required=True)
        return tier

    return make


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
