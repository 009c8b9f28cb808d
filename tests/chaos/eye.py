"""Sees each message of a run set out; sets faults off; brings messages late. And wrong clocks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from dht.memory import MemoryDirectoryStore
from peers.faults import Fate, FaultPlan, FaultyTransport, Link
from peers.transport import Frame
from swarm.errors import SwarmError
from swarm.types import PeerId
from tests.chaos.schedule import ANY, Fault


class SkewedStore(MemoryDirectoryStore):
    """The clocks of those who announce differ: their records expire too late, or too early."""

    def __init__(self, staleness_s: float, skews: Callable[[PeerId], float]) -> None:
        super().__init__(staleness_s)
        self._skews = skews

    def put(self, key: str, subkey: str, value: bytes, *, now: float, ttl_s: float) -> None:
        lasts_s = max(0.3 * ttl_s, ttl_s + self._skews(subkey))
        super().put(key, subkey, value, now=now, ttl_s=lasts_s)


@dataclass(slots=True)
class _Waiting:
    fault: Fault
    left: int


@dataclass(eq=False, slots=True)
class _Late:
    target: PeerId
    header: Mapping[str, Any]
    release: anyio.Event = field(default_factory=anyio.Event)


MOST = 100_000
"""Messages of a run. Where peers call each other without a pause, virtual time stands still."""


class Eye(FaultPlan):
    """Sees each message set out, and sets off the faults that wait for it.

    ``digest`` of all that was sent, when, and by whom: equal for equal runs.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.digest = hashlib.sha256()
        self.messages = 0
        self.too_many: Callable[[], None] = lambda: None
        self.steps_done: Callable[[], int] = lambda: 0
        self.befalls: Callable[[Fault, Link, Mapping[str, Any]], None] | None = None
        self._waiting: dict[tuple[str, bool], list[_Waiting]] = {}
        self._late: list[_Late] = []

    def wait_for(self, fault: Fault) -> None:
        key = (fault.when.kind, fault.when.reply)
        self._waiting.setdefault(key, []).append(_Waiting(fault, fault.when.nth))

    def fate(self, link: Link, header: Mapping[str, Any], nbytes: int) -> Fate:
        kind = header["kind"]
        self.messages += 1
        if self.messages > MOST:
            self.too_many()
        line = f"{anyio.current_time():.9f} {link.source} {link.target} {kind} {link.is_reply}\n"
        self.digest.update(line.encode())
        if kind == "prepare" and link.is_reply:
            self._release(link.source, header["stamp"])
        for key in ((kind, link.is_reply), (ANY, link.is_reply)):
            for waiting in list(self._waiting.get(key, ())):
                if self.steps_done() >= waiting.fault.when.step:
                    waiting.left -= 1
                    if waiting.left == 0:
                        self._waiting[key].remove(waiting)
                        assert self.befalls is not None
                        self.befalls(waiting.fault, link, header)
        return super().fate(link, header, nbytes)

    # -- late messages ----------------------------------------------------------------------

    def hold(self, link: Link, header: Mapping[str, Any]) -> None:
        """A copy of this request arrives when its target has obeyed a prepare of another round."""
        self._late.append(_Late(link.target, header))

    def _release(self, target: PeerId, round_: object) -> None:
        for late in list(self._late):
            own = late.header.get("round", late.header.get("stamp"))
            if late.target == target and own != round_:
                self._late.remove(late)
                late.release.set()

    def late_copy(self, header: Mapping[str, Any]) -> anyio.Event | None:
        """What to wait for before a copy of the request with this very header may go."""
        found = [late.release for late in self._late if late.header is header]
        return found[0] if found else None


class ChaosTransport(FaultyTransport):
    """Keeps copies of the messages that are to come late."""

    async def call(self, peer: PeerId, request: Frame, *, timeout_s: float) -> Frame:
        assert isinstance(self._plan, Eye)
        # The accumulators themselves may be sent: what is in them may be another gradient later.
        parts = [memoryview(bytes(part)) for part in request.payload]
        try:
            return await super().call(peer, request, timeout_s=timeout_s)
        finally:
            event = self._plan.late_copy(request.header)
            if event is not None:
                copy = Frame(dict(request.header), parts)
                self._plan.tasks.start_soon(self._carry, event, peer, copy)

    async def _carry(self, event: anyio.Event, peer: PeerId, copy: Frame) -> None:
        await event.wait()
        try:
            await self._inner.call(peer, copy, timeout_s=2.0)
        except SwarmError:
            return
