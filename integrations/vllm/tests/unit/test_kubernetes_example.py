"""The Kubernetes example is a config that vLLM takes, and its numbers fit together."""

import re
from pathlib import Path

import pytest
import yaml

from kvtiers import _log_queue
from kvtiers.api.units import parse_size
from kvtiers.cli.pool import pool as pool_command
from kvtiers.config import load_config
from kvtiers.secondary.supervisor import USUAL_PACE
from kvtiers_vllm.cli import transfer_config
from kvtiers_vllm.own_tiering.options import TierSettings

from .test_deployment_examples import longest_end

EXAMPLES = Path(__file__).parents[4] / "examples" / "kubernetes"
OWN_TIERING, WHOLE_STACK, POOL = "vllm.yaml", "vllm-whole-stack.yaml", "pool.yaml"
GIB = 1 << 30


@pytest.fixture(scope="module", params=[OWN_TIERING, WHOLE_STACK])
def example(request):
    return request.param


@pytest.fixture(scope="module")
def objects(example):
    return {item["kind"]: item for item in yaml.safe_load_all((EXAMPLES / example).read_text())}


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


def test_vllm_takes_its_tiers_and_the_secret_stays_in_its_file(tiers, pod, example):
    config, document = tiers
    (command,) = [word for word in pod["containers"][0]["args"] if "vllm serve" in word]
    assert ("--whole-stack" in command) is (example == WHOLE_STACK)
    text = str(transfer_config(config, document))
    assert "kvtiers-fs" in text
    assert "kvtiers-redis" in text
    assert "'secret'" not in text


def test_the_primary_fits_shared_memory_and_the_limit_counts_it(tiers, pod, example):
    primary = tiers[0].primary.capacity
    (shared,) = [gib(volume["emptyDir"]["sizeLimit"]) for volume in pod["volumes"] if volume["name"] == "shm"]
    resources = pod["containers"][0]["resources"]
    if example == OWN_TIERING:  # vLLM's primary is a file there, kvtiers' own is none
        assert primary < shared
    assert shared < gib(resources["limits"]["memory"]) == gib(resources["requests"]["memory"])
    assert gib(resources["limits"]["memory"]) - primary >= 16 * GIB


def test_the_grace_period_holds_vllms_and_vllms_that_of_all_tiers(pod):
    (command,) = [word for word in pod["containers"][0]["args"] if "vllm serve" in word]
    shutdown_timeout = int(re.search(r"--shutdown-timeout (\d+)", command)[1])
    assert pod["terminationGracePeriodSeconds"] > shutdown_timeout
    drained_and_closed = TierSettings().drain + USUAL_PACE.end_seconds + USUAL_PACE.close_seconds
    assert shutdown_timeout > drained_and_closed + _log_queue._CLOSE_SECONDS


def test_the_whole_stack_ends_in_time(example, pod):
    if example == WHOLE_STACK:
        (command,) = [word for word in pod["containers"][0]["args"] if "vllm serve" in word]
        assert int(re.search(r"--shutdown-timeout (\d+)", command)[1]) > longest_end()


def test_no_probe_asks_a_tier_and_the_secret_is_a_file(pod):
    (container,) = pod["containers"]
    probes = [container[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert set(probes) == {"/health"}
    assert "env" not in container
    assert [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume] == ["kvtiers-redis"]


def test_a_client_and_prometheus_find_the_server_by_its_port(objects, pod):
    service, deployment = objects["Service"]["spec"], objects["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    (port,) = pod["containers"][0]["ports"]
    assert [entry["targetPort"] for entry in service["ports"]] == [port["name"]]
    annotations = deployment["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert annotations["prometheus.io/scrape"] == "true"
    assert f"--port {port['containerPort']}" in pod["containers"][0]["args"][0]


def test_a_gated_model_has_its_token_in_a_file_and_another_needs_none(pod):
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "huggingface"]
    (source,) = volume["projected"]["sources"]
    assert source["secret"]["optional"]
    (mount,) = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "huggingface"]
    assert f"export HF_TOKEN_PATH={mount['mountPath']}/token;" in pod["containers"][0]["args"][0]


def test_nothing_outlives_the_server_since_it_is_the_first_process_of_its_container(pod):
    container = pod["containers"][0]
    assert container["command"] == ["bash", "-c"]
    assert "exec vllm serve " in container["args"][0]
    assert not pod.get("shareProcessNamespace")


def test_every_mount_has_its_volume(pod):
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


@pytest.fixture(scope="module")
def keeper():
    (daemons,) = yaml.safe_load_all((EXAMPLES / POOL).read_text())
    return daemons["spec"]["template"]["spec"]


def test_the_keepers_command_is_one_and_its_pod_has_room_for_the_pool(keeper):
    (container,) = keeper["containers"]
    _, group, name, *words = container["command"]
    assert group == "pool"
    given = pool_command.commands[name].make_context(name, words).params
    resources = container["resources"]
    assert gib(resources["limits"]["memory"]) == gib(resources["requests"]["memory"])
    assert gib(resources["limits"]["memory"]) >= parse_size(given["size"]) + 0.3 * GIB
    _, group, name, *words = container["readinessProbe"]["exec"]["command"]
    assert pool_command.commands[name].make_context(name, words).params["path"] == given["path"]


def test_the_socket_is_where_an_engine_with_the_comments_lines_finds_it(keeper):
    text = (EXAMPLES / POOL).read_text()
    mount, volume = (yaml.safe_load(line)[0] for line in re.findall(r"^#   (- {name: pool, .*)$", text, re.MULTILINE))
    (there,) = keeper["containers"][0]["volumeMounts"]
    assert mount == there
    (kept,) = keeper["volumes"]
    assert volume["hostPath"]["path"] == kept["hostPath"]["path"]
    assert volume["hostPath"]["type"] == "DirectoryOrCreate", "an engine starts also where no keeper has run yet"
    path = re.search(r"'pool: (\S+)' below 'primary'", text)[1]
    assert Path(path).parent == Path(mount["mountPath"])
    assert path in keeper["containers"][0]["command"]


def test_the_keeper_has_the_engines_image_and_user(keeper, objects):
    engine = objects["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert keeper["containers"][0]["image"] == engine["image"]
    assert keeper["containers"][0]["securityContext"]["runAsUser"] == 0
    assert "runAsUser" not in engine.get("securityContext", {}), "the image's, which is root"
