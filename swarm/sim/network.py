"""Hosts and the network between them: latency by region, and links that things queue up for."""

from __future__ import annotations

from math import inf

from swarm.sim.world import Latency
from swarm.types import PeerId


class Host:
    """One machine's access to the network. Rates in bytes per second.

    The uplink sends one thing after the other, the downlink receives so; a transfer between two
    takes its bytes over the slower of both, and the latency. ``dead_at``: when it was gone.
    ``sent``, ``received``: bytes so far.
    """

    __slots__ = (
        "_down_free",
        "_down_s",
        "_up_free",
        "_up_s",
        "dead_at",
        "down",
        "peer",
        "received",
        "region",
        "sent",
        "up",
    )

    def __init__(self, peer: PeerId, region: str, up: float, down: float) -> None:
        self.peer, self.region, self.up, self.down = peer, region, up, down
        self.dead_at = inf
        self.sent = self.received = 0.0
        self._up_s, self._down_s = 1.0 / up, 1.0 / down
        self._up_free = self._down_free = 0.0

    def send(self, now: float, nbytes: float) -> float:
        """When the last byte leaves, if all is handed over now."""
        left = (now if now > self._up_free else self._up_free) + nbytes * self._up_s
        self._up_free = left
        self.sent += nbytes
        return left

    def upload_s(self, nbytes: float) -> float:
        """How long the uplink is taken by so much."""
        return nbytes * self._up_s

    def receive(self, now: float, upload_s: float, nbytes: float) -> float:
        """When all is here, if the last byte comes now and the first one ``upload_s`` ago."""
        first = now - upload_s
        free = (first if first > self._down_free else self._down_free) + nbytes * self._down_s
        self._down_free = free
        self.received += nbytes
        return free if free > now else now


class Delays:
    """One-way latencies between hosts, in seconds, looked up once for each pair of regions."""

    __slots__ = ("_known", "_table")

    def __init__(self, table: Latency) -> None:
        self._table = table
        self._known: dict[tuple[str, str], float] = {}

    def between(self, a: Host, b: Host) -> float:
        key = (a.region, b.region)
        delay = self._known.get(key)
        if delay is None:
            delay = self._known[key] = self._table.one_way_s(*key)
        return delay

    def widest(self, hosts: list[Host]) -> float:
        """The largest between any two of ``hosts``."""
        some = {host.region: host for host in hosts}.values()
        alone = len(hosts) < 2
        return 0.0 if alone else max(self.between(a, b) for a in some for b in some)
