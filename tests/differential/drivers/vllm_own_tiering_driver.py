"""The driver of kvtiers' tiers under vLLM's own tiering; all else is the whole stack's."""

from vllm_driver import Engine as WholeStack
from vllm_driver import release  # it also makes vLLM's tests importable

from real_vllm.ways import PATIENT, tiers  # isort: skip

__all__ = ["open", "release"]


class Engine(WholeStack):
    def extra(self, config):
        return tiers(*config["secondary"], waits=PATIENT, options={"namespace": config["namespace"]})


open = Engine  # noqa: A001 -- the interface of drivers
