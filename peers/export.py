"""One model from a run directory: weights of all stages in one file, and the manifest beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from peers.checkpoints import CheckpointStore
from peers.rundir import RunDirectory, published
from swarm.errors import BadMessage, UserError
from swarm.manifest import Manifest
from swarm.model.digest import weights_sha256
from swarm.model.registry import model_spec
from swarm.model.stage import StageModel

log = logging.getLogger("swarm")

WEIGHTS = "model.safetensors"
CONFIG = "config.toml"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that can compute: its stages in order."""

    manifest: Manifest
    stages: list[StageModel]


def export_model(
    run: Path, out: Path, *, allow: Collection[str] = (), say: Callable[[str], None] = log.info
) -> str:
    """Write the model of the run directory ``run`` to the folder ``out``.

    A run that has not ended gives that of its newest checkpoint; ``say`` is told so.

    Returns the SHA-256 over all weights, which the run's summary names too.

    Raises:
        UserError: ``run`` is no run directory with weights or a checkpoint, or ``out`` is in use.
    """
    directory = RunDirectory(run)
    if not directory.manifest_path.exists():
        raise UserError(f"{run} is not a run directory: it has no run.toml")
    manifest = Manifest.load(directory.manifest_path)
    weights = directory.load_weights()
    missing = sorted(set(range(manifest.stages.count)) - set(weights))
    if missing:
        tensors, step = _from_checkpoint(run, manifest, missing, allow, say)
        metadata = {"step": str(step)}
    else:
        tensors = {name: tensor for stage in weights.values() for name, tensor in stage.items()}
        metadata = directory.load_metadata(0)
    _make_folder(out)
    with published(out / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"run_id": manifest.run_id, **metadata})
    with published(out / CONFIG) as temporary:
        temporary.write_text(manifest.to_toml(), encoding="utf-8")
    return weights_sha256(tensors)


def _from_checkpoint(
    run: Path,
    manifest: Manifest,
    missing: list[int],
    allow: Collection[str],
    say: Callable[[str], None],
) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of the newest checkpoint, by name, and its step."""
    store = CheckpointStore(run / "checkpoints", manifest.run_id, say=say)
    newest = store.newest()
    if newest is None:
        names = ", ".join(f"stage-{stage}.safetensors" for stage in missing)
        raise UserError(
            f"{run} lacks {names} and has no checkpoint: the run did not end, or its weights were "
            "moved"
        )
    say(f"the run has not ended: this is the model of its checkpoint of step {newest.mark.t}")
    spec = model_spec(manifest, allow)
    tensors: dict[str, torch.Tensor] = {}
    for stage in range(manifest.stages.count):
        model = StageModel(manifest, spec, stage)
        model.weights.copy_(store.load_stage(newest, stage)["weights"])
        tensors |= model.tensors()
    return tensors, newest.mark.t


def load_model(folder: Path, allow: Collection[str] = ()) -> LoadedModel:
    """What ``export_model`` wrote. ``allow``: import paths of own models that may be run.

    Raises:
        UserError: a file is missing or damaged, or the weights do not fit the manifest.
    """
    path = folder / WEIGHTS
    if not path.exists() or not (folder / CONFIG).exists():
        raise UserError(f"{folder} is not an exported model: it lacks {WEIGHTS} or {CONFIG}")
    manifest = Manifest.load(folder / CONFIG)
    spec = model_spec(manifest, allow)
    stages = [StageModel(manifest, spec, stage) for stage in range(manifest.stages.count)]
    try:
        with safe_open(path, framework="pt") as file:
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for stage in stages:
            own = {name: tensors[name] for name in stage.tensors() if name in tensors}
            stage.load_tensors(own)
    except (SafetensorError, BadMessage) as error:
        raise UserError(f"{path} does not hold the model of {CONFIG}: {error}") from error
    return LoadedModel(manifest, stages)


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {out}: {error.strerror}") from error
    foreign = [path.name for path in out.iterdir() if path.name not in (WEIGHTS, CONFIG)]
    if foreign:
        raise UserError(f"{out} holds {foreign[0]}: name a new or empty folder, or an older export")
