"""What is true of all microbatches of a step, kept up to date instead of counted anew."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping

from swarm.core.alarms import Alarms
from swarm.core.journey import Journey, Phase
from swarm.types import Replica

UNDER_WAY = (Phase.FLYING, Phase.ASKING)


class Tally:
    """Watches ``journeys`` (by their ``m``): how many are where, and who holds which.

    ``done``, ``in_flight``: how many are. ``void``: one is, so the step is to be skipped.
    """

    def __init__(self, journeys: Mapping[int, Journey]) -> None:
        self._journeys = journeys
        self.done = self.in_flight = 0
        self.void = False
        self._idle: list[int] = []
        self._queued: set[int] = set()
        self._held: defaultdict[int, defaultdict[Replica, set[int]]]
        self._held = defaultdict(lambda: defaultdict(set))
        self._counts: dict[int, int] = {}
        self._full: set[int] = set()
        self._alarms: Alarms[int] = Alarms(lambda m: journeys[m].deadline)
        for trip in journeys.values():
            for stage, replica in trip.holders.items():
                self.held(trip, stage, replica)
            self._enter(trip)
            trip.watcher = self

    # -- what a journey tells ---------------------------------------------------------------

    def turned(self, trip: Journey, before: Phase) -> None:
        """``trip`` has another phase or an earlier deadline."""
        self.done -= before is Phase.DONE
        self.in_flight -= before in UNDER_WAY
        self._enter(trip)

    def _enter(self, trip: Journey) -> None:
        self.done += trip.phase is Phase.DONE
        self.in_flight += trip.phase in UNDER_WAY
        self.void = self.void or trip.void
        if trip.phase is Phase.IDLE and trip.m not in self._queued:
            self._queued.add(trip.m)
            heapq.heappush(self._idle, trip.m)
        if trip.deadline < float("inf"):
            self._alarms.at(trip.m, trip.deadline)

    def held(self, trip: Journey, stage: int, replica: Replica) -> None:
        """``replica`` is now known to hold ``trip`` for ``stage``."""
        self._held[stage][replica].add(trip.m)
        count = self._counts[stage] = self._counts.get(stage, 0) + 1
        if count == len(self._journeys):
            self._full.add(stage)

    def uncounted(self, trip: Journey, stage: int, replica: Replica) -> None:
        """``replica`` no longer holds ``trip`` for ``stage``."""
        held = self._held[stage]
        held[replica].discard(trip.m)
        if not held[replica]:
            del held[replica]
        self._counts[stage] -= 1
        self._full.discard(stage)

    # -- what is true of all ----------------------------------------------------------------

    @property
    def all_done(self) -> bool:
        return self.done == len(self._journeys)

    def stage_done(self, stage: int) -> bool:
        """Every microbatch is known to have counted in ``stage``."""
        return stage in self._full or not self._journeys

    @property
    def some_stage_done(self) -> bool:
        return bool(self._full) or not self._journeys

    def held_by(self, stage: int, replica: Replica) -> frozenset[int]:
        return frozenset(self._held[stage].get(replica, ()))

    def holders(self, stage: int) -> list[Replica]:
        """Who holds anything for ``stage``."""
        return list(self._held[stage])

    def held_anywhere(self, replica: Replica) -> list[Journey]:
        """What ``replica`` holds for some stage, oldest first."""
        found = {m for held in self._held.values() for m in held.get(replica, ())}
        return [self._journeys[m] for m in sorted(found)]

    def next_idle(self) -> Journey | None:
        """The oldest microbatch that nobody works on, for the caller to send; None if none."""
        while self._idle:
            m = heapq.heappop(self._idle)
            self._queued.discard(m)
            if self._journeys[m].phase is Phase.IDLE:
                return self._journeys[m]
        return None

    def due(self, now: float) -> list[Journey]:
        """Whose deadline has passed, oldest microbatch first; each is found once."""
        return [self._journeys[m] for m in sorted(self._alarms.due(now))]

    def deadline(self) -> float:
        """The earliest deadline of any; infinity if there is none."""
        return self._alarms.next()
