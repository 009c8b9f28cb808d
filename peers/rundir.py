"""The directory of a run: its manifest, metrics, weights and summary.

    run.toml             the manifest
    metrics.jsonl        one JSON object a step
    plot.png             loss and throughput
    stage-N.safetensors  the weights of stage N
    summary.json         what came out
    peers.json           addresses of the run's nodes, for when it is resumed
    checkpoints/         see ``peers.checkpoints``

Files appear whole or not at all (temporary name, fsync, rename), except ``metrics.jsonl``, which
grows by whole lines, and ``plot.png``, which is drawn over the old one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from swarm.errors import UserError

_WEIGHTS_NAME = re.compile(r"stage-(\d+)\.safetensors")
_MARKERS = ("run.toml", "metrics.jsonl")
_RESULTS = ("metrics.jsonl", "plot.png", "summary.json")


class WritesToml(Protocol):
    """What a manifest must be able to do to be kept here."""

    def to_toml(self) -> str: ...


class RunDirectory:
    """The files of one run under ``path``. Making the object touches nothing; see `create`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "run.toml"
        self.metrics_path = path / "metrics.jsonl"
        self.plot_path = path / "plot.png"
        self.summary_path = path / "summary.json"
        self.peers_path = path / "peers.json"

    @classmethod
    def create(
        cls,
        path: Path | None = None,
        *,
        name: str = "run",
        now: datetime | None = None,
        resume: bool = False,
    ) -> RunDirectory:
        """Make the directory ``path``, or a fresh ``runs/<name>-<YYYYmmdd-HHMMSS>``.

        An existing run directory is used again: the results of the earlier run in it are
        removed, so that what is found there afterwards belongs together. Not if it is to
        ``resume`` that run.

        Raises:
            UserError: ``path`` is a file, holds something else than a run, or is not writable.
        """
        try:
            if path is None:
                return cls(_make_unique(Path("runs"), name, now or datetime.now()))
            path.mkdir(parents=True, exist_ok=True)
            run = cls(path)
            if not resume:
                run._remove_results()
            return run
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(
                f"{path} is not a directory; name a new or empty one, or a run's"
            ) from error
        except OSError as error:
            raise UserError(
                f"cannot make the run directory {path or 'runs'}: {error.strerror}"
            ) from error

    def write_manifest(self, manifest: WritesToml) -> None:
        """Write ``run.toml``."""
        _write_atomically(self.manifest_path, manifest.to_toml().encode())

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``; floats that are not finite become null."""
        line = json.dumps(_without_nonfinite(metrics), allow_nan=False)
        with self.metrics_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rewind(self, step: int) -> None:
        """Take back the lines of ``step`` and later ones: the run goes on from there."""
        lines = [line for line in self.read_metrics() if line.get("step", 0) < step]
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        _write_atomically(self.metrics_path, text.encode())

    def read_metrics(self) -> list[dict[str, Any]]:
        """All complete lines so far, oldest first; a last line that was cut is left out."""
        if not self.metrics_path.exists():
            return []
        lines = self.metrics_path.read_text(encoding="utf-8").split("\n")
        found = []
        for line in lines[:-1]:
            with suppress(ValueError):  # a full disk may have cut it
                found.append(json.loads(line))
        return found

    def write_weights(
        self, stage: int, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
    ) -> Path:
        """Write the named tensors of ``stage`` and say where."""
        path = self.path / f"stage-{stage}.safetensors"
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with published(path) as temporary:
            try:
                save_file(plain, temporary, metadata=dict(metadata))
            except SafetensorError as error:  # it wraps what the disk says
                raise OSError(str(error)) from error
        return path

    def load_weights(self) -> dict[int, dict[str, torch.Tensor]]:
        """The tensors of every stage whose weights are here, on the CPU, by stage and name.

        Raises:
            UserError: a file is damaged.
        """
        weights: dict[int, dict[str, torch.Tensor]] = {}
        for stage, path in sorted(self._weight_files().items()):
            try:
                with safe_open(path, framework="pt") as file:
                    weights[stage] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise UserError(f"{path} is not a whole safetensors file: {error}") from error
        return weights

    def load_metadata(self, stage: int) -> dict[str, str]:
        """What was written with the weights of ``stage``."""
        with safe_open(self.path / f"stage-{stage}.safetensors", framework="pt") as file:
            return file.metadata() or {}

    def write_peers(self, addresses: Iterable[str]) -> None:
        """Where the run's nodes are: multiaddrs that end in ``/p2p/ID``."""
        _write_atomically(self.peers_path, (json.dumps(list(addresses), indent=1) + "\n").encode())

    def read_peers(self) -> list[str]:
        """What ``write_peers`` wrote, or nothing if that cannot be read."""
        try:
            found = json.loads(self.peers_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        return [a for a in found if isinstance(a, str)] if isinstance(found, list) else []

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``; floats that are not finite become null."""
        text = json.dumps(_without_nonfinite(summary), indent=2, allow_nan=False)
        _write_atomically(self.summary_path, (text + "\n").encode())

    def _weight_files(self) -> dict[int, Path]:
        found = ((_WEIGHTS_NAME.fullmatch(path.name), path) for path in self.path.iterdir())
        return {int(match[1]): path for match, path in found if match}

    def _remove_results(self) -> None:
        entries = [path.name for path in self.path.iterdir()]
        if entries and not any(marker in entries for marker in _MARKERS):
            raise UserError(
                f"{self.path} holds other files and is not a run directory; name a new or empty one"
            )
        for path in [*(self.path / name for name in _RESULTS), *self._weight_files().values()]:
            path.unlink(missing_ok=True)


def _make_unique(parent: Path, name: str, now: datetime) -> Path:
    base = f"{name}-{now:%Y%m%d-%H%M%S}"
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        path = parent / (base if number == 1 else f"{base}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise UserError(f"{parent / base} and 998 more like it exist; name a directory with --out")


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return value


def _write_atomically(path: Path, content: bytes) -> None:
    with published(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """A temporary file to write, which gets its name once its bytes are on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Have what ``path`` holds, a file or a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
