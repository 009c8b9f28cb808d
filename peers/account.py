"""What a run has counted, and whether every microbatch was counted exactly once. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peers.steps import StepDone
from swarm.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Account:
    """``samples``: those of all microbatches counted. ``resent``: tries of microbatches beyond
    the first. ``wrong``: a line for each step or stage that did not count each microbatch once."""

    steps: int
    stages: int
    samples: int
    resent: int
    skipped: int
    wrong: tuple[str, ...]


def make_account(steps: Sequence[StepDone], manifest: Manifest) -> Account:
    """Check ``steps``, all steps of a run that is complete, against its ``manifest``.

    The counts of a step are those of its decision: the microbatches that each replica's ledger
    held when it took part in the round. A step that was skipped has to count nothing.
    """
    size = manifest.batch.microbatch
    return Account(
        steps=manifest.run.steps,
        stages=manifest.stages.count,
        samples=sum(sum(done.counts[0].values()) for done in steps if done.counts) * size,
        resent=sum(done.resent for done in steps),
        skipped=sum(done.skipped for done in steps),
        wrong=tuple(_wrong(steps, manifest)),
    )


def _wrong(steps: Sequence[StepDone], manifest: Manifest) -> Iterator[str]:
    times = Counter(done.step for done in steps)
    for step in range(manifest.run.steps):
        if not times[step]:
            yield f"step {step} is missing"
        elif times[step] > 1:
            yield f"step {step} was done {times[step]} times"
    for step in sorted(step for step in times if not 0 <= step < manifest.run.steps):
        yield f"step {step} is none of the run's"
    for done in steps:
        want = 0 if done.skipped else manifest.batch.microbatches
        if len(done.counts) != manifest.stages.count:
            yield f"step {done.step}: {len(done.counts)} of {manifest.stages.count} stages counted"
        for stage, counts in enumerate(done.counts):
            if sum(counts.values()) != want:
                yield (
                    f"step {done.step}: stage {stage} counted {sum(counts.values())} microbatches "
                    f"instead of {want}"
                )


def in_words(account: Account, killed: int | None = None) -> str:
    """The figures in one line; ``killed``: how many nodes were, if any were to be."""
    parts = [] if killed is None else [f"{_number(killed, 'node')} killed"]
    parts += [
        f"{_number(account.resent, 'microbatch', 'microbatches')} sent again",
        f"{_number(account.samples, 'sample')} counted",
    ]
    if account.skipped:
        parts.append(f"{_number(account.skipped, 'step')} skipped, which counted nothing")
    line = ", ".join(parts)
    if account.wrong:
        return line
    done = account.steps - account.skipped
    each = f"each of {done:,} steps" if done != 1 else "the one step"
    stages = f" in each of {account.stages} stages" if account.stages > 1 else ""
    return f"{line}; {each} counted every microbatch exactly once{stages}, by the replicas' ledgers"


def _number(count: int, one: str, many: str = "") -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
