"""The coordinator: starts a run, drives it with a trainer, and takes home a model."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from torch import Tensor

from dht.records import RunRecord, TrainerRecord, TrainerState, encode
from peers.entering import Entered, Entry, entered, wire_limits
from peers.plots import plot_run
from peers.rpc import Caller
from peers.rundir import RunDirectory
from peers.state import StateLost, fetch_weights
from peers.status import Monitor
from peers.trainer import StepDone, Trainer
from swarm.data import Batches, load_batches
from swarm.errors import UserError
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import model_spec
from swarm.model.sampling import generate
from swarm.model.stage import StageModel

log = logging.getLogger("swarm.coordinator")

PROMPT = b"def "
SAMPLE_BYTES = 240
FAREWELL_S = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A run that can start: its manifest completed, its data loaded."""

    manifest: Manifest
    batches: Batches
    allow: frozenset[str] = frozenset()


@dataclass(slots=True)
class Result:
    """What a run ended with."""

    directory: RunDirectory
    steps: list[StepDone] = field(default_factory=list)
    sha256: str = ""
    sample: bytes = b""


def plan_run(manifest: Manifest, allow: Collection[str] = ()) -> Plan:
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
    return Plan(manifest.changed({"data.sha256": sha256}), batches, frozenset(allow))


class Coordinator:
    """One run from its start to its model.

    Args:
        plan: what to train.
        out: the run directory; None: a new one under ``runs``.
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
    ) -> None:
        self._plan, self._out, self._monitor, self._on_open = plan, out, monitor, on_open

    async def run(self, entry: Entry) -> Result:
        """Train ``run.steps`` steps and fetch the weights.

        Raises:
            UserError: the swarm cannot be started as asked. Superseded: another trainer leads.
        """
        async with entered(entry, wire_limits(self._plan.manifest)) as swarm:
            manifest = self._plan.manifest
            if not manifest.trainers:
                manifest = manifest.changed({"trainers": [swarm.identity.peer_id]})
            if swarm.identity.peer_id not in manifest.trainers:
                raise UserError(
                    f"{entry.identity} ({swarm.identity.peer_id}) is not among the manifest's "
                    "trainers; add it, or give the right key with --identity"
                )
            directory = RunDirectory.create(self._out, name=manifest.name)
            directory.write_manifest(manifest)
            async with anyio.create_task_group() as tasks:
                result = await self._train(swarm, manifest, directory, tasks)
                tasks.cancel_scope.cancel()
        return result

    async def _train(
        self, swarm: Entered, manifest: Manifest, directory: RunDirectory, tasks: TaskGroup
    ) -> Result:
        trainer = Trainer(
            manifest,
            caller=Caller(swarm.transport, timeout_s=manifest.periods.call_s),
            batches=self._plan.batches,
            boot=swarm.boot,
            tasks=tasks,
            rng=random.Random(),
            on_event=self._monitor.event,
        )
        self._monitor.attach(trainer)
        await swarm.transport.serve(trainer.handle)
        await self._announce(swarm, trainer)
        tasks.start_soon(self._announce_for_ever, swarm, trainer)
        tasks.start_soon(trainer.admissions.watch, swarm.directory)
        tasks.start_soon(self._monitor.refresh_for_ever)
        self._on_open(manifest, swarm.addresses)
        result = Result(directory)
        ending = "the coordinator has stopped before the run was complete"
        try:
            await self._steps(trainer, result)
            await self._take_home(trainer, result)
            ending = "the run is complete"
        finally:
            # Nobody can take the run over yet, so whoever serves it may go.
            with anyio.move_on_after(FAREWELL_S, shield=True):
                await trainer.finish(ending)
            self._keep(manifest, result)
        return result

    async def _steps(self, trainer: Trainer, result: Result) -> None:
        run = trainer.manifest.run
        self._monitor.phase = "waiting for replicas"
        await trainer.wait_for_start()
        self._monitor.phase = ""
        for step in range(run.steps):
            done = await trainer.step()
            if run.eval_every and ((step + 1) % run.eval_every == 0 or step + 1 == run.steps):
                self._monitor.phase = "evaluating"
                eval_loss = await trainer.evaluate(run.eval_microbatches)
                self._monitor.phase = ""
                done = replace(done, eval_loss=eval_loss)
            result.steps.append(done)
            result.directory.append_metrics(_metrics(done))
            self._monitor.step_done(done)

    async def _take_home(self, trainer: Trainer, result: Result) -> None:
        """Weights of every stage, their digest, and a sample of text."""
        manifest = trainer.manifest
        spec = model_spec(manifest, self._plan.allow)
        self._monitor.phase = "fetching the weights"
        stages = []
        for stage in range(manifest.stages.count):
            model = StageModel(manifest, spec, stage)
            model.weights.copy_(await _weights(trainer, stage, model.length))
            metadata = {"run_id": manifest.run_id, "step": str(trainer.mark.t), "stage": str(stage)}
            result.directory.write_weights(stage, model.tensors(), metadata)
            stages.append(model)
        tensors = {name: tensor for model in stages for name, tensor in model.tensors().items()}
        result.sha256 = weights_sha256(tensors)
        self._monitor.phase = "done"
        if manifest.model.kind == "gpt":
            result.sample = await _sample(stages, manifest.model.sequence)

    def _keep(self, manifest: Manifest, result: Result) -> None:
        """Plot and summary, of a run that was cut short too."""
        directory, steps = result.directory, result.steps
        if not steps:
            return
        try:
            plot_run(directory.read_metrics(), directory.plot_path, manifest.name)
        except (OSError, ValueError) as error:
            log.warning("the plot could not be made: %s", error)
        directory.write_summary(
            {
                "run_id": manifest.run_id,
                "steps": len(steps),
                "samples": sum(step.samples for step in steps),
                "loss": steps[-1].loss,
                "weights_sha256": result.sha256,
                "resent": sum(step.resent for step in steps),
                "skipped": sum(step.skipped for step in steps),
            }
        )

    # -- the directory ----------------------------------------------------------------------

    async def _announce_for_ever(self, swarm: Entered, trainer: Trainer) -> None:
        while True:
            await anyio.sleep(trainer.manifest.periods.announce_s)
            if not await self._announce(swarm, trainer):
                log.warning("nobody stored the run's announcement; trying again")

    async def _announce(self, swarm: Entered, trainer: Trainer) -> bool:
        manifest, me = trainer.manifest, swarm.identity.peer_id
        ttl_s = manifest.periods.record_ttl_s
        run = RunRecord(peer=me, run_id=manifest.run_id, manifest=manifest.canonical())
        state = TrainerState.WAITING if trainer.work is None else TrainerState.TRAINING
        reign = TrainerRecord(
            peer=me,
            run_id=manifest.run_id,
            boot=swarm.boot,
            term=trainer.term.number,
            state=state,
            step=trainer.mark.t,
        )
        stored = True
        for record in (run, reign):
            value = encode(record, swarm.identity, ttl_s=ttl_s)
            stored &= await swarm.directory.announce(record.key, me, value, ttl_s=ttl_s)
        return stored


async def _weights(trainer: Trainer, stage: int, length: int) -> Tensor:
    """The weights of ``stage`` at the run's mark; waits while nobody can give them."""
    while True:
        replicas = await trainer.serving(stage)
        try:
            return await fetch_weights(
                trainer.caller,
                trainer.manifest.run_id,
                replicas,
                mark=trainer.mark,
                length=length,
            )
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
