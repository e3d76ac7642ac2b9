"""A slice of the differential suite, what makes such a run fail, and the documents' table of the kept run."""

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("kvtiers_differential", Path(__file__).with_name("differential.py"))
differential = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(differential)
kinds, scenes, table = (sys.modules[name] for name in ("kinds", "scenes", "table"))
ROOT = differential.ROOT
SOON = {"io": "thread"}
"""The tiers' I/O is in the workers: a tier host takes longer to start than all scenes take."""
KEPT = json.loads(differential.OUTCOMES.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def python():
    """These tests' own interpreter, in the place of each environment's."""
    patch = pytest.MonkeyPatch()
    patch.setattr(differential, "python_of", lambda _: sys.executable)
    yield
    patch.undo()


@pytest.fixture(scope="module")
def workers(python, tmp_path_factory):
    """Two workers of the client's, and two of the replay's."""
    del python
    folder = tmp_path_factory.mktemp("workers")
    started = {
        name: [differential.Worker(name, folder / f"{name}-{number}.log") for number in range(2)]
        for name in ("client", "replay")
    }
    yield started
    for both in started.values():
        for worker in both:
            worker.end()


@pytest.mark.parametrize("kind", ["memory", "fs", "redis"])
@pytest.mark.parametrize("integration", ["client", "replay"])
def test_every_scene_but_the_outage_works(workers, integration, kind, tmp_path):
    with contextlib.ExitStack() as stack:
        tier = kinds.KINDS[kind](tmp_path)
        tier.start(stack)
        cell = scenes.Cell(integration, tier, workers[integration], ["sglang", "vllm"], **SOON)
        stack.callback(cell.close)
        play_all(cell, kind)


def play_all(cell, kind):
    for name, play in scenes.SCENES.items():
        if name != "outage":  # which takes seconds; its deadlines do
            if kind == "memory" and name in ("restart", "wrong identity"):
                with pytest.raises(scenes.DoesNotApply, match="its values lie in the memory of one engine"):
                    play(cell)
            else:
                assert not play(cell)


def test_a_wrong_byte_fails_the_scene(python, tmp_path):
    del python
    worker = differential.Worker("replay", tmp_path / "log")
    cell = scenes.Cell("replay", kinds.Memory(tmp_path), [worker, worker], ["sglang"], **SOON)
    worker.ask("trust")
    with pytest.raises(AssertionError, match="wrong: "):
        scenes.damage(cell)
    cell.close()
    worker.end()


def test_a_value_that_another_engine_would_take_fails_the_scene(workers, tmp_path):
    """An engine whose name is its own: under it, all of its values are found."""
    cell = scenes.Cell("replay", kinds.Files(tmp_path), workers["replay"], ["replay"], **SOON)
    with pytest.raises(AssertionError, match="replay would look under the same name"):
        scenes.wrong_identity(cell)
    cell.close()


def test_the_kept_outcomes_cover_every_integration_tier_kind_and_scene_and_nothing_fails():
    assert set(KEPT["releases"]) == set(KEPT["outcomes"]) == set(differential.ENVIRONMENTS)
    companions = {path.parent.name for path in (ROOT / "integrations").glob("*/pyproject.toml")}
    assert companions <= set(differential.ENVIRONMENTS)
    for integration, played in KEPT["outcomes"].items():
        assert list(played) == list(differential.KINDS), integration
        for kind, outcomes in played.items():
            assert set(outcomes) == set(scenes.SCENES), (integration, kind)
            for scene, outcome in outcomes.items():
                assert outcome.partition(":")[0] in ("works", "does not apply"), (integration, kind, scene, outcome)


def test_every_integration_is_in_one_lane():
    assert sorted(it for lane in differential.LANES for it in lane) == sorted(differential.ENVIRONMENTS)


def test_lanes_are_put_together_and_what_fails_in_one_fails_the_run(tmp_path):
    run = differential.Run(["replay", "client"], ["memory"], ["cold"], tmp_path)
    differential.run_lanes(run, [["replay"], ["client"]], tmp_path)
    assert run.outcomes == {it: {"memory": {"cold": "works"}} for it in ("replay", "client")}
    assert not run.failures
    differential.run_lanes(run, [["no-such"]], tmp_path)
    assert run.failures == ["the lane of no-such has ended with status 2"]


def test_every_tier_type_of_the_project_is_a_kind():
    from kvtiers.plugins import installed_tiers

    assert {tier.name for tier in installed_tiers()} == set(differential.KINDS)


def test_the_documents_table_is_that_of_the_kept_outcomes():
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.written(page, KEPT), "write it: python tests/differential/table.py"
    (readme,) = (ROOT / "README.md").read_text(encoding="utf-8").partition("| engine | tested |")[2:]
    for release in KEPT["releases"].values():
        name, _, version = release.partition(" ")
        if name != "kvtiers":
            assert version in readme, f"{release} is not among the README's engines"
