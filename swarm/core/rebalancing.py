"""Stay at a stage or move to another, and why.

The paper's rule (SWARM, algorithm 2) compares queues: once a period the least loaded peer of the
least loaded stage moves to the most loaded one. It moves somebody every period, whether that
helps or not, and sees nothing before queues have built up. Here the *rate* of a stage decides,
the sum of what its replicas were measured to do: the slowest stage sets the pace of the whole
pipeline, so a move is worth it if the slower of the two stages that it touches is faster
afterwards, by a margin. Queues break ties, decide where nothing has been measured yet, and veto a
move that they contradict.

All peers find the same move from the same records, so only one asks for it. Records are old by
the time they are read; that is why the trainer has the last word (``Grants``), from what it knows
itself.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from swarm.types import PeerId

FIRST_GUESS = 1.0
"""Work per second of every peer while none has been measured."""

PILED_UP = 2.0
"""Microbatches that wait for each replica of a stage, on average, where work piles up; a quarter
of that is nothing."""

SWAP_AMONG = 32
"""In stages of more replicas than this single moves are fine enough, and swaps are not sought."""

SWAP_MARGIN = 2.0
"""A swap is two moves: it has to gain so many times as much."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a stage takes. ``cost``: work for one sample, forward and backward, in one unit for all
    stages (FLOPs, say), above 0. ``memory_bytes``: of one replica, at most."""

    cost: float
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Serving:
    """One peer, and the stage that it serves or is on its way to.

    ``samples_per_s``: what it can do at that stage when it never has to wait; 0: not measured.
    ``queued``: microbatches that wait there, on average. ``memory_bytes``: what it has for a
    stage; None: not known, and then everything fits. ``settled``: False for who is joining or
    leaving; such a peer counts, and stays.
    """

    peer: PeerId
    stage: int
    samples_per_s: float = 0.0
    queued: float = 0.0
    memory_bytes: int | None = None
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Settings:
    """``gain``: by how much of its rate the slower of two stages has to get faster by a move.
    ``least``: replicas that each stage needs before anything else counts."""

    gain: float = 0.05
    least: int = 1


@dataclass(frozen=True, slots=True)
class Stay:
    reason: str


@dataclass(frozen=True, slots=True)
class Move:
    """``peer`` is to go to ``stage``. ``gain``: the slower stage's rate afterwards by that before;
    infinite if a stage had nobody."""

    peer: PeerId
    stage: int
    reason: str
    gain: float


class View:
    """The swarm as somebody knows it: what each stage takes, and who is where.

    Peers of unknown stages are left out.
    """

    def __init__(self, stages: Sequence[Need], peers: Iterable[Serving]) -> None:
        self.stages = tuple(stages)
        self.peers = tuple(p for p in peers if 0 <= p.stage < len(self.stages))

    @cached_property
    def guess(self) -> float:
        """Work per second of a peer that has not been measured: the median of the others'."""
        known = [p.samples_per_s * self.stages[p.stage].cost for p in self.peers if p.samples_per_s]
        return median(known) if known else FIRST_GUESS

    @cached_property
    def measured(self) -> bool:
        """Whether any peer of each stage that has some has been measured."""
        known = {p.stage for p in self.peers if p.samples_per_s}
        return all(p.stage in known for p in self.peers)

    def rate(self, peer: Serving, stage: int) -> float:
        """Samples per second that ``peer`` does, or would do, at ``stage``."""
        if stage == peer.stage and peer.samples_per_s:
            return peer.samples_per_s
        own = peer.samples_per_s * self.stages[peer.stage].cost
        return (own or self.guess) / self.stages[stage].cost

    @cached_property
    def members(self) -> list[list[Serving]]:
        """Who is at each stage, or on the way there."""
        found: list[list[Serving]] = [[] for _ in self.stages]
        for peer in self.peers:
            found[peer.stage].append(peer)
        return found

    @cached_property
    def rates(self) -> list[float]:
        """Samples per second of each stage."""
        return [sum(self.rate(p, s) for p in peers) for s, peers in enumerate(self.members)]

    @cached_property
    def queues(self) -> list[float]:
        """Microbatches that wait for each replica of a stage, on average."""
        return [sum(p.queued for p in peers) / max(1, len(peers)) for peers in self.members]

    @property
    def throughput(self) -> float:
        """Samples per second of the pipeline, if nothing but compute limits it."""
        return min(self.rates)

    def fits(self, peer: Serving, stage: int) -> bool:
        return peer.memory_bytes is None or peer.memory_bytes >= self.stages[stage].memory_bytes

    def without(self, peer: PeerId) -> View:
        return View(self.stages, [p for p in self.peers if p.peer != peer])


# -- a newcomer ------------------------------------------------------------------------------


def choose(view: View, memory_bytes: int | None, settings: Settings, rng: random.Random) -> int:
    """The stage where one more peer is needed most, of those that fit; by lot among equals.

    Raises:
        ValueError: no stage fits into ``memory_bytes``.
    """
    fitting = [
        stage
        for stage, need in enumerate(view.stages)
        if memory_bytes is None or memory_bytes >= need.memory_bytes
    ]
    if not fitting:
        raise ValueError("no stage fits")
    neediest = min(_need(view, stage, settings) for stage in fitting)
    return rng.choice([s for s in fitting if _need(view, s, settings) == neediest])


def _need(view: View, stage: int, settings: Settings) -> tuple[float, ...]:
    """Smallest where a peer is needed most: below the least, then slow (or with long queues)."""
    missing = min(len(view.members[stage]), settings.least)
    if view.measured or max(view.queues) < PILED_UP:
        return (missing, view.rates[stage])
    return (missing, -view.queues[stage], view.rates[stage])


# -- who serves already ----------------------------------------------------------------------


def decide(view: View, me: PeerId, settings: Settings) -> Stay | Move:
    """Whether ``me`` should move, as far as ``view`` tells.

    Takes no chances: of several who could move equally well the first by name does, so that no
    two ask at once.
    """
    found = best_move(view, settings)
    if isinstance(found, Move) and found.peer != me:
        return Stay(f"{found.peer[-6:]} is the one to move to stage {found.stage}")
    return found


def best_move(view: View, settings: Settings) -> Stay | Move:
    """The move that helps most, of whichever peer: the slowest stage gets somebody."""
    if len(view.stages) < 2:
        return Stay("there is one stage")
    target = min(range(len(view.stages)), key=lambda stage: (_need(view, stage, settings), stage))
    veto = _contradiction(view, target, settings)
    if veto:
        return Stay(veto)
    movers = [p for p in view.peers if _may_move(view, p, target, settings)]
    move = _best_single(view, movers, target, settings) or _best_swap(
        view, movers, target, settings
    )
    return move or Stay(f"no move makes stage {target}, the slowest, faster by enough")


def judge(view: View, peer: PeerId, target: int, settings: Settings) -> str:
    """Why ``peer`` had better not move to ``target``; empty if it may.

    Half the gain is enough: the views of two are never quite the same.
    """
    if not 0 <= target < len(view.stages):
        return f"there is no stage {target}"
    found = next((p for p in view.peers if p.peer == peer), None)
    if found is None:
        return "it is not known here"
    if found.stage == target:
        return f"it is at stage {target} already"
    if len([p for p in view.members[found.stage] if p.settled]) < 2:
        return f"it is the last of stage {found.stage}"
    if not view.fits(found, target):
        return f"stage {target} does not fit into its memory"
    lenient = Settings(settings.gain / 2, settings.least)
    if not _may_move(view, found, target, lenient):
        return f"stage {found.stage} needs it as much"
    if _best_single(view, [found], target, lenient) or _best_swap(view, [found], target, lenient):
        return ""
    return f"that would not make stage {target} and stage {found.stage} faster by enough"


def _contradiction(view: View, target: int, settings: Settings) -> str:
    """The queues say that work piles up elsewhere, while none waits at the slowest stage."""
    if len(view.members[target]) < settings.least or view.queues[target] > PILED_UP / 4:
        return ""
    longest = max(range(len(view.stages)), key=lambda stage: view.queues[stage])
    if view.queues[longest] < PILED_UP:
        return ""
    return f"by its rate stage {target} is the slowest, but work piles up at stage {longest}"


def _may_move(view: View, peer: Serving, target: int, settings: Settings) -> bool:
    """Whether it is free to go at all: settled, not needed where it is, and not too big."""
    if not peer.settled or peer.stage == target or not view.fits(peer, target):
        return False
    staying = [p for p in view.members[peer.stage] if p.settled and p is not peer]
    have, wants = len(view.members[peer.stage]), len(view.members[target])
    # Below the least, a stage gives nobody away but to one that has fewer still.
    return bool(staying) and (have > settings.least or have - 1 > wants)


def _best_single(
    view: View, movers: Sequence[Serving], target: int, settings: Settings
) -> Move | None:
    """The move after which the slower of its two stages is fastest."""
    before = view.rates[target]
    short = len(view.members[target]) < settings.least

    def after(peer: Serving) -> float:
        left = view.rates[peer.stage] - view.rate(peer, peer.stage)
        return min(left, before + view.rate(peer, target))

    best = min(
        movers,
        key=lambda p: (-after(p), view.queues[p.stage], p.queued, p.peer),
        default=None,
    )
    if best is None:
        return None
    rate = after(best)
    if not short and rate < before * (1 + settings.gain):
        return None
    if short and not before:
        why = f"stage {target} has nobody"
    elif short:
        why = f"stage {target} has {len(view.members[target])} of {settings.least} replicas"
    else:
        why = (
            f"stage {target} does {before:.3g} samples/s, stage {best.stage} "
            f"{view.rates[best.stage]:.3g}; then the slower does {rate:.3g}"
        )
    return Move(best.peer, target, why, rate / before if before else float("inf"))


def _best_swap(
    view: View, movers: Sequence[Serving], target: int, settings: Settings
) -> Move | None:
    """The first half of the best exchange: a fast peer comes, a slow one goes where it was.

    The second half is the best move once the first has been made.
    """
    before = view.rates[target]
    theirs = [p for p in view.members[target] if p.settled]
    if not 0 < len(theirs) <= SWAP_AMONG:
        return None
    best: tuple[float, PeerId, Serving, Serving] | None = None
    for come in movers:
        if len(view.members[come.stage]) > SWAP_AMONG:
            continue
        left = view.rates[come.stage] - view.rate(come, come.stage)
        for go in theirs:
            if not view.fits(go, come.stage):
                continue
            here = before + view.rate(come, target) - view.rate(go, target)
            rate = min(left + view.rate(go, come.stage), here)
            if best is None or (-rate, come.peer) < (-best[0], best[1]):
                best = (rate, come.peer, come, go)
    if best is None or best[0] < before * (1 + SWAP_MARGIN * settings.gain):
        return None
    rate, _, come, go = best
    why = (
        f"stage {target} does {before:.3g} samples/s; with {go.peer[-6:]} in its place at stage "
        f"{come.stage} the slower does {rate:.3g}"
    )
    return Move(come.peer, target, why, rate / before if before else float("inf"))


# -- the trainer's word --------------------------------------------------------------------------


@dataclass(slots=True)
class _Mover:
    stage: int
    until: float


class Grants:
    """Machine: which moves the trainer allows. One at a time, each judged by what is known now.

    A mover counts at the stage where it is going from the moment of the grant, so a stale view
    elsewhere cannot cause a second move into the same gap, or one that undoes the first.

    Args:
        limit_s: how long a move may take before it no longer holds up the next one.
        most: moves under way at the same time.
    """

    def __init__(self, settings: Settings, *, limit_s: float, most: int = 1) -> None:
        self._settings = settings
        self._limit_s = limit_s
        self._most = most
        self._movers: dict[PeerId, _Mover] = {}

    def ask(self, view: View, peer: PeerId, target: int, now: float) -> str:
        """``peer`` would like to move to ``target``: why it must not; empty: granted.

        Who asks once more for what was granted is told the same.
        """
        self.expire(now)
        mover = self._movers.get(peer)
        if mover is not None:
            return "" if mover.stage == target else f"it is on its way to stage {mover.stage}"
        if len(self._movers) >= self._most:
            other, its = next(iter(self._movers.items()))
            return f"{other[-6:]} is on its way to stage {its.stage}"
        reason = judge(self.applied_to(view), peer, target, self._settings)
        if not reason:
            self._movers[peer] = _Mover(target, now + self._limit_s)
        return reason

    def applied_to(self, view: View) -> View:
        """``view`` as it will be when those that are on their way have arrived."""
        if not self._movers:
            return view
        known = {p.peer: p for p in view.peers}
        movers = [
            Serving(
                peer,
                mover.stage,
                view.rate(known[peer], mover.stage) if peer in known else 0.0,
                settled=False,
            )
            for peer, mover in self._movers.items()
        ]
        return View(view.stages, [*(p for p in view.peers if p.peer not in self._movers), *movers])

    def ended(self, peer: PeerId) -> None:
        """It has arrived, or will not move after all."""
        self._movers.pop(peer, None)

    def expire(self, now: float) -> None:
        self._movers = {peer: m for peer, m in self._movers.items() if m.until > now}

    @property
    def under_way(self) -> dict[PeerId, int]:
        """Who is on the way to which stage."""
        return {peer: mover.stage for peer, mover in self._movers.items()}


# -- the best that there is --------------------------------------------------------------------


def best_assignment(view: View) -> float:
    """Samples per second of the best assignment of all peers that ``view`` knows, from above.

    Exact where all peers are equally fast and fit everywhere; else a bound that no assignment can
    beat: all work shared out as if peers could be cut into pieces.
    """
    work = [view.rate(p, p.stage) * view.stages[p.stage].cost for p in view.peers]
    if len(work) < len(view.stages):
        return 0.0
    shared = sum(work) / sum(need.cost for need in view.stages)
    if max(work) > min(work) * (1 + 1e-9):
        return shared
    return _of_equals(len(work), work[0], view.stages)


def _of_equals(peers: int, work: float, stages: Sequence[Need]) -> float:
    """One after the other to the stage that is slowest: for equal peers there is no better way."""
    counts: dict[int, int] = defaultdict(int)
    for stage in range(len(stages)):
        counts[stage] = 1
    for _ in range(peers - len(stages)):
        slowest = min(range(len(stages)), key=lambda s: counts[s] / stages[s].cost)
        counts[slowest] += 1
    return min(counts[s] * work / stages[s].cost for s in range(len(stages)))
