"""The actions of an operator's commands: what each does to a running engine, in a step of its own.

An action runs on its command's thread (``control.py``). What touches the engine waits in the ``CommandQueue`` for the
engine's next step; what builds or ends tiers, which takes long, is done on the command's thread (``live_config.py``).
"""

import contextlib
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvtiers.api import ConfigError
from kvtiers.api.units import format_size
from kvtiers.control import LATE_SECONDS, Action, Request
from kvtiers.layout.storage_name import check_tenant
from kvtiers.tiering.command_queue import Command, CommandRefused
from kvtiers.tiering.engine_side import LiveSide
from kvtiers.tiering.manager import TieringManager

__all__ = ["EngineActions"]

_FEWEST_DIGITS = 8  # of a fingerprint: fewer may be a slip
_RATES = ("bytes_per_second", "requests_per_second")


class EngineActions:
    """The actions of an engine with a tiering manager."""

    def __init__(self, manager: TieringManager, model: str) -> None:
        self._manager = manager
        self._model = model
        self._commands = manager.commands

    def actions(self) -> dict[str, Action]:
        """Return the actions by name."""
        actions: dict[str, Action] = {"switch": self._switch, "drain": self._drain, "clear": self._clear}
        actions |= _WarmUpActions(self._manager, self.in_step).actions()
        if self._manager.live is not None:
            live = _LiveActions(self._manager.live, self.in_step)
            actions |= {"limit": live.limit, "reload": live.reload, "attach": live.attach, "detach": live.detach}
        return actions

    def _switch(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        tier, to = request.text("tier"), request.text("to")
        request.end()
        done = self.in_step(request, lambda: self._manager.tier_commands.switch(tier, to))
        said = f"{tier}: {done['is']}, it was {done['was']}"
        if done["cancelled_chunks"]:
            said += f"; {done['cancelled_chunks']} chunks that it was to load are misses"
        if done["is"] != "on" and done["running_jobs"]:
            said += f"; {done['running_jobs']} jobs run to their end"
        return said, done

    def _drain(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        request.end()
        done = self.in_step(request, self._manager.chunk_commands.drain(), "its stores go on")
        said = f"drained: {done['stored_chunks']} chunks were stored meanwhile, {done['failed_chunks']} were not"
        if done["memory_only_chunks"]:
            said += f"; {done['memory_only_chunks']} wait in memory for 'admission: on_eviction'"
        return said, done

    def _clear(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        of = {name: request.text(name) for name in ("fingerprint", "model", "tenant") if request.has(name)}
        request.end()
        if len(of) != 1:
            raise CommandRefused("give one of fingerprint, model and tenant; nothing was changed")
        ((what, wanted),) = of.items()
        if what == "tenant":
            return self._clear_tenant(request, wanted)
        done = self.in_step(request, partial(self._clear_if, what, wanted))
        return f"{done['cleared_chunks']} chunks forgotten; what the tiers hold stays: 'kvtiers store' removes it", done

    def _clear_tenant(self, request: Request, tenant: str) -> tuple[str, Mapping[str, Any]]:
        try:
            check_tenant(tenant)
        except ConfigError as error:
            raise CommandRefused(f"{error}; nothing was changed") from None
        if not self._manager.tenants.is_on:
            raise CommandRefused("this engine's config has no 'tenants', so no chunk is one's; nothing was changed")
        unfinished = "chunks that are in use stay until they are free; clear it again"
        done = self.in_step(request, self._manager.chunk_commands.clear_tenant(tenant), unfinished)
        text = "chunks of tenant {!r} forgotten; what the tiers hold stays: 'kvtiers store prune --tenant' removes it"
        return f"{done['cleared_chunks']} {text.format(tenant)}", done

    def _clear_if(self, what: str, wanted: str) -> dict[str, Any]:
        """Clear the primary, if all that it has is of this fingerprint or model; engine's thread."""
        names = {"fingerprint": self._manager.fingerprint(), "model": self._model}
        has = names[what]
        if has != wanted and not (what == "fingerprint" and len(wanted) >= _FEWEST_DIGITS and has.startswith(wanted)):
            raise CommandRefused(f"this engine's {what} is {has!r}, not {wanted!r}; nothing was changed")
        return {**names, **self._manager.chunk_commands.clear()}

    def in_step(
        self, request: Request, work: Callable[[], Mapping[str, Any] | None], unfinished: str = ""
    ) -> Mapping[str, Any]:
        """Have a step of the engine do this work, and wait for its answer as long as the client does.

        ``unfinished``: of work of several steps, what becomes of it when its client waits no longer.
        """
        command, steps, began = Command(work), self._manager.steps, time.monotonic()
        if not self._commands.post(command):
            raise CommandRefused("too many commands wait for the engine's next step; nothing was changed")
        with contextlib.suppress(queue.Empty):
            return command.answer(request.seconds)
        waited = time.monotonic() - began
        if command.withdraw():
            idle = self._manager.steps == steps
            why = "the engine has not stepped for" if idle else "the engine's steps have not come to it in"
            hint = "; an idle engine steps with its next request" if idle else ""
            raise CommandRefused(f"{why} {waited:.3g}s; nothing was changed{hint}")
        with contextlib.suppress(queue.Empty):
            return command.answer(LATE_SECONDS)
        raise CommandRefused(f"it has begun, and has not ended in {waited:.3g}s; {unfinished or 'see the log'}")


_NOT_READY = (
    "the engine's ranks, which have not all joined, or for 'prefault: all'; if it goes on, the engine's log says why"
)


class _WarmUpActions:
    """The actions of a warm-up: its begin, its keys (also none of them, to ask how far it is), and its end."""

    def __init__(self, manager: TieringManager, in_step: Callable[..., Mapping[str, Any]]) -> None:
        self._manager = manager
        self._warm_ups = manager.warm_ups
        self._in_step = in_step

    def actions(self) -> dict[str, Action]:
        """Return the actions by name."""
        return {"warm": self.begin, "warm-keys": self.keys, "warm-end": self.end}

    def begin(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Begin to fill the primary from a tier."""
        tier = request.text("tier")
        limits = [request.number(name, default=None) for name in ("bytes_per_second", "most_bytes")]
        request.end()
        done = dict(self._in_step(request, lambda: self._warm_ups.begin(tier, *limits)))
        done["tokens_per_chunk"] = list(self._manager.tokens_per_chunk)
        done["fingerprint"] = self._manager.fingerprint()
        return f"warm-up {done['id']} from {tier} has begun", done

    def keys(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Give a warm-up more keys, as far as it takes them now."""
        number = request.whole("id")
        runs = request.keys("prefixes")
        continues, is_last = request.flag("continues"), request.flag("last")
        request.end()
        done = self._in_step(request, lambda: self._warm_ups.give(number, runs, continues=continues, is_last=is_last))
        if not self._manager.is_ready:
            done = {**done, "waits_for": _NOT_READY}
        return f"warm-up {number}: {_so_far(done)}", done

    def end(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Stop a warm-up, if it is not over, and return what has come of it."""
        number = request.whole("id")
        request.end()
        done = self._in_step(request, lambda: self._warm_ups.end(number))
        return f"warm-up {number}: {_so_far(done)}; {done['ended']}", done


def _so_far(done: Mapping[str, Any]) -> str:
    return (
        f"{done['loaded']} chunks loaded, {done['resident']} were in memory, {done['missing']} are not in the tier, "
        f"{done['failed']} failed"
    )


class _LiveActions:
    """The actions that change a config's options and tiers. ``in_step``: as in ``EngineActions``."""

    def __init__(self, live: LiveSide, in_step: Callable[..., Mapping[str, Any]]) -> None:
        self._live = live
        self._in_step = in_step

    def limit(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Give a tier other threads, or another rate limit; one that is null is none."""
        tier = request.text("tier")
        changes: dict[str, Any] = {}
        if request.has("threads"):
            changes["threads"] = request.number("threads")
        rate = {name: request.number(name) for name in _RATES if request.has(name)}
        request.end()
        if rate:
            changes["rate_limit"] = rate
        if not changes:
            raise CommandRefused(f"give threads, {' or '.join(_RATES)}; nothing was changed")
        done = self._live.limit(tier, changes, partial(self._in_step, request))
        nbytes, calls = done["bytes_per_second"], done["requests_per_second"]
        most = [f"{format_size(nbytes)} a second"] if nbytes else []
        most += [f"{calls:g} calls a second"] if calls else []
        threads = f"{done['threads']} thread{'s' if done['threads'] > 1 else ''}"
        return f"{tier}: {threads} a host, {' and '.join(most) or 'no rate limit'}", done

    def reload(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Apply what is live of the config's file."""
        path = request.text("config") if request.has("config") else ""
        request.end()
        done = self._live.reload(path, partial(self._in_step, request))
        lines = [f"applied: {', '.join(done['applied'])}" if done["applied"] else "nothing to apply"]
        return "\n".join([*lines, *(f"not applied: {line}" for line in done["refused"])]), done

    def attach(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Open a tier of the config's file."""
        tier, path = request.text("tier"), request.text("config") if request.has("config") else ""
        request.end()
        done = self._live.attach(tier, path, partial(self._in_step, request))
        state = "and open" if done["open"] else f"not open so far ({done['error']}); it goes on trying"
        return f"{tier}: attached, {state}", done

    def detach(self, request: Request) -> tuple[str, Mapping[str, Any]]:
        """Close a tier."""
        tier = request.text("tier")
        request.end()
        unfinished = "it is off, and stays so: detach it again when its jobs have ended"
        done = self._live.detach(tier, partial(self._in_step, request, unfinished=unfinished))
        return f"{tier}: detached", done
