"""When a standby may take over: the lease that the trainer's messages renew at the replicas.

Clocks are never compared: replicas say for how long they have heard no trainer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite

from swarm.types import Replica

SHARE = 0.25
"""The gap between two looks counts for at most this share of the patience.

A standby that was frozen has not been looking, and finds its connections broken when it wakes:
that it then reaches nobody says little.
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to take over now, why (in plain words), and about how long still if not.

    ``in_s`` (seconds) holds if nothing changes: nobody hears a trainer, the same are reached.
    """

    may: bool
    reason: str
    in_s: float


class Watch:
    """Machine: what a standby sees whenever it looks around; whether it may take over.

    Args:
        stages: of the run.
        lease_s: a trainer that nobody reached has heard for longer is taken for dead.
        patience_s: how long to look before believing that where only a few are reached.
    """

    def __init__(self, stages: int, lease_s: float, patience_s: float) -> None:
        self._stages = stages
        self._lease_s = lease_s
        self._patience_s = patience_s
        self._seen: deque[tuple[float, int]] = deque()  # (when, how many peers), falling
        self._last_look: float | None = None
        self._waited_s = 0.0

    def looked(
        self,
        reached: Mapping[Replica, tuple[int, float]],
        announced: Collection[Replica],
        now: float,
    ) -> Verdict:
        """A round of questions has ended.

        Args:
            reached: who answered: its stage, and for how many seconds it has heard no trainer.
                One that never heard any since it started says inf: it is no witness. Nonsense
                (NaN, a negative number, a stage that is not there) is none either.
            announced: the replicas that the directory shows now.
            now: seconds, on any clock that runs evenly.
        """
        self._remember({replica.peer for replica in (*announced, *reached)}, now)
        witnesses = {
            replica: (stage, quiet_s)
            for replica, (stage, quiet_s) in sorted(reached.items())
            if 0 <= stage < self._stages and isfinite(quiet_s) and quiet_s >= 0
        }
        shortage = self._shortage(witnesses)
        quiets = {replica: quiet_s for replica, (_, quiet_s) in witnesses.items()}
        latest = min(quiets, key=quiets.__getitem__, default=None)
        if latest is not None and quiets[latest] <= self._lease_s:
            return self._alive(latest, quiets[latest], shortage, now)
        self._wait(now)
        if not shortage:
            quiet_s = min(quiets.values())
            return Verdict(True, f"no replica has heard a trainer for {quiet_s:.0f} s", 0.0)
        left_s = self._patience_s - self._waited_s
        if left_s > 0:
            reason = f"{shortage}; a trainer may live out of reach, so {left_s:.0f} s more to wait"
            return Verdict(False, reason, left_s)
        reason = f"{shortage}, and no trainer was heard of for {self._patience_s:.0f} s"
        return Verdict(True, reason, 0.0)

    def _alive(self, replica: Replica, quiet_s: float, shortage: str, now: float) -> Verdict:
        """``replica`` has heard a trainer not long ago: that undoes all waiting."""
        self._last_look, self._waited_s = now, 0.0
        in_s = self._lease_s - quiet_s
        if shortage:
            in_s = max(in_s, self._patience_s)
        return Verdict(False, f"{replica.peer} heard a trainer {quiet_s:.0f} s ago", in_s)

    def _wait(self, now: float) -> None:
        """No sign of a trainer since the look before, nor in this one."""
        gap_s = 0.0 if self._last_look is None else now - self._last_look
        self._waited_s += min(gap_s, SHARE * self._patience_s)
        self._last_look = now

    def _remember(self, peers: Collection[str], now: float) -> None:
        """Keep the largest number of peers seen at once within the patience.

        Records of the dead expire, and a directory that is cut too shows only one side. Numbers
        are kept, not names: where peers come and go, half of the old names may be gone for good.
        """
        while self._seen and self._seen[0][0] < now - self._patience_s:
            self._seen.popleft()
        while self._seen and self._seen[-1][1] <= len(peers):
            self._seen.pop()
        self._seen.append((now, len(peers)))

    def _shortage(self, witnesses: Mapping[Replica, tuple[int, float]]) -> str:
        """What is wrong with the ``witnesses``; empty if they are enough to take over at once."""
        if not witnesses:
            return "no replica that has heard a trainer is reached"
        seen = self._seen[0][1]
        peers = {replica.peer for replica in witnesses}
        if 2 * len(peers) < seen:
            return f"only {len(peers)} of {seen} replicas are reached"
        covered = {stage for stage, _ in witnesses.values()}
        missing = [stage for stage in range(self._stages) if stage not in covered]
        return f"no replica of stage {missing[0]} is reached" if missing else ""
