"""Keeps checkpoints: has replicas set a copy aside, fetches it, and writes it to this disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from anyio.abc import TaskGroup
from torch import Tensor

from peers import messages as msg
from peers.checkpoints import Checkpoint, CheckpointStore, CheckpointWriter, StageReader
from peers.executor import Blocking
from peers.lookout import Sight
from peers.rpc import Caller
from peers.sources import cut
from peers.state import PieceSource, StateLost, differing, fetch_digests, fetch_state
from peers.trainer import Trainer
from swarm.core.totals import Totals
from swarm.errors import BadInput, TransportError
from swarm.manifest import Manifest
from swarm.model.stage import state_names
from swarm.types import Mark, Replica

log = logging.getLogger("swarm.coordinator")


class Keeper:
    """Fetches one checkpoint at a time, off the critical path.

    ``say`` is told of each that is written, and why one was not. ``blocking`` runs what waits for
    the disk.
    """

    def __init__(
        self,
        manifest: Manifest,
        caller: Caller,
        store: CheckpointStore,
        *,
        tasks: TaskGroup,
        say: Callable[[str], None],
        blocking: Blocking,
    ) -> None:
        self._manifest, self._caller, self._store = manifest, caller, store
        self._tasks, self._say, self._blocking = tasks, say, blocking
        self._names = state_names(manifest)
        self._busy_with: Mark | None = None
        self._done: Mark | None = None

    def keep(self, trainer: Trainer) -> None:
        """Begin a checkpoint at the trainer's mark, unless one is still on its way."""
        mark = trainer.mark
        if self._busy_with is not None:
            self._say(
                f"no checkpoint at step {mark.t}: that of step {self._busy_with.t} is still on "
                "its way (raise run.checkpoint_every or limits.join_bytes_per_s)"
            )
            return
        self._busy_with = mark
        self._tasks.start_soon(self._guarded, mark, partial(self._set_aside, trainer, mark))

    def saw(self, sight: Sight) -> None:
        """A standby fetches what the trainer has had set aside, if all stages have it."""
        stages = range(self._manifest.stages.count)
        kept: dict[int, dict[Replica, msg.Status]] = {stage: {} for stage in stages}
        for replica, status in sight.statuses.items():
            kept.get(sight.stages[replica], {})[replica] = status
        marks = [{s.kept for s in kept[stage].values() if s.kept is not None} for stage in stages]
        common = set.intersection(*marks) if marks else set()
        if self._busy_with is not None or not common:
            return
        mark = max(common)
        if self._done is not None and mark <= self._done:
            return
        holders = {
            stage: [(r, s.values) for r, s in sorted(kept[stage].items()) if s.kept == mark]
            for stage in stages
        }
        self._busy_with = mark
        self._tasks.start_soon(self._guarded, mark, partial(self._fetch_all, mark, holders))

    async def _guarded(self, mark: Mark, fetch: Callable[[], object]) -> None:
        """Whatever goes wrong costs this checkpoint alone."""
        try:
            await fetch()  # type: ignore[misc]
            self._done = mark
        except Exception as error:
            log.debug("no checkpoint at step %d", mark.t, exc_info=error)
            self._say(f"no checkpoint at step {mark.t}: {error}")
        finally:
            self._busy_with = None

    async def _set_aside(self, trainer: Trainer, mark: Mark) -> None:
        holders: dict[int, list[tuple[Replica, int]]] = {}
        for stage in range(trainer.stages):
            replicas = trainer.ready(stage)
            for replica in replicas:
                if await self._asked_to_keep(trainer, replica, mark):
                    holders[stage] = [(replica, trainer.admissions.values(stage))]
                    break
            else:
                raise StateLost(f"no replica of stage {stage} has set its state aside")
        await self._fetch_all(mark, holders)

    async def _asked_to_keep(self, trainer: Trainer, replica: Replica, mark: Mark) -> bool:
        order = msg.Keep(
            run=self._manifest.run_id, to=replica.boot, stamp=trainer.stamps.take(), mark=mark
        )
        try:
            answer = await self._caller.insist(replica.peer, order, tries=2)
        except (TransportError, BadInput) as error:
            log.info("%s sets nothing aside: %s", replica.peer[-6:], error)
            return False
        return isinstance(answer, msg.At) and answer.mark == mark

    # -- fetching ---------------------------------------------------------------------------

    async def _fetch_all(
        self, mark: Mark, holders: Mapping[int, Sequence[tuple[Replica, int]]]
    ) -> None:
        writer: CheckpointWriter | None = None
        try:
            for stage in sorted(holders):
                vectors, applied, totals = await self._fetch(mark, stage, holders[stage])
                if writer is None:
                    begin = partial(self._store.write, mark, applied, totals)
                    writer = await self._blocking(begin)
                named = dict(zip(self._names, vectors, strict=True))
                await self._blocking(partial(writer.add_stage, stage, named))
            assert writer is not None
            await self._blocking(writer.finish)
        finally:
            if writer is not None:
                writer.abandon()
        self._say(f"checkpoint of step {mark.t} written")

    async def _fetch(
        self, mark: Mark, stage: int, holders: Sequence[tuple[Replica, int]]
    ) -> tuple[list[Tensor], int, Totals]:
        """The stage's vectors, checked against the digests that a holder tells."""
        sources = [
            PieceSource(self._caller, self._manifest.run_id, replica, stage)
            for replica, _ in holders
        ]
        length = max(values for _, values in holders)
        if length > self._manifest.limits.parameters:
            raise StateLost(f"stage {stage} is said to have {length} values, more than the model")
        vectors = await fetch_state(sources, mark=mark, length=length, vectors=len(self._names))
        size = self._manifest.limits.state_piece
        stages = self._manifest.stages.count
        told = await fetch_digests(sources[-1], mark, len(cut(length, size)), stages=stages)
        wrong = await self._blocking(partial(differing, vectors, told, size))
        if wrong:
            raise StateLost(f"{len(wrong)} pieces of stage {stage} came with other bits")
        return vectors, told.applied, told.totals


class Files:
    """A checkpoint's stages as sources; each file is opened, and checked, on its first use."""

    def __init__(self, store: CheckpointStore, checkpoint: Checkpoint) -> None:
        self._store, self._checkpoint = store, checkpoint
        self._open: dict[int, StageReader] = {}

    def __call__(self, stage: int) -> StageReader:
        """Raises CheckpointUnusable."""
        if stage not in self._open:
            self._open[stage] = self._store.open_stage(self._checkpoint, stage)
        return self._open[stage]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()
