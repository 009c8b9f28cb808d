"""What a look at a swarm comes to, as frozen nouns; and as one JSON document with stable keys.

The document of ``as_json`` (durations are seconds before now; null: not known, or never):

    run, name     the run's id and name
    state         "training"; "waiting" (for replicas); "leaderless"; "done"
    step, steps   the step that every stage has reached, and how many the run has
    mark          the same as a mark: {"term", "boot", "step"}
    note          how the stages differ, if they do
    loss          of the last step
    batch         samples in a step
    leader        peer id of the trainer that leads
    term          number of the term that is obeyed
    quiet_s       since when no replica has heard a trainer
    trainers      [{"peer", "state", "term", "step", "leads", "why"}]: state is waiting, training,
                  standby or done as announced, or silent
    stages        [{"stage", "mark", "samples", "replicas"}]: samples counted so far
    replicas      [{"peer", "boot", "state", "mark", "share", "samples", "last_work_s", "why",
                  "queued", "samples_per_s", "quiet_s", "version"}]: state is waiting, joining,
                  ready or draining; silent: announced, but does not answer; gone: has counted,
                  and serves here no more. share: of its stage's microbatches in the last step,
                  0 to 1. samples: counted for this peer and stage so far. why: of silence, or of
                  no work. samples_per_s: what it could do if it never waited, as announced.
    warnings      [text]: what a person should look at
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.types import Boot, Mark, PeerId

SILENT = "silent"
GONE = "gone"
SERVING = ("ready", "draining")
"""States of replicas whose weights are of the run."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One peer of one stage: see the module's docstring."""

    peer: PeerId
    boot: Boot
    state: str
    mark: Mark | None = None
    share: float | None = None
    samples: int = 0
    last_work_s: float | None = None
    why: str = ""
    queued: int | None = None
    samples_per_s: float | None = None
    quiet_s: float | None = None
    version: str = ""

    @property
    def name(self) -> str:
        """A short peer id, for people."""
        return self.peer[-6:]

    @property
    def serves(self) -> bool:
        return self.state in SERVING and self.mark is not None


@dataclass(frozen=True, slots=True)
class StageReport:
    """``mark``: the highest at which a replica serves; None: none does."""

    stage: int
    mark: Mark | None
    samples: int
    replicas: tuple[ReplicaReport, ...]

    def of_state(self, *states: str) -> list[ReplicaReport]:
        return [replica for replica in self.replicas if replica.state in states]


@dataclass(frozen=True, slots=True)
class TrainerReport:
    peer: PeerId
    state: str
    term: int
    step: int
    leads: bool
    why: str = ""

    @property
    def name(self) -> str:
        """A short peer id, for people."""
        return self.peer[-6:]


@dataclass(frozen=True, slots=True)
class Report:
    """A run at one moment: see the module's docstring. ``mark`` None: no stage is complete."""

    run_id: str
    name: str
    steps: int
    batch: int
    state: str
    mark: Mark | None
    note: str
    loss: float | None
    leader: PeerId
    term: int
    quiet_s: float | None
    trainers: tuple[TrainerReport, ...]
    stages: tuple[StageReport, ...]
    warnings: tuple[str, ...] = ()

    @property
    def begun(self) -> bool:
        """Whether anybody says that there are weights, or a step that was done."""
        served = any(stage.mark is not None for stage in self.stages)
        return served or any(trainer.step > 0 for trainer in self.trainers)


def as_json(report: Report) -> dict[str, object]:
    """Plain dicts, lists and scalars: see the module's docstring."""
    return {
        "run": report.run_id,
        "name": report.name,
        "state": report.state,
        "step": None if report.mark is None else report.mark.t,
        "steps": report.steps,
        "mark": _mark(report.mark),
        "note": report.note,
        "loss": report.loss,
        "batch": report.batch,
        "leader": report.leader or None,
        "term": report.term,
        "quiet_s": _rounded(report.quiet_s),
        "trainers": [_trainer(trainer) for trainer in report.trainers],
        "stages": [_stage(stage) for stage in report.stages],
        "warnings": list(report.warnings),
    }


def _stage(stage: StageReport) -> dict[str, object]:
    return {
        "stage": stage.stage,
        "mark": _mark(stage.mark),
        "samples": stage.samples,
        "replicas": [_replica(replica) for replica in stage.replicas],
    }


def _replica(replica: ReplicaReport) -> dict[str, object]:
    return {
        "peer": replica.peer,
        "boot": replica.boot or None,
        "state": replica.state,
        "mark": _mark(replica.mark),
        "share": _rounded(replica.share),
        "samples": replica.samples,
        "last_work_s": _rounded(replica.last_work_s),
        "why": replica.why,
        "queued": replica.queued,
        "samples_per_s": _rounded(replica.samples_per_s),
        "quiet_s": _rounded(replica.quiet_s),
        "version": replica.version or None,
    }


def _trainer(trainer: TrainerReport) -> dict[str, object]:
    return {
        "peer": trainer.peer,
        "state": trainer.state,
        "term": trainer.term,
        "step": trainer.step,
        "leads": trainer.leads,
        "why": trainer.why,
    }


def _mark(mark: Mark | None) -> dict[str, object] | None:
    if mark is None:
        return None
    return {"term": mark.term.number, "boot": mark.term.boot, "step": mark.t}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
