"""The simulator with rates instead of microbatches: for days of virtual time and many peers.

Between events the swarm does what ``pace`` says. Events are arrivals and departures, the moment
when a departure is found out, the end of a download, and once a period a look at who should move.
Who moves where, and who may, is decided by ``swarm.core.rebalancing``.

Left out: the queue of each peer (so no veto by queues, and a model of queues for the paper's
rule), wiring (work is shared out in proportion to speed), and what a stage loses that has no
replica any more: the run stands still until somebody is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from math import inf

from swarm.core.grants import Grants
from swarm.core.rebalancing import Move, Settings, best_move, choose, rested
from swarm.sim.balancer import LIMIT_S
from swarm.sim.clock import Clock
from swarm.sim.costs import Costs
from swarm.sim.flow import Flow, Worker
from swarm.sim.leaving import DRAIN_S
from swarm.sim.listing import Listing
from swarm.sim.optimum import Optimum
from swarm.sim.paper import paper_choice, paper_move, queues
from swarm.sim.world import Machine, Moved, Outcome, Rebalancing, Sample, World
from swarm.types import PeerId

INSTANT_S = 1e-6
"""Times that differ by less are the same."""


def simulate_fluid(world: World, *, progress: Callable[[float], None] | None = None) -> Outcome:
    """Play ``world`` with rates. The same world gives the same outcome.

    ``progress`` is told the share that is done, once for each sample.
    """
    return _Fluid(world, progress).run()


class _State(Enum):
    JOINING = "downloads its first state"
    SERVING = "serves"
    LEAVING = "finishes the step"
    MOVING = "downloads the state of another stage"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class _Peer:
    """``move``: the index of the move that it is on, -1 if none."""

    machine: Machine
    stage: int
    state: _State = _State.JOINING
    worker: Worker | None = None
    move: int = -1
    since: float = 0.0
    """When it began to serve."""

    @property
    def has_joined(self) -> bool:
        return self.state in (_State.SERVING, _State.LEAVING, _State.MOVING)


class _Fluid:
    def __init__(self, world: World, progress: Callable[[float], None] | None) -> None:
        self._world, self._progress = world, progress
        self._rng = random.Random(f"{world.seed}/fluid")
        self._clock = Clock()
        self._outcome = Outcome(world, "fluid")
        self._costs = Costs(world)
        self._flow = Flow(self._costs, self._outcome)
        self._listing = Listing(self._costs)
        self._optimum = Optimum(self._costs)
        self._best: float | None = None
        self._resent_before = 0
        self._best_done, self._done_before, self._best_since = 0.0, 0.0, 0.0
        self._settings = Settings(gain=world.gain)
        self._often_s = min(world.announce_s or world.rebalance_s, world.rebalance_s)
        self._grants = Grants(self._settings, limit_s=LIMIT_S)
        self._peers: dict[PeerId, _Peer] = {}
        self._goers = [0 for _ in world.stages]
        """Movers of each stage that wait for the end of the step: one at a time."""

    def run(self) -> Outcome:
        world = self._world
        for machine in sorted(world.machines, key=lambda m: m.arrives_s):
            if machine.arrives_s <= world.duration_s:
                self._clock.at(max(0.0, machine.arrives_s), self._arrives, machine)
        if world.rebalancing is not Rebalancing.NONE and len(world.stages) > 1:
            ours = world.rebalancing is Rebalancing.OURS
            self._clock.at(self._often_s if ours else world.rebalance_s, self._looks)
        times = int(world.duration_s / world.sample_every_s + 1e-9)
        for number in range(1, times + 1):
            self._clock.at(number * world.sample_every_s, self._samples)
        self._clock.run(world.duration_s)
        self._flow.advance(world.duration_s)
        self._flow.close()
        self._outcome.done = self._flow.done * world.microbatch
        return self._outcome

    # -- arrivals ---------------------------------------------------------------------------

    def _arrives(self, machine: Machine) -> None:
        stage = machine.stage if machine.stage is not None else self._chosen(machine)
        if stage is None:
            return  # no stage fits: such a node says so and ends
        peer = self._peers[machine.peer] = _Peer(machine, stage)
        self._listing.put(machine, stage, settled=False)
        if machine.leaves_s <= self._world.duration_s:
            self._clock.at(max(machine.leaves_s, self._clock.now), self._leaves, peer)
        if not self._clock.now:
            self._serves(peer)  # initial weights are made, not copied
        else:
            self._download(peer)

    def _chosen(self, machine: Machine) -> int | None:
        """The stage that a newcomer chooses: by the rule, or by the paper's."""
        fitting = [s for s in range(len(self._costs.work)) if self._costs.fits(machine, s)]
        if not fitting:
            return None
        view = self._listing.sums()
        if self._clock.now and self._world.rebalancing is Rebalancing.PAPER:
            return paper_choice(queues(view.rates, self._flow.waiting, self._rng), fitting)
        return choose(view, machine.memory_bytes, self._settings, self._rng)

    def _download(self, peer: _Peer) -> None:
        """The state of a stage, as fast as its replicas' links and its own let through."""
        size = self._world.stages[peer.stage].state_bytes
        speed = min(peer.machine.down_bytes_per_s, self._flow.link_of(peer.stage))
        self._clock.after(size / speed, self._serves, peer)

    def _serves(self, peer: _Peer) -> None:
        if peer.state is _State.GONE:
            return
        self._flow.advance(self._clock.now)
        joined_now = not peer.has_joined
        if self._clock.now:
            self._flow.give_state(peer.machine.peer, peer.stage)
        peer.state, peer.since = _State.SERVING, self._clock.now
        peer.worker = self._flow.enter(peer.machine, peer.stage)
        self._listing.put(peer.machine, peer.stage, settled=True)
        self._grants.ended(peer.machine.peer)
        if peer.move >= 0:
            moves = self._outcome.moves
            moves[peer.move] = replace(moves[peer.move], done_s=self._clock.now)
            peer.move = -1
        if joined_now:
            self._count_best()
            self._optimum.add(peer.machine)
            self._best = None

    # -- departures -------------------------------------------------------------------------

    def _leaves(self, peer: _Peer) -> None:
        """It goes: in good order, if the step ends soon enough for that; or without a word, and
        then it is missed a while later."""
        now, drains = self._clock.now, peer.machine.drains
        self._flow.advance(now)
        found_s = now + (0.0 if drains else self._world.silence_s)
        if peer.worker is not None:
            if not drains or self._flow.step_ends_s > now + DRAIN_S:
                self._outcome.resent += round(self._flow.lost(peer.worker, found_s))
            self._flow.leave(peer.worker)
            peer.worker = None
        if peer.has_joined:
            self._count_best()
            self._optimum.remove(peer.machine)
            self._best = None
        peer.state = _State.GONE
        self._clock.at(found_s, self._found_out, peer)

    def _found_out(self, peer: _Peer) -> None:
        self._listing.drop(peer.machine.peer)
        self._grants.ended(peer.machine.peer)
        del self._peers[peer.machine.peer]

    # -- moves ------------------------------------------------------------------------------

    def _looks(self) -> None:
        """Once a period everybody looks; all see the same, so one asks. Until the run has made
        a step they look more often, since then all wait for a stage that has nobody."""
        self._flow.advance(self._clock.now)
        begun = self._flow.steps > 0 or self._world.rebalancing is Rebalancing.PAPER
        period_s = self._world.rebalance_s if begun else self._often_s
        self._clock.after(period_s, self._looks)
        if self._world.rebalancing is Rebalancing.PAPER:
            self._look_as_in_the_paper()
            return
        if not self._listing.may_gain(self._settings):
            return
        view = self._listing.view()
        found = best_move(view, self._settings)
        if isinstance(found, Move) and self._has_rested(found):
            reason = self._grants.ask(view, found.peer, found.stage, self._clock.now)
            if not reason:
                self._moves(self._peers[found.peer], found.stage, found.reason)

    def _has_rested(self, move: Move) -> bool:
        """Before the first step there is nothing to rest from."""
        served_s = self._clock.now - self._peers[move.peer].since if self._flow.steps else inf
        return rested(move, served_s, self._world.rebalance_s)

    def _look_as_in_the_paper(self) -> None:
        members, rates = self._listing.members, self._listing.rates
        loads = queues(rates, self._flow.waiting, self._rng)
        queued = [
            {peer: load * rate / total for peer, rate in stage.items()} if total else {}
            for stage, load, total in zip(members, loads, rates, strict=True)
        ]
        found = paper_move(queued, self._rng)
        if found is None:
            return
        peer, target = self._peers[found[0]], found[1]
        if peer.state is _State.SERVING and self._costs.fits(peer.machine, target):
            why = f"stage {target} has most queued, stage {peer.stage} least"
            self._moves(peer, target, why)

    def _moves(self, peer: _Peer, target: int, reason: str) -> None:
        """It is granted a move, gets no more work, and goes when the step has ended; at once if
        the target has nobody, for then no step can end."""
        now = self._clock.now
        if peer.worker is None or self._goers[peer.stage]:
            self._grants.ended(peer.machine.peer)
            return  # nobody knows yet that it has died; or another of its stage is about to go
        peer.state, peer.move = _State.LEAVING, len(self._outcome.moves)
        self._outcome.moves.append(Moved(now, peer.machine.peer, peer.stage, target, reason))
        self._flow.leave(peer.worker)
        peer.worker = None
        self._goers[peer.stage] += 1
        source, peer.stage = peer.stage, target
        self._listing.put(peer.machine, target, settled=False)
        self._goes(peer, source, self._flow.steps if self._flow.peers[target] else -1)

    def _goes(self, peer: _Peer, source: int, step: int) -> None:
        """Once ``step``, the one under way when it was told, has ended."""
        self._flow.advance(self._clock.now)
        alive, ends_s = peer.state is _State.LEAVING, self._flow.step_ends_s
        # The end may come later than was thought, but not by what numbers are rounded.
        if alive and self._flow.steps == step and ends_s > self._clock.now + INSTANT_S:
            self._clock.at(ends_s, self._goes, peer, source, step)
            return
        self._goers[source] -= 1
        if not alive:
            return
        peer.state = _State.MOVING
        self._download(peer)

    # -- what is measured -------------------------------------------------------------------

    def _count_best(self) -> None:
        """What the best assignment has done until now. A newcomer counts from when it has its
        first state: whatever the assignment, that takes its time."""
        passed = self._clock.now - self._best_since
        if passed:
            if self._best is None:
                self._best = self._optimum.in_steps
            self._best_done += self._best * passed
            self._best_since = self._clock.now

    def _samples(self) -> None:
        now, every_s = self._clock.now, self._world.sample_every_s
        self._flow.advance(now)
        self._count_best()
        scale = self._world.microbatch / every_s
        self._outcome.samples.append(
            Sample(
                now,
                (self._flow.done - self._done_before) * scale,
                self._best_done * scale,
                self._flow.peers,
                self._outcome.resent - self._resent_before,
            )
        )
        self._resent_before = self._outcome.resent
        self._done_before, self._best_done = self._flow.done, 0.0
        if self._progress is not None:
            self._progress(now / self._world.duration_s)
