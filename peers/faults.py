"""Faults on purpose: a wrapper around any transport that delays, drops, cuts and repeats messages.

Each call is two messages, and each travels over a ``Link``: the request from caller to callee, the
reply back. A ``Rule`` says which messages it is about, what happens to them (an action) and how
often. Rules are looked up when a message sets out, so a partition that begins in the middle of a
call swallows its reply. All that is random comes from the generator given to the plan; with
anyio's virtual clocks a plan and a seed give the same run again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import anyio
from anyio.abc import TaskGroup

from peers.transport import Frame, Handler, Transport
from swarm.errors import CallLost, NotConnected, SwarmError
from swarm.types import PeerId


@dataclass(frozen=True, slots=True)
class Link:
    """One way of one call: from whom to whom, and whether it carries the reply."""

    source: PeerId
    target: PeerId
    is_reply: bool = False


Matches = Callable[[Link, Mapping[str, Any]], bool]
"""Gets the link and the header of the call's *request*, for its reply too."""


@dataclass(frozen=True, slots=True)
class Delay:
    """The message takes this long more. It arrives even if the caller has given up by then."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Rate:
    """A link of so many payload bytes a second; messages queue behind each other."""

    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Drop:
    """The message never arrives, and nobody is told: the caller waits until its time is up."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The message never arrives, and the caller sees the connection break at once."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """No connection can be opened (``NotConnected``); for a reply the same as ``Cut``."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A request arrives once more, this many seconds after the first; no effect on replies."""

    after_s: float


Action = Delay | Rate | Drop | Cut | Unreachable | Duplicate


@dataclass(eq=False, slots=True)
class Rule:
    """``action`` befalls messages that match, at most ``times_left`` times (None: always).

    ``chance`` is the probability with which it befalls a message that matches.
    """

    matches: Matches
    action: Action
    times_left: int | None = None
    chance: float = 1.0


@dataclass(frozen=True, slots=True)
class Event:
    """An entry of the plan's log: what befell which message, and when (seconds)."""

    at: float
    link: Link
    action: Action
    header: Mapping[str, Any]


@dataclass(slots=True)
class Fate:
    """All that the rules do to one message."""

    delay_s: float = 0.0
    loss: Drop | Cut | Unreachable | None = None
    repeats_after_s: list[float] = field(default_factory=list)


class FaultPlan:
    """The rules in force; tests change them at run time. An async context: use ``async with``.

    Args:
        rng: decides for rules whose chance is below 1.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rules: list[Rule] = []
        self.log: list[Event] = []
        self._rng = rng
        self._busy_until: dict[tuple[PeerId, PeerId], float] = {}
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> FaultPlan:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        self.tasks.cancel_scope.cancel()
        return await self.tasks.__aexit__(kind, error, trace)

    @property
    def tasks(self) -> TaskGroup:
        """Carries messages that arrive later than their caller waits."""
        assert self._tasks is not None, "use FaultPlan as an async context manager"
        return self._tasks

    def add(
        self, matches: Matches, action: Action, *, times: int | None = None, chance: float = 1.0
    ) -> Rule:
        """Put a rule in force, after those that are; returns it for ``remove``."""
        rule = Rule(matches, action, times, chance)
        self.rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        """End a rule; one that is not in force (any more) is no error."""
        self.rules = [other for other in self.rules if other is not rule]

    def fate(self, link: Link, header: Mapping[str, Any], nbytes: int) -> Fate:
        """What the rules do to a message that sets out now. Uses up and logs what it applies."""
        fate = Fate()
        now = anyio.current_time()
        for rule in self.rules:
            if rule.times_left == 0 or not rule.matches(link, header):
                continue
            if rule.chance < 1.0 and self._rng.random() >= rule.chance:
                continue
            if rule.times_left is not None:
                rule.times_left -= 1
            self.log.append(Event(now, link, rule.action, dict(header)))
            self._apply(rule.action, fate, link, now, nbytes)
        return fate

    def _apply(self, action: Action, fate: Fate, link: Link, now: float, nbytes: int) -> None:
        if isinstance(action, Delay):
            fate.delay_s += action.seconds
        elif isinstance(action, Rate):
            way = (link.source, link.target)
            sent = max(now, self._busy_until.get(way, now)) + nbytes / action.bytes_per_s
            self._busy_until[way] = sent
            fate.delay_s += sent - now
        elif isinstance(action, Duplicate):
            fate.repeats_after_s.append(action.after_s)
        elif fate.loss is None:
            fate.loss = action


def requests(
    source: PeerId | None = None, target: PeerId | None = None, **header: object
) -> Matches:
    """Requests from ``source`` to ``target`` (None: anyone) whose header has these values."""
    return _messages(False, source, target, header)


def replies(
    source: PeerId | None = None, target: PeerId | None = None, **header: object
) -> Matches:
    """Replies from ``source`` to ``target`` to requests whose header has these values."""
    return _messages(True, source, target, header)


def anything(source: PeerId | None = None, target: PeerId | None = None) -> Matches:
    """Requests and replies from ``source`` to ``target`` (None: anyone)."""
    return _messages(None, source, target, {})


def one_way(sources: Iterable[PeerId], targets: Iterable[PeerId]) -> Matches:
    """Whatever goes from one of ``sources`` to one of ``targets``, not what comes back."""
    here, there = frozenset(sources), frozenset(targets)
    return lambda link, _: link.source in here and link.target in there


def across(groups: Sequence[Iterable[PeerId]]) -> Matches:
    """Whatever goes from a peer of one group to a peer of another: with ``Drop``, a partition."""
    side = {peer: index for index, group in enumerate(groups) for peer in group}

    def matches(link: Link, _: Mapping[str, Any]) -> bool:
        here, there = side.get(link.source), side.get(link.target)
        return here is not None and there is not None and here != there

    return matches


def _messages(
    is_reply: bool | None,
    source: PeerId | None,
    target: PeerId | None,
    wanted: Mapping[str, object],
) -> Matches:
    def matches(link: Link, header: Mapping[str, Any]) -> bool:
        return (
            is_reply in (None, link.is_reply)
            and source in (None, link.source)
            and target in (None, link.target)
            and all(key in header and header[key] == value for key, value in wanted.items())
        )

    return matches


class FaultyTransport:
    """``inner``, seen through a ``FaultPlan``; wrap the transports of all peers with one plan."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self._inner = inner
        self._plan = plan

    @property
    def peer(self) -> PeerId:
        return self._inner.peer

    async def serve(self, handler: Handler) -> None:
        await self._inner.serve(handler)

    async def connect(self, address: str) -> PeerId:
        return await self._inner.connect(address)

    async def close(self) -> None:
        await self._inner.close()

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        deadline = anyio.current_time() + timeout_s
        fate = self._plan.fate(Link(self.peer, peer), request.header, request.payload_bytes)
        await _suffer(fate.loss, peer, deadline)
        if fate.delay_s or fate.repeats_after_s:
            reply = await self._call_by_courier(peer, request, fate, timeout_s)
        else:
            reply = await self._inner.call(peer, request, timeout_s=timeout_s)
        back = Link(peer, self.peer, is_reply=True)
        fate = self._plan.fate(back, request.header, reply.payload_bytes)
        loss = fate.loss or (Drop() if anyio.current_time() + fate.delay_s > deadline else None)
        await _suffer(Cut() if isinstance(loss, Unreachable) else loss, peer, deadline)
        await anyio.sleep(fate.delay_s)
        return reply

    async def _call_by_courier(
        self, peer: PeerId, request: Frame, fate: Fate, timeout_s: float
    ) -> Frame:
        """Let tasks of the plan carry a copy: it arrives whatever becomes of the caller."""
        copy = Frame(dict(request.header), [memoryview(bytes(part)) for part in request.payload])
        outcome: list[Frame | SwarmError] = []
        arrived = anyio.Event()

        async def carry(delay_s: float) -> None:
            await anyio.sleep(delay_s)
            try:
                result: Frame | SwarmError = await self._inner.call(peer, copy, timeout_s=timeout_s)
            except SwarmError as error:
                result = error
            outcome.append(result)
            arrived.set()

        for extra_s in (0.0, *fate.repeats_after_s):
            self._plan.tasks.start_soon(carry, fate.delay_s + extra_s)
        with anyio.move_on_after(timeout_s):
            await arrived.wait()
        if not outcome:
            raise CallLost(f"no reply from {peer} within {timeout_s:g} s")
        if isinstance(outcome[0], SwarmError):
            raise outcome[0]
        return outcome[0]


async def _suffer(loss: Drop | Cut | Unreachable | None, peer: PeerId, deadline: float) -> None:
    """Raise what the caller sees of ``loss``, when it sees it."""
    if isinstance(loss, Unreachable):
        raise NotConnected(f"{peer} cannot be reached")
    if isinstance(loss, Cut):
        raise CallLost(f"no reply from {peer}: connection cut")
    if isinstance(loss, Drop):
        await anyio.sleep_until(deadline)
        raise CallLost(f"no reply from {peer}: nothing came in time")
