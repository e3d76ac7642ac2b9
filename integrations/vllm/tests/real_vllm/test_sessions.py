"""Streaming-input sessions: a block is stored under the tokens that it was computed from, or not at all."""

import pytest

from kvtiers_vllm.releases import release_of

from .engines import BLOCK
from .models import make_prompt
from .ways import fs, tiers, whole_stack

ANSWER = 4
FIRST = make_prompt(11, 2 * BLOCK - ANSWER)
"""With an answer it fills two blocks; vLLM discards the last token of the answer when the session goes on."""
SECOND = make_prompt(12, 3 * BLOCK)
ENDING = make_prompt(13, 40)


EVERY = [
    ("0.28.0", tiers),
    ("0.30.0", tiers),
    ("0.30.0", whole_stack),
    ("0.32.0", whole_stack),
    ("0.33.0", tiers),
    ("0.33.0", whole_stack),
    ("0.29.0", tiers),
    ("0.31.0", tiers),
    ("0.31.0", whole_stack),
]
BY_ALL_ALONE = {"0.29.0", "0.31.0"}  # installed for make test-vllm-all


@pytest.mark.parametrize(
    ("version", "way"),
    [
        pytest.param(
            version,
            way,
            id=f"{version}-{way.__name__.replace('_', '-')}",
            marks=[pytest.mark.every_release] if version in BY_ALL_ALONE else [],
        )
        for version, way in EVERY
    ],
)
def test_what_is_stored_of_a_session_is_the_kv_of_its_tokens_and_not_of_one_that_it_has_discarded(
    start, model, tmp_path, version, way
):
    release = version if version != "0.32.0" else ""  # that of the environment
    engine = start(model, way(fs(tmp_path / "store")), release=release, env={"PYTHONHASHSEED": "0"})
    answers = engine.do("session", inputs=[FIRST, SECOND], tokens=ANSWER)["tokens"]
    engine.forget()
    prompt = FIRST + answers[:ANSWER] + ENDING
    right, cached = engine.generate(prompt, tokens=24, salt="computed")
    assert cached == [0]
    assert engine.generate(prompt, tokens=24)[0] == right
    engine.forget()
    computed = [*FIRST, *answers[: ANSWER - 1], *SECOND, *answers[ANSWER:-1], *ENDING]
    found, cached = engine.generate(computed, tokens=24)
    of_the_session = len(FIRST + SECOND) // BLOCK * BLOCK
    assert cached == [of_the_session if release_of(version).offloads_sessions else BLOCK], "the prompt above has one"
    engine.forget()
    assert engine.generate(computed, tokens=24, salt="computed")[0] == found
    engine.shutdown()
