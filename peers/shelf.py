"""The copy of a stage's state that a node keeps on its own disk for checkpoints: the newest one.

One file, published whole. A node that is started again offers what it finds there, so a run
outlives even the loss of all its coordinators' disks.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from peers.fields import Count, Totals, WireMark, plain
from peers.rundir import published
from peers.sources import Copy

log = logging.getLogger("swarm.node")


class _Label(BaseModel):
    """What is written beside the tensors."""

    model_config = ConfigDict(extra="forbid")
    run_id: str
    stage: int
    mark: WireMark
    applied: Count
    totals: Totals = Field(default=[])


class Shelf:
    """The copies of one node in ``folder``. All calls block."""

    def __init__(self, folder: Path, run_id: str, stage: int) -> None:
        self._run_id, self._stage = run_id, stage
        self._path = folder / f"{run_id}-stage-{stage}.safetensors"

    def put(self, copy: Copy) -> None:
        """Write ``copy`` in the place of the one before.

        Raises:
            OSError: the disk is full, or refuses; the one before stays.
        """
        label = _Label(
            run_id=self._run_id,
            stage=self._stage,
            mark=copy.mark,
            applied=copy.applied,
            totals=plain(copy.totals),
        )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with published(self._path) as temporary:
            metadata = {"label": json.dumps(label.model_dump(mode="json"))}
            try:
                save_file(dict(copy.vectors), temporary, metadata=metadata)
            except SafetensorError as error:  # it wraps what the disk says
                raise OSError(str(error)) from error

    def get(self, length: int, names: tuple[str, ...]) -> Copy | None:
        """What is there, if it is of this run and stage and of vectors ``names`` so long."""
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                label = _Label.model_validate_json((file.metadata() or {}).get("label", ""))
                vectors = {name: file.get_tensor(name) for name in names}
        except (SafetensorError, ValidationError, OSError) as error:
            why = str(error).splitlines()[0]
            log.warning("%s is not used: %s", self._path, why)
            return None
        fits = all(vector.shape == (length,) for vector in vectors.values())
        if (label.run_id, label.stage) != (self._run_id, self._stage) or not fits:
            log.warning("%s is not used: it is of another run or stage", self._path)
            return None
        return Copy(label.mark, label.applied, tuple(label.totals), vectors)
