"""The process that runs an operator's key command, as the leader of its group: the group never outlives a tier host.

The kernel sends it a signal when the tier host ends, whatever ended that; it kills all that the command has started
and that has stayed in the group.
"""

import os
import signal
import sys

from kvtiers._process import die_with_parent, run

__all__ = ["main"]


def main() -> None:
    """Run the command in ``sys.argv``, behind namespace and tenant, and end with its exit status."""
    namespace, tenant, *command, parent, _path, _name = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    die_with_parent(int(parent), signal.SIGTERM)
    os.environ |= {"KVTIERS_NAMESPACE": namespace, "KVTIERS_TENANT": tenant}
    try:
        status = run(command)
    except OSError as error:
        sys.exit(f"it cannot be started: {error.strerror}")
    sys.exit(status)
