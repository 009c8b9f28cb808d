"""Makes a schedule that fails as small as it goes, and says how to run it again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tests.chaos.chaos import Outcome
from tests.chaos.schedule import Schedule, draw


@dataclass(frozen=True, slots=True)
class Smaller:
    """A schedule drawn from a seed, made smaller: ``kept`` faults, and perhaps fewer of the rest.

    None leaves what the seed says.
    """

    seed: int
    kept: tuple[int, ...]
    replicas: int | None = None
    steps: int | None = None
    standbys: int | None = None
    plain: bool = False

    @property
    def schedule(self) -> Schedule:
        """``plain``: an up-to-date directory, clocks that agree, room in queues, no checkpoints."""
        drawn = draw(self.seed).keep(self.kept)
        if self.plain:
            drawn = replace(drawn, staleness_s=0.0, skew=False, tight=False, checkpoint_every=0)
        return replace(
            drawn,
            replicas=drawn.replicas if self.replicas is None else self.replicas,
            steps=drawn.steps if self.steps is None else self.steps,
            standbys=drawn.standbys if self.standbys is None else self.standbys,
        )

    def command(self, rules_off: Sequence[str] = ()) -> str:
        """The one command that runs it again."""
        parts = [f"python scripts/chaos.py --seed {self.seed}"]
        parts.append(f"--keep {','.join(map(str, self.kept)) or 'none'}")
        for name in ("replicas", "steps", "standbys"):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"--{name} {value}")
        parts += ["--plain"] if self.plain else []
        return " ".join([*parts, *(f"--rules-off {rule}" for rule in rules_off)])


def whole(seed: int) -> Smaller:
    return Smaller(seed, tuple(range(len(draw(seed).faults))))


def shrink(start: Smaller, fails: Callable[[Schedule], bool]) -> Smaller:
    """Greedily: take away what can be taken away while ``fails`` says that it still fails."""
    found, goes_on = start, True
    while goes_on:
        goes_on = False
        for smaller in _ways(found):
            if fails(smaller.schedule):
                found, goes_on = smaller, True
                break
    return found


def _ways(of: Smaller) -> Iterator[Smaller]:
    half = len(of.kept) // 2
    if half > 1:
        yield replace(of, kept=of.kept[:half])
        yield replace(of, kept=of.kept[half:])
    for number in of.kept:
        yield replace(of, kept=tuple(n for n in of.kept if n != number))
    schedule = of.schedule
    if not of.plain:
        yield replace(of, plain=True)
    if schedule.standbys:
        yield replace(of, standbys=schedule.standbys - 1)
    if schedule.replicas > 1:
        yield replace(of, replicas=schedule.replicas - 1)
    if schedule.steps > 1:
        yield replace(of, steps=schedule.steps - 1)


def alike(failed: Outcome) -> Callable[[Outcome], bool]:
    """Whether another run fails in the same way: numbers and names may differ."""
    kinds = {_kind(problem) for problem in failed.problems}
    return lambda outcome: any(_kind(problem) in kinds for problem in outcome.problems)


def _kind(problem: str) -> str:
    return re.sub(r"\d+", "#", problem.split(": ")[0] if "crash" not in problem else problem)[:60]
