"""Who moves to another stage: each peer looks once a period, and the trainer has the last word."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from swarm.core.grants import Grants
from swarm.core.rebalancing import Move, best_move, rested
from swarm.core.roster import State
from swarm.sim.joins import PATIENCE_S
from swarm.sim.leaving import DRAIN_S
from swarm.sim.paper import paper_move
from swarm.sim.world import Moved, Rebalancing
from swarm.types import PeerId

if TYPE_CHECKING:
    from swarm.sim.arrivals import Arrivals
    from swarm.sim.server import Server
    from swarm.sim.simulation import Simulation

LIMIT_S = DRAIN_S + PATIENCE_S
"""A move that takes so long after the step in which it was granted holds up the next no longer."""


class Balancer:
    """Looks at the directory whenever its records are new, for all peers at once.

    All of them find the same move in the same records, and only the mover asks for it, when it
    looks next: once a period, at a phase of its own.
    """

    def __init__(self, sim: Simulation, arrivals: Arrivals) -> None:
        self._sim, self._arrivals = sim, arrivals
        self._grants = Grants(sim.directory.settings, limit_s=LIMIT_S)
        self._phase: dict[PeerId, float] = {}

    def begin(self) -> None:
        world, clock = self._sim.world, self._sim.clock
        if len(world.stages) < 2:
            return
        clock.at(world.announce_s, self._refresh)
        if world.rebalancing is Rebalancing.PAPER:
            clock.at(world.rebalance_s, self._move_as_paper)

    def _refresh(self) -> None:
        """All records are new."""
        sim = self._sim
        view = sim.directory.refresh()
        sim.clock.after(sim.world.announce_s, self._refresh)
        if sim.world.rebalancing is not Rebalancing.OURS:
            return
        found = best_move(view, sim.directory.settings)
        if isinstance(found, Move):
            looks = self._looks_at(found.peer)
            if looks < sim.clock.now + sim.world.announce_s:
                sim.clock.at(looks, self._ask, found)

    def _looks_at(self, peer: PeerId) -> float:
        """When ``peer`` looks next. Often until the run has begun, since then all wait."""
        sim = self._sim
        if sim.trainer.mark.t == 0:
            return sim.clock.now
        period_s = sim.world.rebalance_s
        phase = self._phase.setdefault(peer, sim.rng.uniform(0.0, period_s))
        return sim.clock.now + (phase - sim.clock.now) % period_s

    def _ask(self, move: Move) -> None:
        """The mover asks the trainer."""
        sim, now = self._sim, self._sim.clock.now
        server = sim.serving.get(move.peer)
        if server is None or server.mark is None or server in sim.leaving:
            return
        if not rested(move, self._served_s(server), sim.world.rebalance_s):
            return
        mark = sim.trainer.mark
        self._grants.tidy(now, mark, self._is_over)
        reason = self._grants.ask(sim.directory.truth(), move.peer, move.stage, now, mark)
        if not reason and not self._set_out(server, move.stage, move.reason):
            self._grants.ended(move.peer)

    def _served_s(self, server: Server) -> float:
        """For how long; before the first step there is nothing to rest from."""
        begun = self._sim.trainer.mark.t > 0
        return self._sim.clock.now - server.since if begun else inf

    def _is_over(self, peer: PeerId, stage: int) -> bool:
        """It has arrived, or is gone."""
        server = self._sim.serving.get(peer)
        if server is None:
            return True
        member = self._sim.trainer.members.roster.get(server.me)
        return member is not None and member.state is State.READY and member.stage == stage

    def _move_as_paper(self) -> None:
        """The paper's rule: somebody moves every period, and nobody has to be asked."""
        sim = self._sim
        sim.clock.after(sim.world.rebalance_s, self._move_as_paper)
        queued: list[dict[PeerId, float]] = [{} for _ in sim.world.stages]
        for peer, server in sim.serving.items():
            queued[server.stage][peer] = float(server.intake.queued)
        found = paper_move(queued, sim.rng)
        if found is None:
            return
        server = sim.serving[found[0]]
        if server.mark is None or server in sim.leaving:
            return
        self._set_out(server, found[1], "the most work waits there")

    def _set_out(self, server: Server, target: int, reason: str) -> bool:
        """It drains, then it is another replica at ``target``. False: it has to stay for now."""
        sim, peer, source = self._sim, server.host.peer, server.stage
        number = len(sim.outcome.moves)

        def settle() -> None:
            moved = sim.serve(server.host, target)
            sim.moving[peer] = number
            self._arrivals.announce(moved)

        wait = bool(sim.trainer.members.ready(target))
        if not sim.leaving.begin(server, settle, wait=wait, insist=False):
            return False
        sim.meter.moved(Moved(sim.clock.now, peer, source, target, reason))
        sim.tell(f"move {peer} {source}->{target} {reason}")
        return True
