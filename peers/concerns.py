"""What a person should look at in a ``Report``, in plain words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from peers.report import SILENT, ReplicaReport, Report, StageReport
from swarm.manifest import Manifest
from swarm.types import Mark


def difference(stages: Sequence[StageReport]) -> str:
    """How the marks of the stages differ, e.g. "stage 1 is at step 40, the others at step 41:
    applying a decision"; empty if they don't."""
    places: dict[Mark, list[int]] = defaultdict(list)
    for stage in stages:
        if stage.mark is not None:
            places[stage.mark].append(stage.stage)
    if len(places) < 2:
        return ""
    one_term = len({mark.term for mark in places}) == 1
    groups = sorted(places.items(), key=lambda item: (len(item[1]), item[1]))
    words = []
    for i, (mark, numbers) in enumerate(groups):
        last = i == len(groups) - 1 and len(numbers) > 1
        who = "the others" if last else _stage_names(numbers)
        verb = "" if i else " are" if len(numbers) > 1 else " is"
        of_term = "" if one_term else f" of term {mark.term.number}"
        words.append(f"{who}{verb} at step {mark.t}{of_term}")
    steps = {mark.t for mark in places}
    why = (
        "applying a decision"
        if max(steps) - min(steps) == 1
        else "they have to be brought together"
    )
    return f"{', '.join(words)}: {why}"


def _stage_names(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    return f"stages {', '.join(map(str, numbers))}"


def concerns(report: Report, manifest: Manifest) -> tuple[str, ...]:
    """A line each, the worst first. None of a run that is done: its nodes are going home."""
    if report.state == "done":
        return ()
    found = list(_of_trainers(report, manifest.periods.lease_s))
    for stage in report.stages:
        found += _of_stage(stage, begun=report.begun, need=manifest.start.replicas)
    return tuple(found)


def _of_trainers(report: Report, lease_s: float) -> Iterator[str]:
    leading = [trainer for trainer in report.trainers if trainer.leads]
    standbys = [trainer for trainer in report.trainers if trainer.state == "standby"]
    if not leading or (report.quiet_s is not None and report.quiet_s > lease_s):
        since = "" if report.quiet_s is None else f" for {report.quiet_s:.0f} s"
        what = "a standby is there to take over" if standbys else "no standby is announced"
        yield f"no replica has heard a trainer{since}; {what}"
    for trainer in leading:
        if trainer.why:
            yield f"the trainer {trainer.name}: {trainer.why}"
    if len(leading) > 1:
        names = ", ".join(f"{trainer.name} (term {trainer.term})" for trainer in leading)
        yield f"more than one trainer leads: {names}; the higher term will win"


def _of_stage(stage: StageReport, *, begun: bool, need: int) -> Iterator[str]:
    where = f"stage {stage.stage}"
    serving = [replica for replica in stage.replicas if replica.serves]
    waiting, joining = stage.of_state("waiting"), stage.of_state("joining")
    coming = f" ({_names(joining)} joining)" if joining else ""
    if begun and not serving:
        yield f"{where} has no replica with the run's weights{coming}: the run waits for one"
    elif not begun and not waiting:
        yield f"{where} has no replica yet{coming}"
    elif begun and len(serving) == 1 and need > 1:
        yield f"{where} has one replica left{coming}"
    for replica in stage.of_state(SILENT):
        yield f"{where}: {replica.name} is {replica.why}"
    if begun and waiting:
        yield f"{where}: no trainer has told {_names(waiting)} to join yet"
    for replica in serving:
        yield from _behind(replica, stage)


def _names(replicas: Sequence[ReplicaReport]) -> str:
    return ", ".join(replica.name for replica in replicas)


def _behind(replica: ReplicaReport, stage: StageReport) -> Iterator[str]:
    """One step behind is nothing: the decision is on its way."""
    mark, head = replica.mark, stage.mark
    assert mark is not None
    assert head is not None
    where = f"stage {stage.stage}: {replica.name}"
    if mark.term != head.term and head.t - mark.t != 1:
        yield (
            f"{where} has weights of step {mark.t} of term {mark.term.number}, others have those "
            f"of step {head.t} of term {head.term.number}"
        )
    elif head.t - mark.t > 1:
        yield f"{where} is at step {mark.t}, {head.t - mark.t} steps behind"
