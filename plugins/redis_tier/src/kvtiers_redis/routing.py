"""Routing: requests are split by the server that has their keys, and sent again where a server redirects them."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from redis.exceptions import RedisError

from kvtiers.api import NotKept, TierUnavailable
from kvtiers_redis.link import Link, ReplyError
from kvtiers_redis.places import Address
from kvtiers_redis.servers import Server
from kvtiers_redis.topology import Topology
from kvtiers_redis.windows import Answer, Exchange, to_the_end

__all__ = ["Router", "Talk", "as_error"]

_ROUNDS = 5  # a slot that moves at this moment takes two
_GRACE_SECONDS = 0.1  # for the next reply of a server that answers, when the wait for another one took all the time
_PASSING = frozenset({"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MOVED", "ASK", "NOAUTH", "READONLY", "TRYAGAIN"})
"""Error codes of a server that will answer soon, or is about to be replaced."""

Talk: TypeAlias = Callable[[Link, Sequence[int], bool], Exchange]
"""Send the requests of these indexes on a link, each behind ASKING or not, and return the answers."""

_Groups: TypeAlias = dict[tuple[Server, bool], list[int]]
"""Indexes by the server to send them to, behind ASKING or not."""


class Router:
    """Used by several threads."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self.redirected = 0
        """Requests that a server sent to another one."""
        self.unreachable = 0
        """Values that count as absent, or were not kept, because their server, one of several, does not answer."""

    def ask(
        self,
        keys: Sequence[bytes],
        talk: Talk,
        *,
        instead: Mapping[str, Answer] | None = None,
        partial: bool = True,
        refusals: Collection[str] | None = None,
    ) -> list[Answer]:
        """Return an answer for each key.

        ``instead``: what to return for an error with this code. Other errors are raised. With ``partial``, False stands
        for the keys of a server of many that cannot be reached, unless no server can. ``refusals``: if given, not False
        but a NotKept that says why, and the same for an error with one of these codes.
        """
        answers = self._run(keys, talk)
        if _has_results_alone(answers):
            return answers
        for i, answer in enumerate(answers):
            if isinstance(answer, ReplyError):
                answers[i] = _instead_of(answer, instead or {}, refusals or ())
        failed = [i for i, answer in enumerate(answers) if _is_failure(answer)]
        if not failed:
            return answers
        for i in failed:
            if isinstance(answers[i], ReplyError) and not _is_passing(answers[i]):
                raise as_error(answers[i])
        if not (partial and self._topology.is_split) or len(failed) == len(answers):
            raise as_error(answers[failed[0]])
        self.unreachable += len(failed)
        for i in failed:
            answers[i] = False if refusals is None else NotKept(str(answers[i]), full=False)
        return answers

    def _run(self, keys: Sequence[bytes], talk: Talk) -> list[Answer]:
        answers: list[Answer] = [None] * len(keys)
        groups = self._split(keys, range(len(keys)), answers)
        for _ in range(_ROUNDS):
            said = to_the_end(
                [_talk(server, talk, indexes, asking=asking) for (server, asking), indexes in groups.items()]
            )
            for indexes, theirs in zip(groups.values(), said, strict=True):
                for i, answer in zip(indexes, theirs, strict=True):
                    answers[i] = answer
            if _has_results_alone(answers):
                break
            groups = self._redirect(keys, groups, answers)
            if not groups:
                break
        return answers

    def _split(self, keys: Sequence[bytes], indexes: Sequence[int], answers: list[Answer]) -> _Groups:
        groups: _Groups = defaultdict(list)
        for i in indexes:
            try:
                groups[self._topology.server_of(keys[i]), False].append(i)
            except TierUnavailable as error:
                answers[i] = error.with_traceback(None)
        return groups

    def _redirect(self, keys: Sequence[bytes], groups: _Groups, answers: list[Answer]) -> _Groups:
        """Return the servers of the next round, for keys that were not answered."""
        again: _Groups = defaultdict(list)
        lost: list[tuple[int, Server]] = []
        stale = False
        for (server, _), indexes in groups.items():
            for i in indexes:
                answer = answers[i]
                if not isinstance(answer, Exception):
                    continue
                target = self._target(answer, server)
                if target is not None:
                    self.redirected += 1
                    again[target].append(i)
                    stale = stale or not target[1]
                elif not isinstance(answer, ReplyError) or _is_passing(answer):
                    lost.append((i, server))
        if lost or stale:
            self._topology.refresh()
        for i, server in lost:
            for other in self._split(keys, [i], answers):
                if other[0] is not server:
                    again[other].append(i)
        return again

    def _target(self, answer: Exception, server: Server) -> tuple[Server, bool] | None:
        """Return the server that a redirection names, and whether it wants ASKING."""
        if not isinstance(answer, ReplyError) or answer.code not in {"MOVED", "ASK"}:
            return None
        address = _address_in(str(answer), server)
        other = self._topology.server_at(address) if address is not None else None
        return (other, answer.code == "ASK") if other is not None else None


def _is_failure(answer: Answer) -> bool:
    return isinstance(answer, Exception) and not isinstance(answer, NotKept)


def _has_results_alone(answers: Sequence[Answer]) -> bool:
    """Return whether no error is among them; many answers are of few types."""
    return not any(issubclass(kind, Exception) for kind in set(map(type, answers)))


def _talk(server: Server, talk: Talk, indexes: Sequence[int], *, asking: bool) -> Exchange:
    try:
        with server.link() as link:
            exchange, until = talk(link, indexes, asking), 0.0
            while True:
                try:
                    next(exchange)
                except StopIteration as end:
                    answers: list[Answer] = end.value
                    return answers
                until = until or time.monotonic() + link.seconds_left
                yield
                # The time spent on the others counts, too: several hung servers cost a call its time once.
                if time.monotonic() > until and link.is_idle(_GRACE_SECONDS):
                    raise TimeoutError("no reply in the time of the call")
    except (OSError, RedisError, TierUnavailable) as error:
        # A new one, since the traceback of this one holds the callers' buffers.
        failure = TierUnavailable(f"{server.name}: {error or type(error).__name__}")
    return [failure] * len(indexes)


def _address_in(text: str, server: Server) -> Address | None:
    """Return the address in ``MOVED 3999 127.0.0.1:6381``; without a host it is the one that was asked."""
    words = text.split()
    host, colon, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    if not colon or not port.isdecimal():
        return None
    return host or server.host, int(port)


def _instead_of(error: ReplyError, instead: Mapping[str, Answer], refusals: Collection[str]) -> Answer:
    """Return what an error stands for where it is an answer of one key, or the error."""
    return NotKept(str(error), full=False) if error.code in refusals else instead.get(error.code, error)


def _is_passing(answer: Answer) -> bool:
    return isinstance(answer, ReplyError) and answer.code in _PASSING


def as_error(answer: Answer) -> Exception:
    """Return what to raise for an error that was answered: TierUnavailable if it passes, the error itself if not."""
    assert isinstance(answer, Exception)
    return TierUnavailable(str(answer)) if _is_passing(answer) else answer
