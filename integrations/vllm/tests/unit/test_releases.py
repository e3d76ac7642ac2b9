"""Which releases of vLLM are supported, and what stands for their layout."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtiers.api import ConfigError, StartError
from kvtiers_vllm.releases import RELEASES, public_version, release_of


@pytest.mark.parametrize("version", ["0.28.0", "0.30.0", "0.32.0+cpu", "0.33.0", "0.33.1.dev3"])
def test_a_release_between_the_first_and_the_last_is_known(version):
    assert release_of(version).version == version[:4]


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0", "", "dev"])
def test_any_other_is_refused_by_a_sentence_that_names_those(version):
    with pytest.raises(StartError, match=r"does not support vLLM .*; it supports vLLM 0\.28 to 0\.33") as refused:
        release_of(version)
    assert version in str(refused.value)


def test_a_release_that_no_test_runs_shares_nothing():
    epochs = [
        RELEASES["0.32"].epoch("0.32.0"),
        RELEASES["0.32"].epoch("0.32.1"),
        RELEASES["0.31"].epoch("0.31.0"),
        RELEASES["0.29"].epoch("0.29.0"),
        RELEASES["0.30"].epoch("0.30.0"),
    ]
    assert len(set(epochs)) == 5
    assert RELEASES["0.32"].epoch(public_version("0.32.0+cpu")) == epochs[0]


def request(resumable=False, media=0):
    return SimpleNamespace(resumable=resumable, mm_features=[object()] * media)


@pytest.mark.parametrize("prompt_only", [True, False])
def test_a_session_is_trusted_where_vllm_offers_the_blocks_of_it_that_it_has_hashed(prompt_only):
    trusted = [
        version
        for version, release in RELEASES.items()
        if release.offloads_rightly(request(resumable=True), prompt_only=prompt_only)
    ]
    assert trusted == ["0.33"]


def test_vllms_own_cache_is_spoiled_by_sessions_where_their_hashes_are_not_trimmed():
    spoiled = [version for version, release in RELEASES.items() if release.spoils_cache(request(resumable=True))]
    assert spoiled == ["0.28", "0.29", "0.30", "0.31"]
    assert not any(release.spoils_cache(request()) for release in RELEASES.values())


def test_an_answer_behind_several_images_is_trusted_where_its_blocks_are_hashed_with_all_of_them():
    def trusted(media, *, prompt_only):
        return [
            version
            for version, release in RELEASES.items()
            if release.offloads_rightly(request(media=media), prompt_only=prompt_only)
        ]

    assert trusted(2, prompt_only=False) == ["0.31", "0.32", "0.33"]
    assert trusted(1, prompt_only=False) == trusted(2, prompt_only=True) == list(RELEASES)
    assert RELEASES["0.28"].offloads_rightly(SimpleNamespace(mm_features=None), prompt_only=False)


def test_answers_are_not_offloaded_where_vllm_stores_a_token_of_them_that_it_has_not_computed():
    for version, release in RELEASES.items():
        release.require_computed(prompt_only=True)
        if version in {"0.28", "0.29"}:
            with pytest.raises(ConfigError, match=f"offload_prompt_only: false: vLLM {version} stores blocks"):
                release.require_computed(prompt_only=False)
        else:
            release.require_computed(prompt_only=False)


def test_the_table_in_the_docs_says_what_is_known_of_each_release():
    text = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text()
    said = {
        cells[0]: (
            cells[1] == "both",
            re.findall(r"\d+\.\d+\.\d+", cells[2]),
            cells[3] == "random",
            cells[4] == "with a tag",
            cells[5] == "stored",
            cells[6] == "can be stored",
        )
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
        if re.fullmatch(r"\d+\.\d+", cells[0])
    }
    assert said == {
        version: (
            release.whole_stack,
            list(release.tested),
            release.random_seed,
            release.tags_salt,
            release.offloads_sessions,
            release.leaves_last_token,
        )
        for version, release in RELEASES.items()
    }
