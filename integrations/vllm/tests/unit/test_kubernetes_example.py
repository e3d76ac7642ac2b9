"""The Kubernetes example is a config that vLLM takes, and its numbers fit together."""

import re
from pathlib import Path

import pytest
import yaml

from kvtiers.config import load_config
from kvtiers.secondary import placement, store_tier
from kvtiers_vllm.cli import transfer_config
from kvtiers_vllm.own_tiering import build as opening
from kvtiers_vllm.own_tiering.options import TierSettings

EXAMPLE = Path(__file__).parents[4] / "examples" / "kubernetes" / "vllm.yaml"
GIB = 1 << 30


@pytest.fixture(scope="module")
def objects():
    return {item["kind"]: item for item in yaml.safe_load_all(EXAMPLE.read_text())}


@pytest.fixture
def tiers(objects, tmp_path, monkeypatch):
    """The tiers' config, its secret where the test can write it."""
    text = objects["ConfigMap"]["data"]["tiers.yaml"]
    (tmp_path / "password").write_text("secret")
    document = yaml.safe_load(text.replace("/etc/kvtiers-redis", str(tmp_path)))
    return load_config(document), document


@pytest.fixture
def pod(objects):
    return objects["Deployment"]["spec"]["template"]["spec"]


def gib(text):
    return int(re.fullmatch(r"(\d+)Gi", text)[1]) * GIB


def test_vllm_takes_its_tiers_and_the_secret_stays_in_its_file(tiers):
    config, document = tiers
    text = str(transfer_config(config, document))
    assert "kvtiers-fs" in text
    assert "kvtiers-redis" in text
    assert "'secret'" not in text


def test_the_primary_fits_shared_memory_and_the_limit_counts_it(tiers, pod):
    primary = tiers[0].primary.capacity
    (shared,) = [gib(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"] if volume["name"] == "shm"]
    resources = pod["containers"][0]["resources"]
    assert primary < shared < gib(resources["limits"]["memory"]) == gib(resources["requests"]["memory"])
    assert gib(resources["limits"]["memory"]) - primary >= 16 * GIB


def test_the_grace_period_holds_vllms_and_vllms_that_of_all_tiers(pod):
    (command,) = [word for word in pod["containers"][0]["args"] if "vllm serve" in word]
    shutdown_timeout = int(re.search(r"--shutdown-timeout (\d+)", command)[1])
    assert pod["terminationGracePeriodSeconds"] > shutdown_timeout
    drained_and_closed = TierSettings().drain + opening._CLOSE_SECONDS + store_tier._CLOSE_SECONDS
    assert shutdown_timeout > drained_and_closed + placement._LOG_SECONDS


def test_no_probe_asks_a_tier_and_the_secret_is_a_file(pod):
    (container,) = pod["containers"]
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert set(probes) == {"/health"}
    assert "env" not in container
    assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == ["kvtiers-redis"]


def test_every_mount_has_its_volume(pod):
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
