"""Which moves the trainer allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.core.balance import Serving, Settings, View
from swarm.core.rebalancing import judge
from swarm.types import Mark, PeerId


@dataclass(slots=True)
class _Mover:
    """``serving``: as it will be where it goes. It was let go at ``mark``, and holds up others
    ``until`` then."""

    serving: Serving
    mark: Mark | None
    until: float


class Grants:
    """Machine: which moves the trainer allows. One at a time, each judged by what is known now.

    A mover counts at the stage where it is going from the moment of the grant, so a stale view
    elsewhere cannot cause a second move into the same gap, or one that undoes the first.

    Args:
        limit_s: how long a move may take before it no longer holds up the next one, from the end
            of the step in which it was granted. Who takes longer rests for as long.
        most: moves under way at the same time.
    """

    def __init__(self, settings: Settings, *, limit_s: float, most: int = 1) -> None:
        self._settings = settings
        self._limit_s = limit_s
        self._most = most
        self._movers: dict[PeerId, _Mover] = {}
        self._rests: dict[PeerId, float] = {}

    def ask(
        self, view: View, peer: PeerId, target: int, now: float, mark: Mark | None = None
    ) -> str:
        """``peer`` would like to move to ``target``: why it must not; empty: granted.

        ``mark``: the run's now, if ``tidy`` is told it too. Who asks once more for what was
        granted is told the same.
        """
        self.expire(now)
        if self._rests.get(peer, now) > now:
            return f"its last move came to nothing; not again for {self._rests[peer] - now:.0f} s"
        mover = self._movers.get(peer)
        if mover is not None:
            on_its_way = f"it is on its way to stage {mover.serving.stage}"
            return "" if mover.serving.stage == target else on_its_way
        if len(self._movers) >= self._most:
            other, its = next(iter(self._movers.items()))
            return f"{other[-6:]} is on its way to stage {its.serving.stage}"
        reason = judge(self.applied_to(view), peer, target, self._settings)
        if not reason:
            found = next(p for p in view.peers if p.peer == peer)
            expected = view.rate(found, target)
            serving = replace(found, stage=target, samples_per_s=expected, settled=False)
            self._movers[peer] = _Mover(serving, mark, now + self._limit_s)
        return reason

    def applied_to(self, view: View) -> View:
        """``view`` as it will be when those that are on their way have arrived."""
        if not self._movers:
            return view
        staying = [p for p in view.peers if p.peer not in self._movers]
        return View(view.stages, [*staying, *(m.serving for m in self._movers.values())])

    def ended(self, peer: PeerId) -> None:
        """It has arrived, or will not move after all."""
        self._movers.pop(peer, None)

    def tidy(self, now: float, mark: Mark, is_over: Callable[[PeerId, int], bool]) -> list[PeerId]:
        """End the moves that ``is_over`` (peer, where to) says are, or that take too long.

        Returns whose. At the ``mark`` of its grant a move takes no time yet: the step under way
        has to be finished first.
        """
        self._rests = {peer: until for peer, until in self._rests.items() if until > now}
        ended = []
        for peer, mover in self._movers.items():
            if mover.mark == mark:
                mover.until = now + self._limit_s
            if now >= mover.until:
                self._rests[peer] = now + self._limit_s
            if now >= mover.until or is_over(peer, mover.serving.stage):
                ended.append(peer)
        for peer in ended:
            self.ended(peer)
        return ended

    def expire(self, now: float) -> None:
        self._movers = {peer: m for peer, m in self._movers.items() if m.until > now}

    @property
    def under_way(self) -> dict[PeerId, int]:
        """Who is on the way to which stage."""
        return {peer: mover.serving.stage for peer, mover in self._movers.items()}
