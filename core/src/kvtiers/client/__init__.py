"""The client: the tiers without a scheduler, for an engine that has bytes and keys. ``open_client`` is the way in.

=================  ==============================================================================================
thread             does
=================  ==============================================================================================
any caller's       gathers its values into bounce rows, waits, scatters what was found; never touches a tier
driver (1)         makes every call of the tiers, keeps the jobs and their deadlines (``driver.py``)
=================  ==============================================================================================

A bounce row has holders: the call that took it, and each job on it. It is free again when the last of them has
released it: a call that ends at its deadline leaves its rows to the jobs that still run.
"""

from kvtiers.client.client import Client, PutResult
from kvtiers.client.open import open_client

__all__ = ["Client", "PutResult", "open_client"]
