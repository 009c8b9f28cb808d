"""What a trainer has given to one replica, and how fast it was: the figures that wiring goes by."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.core.estimates import Estimate
from swarm.types import Replica, Stamp

OVERDUE = 2.0
"""A replica that is quiet for this multiple of its usual time is expected to have slowed down."""
HUNG = 6.0
"""From this multiple on, what it misses meanwhile is not made up for afterwards."""
PROBES = 2
"""How many microbatches a replica is given before it has finished one, if others can serve."""

Entry = tuple[int, float, float, Replica, "Server"]
"""Its place among the servers of its stage: (tier, priority, tie, replica, itself), the best first.

Tiers: 0; ``PROBING``; ``SHUNNED``, and that with ``PROBING``.
"""
PROBING, SHUNNED = 1, 2


@dataclass(slots=True, eq=False)
class Server:
    """One replica of a stage.

    ``busy_s``: work done, counted from the smallest priority of the stage when it entered.
    ``debts``: attempts that it owes.
    ``quiet_since``: when it last finished work, or was given some after it had none.
    ``here``, ``apart``, ``entry``, ``late``: its places in the ranking of its stage; ``changed``:
    they are out of date.
    """

    replica: Replica
    busy_s: float = 0.0
    service: Estimate = field(default_factory=Estimate)
    quiet: Estimate = field(default_factory=Estimate)
    debts: set[Debt] = field(default_factory=set)
    quiet_since: float | None = None
    served: int = 0
    entry: Entry | None = None
    late: Entry | None = None
    here: bool = False
    apart: bool = False
    changed: bool = False

    def __lt__(self, other: Server) -> bool:
        return self.replica < other.replica

    def slowdown(self, now: float) -> float:
        """How much slower than usual it seems to be, by how long it has been quiet; 1 if not."""
        if self.quiet_since is None or not self.quiet.value:
            return 1.0
        factor = (now - self.quiet_since) / self.quiet.value
        return factor if factor > OVERDUE else 1.0

    def hung_at(self) -> float:
        """From when on it counts as hung: never by less than a rounding error too late."""
        if self.quiet_since is None or not self.quiet.value:
            return float("inf")
        quiet_s = HUNG * self.quiet.value
        return self.quiet_since + quiet_s - 1e-9 * (abs(self.quiet_since) + quiet_s)

    def priority(self, expected_s: float, slowdown: float = 1.0) -> float:
        """The busy time given to it so far, done or expected."""
        return self.busy_s + len(self.debts) * expected_s * slowdown

    def give(self, debt: Debt, now: float) -> None:
        debt.server = self
        self.debts.add(debt)
        if self.quiet_since is None:
            self.quiet_since = now

    def decline(self, debt: Debt) -> None:
        """Another took it. Who had nothing else to do has not been quiet since then."""
        self.debts.discard(debt)
        if not self.debts and self.quiet_since == debt.sent_at:
            self.quiet_since = None

    def close(self, debt: Debt) -> None:
        """It is over. A replica that told nothing of it still counts as quiet."""
        self.debts.discard(debt)
        if debt.heard and not self.debts:
            self.quiet_since = None

    def done(self, took_s: float, now: float) -> None:
        self.busy_s += took_s
        self.service.update(took_s)
        self.served += 1
        if self.quiet_since is not None:
            self.quiet.update(now - self.quiet_since)
        self.quiet_since = now if self.debts else None

    def leave(self) -> None:
        self.debts.clear()
        self.quiet_since = None

    @property
    def tier(self) -> int:
        return PROBING if self.served == 0 and len(self.debts) >= PROBES else 0


@dataclass(slots=True, eq=False)
class Debt:
    """An attempt that ``server`` owes its stage. ``heard``: it has begun to tell of it."""

    stamp: Stamp
    sent_at: float
    server: Server
    heard: bool = False
