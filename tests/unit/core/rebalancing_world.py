"""A model of a swarm that rebalances itself: virtual time, records that are old when they are read.

Each peer decides once a period from records up to ``delay_s`` old, each reader from others; the
trainer grants from what is true now. Who moves serves nowhere until it has arrived. There are no
microbatches: a stage does what its serving peers do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm.core.grants import Grants
from swarm.core.rebalancing import Move, Need, Serving, Settings, Stay, View, best_move

KEPT_S = 15.0
"""A record of a peer that is gone is read for so long."""


@dataclass(frozen=True)
class Plan:
    """``delay_s``: age at which a record is seen by every reader; younger ones only by some.
    ``noise``: each announcement is off by up to this share. ``measured``: whether speeds are known
    at all. ``move_s``: the shortest and longest time a move takes. ``hidden``: (stage, from,
    until): nobody reads its records then."""

    period_s: float = 30.0
    announce_s: float = 5.0
    delay_s: float = 5.0
    noise: float = 0.0
    measured: bool = True
    move_s: tuple[float, float] = (10.0, 30.0)
    hidden: tuple[int, float, float] | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True)
class Moved:
    """A move that was granted."""

    at: float
    peer: str
    source: int
    stage: int


@dataclass
class Peer:
    """``work``: per second, in the unit of the stages' costs. ``arrives``: while it moves."""

    name: str
    work: float
    stage: int
    memory_bytes: int | None
    decides: float
    announces: float
    arrives: float | None = None
    records: list[tuple[float, Serving]] = field(default_factory=list)


class World:
    """``peers``: name to (work per second, memory or None); ``places``: name to stage."""

    def __init__(
        self,
        needs: Sequence[Need],
        peers: Mapping[str, tuple[float, int | None]],
        places: Mapping[str, int],
        seed: int,
        plan: Plan | None = None,
    ) -> None:
        self.plan = plan or Plan()
        self.needs = tuple(needs)
        self.now = 0.0
        self.rng = random.Random(seed)
        self.grants = Grants(self.plan.settings, limit_s=300.0)
        self.peers: dict[str, Peer] = {}
        self.gone: dict[str, tuple[float, Peer]] = {}
        self.moves: list[Moved] = []
        self.refused: list[tuple[float, str, str]] = []
        self.fewest: list[int] = [len(peers)] * len(self.needs)
        self._answers: dict[tuple[Serving, ...], Stay | Move] = {}
        for name, (work, memory) in peers.items():
            self._add(name, work, memory, places[name])

    def _add(self, name: str, work: float, memory: int | None, stage: int) -> None:
        first = self.rng.uniform(0, self.plan.period_s)
        peer = Peer(name, work, stage, memory, self.now + first, self.now)
        self.peers[name] = peer
        self._announce(peer, self.now - self.plan.delay_s)  # all know of it from the beginning

    # -- what is true, and what is known -------------------------------------------------------

    def truth(self) -> View:
        """Who is where now; movers at the stage where they go."""
        return View(self.needs, [self._serving(p) for p in self.peers.values()])

    def _serving(self, peer: Peer) -> Serving:
        rate = peer.work / self.needs[peer.stage].cost if self.plan.measured else 0.0
        settled = peer.arrives is None
        return Serving(peer.name, peer.stage, rate, 0.0, peer.memory_bytes, settled)

    def _announce(self, peer: Peer, when: float) -> None:
        record = self._serving(peer)
        noise = 1 + self.plan.noise * self.rng.uniform(-1, 1)
        peer.records.append((when, replace(record, samples_per_s=record.samples_per_s * noise)))

    def seen_by_one(self) -> View:
        """The records as one reader finds them: of each peer one that may be old."""
        found = []
        gone = [p for at, p in self.gone.values() if self.now < at + KEPT_S]
        for peer in [*self.peers.values(), *gone]:
            until = self.now - self.rng.uniform(0, self.plan.delay_s)
            record = next(r for at, r in reversed(peer.records) if at <= until)
            found += [] if self._is_hidden(record.stage) else [record]
        return View(self.needs, sorted(found, key=lambda record: record.peer))

    def _is_hidden(self, stage: int) -> bool:
        if self.plan.hidden is None:
            return False
        which, since, until = self.plan.hidden
        return stage == which and since <= self.now < until

    @property
    def serving(self) -> list[int]:
        """How many work at each stage."""
        stages = [p.stage for p in self.peers.values() if p.arrives is None]
        return [stages.count(stage) for stage in range(len(self.needs))]

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((p.name, p.stage) for p in self.peers.values()))

    # -- what happens --------------------------------------------------------------------------

    def lose(self, name: str) -> None:
        """It is gone, and the trainer knows."""
        self.gone[name] = (self.now, self.peers.pop(name))
        self.grants.ended(name)

    def run(self, seconds: float) -> None:
        """Second by second."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1.0
            for peer in list(self.peers.values()):
                self._tick(peer)
            self.fewest = [min(pair) for pair in zip(self.fewest, self.serving, strict=True)]

    def _tick(self, peer: Peer) -> None:
        if peer.arrives is not None and peer.arrives <= self.now:
            peer.arrives = None
            self.grants.ended(peer.name)
            self._announce(peer, self.now)
        if peer.announces <= self.now:
            peer.announces += self.plan.announce_s
            self._announce(peer, self.now)
        if peer.decides <= self.now:
            peer.decides += self.plan.period_s
            if peer.arrives is None:
                self._decide(peer)

    def _decide(self, peer: Peer) -> None:
        view = self.seen_by_one()
        if view.peers not in self._answers:
            self._answers[view.peers] = best_move(view, self.plan.settings)
        wish = self._answers[view.peers]
        if isinstance(wish, Stay) or wish.peer != peer.name:
            return
        reason = self.grants.ask(self.truth(), peer.name, wish.stage, self.now)
        if reason:
            self.refused.append((self.now, peer.name, reason))
            return
        self.moves.append(Moved(self.now, peer.name, peer.stage, wish.stage))
        peer.stage, peer.arrives = wish.stage, self.now + self.rng.uniform(*self.plan.move_s)
        self._announce(peer, self.now)


# -- small random swarms, and the best there is for them -----------------------------------------


def random_view(seed: int) -> View:
    """4 to 8 peers on 3 stages, no stage empty: speeds up to 10x apart, stages of equal or unequal
    cost, memory that does not fit everywhere; everybody somewhere where it fits."""
    rng = random.Random(seed)
    count, even = rng.randint(4, 8), rng.random() < 0.5
    needs = [Need(1.0 if even else rng.uniform(0.5, 2), rng.choice([0, 4, 8])) for _ in range(3)]
    while True:
        peers = []
        for index in range(count):
            work, memory = 10 ** rng.random(), rng.choice([3, 6, 8, 16])
            fitting = [s for s, need in enumerate(needs) if memory >= need.memory_bytes]
            if fitting:
                stage = rng.choice(fitting)
                peers.append(
                    Serving(f"p{index}", stage, work / needs[stage].cost, memory_bytes=memory)
                )
        if len(peers) > 3 and len({p.stage for p in peers}) == 3:
            return View(needs, peers)


def after(view: View, move: Move) -> View:
    """``view`` once the mover has arrived."""
    return View(
        view.stages,
        [
            replace(p, stage=move.stage, samples_per_s=view.rate(p, move.stage))
            if p.peer == move.peer
            else p
            for p in view.peers
        ],
    )


def optimum(view: View) -> float:
    """Samples per second of the best assignment into which everybody fits, by enumeration."""
    stages = range(len(view.stages))
    peers = sorted(view.peers, key=lambda p: -view.rate(p, 0))
    choices = [[(s, view.rate(p, s)) for s in stages if view.fits(p, s)] for p in peers]
    costs = [need.cost for need in view.stages]
    left = [0.0]  # work of those not placed yet
    for peer in reversed(peers):
        left.insert(0, left[0] + view.rate(peer, 0) * costs[0])
    best, rates = 0.0, [0.0 for _ in stages]

    def place(index: int) -> None:
        nonlocal best
        lacking = sum(max(0.0, best - rates[s]) * costs[s] for s in stages)
        if left[index] < lacking * (1 - 1e-9):
            return
        if index == len(peers):
            best = max(best, min(rates))
            return
        for stage, rate in choices[index]:
            kept = rates[stage]
            rates[stage] += rate
            place(index + 1)
            rates[stage] = kept

    place(0)
    return best


def reachable(view: View) -> float:
    """The best that moves can lead to which never take the last of a stage, by enumeration."""
    stages, peers = range(len(view.stages)), view.peers

    def throughput(places: tuple[int, ...]) -> float:
        rates = [0.0 for _ in stages]
        for peer, stage in zip(peers, places, strict=True):
            rates[stage] += view.rate(peer, stage)
        return min(rates)

    todo = [tuple(p.stage for p in peers)]
    seen, best = set(todo), 0.0
    while todo:
        places = todo.pop()
        best = max(best, throughput(places))
        for index, peer in enumerate(peers):
            if places.count(places[index]) < 2:
                continue
            for stage in stages:
                then = (*places[:index], stage, *places[index + 1 :])
                if view.fits(peer, stage) and then not in seen:
                    seen.add(then)
                    todo.append(then)
    return best
