"""Engines whose ranks lie on several hosts are refused, whatever put them there; replicas are engines of their own."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvtiers.api import StartError
from kvtiers_vllm.identity import Engine
from kvtiers_vllm.own_tiering.topology_check import refuse_several_hosts


def engine(**parallel):
    config = SimpleNamespace(parallel_config=SimpleNamespace(**{"world_size": 8, "nnodes": 1} | parallel))
    return Engine(config, None)


@pytest.fixture
def ray(monkeypatch):
    """Ray, as far as it is asked: where a placement group's bundles lie."""
    util = ModuleType("ray.util")
    util.placement_group_table = lambda group: {"bundles_to_node_id": group}
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", util)


@pytest.mark.parametrize("parallel", [{"nnodes": 2}, {"nnodes": 4, "nnodes_within_dp": 2}])
def test_ranks_on_two_hosts_are_refused_with_their_number(parallel):
    with pytest.raises(StartError, match="the 8 ranks of this engine lie on 2 hosts"):
        refuse_several_hosts(engine(**parallel))


def test_ranks_that_ray_has_placed_on_two_hosts_are_refused(ray):
    with pytest.raises(StartError, match="on 2 hosts"):
        refuse_several_hosts(engine(placement_group={0: "a", 1: "a", 2: "b"}))


def test_one_host_is_as_it_should_be_whatever_other_replicas_do(ray):
    refuse_several_hosts(engine())
    refuse_several_hosts(engine(nnodes=2, nnodes_within_dp=1))
    refuse_several_hosts(engine(placement_group={0: "a", 1: "a"}))
    refuse_several_hosts(Engine(None, None))
