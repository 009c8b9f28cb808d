"""Schedules of faults, drawn from a seed: pure data, so that they can be printed and shrunk.

A fault sets in at an event rather than at a time: when the n-th message of some kind sets out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import StrEnum

ANY = "any"
"""A message of any kind."""


class What(StrEnum):
    """What befalls. Those in the first group befall the one message that sets the fault off."""

    DROP = "drop"
    CUT = "cut"
    DELAY = "delay"
    DUPLICATE = "duplicate"
    LATE = "late"  # it comes (again) once the next prepare of its target has been answered
    KILL = "kill"
    KILL_STAGE = "kill the stage of"
    KILL_WHILE_ADDING = "kill, while it adds,"
    FAIL_TO_ADD = "fail to add at"
    FREEZE = "freeze"
    BREAK = "break the connection of"  # between the two ends of the message
    MUTE = "mute"  # it hears, and is not heard
    DEAFEN = "deafen"
    PARTITION = "partition"
    JOIN = "join stage of"
    LEAVE = "leave"
    SUSPECT = "suspect"
    HURRY = "end the attempts of"  # early time limits
    SLOW = "slow down"
    DECIDE_ONE = "let decisions reach only"
    RIVAL = "start a rival of"


OF_MESSAGES = {What.DROP, What.CUT, What.DELAY, What.DUPLICATE, What.LATE}
OF_TRAINERS = {What.PARTITION, What.DECIDE_ONE, What.RIVAL}


@dataclass(frozen=True, slots=True)
class When:
    """At the ``nth`` message of ``kind`` (or reply to one) once ``step`` steps are done."""

    step: int
    kind: str = ANY
    nth: int = 1
    reply: bool = False

    def __str__(self) -> str:
        what = "answer to" if self.reply else "message"
        return f"from step {self.step}, {what} {self.kind} no. {self.nth}"


@dataclass(frozen=True, slots=True)
class Fault:
    """``whom``: "source" or "target" of the message; "0.2": of those of stage 0 that live, no. 2
    (counted round); "leader"; "" where it does not matter. ``seconds`` until it is over, or until
    who was killed is replaced. ``how``: details, by kind of fault.
    """

    what: What
    when: When
    whom: str = ""
    seconds: float = 0.0
    how: str = ""

    def __str__(self) -> str:
        parts = [f"{self.when}:", str(self.what), self.whom, f"for {self.seconds:g} s"]
        return " ".join(part for part in [*parts, self.how] if part)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run, whole. ``counting``: see ``tests.chaos.audit``; else bits are compared.

    ``standbys``: trainers beside the first; ``skew``: clocks are up to ten minutes apart;
    ``tight``: queues and contexts that hold next to nothing. ``moves``: nodes move between the
    stages, all the time. ``delay``: with delayed updates.
    """

    seed: int
    counting: bool
    steps: int
    replicas: int
    standbys: int
    faults: tuple[Fault, ...]
    checkpoint_every: int = 0
    staleness_s: float = 0.0
    skew: bool = False
    tight: bool = False
    moves: bool = False
    delay: bool = False
    delay_after: int = 0

    def keep(self, numbers: Collection[int]) -> Schedule:
        """With only the faults of these numbers."""
        kept = tuple(fault for i, fault in enumerate(self.faults) if i in numbers)
        return replace(self, faults=kept)

    @property
    def spares_trainers(self) -> bool:
        """Whether nothing here can keep a trainer from being heard for long."""
        return not any(
            fault.what in OF_TRAINERS
            or (fault.what not in OF_MESSAGES and fault.whom in ("source", "target", "leader", ""))
            or fault.what in (What.KILL_STAGE, What.SLOW)
            for fault in self.faults
        )

    def __str__(self) -> str:
        head = (
            f"seed {self.seed}: {'counting' if self.counting else 'bits'}, {self.steps} steps, "
            f"{self.replicas} replicas, {self.standbys} standbys, "
            f"checkpoint every {self.checkpoint_every}, staleness {self.staleness_s:g} s, "
            f"skew {self.skew}, tight {self.tight}"
        )
        head += (", moves" if self.moves else "") + (
            f", delay after {self.delay_after}" if self.delay else ""
        )
        return "\n".join([head, *(f"  {i}: {fault}" for i, fault in enumerate(self.faults))])


WORK = ["forward", "backward", "receipt", "cancel", "failed"]
CLOSE = ["prepare", "part", "sum", "vote", "decide", "get_sum", "fetch", "trouble"]
COMING = ["question", "reset", "join", "get_state", "get_decision", "get_decided_sum"]
COMING += ["get_digests", "ready", "load"]
LEADING = ["poll", "renew", "keep", "question"]
GOING = ["leave", "goodbye"]
KINDS = [*WORK, *CLOSE, *CLOSE, *COMING, *LEADING, *GOING]
PAUSES_S = [0.0, 0.02, 0.1, 0.5, 3.0, 9.0, 20.0]
NTHS = [1, 1, 1, 2, 2, 3, 4, 6, 9, 14]


class Draw:
    """Draws faults; ``recipes`` are the ways, the often wanted ones more than once."""

    def __init__(self, rng: random.Random, steps: int) -> None:
        self.rng, self.steps = rng, steps

    def when(self, kinds: list[str], *, step: int | None = None) -> When:
        rng = self.rng
        if step is None:
            step = rng.randrange(self.steps)
        return When(step, rng.choice(kinds), rng.choice(NTHS), rng.random() < 0.3)

    def node(self) -> str:
        return f"{self.rng.randrange(2)}.{self.rng.randrange(3)}"

    def end(self) -> str:
        return self.rng.choice(["source", "target"])

    def pause_s(self) -> float:
        return self.rng.choice(PAUSES_S)

    def key(self) -> str:
        return self.rng.choice(["same key", "new key"])

    # -- recipes ----------------------------------------------------------------------------

    def message(self) -> list[Fault]:
        """One message comes late, twice, or never."""
        what = self.rng.choice([What.DROP, What.DROP, What.CUT, What.DELAY, What.DUPLICATE])
        return [Fault(what, self.when(KINDS), seconds=self.rng.choice([0.01, 0.05, 0.3, 3.0]))]

    def late(self) -> list[Fault]:
        """An old message of a round, after the next prepare."""
        when = replace(self.when(["prepare", "part", "part", "sum", "decide"]), reply=False)
        how = self.rng.choice(["again", "not before", "not before"])
        return [Fault(What.LATE, when, how=how), *self.trouble_in_round(when.step)]

    def trouble_in_round(self, step: int) -> list[Fault]:
        """Something that ends a round."""
        return [
            self.rng.choice(
                [
                    Fault(What.KILL, self.when(["prepare", "part", "sum"], step=step), self.node()),
                    Fault(What.DROP, self.when(["receipt"], step=step)),
                    Fault(What.SUSPECT, self.when(["part", "sum"], step=step), self.node()),
                ]
            )
        ]

    def kill(self) -> list[Fault]:
        """Whoever sends or gets a message: a replica or a trainer."""
        when, whom = self.when(KINDS), self.rng.choice([self.end(), self.end(), self.node()])
        return [Fault(What.KILL, when, whom, self.pause_s(), self.key())]

    def kill_in_add(self) -> list[Fault]:
        when = self.when(["forward", "backward"])
        what = self.rng.choice([What.KILL_WHILE_ADDING, What.FAIL_TO_ADD, What.FAIL_TO_ADD])
        return [Fault(what, when, self.node(), self.pause_s(), self.key())]

    def kill_stage(self) -> list[Fault]:
        return [Fault(What.KILL_STAGE, self.when(KINDS), self.node(), self.pause_s(), self.key())]

    def silence(self) -> list[Fault]:
        what = self.rng.choice([What.FREEZE, What.FREEZE, What.MUTE, What.DEAFEN, What.BREAK])
        whom = self.rng.choice([self.end(), self.node()])
        return [Fault(what, self.when(KINDS), whom, self.rng.choice([0.5, 3.0, 9.0, 20.0]))]

    def partition(self) -> list[Fault]:
        how = str(self.rng.randrange(1 << 16))
        seconds = self.rng.choice([1.0, 6.0, 15.0, 40.0])
        return [Fault(What.PARTITION, self.when(KINDS), seconds=seconds, how=how)]

    def join(self) -> list[Fault]:
        """One comes, and then something happens to it or to its donors."""
        step = self.rng.randrange(self.steps)
        faults = [Fault(What.JOIN, self.when([*WORK, *CLOSE], step=step), self.node())]
        when = self.when(COMING, step=step)
        whom, seconds = self.end(), self.pause_s()
        what = self.rng.choice([What.KILL, What.KILL, What.FREEZE, What.DROP, None])
        return [*faults, Fault(what, when, whom, seconds, self.key())] if what else faults

    def leave(self) -> list[Fault]:
        step, whom = self.rng.randrange(self.steps), self.node()
        faults = [Fault(What.LEAVE, self.when([*WORK, *CLOSE], step=step), whom, self.pause_s())]
        if self.rng.random() < 0.3:
            other = whom[:2] + str(int(whom[2]) + 1)
            faults.append(Fault(What.LEAVE, faults[0].when, other, self.pause_s()))
        if self.rng.random() < 0.5:
            kinds = ["leave", *CLOSE]
            victim = self.rng.choice([self.end(), whom])
            faults.append(
                Fault(What.KILL, self.when(kinds, step=step), victim, self.pause_s(), self.key())
            )
        return faults

    def suspect(self) -> list[Fault]:
        return [Fault(What.SUSPECT, self.when(KINDS), self.node())]

    def hurry(self) -> list[Fault]:
        return [Fault(What.HURRY, self.when([*WORK, "prepare", "part"]), "leader")]

    def slow(self) -> list[Fault]:
        factor = self.rng.choice(["3", "30", "300"])
        return [Fault(What.SLOW, self.when(KINDS), self.node(), how=factor)]

    def leader(self) -> list[Fault]:
        """The trainer dies or freezes; those who stand by meet."""
        when = self.when([*WORK, *CLOSE, *CLOSE, *LEADING])
        if self.rng.random() < 0.3:
            return [Fault(What.FREEZE, when, "leader", self.rng.choice([2.0, 6.0, 15.0, 40.0]))]
        how = self.rng.choice(["fresh", "standby", "resume"])
        return [Fault(What.KILL, when, "leader", self.rng.choice([0.0, 2.0, 6.0, 25.0]), how)]

    def decide_one(self) -> list[Fault]:
        """A decision reaches one replica only, then its trainer goes, and perhaps the replica."""
        step, node = self.rng.randrange(self.steps), self.node()
        when = When(step, "vote", self.rng.choice([1, 2, 3]))
        faults = [Fault(What.DECIDE_ONE, when, node, self.rng.choice([0.0, 8.0, 25.0]))]
        if self.rng.random() < 0.5:
            freeze = When(step, "decide", self.rng.choice([1, 2]), reply=True)
            faults.append(Fault(What.FREEZE, freeze, "source", self.rng.choice([5.0, 15.0])))
        return faults

    def rival(self) -> list[Fault]:
        how = self.rng.choice(["fresh", "standby", "resume"])
        return [Fault(What.RIVAL, self.when([*WORK, *CLOSE]), "leader", how=how)]

    @property
    def recipes(self) -> list[Callable[[], list[Fault]]]:
        often = [self.message, self.kill, self.late, self.silence, self.leader]
        seldom = [self.kill_in_add, self.kill_stage, self.partition, self.join, self.leave]
        seldom += [self.suspect, self.hurry, self.slow, self.decide_one, self.rival]
        return [*often, *often, *often, *seldom, *seldom, self.join, self.leave]


MOVING = 1_000_000
"""From this seed on nodes move."""

DELAYED = 2_000_000
"""From this seed on updates are delayed; nodes move in every third."""


def draw(seed: int) -> Schedule:
    """The schedule of ``seed``: odd ones count microbatches, even ones compare bits."""
    rng = random.Random(seed)
    steps = rng.choice([3, 3, 4, 5])
    recipes = Draw(rng, steps)
    faults: list[Fault] = []
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 3, 4, 6])):
        faults += rng.choice(recipes.recipes)()
    return Schedule(
        seed=seed,
        counting=bool(seed % 2),
        steps=steps,
        replicas=rng.choice([2, 2, 3]),
        standbys=rng.choice([0, 1, 1, 2]),
        faults=tuple(faults),
        checkpoint_every=rng.choice([0, 0, 1, 2]),
        staleness_s=rng.choice([0.0] * 8 + [1.0, 3.0]),
        skew=rng.random() < 0.15,
        tight=rng.random() < 0.2,
        moves=seed >= MOVING and (seed < DELAYED or seed % 3 == 0),
        delay=seed >= DELAYED,
        delay_after=seed % 5 % 3 if seed >= DELAYED else 0,
    )
