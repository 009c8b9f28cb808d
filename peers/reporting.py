"""Makes a ``Report`` of what a look around has shown. No I/O.

What peers say of themselves is shown as they say it; nothing of it raises here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dht.records import PeerState, TrainerRecord, TrainerState
from peers import messages as msg
from peers.concerns import concerns, difference
from peers.lookout import Sight
from peers.report import (
    GONE,
    SERVING,
    SILENT,
    ReplicaReport,
    Report,
    StageReport,
    TrainerReport,
)
from swarm.core.totals import OTHERS
from swarm.manifest import Manifest
from swarm.types import FRESH, Mark, PeerId, Replica


def make_report(sight: Sight, manifest: Manifest) -> Report:
    """The run of ``manifest`` as ``sight`` shows it; look with ``detail`` for the whole of it."""
    stages = tuple(_stage(sight, manifest, stage) for stage in range(manifest.stages.count))
    heads = [stage.mark for stage in stages if stage.mark is not None]
    quiets = [status.quiet_s for status in sight.statuses.values() if status.quiet_s is not None]
    quiet_s = min(quiets, default=None)
    heard = quiet_s is not None and quiet_s <= manifest.periods.lease_s
    trainers = _trainers(sight, manifest, heard=heard)
    leader = max((t for t in trainers if t.leads), key=lambda t: (t.term, t.peer), default=None)
    terms = [status.term for status in sight.statuses.values()]
    report = Report(
        run_id=manifest.run_id,
        name=manifest.name,
        steps=manifest.run.steps,
        batch=manifest.batch.microbatch * manifest.batch.microbatches,
        state=_state(trainers, leader),
        mark=min(heads) if len(heads) == len(stages) else None,
        note=difference(stages),
        loss=_loss(sight, max(heads, default=None)),
        leader="" if leader is None else leader.peer,
        term=max([*terms, 0 if leader is None else leader.term]),
        quiet_s=quiet_s,
        trainers=trainers,
        stages=stages,
    )
    return replace(report, warnings=concerns(report, manifest))


def _loss(sight: Sight, head: Mark | None) -> float | None:
    for status in sight.statuses.values():
        if head is not None and status.mark == head and status.detail is not None:
            return status.detail.loss
    return None


# -- stages -------------------------------------------------------------------------------------


def _place(sight: Sight, replica: Replica) -> int:
    """The stage that it says it serves, else the one it is announced for."""
    status = sight.statuses.get(replica)
    if status is None or status.stage is None:
        return sight.stages[replica]
    return status.stage


def _stage(sight: Sight, manifest: Manifest, stage: int) -> StageReport:
    here = sorted(replica for replica in sight.stages if _place(sight, replica) == stage)
    known = {replica: sight.statuses[replica] for replica in here if replica in sight.statuses}
    heads = [s for s in known.values() if s.state in SERVING and s.mark is not None]
    newest = max(heads, key=lambda status: status.mark or FRESH, default=None)
    detail = newest.detail if newest is not None else None
    totals: Mapping[str, int] = {} if detail is None else detail.totals
    counts: Mapping[str, int] = {} if detail is None else detail.counts
    size, in_step = manifest.batch.microbatch, manifest.batch.microbatches

    def replica_report(replica: Replica) -> ReplicaReport:
        counted = totals.get(replica.peer, 0) * size
        share = min(counts.get(replica.peer, 0) / in_step, 1.0) if counts else None
        if replica in known:
            speed = _announced_speed(sight, replica)
            return _answering(replica, known[replica], share, counted, speed)
        if _was_going(sight, replica):
            why = "said that it would go, and does not answer any more"
            return ReplicaReport(replica.peer, replica.boot, GONE, samples=counted, why=why)
        why = _why_silent(sight, replica)
        return ReplicaReport(replica.peer, replica.boot, SILENT, None, share, counted, why=why)

    present = {replica.peer for replica in here}
    gone = [
        ReplicaReport(peer, "", GONE, samples=count * size, why=_where(sight, peer))
        for peer, count in sorted(totals.items())
        if peer not in present
    ]
    return StageReport(
        stage,
        None if newest is None else newest.mark,
        sum(totals.values()) * size,
        (*map(replica_report, here), *gone),
    )


def _answering(
    replica: Replica, status: msg.Status, share: float | None, samples: int, speed: float | None
) -> ReplicaReport:
    detail = status.detail or msg.Detail()
    return ReplicaReport(
        peer=replica.peer,
        boot=replica.boot,
        state=status.state,
        mark=status.mark,
        share=share,
        samples=samples,
        last_work_s=detail.last_work_s,
        why=detail.why,
        queued=detail.queued,
        samples_per_s=speed,
        quiet_s=status.quiet_s,
        version=detail.version,
    )


def _announced_speed(sight: Sight, replica: Replica) -> float | None:
    """Samples per second; None before it has measured any."""
    record = sight.announced.get(replica)
    return (record.samples_per_s or None) if record is not None else None


def _was_going(sight: Sight, replica: Replica) -> bool:
    """It has left, or is on its way to another stage: what it announced last lives on."""
    record = sight.announced.get(replica)
    return record is not None and record.state is PeerState.DRAINING


def _why_silent(sight: Sight, replica: Replica) -> str:
    record, why = sight.announced.get(replica), sight.silent.get(replica, "")
    said = f"announced as {record.state} at step {record.mark.t}, " if record is not None else ""
    return f"{said}but does not answer: {why}"


def _where(sight: Sight, peer: PeerId) -> str:
    """What became of a peer that serves a stage no more, as far as can be seen."""
    if peer == OTHERS:
        return "all who came when there was no room for more names"
    elsewhere = {_place(sight, replica) for replica in sight.stages if replica.peer == peer}
    return f"serves stage {min(elsewhere)} now" if elsewhere else ""


# -- trainers -----------------------------------------------------------------------------------


def _trainers(sight: Sight, manifest: Manifest, *, heard: bool) -> tuple[TrainerReport, ...]:
    """Those announced, and the one that the replicas obey. ``heard``: they heard it lately."""
    newest = max(
        (status for status in sight.statuses.values() if status.trainer in manifest.trainers),
        key=lambda status: (status.term, status.term_boot),
        default=None,
    )
    obeyed = "" if newest is None else newest.trainer
    found = [
        _trainer(sight, record, heard=heard and record.peer == obeyed)
        for record in sorted(sight.trainers, key=lambda record: record.peer)
    ]
    if newest is not None and obeyed not in {record.peer for record in sight.trainers}:
        step = 0 if newest.mark is None else newest.mark.t
        why = "the replicas obey it, but it is not announced"
        found.append(TrainerReport(obeyed, SILENT, newest.term, step, heard, why))
    return tuple(found)


def _trainer(sight: Sight, record: TrainerRecord, *, heard: bool) -> TrainerReport:
    status = sight.trainer_statuses.get(record.peer)
    if record.state in (TrainerState.STANDBY, TrainerState.DONE):
        return TrainerReport(record.peer, str(record.state), record.term, record.step, False)
    if status is None or status.role != "trainer":
        why = f"announced as {record.state}, but does not answer"
        return TrainerReport(record.peer, SILENT, record.term, record.step, heard, why)
    step = record.step if status.mark is None else status.mark.t
    why = "" if status.detail is None else status.detail.why
    return TrainerReport(record.peer, str(record.state), status.term, step, True, why)


def _state(trainers: tuple[TrainerReport, ...], leader: TrainerReport | None) -> str:
    if any(trainer.state == TrainerState.DONE for trainer in trainers):
        return "done"
    if leader is None:
        return "leaderless"
    return "waiting" if leader.state == TrainerState.WAITING else "training"
