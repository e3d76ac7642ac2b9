"""The examples for Compose, Helm and systemd: what they name is there, and their numbers fit together and our code."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from kvtiers import _log_queue
from kvtiers.api.units import parse_size
from kvtiers.config import load_config
from kvtiers.secondary.supervisor import USUAL_PACE
from kvtiers.tiering import engine_side, manager

EXAMPLES = Path(__file__).parents[4] / "examples"
COMPOSE, HELM, SYSTEMD = EXAMPLES / "compose", EXAMPLES / "helm", EXAMPLES / "systemd"
GIB = 1 << 30
OF_VLLM = 16 * GIB  # that an example leaves beside the primary
STACK = Path(__file__).parents[2] / "src" / "kvtiers_vllm" / "stack" / "manager.py"  # which imports vLLM
DRAIN_SECONDS = float(re.search(r"^_DRAIN_SECONDS = ([\d.]+)", STACK.read_text(), re.MULTILINE)[1])
UNITS = sorted(SYSTEMD.glob("*.service"))


def longest_end():
    """Seconds that the whole stack takes at most, from the engine's end of its requests on."""
    kept = manager._STEP_SECONDS + engine_side._WHAT_IF_SECONDS + engine_side._SPAN_SECONDS
    return DRAIN_SECONDS + kept + USUAL_PACE.close_seconds + _log_queue._CLOSE_SECONDS


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((COMPOSE / "compose.yaml").read_text())


@pytest.fixture(scope="module")
def model():
    (model,) = yaml.safe_load((HELM / "values.yaml").read_text())["servingEngineSpec"]["modelSpec"]
    return model


def replicas(compose):
    return {name: service for name, service in compose["services"].items() if "build" in service}


def after(words, option):
    return words[words.index(option) + 1]


def test_each_file_that_compose_mounts_is_there(compose):
    volumes = [volume for service in compose["services"].values() for volume in service.get("volumes", ())]
    mounted = [volume.split(":") for volume in volumes]
    files = [(COMPOSE / source).resolve() for source, *_ in mounted if source.startswith(".")]
    assert len(files) == 7
    assert [file for file in files if not file.exists()] == []
    assert {source for source, *_ in mounted if not source.startswith(".")} == set(compose["volumes"])


def test_the_replicas_share_one_config_and_differ_in_port_and_gpu_alone(compose):
    one, two = replicas(compose).values()
    assert {key for key in one if one[key] != two[key]} == {"ports", "deploy"}
    config = load_config(COMPOSE / "tiers.yaml")
    (tier,) = config.secondary
    host = re.fullmatch(r"redis://(.*):6379/0", tier.url)[1]
    assert host in compose["services"]
    assert f"./tiers.yaml:{one['environment']['KVTIERS_CONFIG']}:ro" in one["volumes"]


def test_composes_numbers_fit(compose):
    for service in replicas(compose).values():
        timeout = int(after(service["command"], "--shutdown-timeout"))
        assert int(service["stop_grace_period"].removesuffix("s")) > timeout > longest_end()
        primary = load_config(COMPOSE / "tiers.yaml").primary.capacity
        assert parse_size(service["mem_limit"].upper().replace("GB", "GiB")) >= primary + OF_VLLM
    valkey = compose["services"]["valkey"]
    assert parse_size(after(valkey["command"], "--maxmemory").upper().replace("GB", "GiB")) < parse_size(
        valkey["mem_limit"].upper().replace("GB", "GiB")
    )


def test_prometheus_takes_its_config_and_scrapes_every_replica(compose, tmp_path):
    shutil.copy(COMPOSE / "prometheus.yml", tmp_path)
    shutil.copy(EXAMPLES / "observability" / "alerts.yaml", tmp_path)  # mounted beside it
    done = subprocess.run(
        ["promtool", "check", "config", "prometheus.yml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    (targets,) = [config["targets"] for config in job["static_configs"]]
    port = after(next(iter(replicas(compose).values()))["command"], "--port")
    assert targets == [f"{name}:{port}" for name in replicas(compose)]


def test_grafana_finds_prometheus_and_the_dashboard(compose):
    (source,) = yaml.safe_load((COMPOSE / "grafana/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((COMPOSE / "grafana/dashboards/kvtiers.yaml").read_text())["providers"]
    path = provider["options"]["path"]
    assert f"../observability/dashboard.json:{path}/kvtiers.json:ro" in compose["services"]["grafana"]["volumes"]


def test_helms_mounts_have_their_volumes_and_the_config_is_where_it_is_looked_for(model):
    assert {mount["name"] for mount in model["extraVolumeMounts"]} == {
        volume["name"] for volume in model["extraVolumes"]
    }
    (variable,) = model["env"]
    paths = {mount["name"]: mount["mountPath"] for mount in model["extraVolumeMounts"]}
    assert variable == {"name": "KVTIERS_CONFIG", "value": f"{paths['kvtiers']}/tiers.yaml"}
    kubernetes = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / "vllm-whole-stack.yaml").read_text()))
    (text,) = [each["data"]["tiers.yaml"] for each in kubernetes if each["kind"] == "ConfigMap"]
    assert f"file: {paths['kvtiers-redis']}/password" in text
    assert f"path: {paths['kvtiers-cache']}\n" in text
    primary = parse_size(re.search(r"capacity: (32GiB) +#", text)[1])
    limit, request = (parse_size(f"{model[name]}B") for name in ("limitMemory", "requestMemory"))
    assert limit == request >= primary + OF_VLLM


def test_helms_replicas_can_mount_the_models_files_on_any_node(model):
    assert model["replicaCount"] > 1
    assert model["pvcAccessMode"] == ["ReadWriteMany"]


def test_helms_values_say_how_to_make_each_secret_and_config_map_that_its_pods_wait_for(model):
    wanted = {("secret", model["hf_token"]["secretName"])}
    for volume in model["extraVolumes"]:
        wanted |= {("configmap", volume[kind]["name"]) for kind in volume if kind == "configMap"}
        wanted |= {("secret", volume[kind]["secretName"]) for kind in volume if kind == "secret"}
    made = re.findall(
        r"^#   kubectl create (secret|configmap) (?:generic )?(\S+)", (HELM / "values.yaml").read_text(), re.MULTILINE
    )
    assert set(made) == wanted


def test_helms_engine_ends_within_the_grace_period_that_kubernetes_gives_it(model):
    timeout = int(after(model["vllmConfig"]["extraArgs"], "--shutdown-timeout"))
    assert 30 > timeout > longest_end()


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_unit(unit, tmp_path):
    text = re.sub(r"/opt/vllm/bin/\w+", shutil.which("true"), unit.read_text())
    (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit.name], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_units_numbers_fit():
    text = (SYSTEMD / "vllm.service").read_text()
    timeout = int(re.search(r"--shutdown-timeout (\d+)", text)[1])
    assert int(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1]) > timeout > longest_end()
    primary = parse_size(re.search(r"primary: {capacity: (\w+)}", text)[1])
    assert parse_size(re.search(r"^MemoryMax=(\d+)G$", text, re.MULTILINE)[1] + "GiB") >= primary + OF_VLLM
    assert "\nCacheDirectory=kvtiers\n" in text
    assert "path: /var/cache/kvtiers," in text
    users = {re.search(r"^User=(\w+)$", unit.read_text(), re.MULTILINE)[1] for unit in UNITS}
    assert len(users) == 1, "an engine answers to its own user"
