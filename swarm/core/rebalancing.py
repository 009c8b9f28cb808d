"""Stay at a stage or move to another, and why.

The paper's rule (SWARM, algorithm 2) compares queues: once a period the least loaded peer of the
least loaded stage moves to the most loaded one. It moves somebody every period, whether that
helps or not, and sees nothing before queues have built up. Here the *rate* of a stage decides,
the sum of what its replicas were measured to do: the slowest stage sets the pace of the whole
pipeline, so a move is worth it if the slower of the two stages that it touches is faster
afterwards, by a margin. Where peers differ, a few moves are planned together, since one alone may
help nobody: a fast peer comes, then a slow one goes where it was. Queues break ties, tell a
newcomer where it is needed while nothing has been measured, and veto a move that they contradict.

With constant speeds every plan raises the rates of the stages, the slowest first, and no
assignment ever comes back: no two moves undo each other.

All peers find the same move from the same records, so only one asks for it. Records are old by
the time they are read; that is why the trainer has the last word (``swarm.core.grants``), from
what it knows itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf

from swarm.core.balance import Need, Serving, Settings, View, best_assignment, spares
from swarm.core.plans import Move, Search
from swarm.types import PeerId

__all__ = [
    "Move",
    "Need",
    "Serving",
    "Settings",
    "Stay",
    "View",
    "best_assignment",
    "best_move",
    "choose",
    "decide",
    "judge",
    "rested",
]

REST_PERIODS = 2
"""For so many periods after its arrival a replica stays, unless a stage has nobody."""

PILED_UP = 2.0
"""Microbatches that wait for each replica of a stage, on average, where work piles up; a quarter
of that is nothing."""


@dataclass(frozen=True, slots=True)
class Stay:
    reason: str


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


def decide(view: View, me: PeerId, settings: Settings) -> Stay | Move:
    """Whether ``me`` should move, as far as ``view`` tells.

    Of several who could move equally well the first by name does, so that no two ask at once.
    """
    found = best_move(view, settings)
    if isinstance(found, Move) and found.peer != me:
        return Stay(f"{found.peer[-6:]} is the one to move to stage {found.stage}")
    return found


def rested(move: Move, served_s: float, period_s: float) -> bool:
    """Whether its peer has served for long enough to make this move.

    One that has just come would otherwise go on at once on what is still unsettled. But a stage
    that has nobody holds up all.
    """
    return move.gain == inf or served_s >= REST_PERIODS * period_s


def best_move(view: View, settings: Settings) -> Stay | Move:
    """The move that helps most, of whichever peer; or the first of several, if they help most."""
    if len(view.stages) < 2:
        return Stay("there is one stage")
    order = sorted(range(len(view.stages)), key=lambda s: (len(view.members[s]), view.rates[s]))
    short = [stage for stage in order if len(view.members[stage]) < settings.least]
    for stage in short:
        if move := _relief(view, stage, settings):
            return move
    target = view.rates.index(view.throughput)
    if not short and (veto := _contradiction(view, target)):
        return Stay(veto)
    plan = Search(view, settings).best()
    if plan is None:
        return Stay(f"no move makes stage {target}, the slowest, faster by enough")
    return plan.first(view)


def judge(view: View, peer: PeerId, target: int, settings: Settings) -> str:
    """Why ``peer`` had better not move to ``target``; empty if it may.

    Half the gain is enough for a single move: the views of two are never quite the same. The
    first of several has to gain all of it, or what remains of the plan would not be worth it. If
    it alone does not make the pipeline faster, nothing much better may be known: the others might
    do without it, or have to undo it.
    """
    if not 0 <= target < len(view.stages):
        return f"there is no stage {target}"
    found = next((p for p in view.peers if p.peer == peer), None)
    if found is None:
        return "it is not known here"
    if found.stage == target:
        return f"it is at stage {target} already"
    if not found.settled:
        return f"it is joining or leaving stage {found.stage}"
    if view.settled[found.stage] < 2:
        return f"it is the last of stage {found.stage}"
    if not view.fits(found, target):
        return f"stage {target} does not fit into its memory"
    if not spares(view, found.stage, target, settings, {}):
        return f"stage {found.stage} needs it as much"
    if len(view.members[target]) < settings.least:
        return ""
    plan = Search(view, settings, settings.gain / 2).beginning_with(found, target)
    if plan is None:
        return f"that would not make stage {target} and stage {found.stage} faster by enough"
    if len(plan.steps) > 1 or plan.score <= view.throughput:
        best = Search(view, settings).best()
        if best is not None and plan.score * (1 + settings.gain / 2) < best.score:
            return f"{best.steps[0].peer.peer[-6:]} had better move to stage {best.steps[0].stage}"
    return ""


def _contradiction(view: View, target: int) -> str:
    """The queues say that work piles up elsewhere, while none waits at the slowest stage."""
    longest = max(range(len(view.stages)), key=lambda stage: view.queues[stage])
    if view.queues[target] > PILED_UP / 4 or view.queues[longest] < PILED_UP:
        return ""
    return f"by its rate stage {target} is the slowest, but work piles up at stage {longest}"


def _relief(view: View, target: int, settings: Settings) -> Move | None:
    """Somebody for a stage that has too few, whatever it costs: who leaves most behind."""
    movers = [
        p
        for stage in range(len(view.stages))
        if stage != target and spares(view, stage, target, settings, {})
        for p in view.members[stage]
        if p.settled and view.fits(p, target)
    ]
    before = view.rates[target]

    def after(peer: Serving) -> float:
        left = view.rates[peer.stage] - view.rate(peer, peer.stage)
        return min(left, before + view.rate(peer, target))

    if not movers:
        return None
    best = min(movers, key=lambda p: (-after(p), view.queues[p.stage], p.queued, p.peer))
    if not view.members[target]:
        return Move(best.peer, target, f"stage {target} has nobody", inf)
    have = len(view.members[target])
    why = f"stage {target} has {have} of {settings.least} replicas"
    return Move(best.peer, target, why, after(best) / before)
