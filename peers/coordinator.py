"""The coordinator: starts a run, drives it with a trainer, and takes home a model."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from torch import Tensor

from peers.checkpoints import CheckpointStore
from peers.entering import Entered, Entry, entered, wire_limits
from peers.fields import plain
from peers.finding import learn_run
from peers.leading import Leader, Start, check_may_lead
from peers.plots import plot_run
from peers.rundir import RunDirectory
from peers.state import PieceSource, StateLost, fetch_state
from peers.status import Monitor
from peers.steps import StepDone
from peers.trainer import Trainer
from peers.wire import Limits
from swarm.core.totals import Totals
from swarm.data import Batches, load_batches
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.needs import stage_needs
from swarm.model.registry import model_spec
from swarm.model.sampling import generate
from swarm.model.stage import StageModel
from swarm.types import FRESH

log = logging.getLogger("swarm.coordinator")

PROMPT = b"def "
SAMPLE_BYTES = 240
MAX_PEERS = 256
"""Addresses of nodes that are written down; any one that answers is enough."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can start: its manifest completed, its data loaded.

    ``standbys``: peers that may lead it beside whoever starts it.
    """

    manifest: Manifest
    batches: Batches
    allow: frozenset[str] = frozenset()
    standbys: tuple[str, ...] = ()


@dataclass(slots=True)
class Result:
    """What a run ended with."""

    directory: RunDirectory
    steps: list[StepDone] = field(default_factory=list)
    totals: Totals = ()
    sha256: str = ""
    sample: bytes = b""


def plan_run(manifest: Manifest, allow: Collection[str] = (), standbys: Sequence[str] = ()) -> Plan:
    """Load data and model of ``manifest``; the corpus's hash becomes part of the run.

    Raises:
        ConfigError, DataError: what is wrong with them.
    """
    model_spec(manifest, allow)
    batches, sha256 = load_batches(
        manifest.data.source,
        expected_sha256=manifest.data.sha256,
        holdout=manifest.data.holdout,
        sequence=manifest.model.sequence,
        microbatch=manifest.batch.microbatch,
        seed=manifest.seed,
        allow=allow,
    )
    manifest = manifest.changed({"data.sha256": sha256})
    return Plan(manifest, batches, frozenset(allow), tuple(standbys))


class Coordinator:
    """One run from its start to its model: a ``Leader``, a run directory, and a person's view.

    Args:
        plan: what to train.
        out: the run directory; None: a new one under ``runs``.
        start: whether the run begins here, goes on here, or is led by another for now.
        monitor: is told all that a person may want to see.
        on_open: called with the swarm's join addresses once nodes can come.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        out: Path | None,
        monitor: Monitor,
        on_open: Callable[[Manifest, list[str]], None],
        start: Start = Start.FRESH,
    ) -> None:
        self._plan, self._out, self._monitor, self._on_open = plan, out, monitor, on_open
        self._start = start
        self._result: Result | None = None
        self._disk_failed = False

    async def run(self, entry: Entry) -> Result:
        """Train until step ``run.steps`` and fetch the weights.

        Raises:
            UserError: the swarm cannot be started as asked.
        """
        async with entered(entry, wire_limits(self._plan.manifest)) as swarm:
            manifest, me = self._plan.manifest, swarm.identity.peer_id
            others = [peer for peer in self._plan.standbys if peer != me]
            if others or not manifest.trainers:
                trainers = dict.fromkeys((*manifest.trainers, me, *others))
                manifest = manifest.changed({"trainers": list(trainers)})
            return await self.lead(swarm, manifest, entry)

    @property
    def directory(self) -> RunDirectory | None:
        """Where the run is kept, once that is known."""
        return None if self._result is None else self._result.directory

    async def lead(self, swarm: Entered, manifest: Manifest, entry: Entry) -> Result:
        """``run``, for one who has entered the swarm and knows the run."""
        check_may_lead(manifest, swarm.identity.peer_id, entry.identity)
        resumes = self._start is Start.RESUME
        directory = RunDirectory.create(self._out, name=manifest.name, resume=resumes)
        directory.write_manifest(manifest)
        self._monitor.curve.load(directory.read_metrics())
        result = self._result = Result(directory)
        store = CheckpointStore(
            directory.path / "checkpoints",
            manifest.run_id,
            keep=manifest.run.checkpoints,
            say=self.event,
        )
        store.clean()
        leader = Leader(
            manifest,
            swarm=swarm,
            batches=self._plan.batches,
            rng=random.Random(),
            store=store,
            audience=self,
        )
        leader.needs = stage_needs(manifest, model_spec(manifest, self._plan.allow))
        self._on_open(manifest, swarm.addresses)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._monitor.run)
                tasks.start_soon(_remember_peers, leader, directory)
                await leader.run(self._start)
                tasks.cancel_scope.cancel()
        finally:
            self._keep(manifest, result, complete=leader.complete)
        return result

    # -- the leader's audience --------------------------------------------------------------

    def event(self, line: str) -> None:
        self._monitor.event(line)

    def phase(self, text: str) -> None:
        self._monitor.phase = text
        self._monitor.refresh()

    def leads(self, trainer: Trainer) -> None:
        """What was written of steps that are not on the way to the run's mark is taken back."""
        self._monitor.attach(trainer)
        result = self._result
        if result is not None and trainer.settled and trainer.mark != FRESH:
            # The last step is told again if its decision is known.
            known = trainer.mark.t - (trainer.last_decision is not None)
            result.steps = [done for done in result.steps if done.step < known]
            self._monitor.curve.rewind(known)
            self._write(partial(result.directory.rewind, known))

    def step_done(self, trainer: Trainer, done: StepDone) -> None:
        assert self._result is not None
        self._result.steps.append(done)
        self._result.totals = trainer.totals
        self._write(partial(self._result.directory.append_metrics, _metrics(done)))
        self._monitor.step_done(done)

    def _write(self, write: Callable[[], None]) -> None:
        """A full disk costs what would be written, not a run that goes on well."""
        try:
            write()
        except OSError as error:
            if not self._disk_failed:
                self._disk_failed = True
                self.event(f"the run directory cannot be written, the run goes on: {error}")

    async def complete(self, trainer: Trainer) -> None:
        """Weights of every stage, their digest, and a sample of text."""
        manifest, result = trainer.manifest, self._result
        assert result is not None
        result.totals = trainer.totals
        spec = model_spec(manifest, self._plan.allow)
        self.phase("fetching the weights")
        stages = []
        for stage in range(manifest.stages.count):
            model = StageModel(manifest, spec, stage)
            model.weights.copy_(await _weights(trainer, stage, model.length))
            metadata = {"run_id": manifest.run_id, "step": str(trainer.mark.t), "stage": str(stage)}
            result.directory.write_weights(stage, model.tensors(), metadata)
            stages.append(model)
        tensors = {name: tensor for model in stages for name, tensor in model.tensors().items()}
        result.sha256 = weights_sha256(tensors)
        self.phase("done")
        if manifest.model.kind == "gpt":
            result.sample = await _sample(stages, manifest.model.sequence)

    def _keep(self, manifest: Manifest, result: Result, *, complete: bool) -> None:
        """Plot and summary, of a run that was cut short too."""
        directory, metrics = result.directory, result.directory.read_metrics()
        if not metrics:
            return
        try:
            plot_run(metrics, directory.plot_path, manifest.name)
        except (OSError, ValueError) as error:
            log.warning("the plot could not be made: %s", error)
        directory.write_summary(
            {
                "run_id": manifest.run_id,
                "complete": complete,
                "steps": metrics[-1]["step"] + 1,
                "samples": sum(line["samples"] for line in metrics),
                "loss": metrics[-1]["loss"],
                "weights_sha256": result.sha256,
                "resent": sum(line["resent"] for line in metrics),
                "skipped": sum(line["skipped"] for line in metrics),
                "microbatches_by_peer": plain(result.totals),
            }
        )


async def stand_by_for(
    entry: Entry,
    *,
    run_id: str,
    out: Path | None,
    allow: Collection[str],
    monitor: Monitor,
    on_open: Callable[[Manifest, list[str]], None],
) -> Result:
    """Enter a swarm and lead its run whenever nobody else does.

    Raises:
        UserError: the run cannot be found, or is not ours to lead.
    """
    async with entered(entry, Limits()) as swarm:
        manifest = await learn_run(swarm, entry.join, run_id)
        swarm.limit(wire_limits(manifest))
        check_may_lead(manifest, swarm.identity.peer_id, entry.identity)
        plan = await anyio.to_thread.run_sync(partial(plan_run, manifest, allow))
        coordinator = Coordinator(
            plan, out=out, monitor=monitor, on_open=on_open, start=Start.STANDBY
        )
        return await coordinator.lead(swarm, manifest, entry)


async def _remember_peers(leader: Leader, directory: RunDirectory) -> None:
    """Write down where the nodes are: a coordinator that is started again looks for them there."""
    written: list[str] = []
    while True:
        await anyio.sleep(leader.manifest.periods.announce_s)
        found = {} if leader.trainer is None else leader.trainer.addresses
        addresses = sorted({address for known in found.values() for address in known})
        if addresses and addresses != written:
            written = addresses
            try:
                directory.write_peers(addresses[:MAX_PEERS])
            except OSError as error:
                log.warning("the nodes' addresses are not written down: %s", error)


async def _weights(trainer: Trainer, stage: int, length: int) -> Tensor:
    """The weights of ``stage`` at the run's mark; waits while nobody can give them."""
    while True:
        replicas = await trainer.members(stage)
        run_id = trainer.manifest.run_id
        sources = [PieceSource(trainer.caller, run_id, replica, stage) for replica in replicas]
        try:
            return (await fetch_state(sources, mark=trainer.mark, length=length, vectors=1))[0]
        except StateLost as error:
            for replica in replicas:
                trainer.lose(replica, str(error))


async def _sample(stages: Sequence[StageModel], sequence: int) -> bytes:
    """Text in a thread, which ends soon after this is cancelled, however slow the model is."""
    ended = threading.Event()
    sample = partial(
        generate, stages, PROMPT, count=SAMPLE_BYTES, sequence=sequence, stop=ended.is_set
    )
    try:
        return await anyio.to_thread.run_sync(sample, abandon_on_cancel=True)
    finally:
        ended.set()


def _metrics(done: StepDone) -> dict[str, object]:
    """One line of ``metrics.jsonl``."""
    metrics = asdict(done)
    metrics["replicas"] = [len(counts) for counts in metrics.pop("counts")]
    if metrics["eval_loss"] is None:
        del metrics["eval_loss"]
    return metrics
