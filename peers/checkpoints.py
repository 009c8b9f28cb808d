"""The checkpoints of a run on disk: the state of all stages at one mark.

    checkpoints/
      step-00000120-term-3-<boot>/
        stage-0.safetensors    "weights", then the optimizer's vectors, one after the other
        stage-1.safetensors
        checkpoint.json        written last: what the checkpoint is, sizes and hashes of the files
      .tmp-step-...            being written
      .old-step-...            being removed

A checkpoint is *complete* if ``checkpoint.json`` is whole and every file that it lists is there
with its size. It gets its name by one rename when all of it is on the disk, and loses it by another
before the first of its files goes. So a kill leaves it whole or hidden, and what damage leaves
under its name is seen. Hashes take a reading of the files; they are checked when a stage is opened.

All calls here block; those that read or write stages belong in a worker thread.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from peers.fields import MAX_STAGES, Count, WireMark
from peers.rundir import sync
from swarm.errors import SwarmError, UserError
from swarm.types import Mark, PeerId

INDEX = "checkpoint.json"
WEIGHTS = "weights"
_NAMED, _BEING_WRITTEN, _BEING_REMOVED = "step-", ".tmp-step-", ".old-step-"
_PIECE = 1 << 20
"""Values written at a time: 4 MiB."""
_MAX_INDEX_BYTES = 64 << 20
_MAX_PEERS = 1 << 16
_ITEM = torch.float32.itemsize
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Peer = Annotated[str, Field(max_length=128)]


class CheckpointNotWritten(SwarmError):
    """The disk is full or refuses. Nothing of the checkpoint stays; the older ones do."""

    def __init__(self, path: Path, needed: int, error: OSError) -> None:
        super().__init__(
            f"checkpoint not written: {_shown(path)}{f' of {needed:,} bytes' if needed else ''}: "
            f"{_reason(error)}; older checkpoints are kept"
        )
        self.path = path
        self.needed = needed


class CheckpointUnusable(UserError):
    """A checkpoint, or the folder of all, that cannot be read or is damaged."""


class StageFile(BaseModel):
    """The file of one stage: flat float32 vectors of ``length`` values each, in this order."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    file: Annotated[str, Field(max_length=64)]
    size: Count
    """Bytes, with the header."""
    sha256: _Sha256
    names: Annotated[tuple[Annotated[str, Field(pattern=r"^\w{1,64}$")], ...], Field(max_length=16)]
    length: Count

    @property
    def header(self) -> bytes:
        return _header(self.names, self.length)


class _Index(BaseModel):
    """What is in ``checkpoint.json``. ``sha256`` is of the other fields, see ``_own_hash``."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    format: Literal[1] = 1
    run_id: Annotated[str, Field(max_length=64)]
    mark: WireMark
    applied: Count
    totals: Annotated[
        list[Annotated[dict[_Peer, Count], Field(max_length=_MAX_PEERS)]],
        Field(max_length=MAX_STAGES),
    ]
    stages: Annotated[list[StageFile], Field(min_length=1, max_length=MAX_STAGES)]
    sha256: Annotated[str, Field(max_length=64)] = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.totals) != len(self.stages):
            raise ValueError(f"{len(self.totals)} totals for {len(self.stages)} stages")
        for number, stage in enumerate(self.stages):
            if stage.file != _file_name(number) or stage.names[:1] != (WEIGHTS,):
                raise ValueError(f"stage {number} has another file name, or no weights")
            if stage.size != len(stage.header) + _ITEM * stage.length * len(stage.names):
                raise ValueError(f"stage {number} has another size than its vectors")
        return self


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. ``totals``: microbatches by peer, for each stage."""

    mark: Mark
    applied: int
    """Optimizer updates that were not skipped."""
    totals: tuple[Mapping[PeerId, int], ...]
    run_id: str
    path: Path
    stages: tuple[StageFile, ...]


class CheckpointStore:
    """The checkpoints of run ``run_id`` in ``folder``, of which the newest ``keep`` stay.

    ``say`` gets one line for each thing that a person should know. Making the object touches
    nothing. What is not a checkpoint of this run is left alone.
    """

    def __init__(
        self, folder: Path, run_id: str, *, keep: int = 3, say: Callable[[str], None]
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep {keep} checkpoints; allowed: 1 or more")
        self.folder = folder
        self.run_id = run_id
        self._keep = keep
        self._say = say
        self._said: set[str] = set()

    def newest(self) -> Checkpoint | None:
        """The complete checkpoint of the highest mark. Raises: see `all`."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def all(self) -> list[Checkpoint]:
        """The complete checkpoints by mark; of two at one mark, the one written later is last.

        Raises:
            CheckpointUnusable: the folder is there but cannot be read.
        """
        found = []
        for path in self._entries(_NAMED):
            try:
                checkpoint = _read(path)
                if checkpoint.run_id == self.run_id:
                    found.append(checkpoint)
                    continue
                why = f"it is of another run, {checkpoint.run_id!r}"
            except (OSError, ValueError) as error:
                why = _reason(error)
            if os.path.lexists(path):  # else it was pruned in the meantime
                self._say_once(f"checkpoint {_shown(path)} is not used: {why}")
        return sorted(found, key=lambda one: (one.mark, len(one.path.name), one.path.name))

    def write(
        self, mark: Mark, applied: int, totals: Sequence[Mapping[PeerId, int]]
    ) -> CheckpointWriter:
        """Begin a checkpoint of ``len(totals)`` stages. See `CheckpointWriter`.

        Raises:
            CheckpointNotWritten: the folder cannot be made or written.
        """
        temporary = self.folder / f".tmp-{_name(mark)}-{secrets.token_hex(4)}"
        try:
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True, exist_ok=True)
                sync(self.folder.parent)
            temporary.mkdir()
            held = _hold(temporary)
        except BaseException as error:
            _delete(temporary)
            if isinstance(error, OSError):
                raise CheckpointNotWritten(temporary, 0, error) from error
            raise
        return CheckpointWriter(self, temporary, held, mark, applied, totals)

    def open_stage(self, checkpoint: Checkpoint, stage: int) -> StageReader:
        """The vectors of a stage, to be read in pieces; reads the file once to check its hash.

        What is open stays readable when the checkpoint is pruned.

        Raises:
            CheckpointUnusable: the file is gone, unreadable or damaged.
        """
        path = checkpoint.path / checkpoint.stages[stage].file
        with _unusable(path, f"remove {checkpoint.path}, and an older checkpoint is used"):
            file = open(path, "rb", buffering=0)  # noqa: SIM115 (the reader closes it)
            try:
                _verify(file, checkpoint.stages[stage])
            except BaseException:
                file.close()
                raise
        return StageReader(file, checkpoint.stages[stage])

    def load_stage(self, checkpoint: Checkpoint, stage: int) -> dict[str, Tensor]:
        """The vectors of a stage by name, in the order of `StageReader.names`: flat float32.

        Raises:
            CheckpointUnusable: the file is gone, unreadable or damaged.
        """
        with closing(self.open_stage(checkpoint, stage)) as reader:
            return dict(zip(reader.names, reader.piece(0, reader.length), strict=True))

    def clean(self) -> None:
        """Remove what killed writers left; to be called at start. Says so once, if there was any.

        What another process is writing at this moment stays.

        Raises:
            CheckpointUnusable: the folder is there but cannot be read.
        """
        written = self._entries(_BEING_WRITTEN)
        unfinished = [path for path in written if path.is_dir() and not _held(path)]
        for path in [*unfinished, *self._entries(_BEING_REMOVED)]:
            if error := _delete(path):
                self._say_once(f"cannot remove {_shown(path)}: {_reason(error)}")
        if any(not path.exists() for path in unfinished):
            self._say("a checkpoint was being written when the process ended; removed")

    def _publish(self, temporary: Path, mark: Mark) -> Path:
        """Give a whole checkpoint its name; where that is taken, with a number above all others."""
        name = _name(mark)
        pattern = re.compile(re.escape(name) + r"(?:-(\d{1,9}))?")
        twins = map(pattern.fullmatch, os.listdir(self.folder))
        number = max((int(twin[1] or 1) for twin in twins if twin), default=0) + 1
        path = self.folder / (name if number == 1 else f"{name}-{number}")
        os.rename(temporary, path)
        sync(self.folder)
        return path

    def _prune(self, written: Path) -> None:
        """Remove all but the newest ``keep``, and never what was just written."""
        try:
            checkpoints = self.all()
        except CheckpointUnusable as error:
            self._say_once(f"older checkpoints are not pruned: {error}")
            return
        by_mark = {checkpoint.mark: checkpoint.path for checkpoint in checkpoints}
        kept = {written, *(by_mark[mark] for mark in sorted(by_mark)[-self._keep :])}
        for path in [checkpoint.path for checkpoint in checkpoints]:
            if path in kept:
                continue
            hidden = self.folder / f".old-{path.name}-{secrets.token_hex(4)}"
            try:
                os.rename(path, hidden)
                sync(self.folder)
            except OSError as error:
                self._say_once(f"cannot remove checkpoint {_shown(path)}: {_reason(error)}")
            _delete(hidden)  # what does not go now goes at the next start

    def _entries(self, prefix: str) -> list[Path]:
        with _unusable(self.folder, "name another folder"), suppress(FileNotFoundError):
            names = sorted(name for name in os.listdir(self.folder) if name.startswith(prefix))
            return [self.folder / name for name in names]
        return []

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


class CheckpointWriter:
    """A checkpoint on its way: `add_stage` each stage once, in any order, then `finish`.

    As a context manager, or by `abandon`, it leaves nothing behind where it was not finished. An
    error of the disk abandons it. Not to be used from two threads at a time.
    """

    def __init__(
        self,
        store: CheckpointStore,
        temporary: Path,
        held: int,
        mark: Mark,
        applied: int,
        totals: Sequence[Mapping[PeerId, int]],
    ) -> None:
        self._store = store
        self._temporary = temporary
        self._held: int | None = held
        self._mark = mark
        self._applied = applied
        self._totals = [dict(peers) for peers in totals]
        self._stages: dict[int, StageFile] = {}

    def add_stage(self, stage: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the flat float32 ``tensors``, of one length, among them ``weights``.

        They may be on any device, are copied to the host in pieces of 4 MiB, and must not change
        before this returns.

        Raises:
            ValueError: a stage that is not to be written, or other tensors.
            CheckpointNotWritten: the disk is full or refuses; the writer is then abandoned.
        """
        if self._held is None or stage in self._stages or stage not in range(len(self._totals)):
            raise ValueError(f"stage {stage} is not to be written, or not any more")
        names = (WEIGHTS, *(name for name in tensors if name != WEIGHTS))
        length = _common_length(tensors)
        header = _header(names, length)
        size = len(header) + _ITEM * length * len(names)
        path = self._temporary / _file_name(stage)
        with self._writing(path, size):
            if shutil.disk_usage(self._temporary).free < size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            pieces = (piece for name in names for piece in _pieces(tensors[name]))
            sha256 = _write(path, chain([header], pieces))
        self._stages[stage] = StageFile(
            file=path.name, size=size, sha256=sha256, names=names, length=length
        )

    def finish(self) -> Checkpoint:
        """Make the checkpoint complete, then prune older ones.

        Raises:
            ValueError: not all stages were added, or the writer was finished or abandoned.
            CheckpointNotWritten: the disk is full or refuses; the writer is then abandoned.
        """
        if self._held is None or len(self._stages) != len(self._totals):
            raise ValueError(f"{len(self._stages)} of {len(self._totals)} stages written, or ended")
        index = _Index(
            run_id=self._store.run_id,
            mark=self._mark,
            applied=self._applied,
            totals=self._totals,
            stages=[self._stages[stage] for stage in range(len(self._totals))],
        )
        fields = index.model_dump(mode="json", exclude={"sha256"})
        data = json.dumps(fields | {"sha256": _own_hash(fields)}, indent=1).encode()
        path = self._temporary / INDEX
        with self._writing(path, len(data)):
            _write(path, [data])
            os.fsync(self._held)
            named = self._store._publish(self._temporary, self._mark)
        self.abandon()
        self._store._prune(named)
        return _checkpoint(index, named)

    def abandon(self) -> None:
        """End it; what was written goes. Does nothing where it has ended."""
        if self._held is not None:
            with suppress(OSError):
                os.close(self._held)
            self._held = None
            _delete(self._temporary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.abandon()

    @contextmanager
    def _writing(self, path: Path, size: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            raise CheckpointNotWritten(path, size, error) from error


class StageReader:
    """The vectors ``names`` of a stage, each of ``length`` values. Threads may share it."""

    def __init__(self, file: FileIO, stage: StageFile) -> None:
        self.names = stage.names
        self.length = stage.length
        self._file = file
        self._start = len(stage.header)

    def piece(self, start: int, stop: int) -> list[Tensor]:
        """Values ``start`` to ``stop`` of each vector, in the order of ``names``; reads only these.

        Raises:
            ValueError: not a range of ``0..length``.
            CheckpointUnusable: the disk fails.
        """
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"values {start} to {stop}; there are {self.length}")
        tensors = [torch.empty(stop - start, dtype=torch.float32) for _ in self.names]
        with _unusable(self._file.name, "check the disk"):
            for number, tensor in enumerate(tensors):
                place = self._start + _ITEM * (number * self.length + start)
                _read_into(self._file.fileno(), tensor, place)
        return tensors

    def close(self) -> None:
        """To be called once no `piece` is under way."""
        self._file.close()


def _read(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``; OSError or ValueError if it is not complete."""
    if not (folder / INDEX).is_file():
        raise ValueError(f"it has no {INDEX}")
    with open(folder / INDEX, "rb") as file:
        data = file.read(_MAX_INDEX_BYTES + 1)
    if len(data) > _MAX_INDEX_BYTES:
        raise ValueError(f"{INDEX} has more than {_MAX_INDEX_BYTES:,} bytes")
    index = _Index.model_validate_json(data)
    if _own_hash(json.loads(data)) != index.sha256:
        raise ValueError(f"{INDEX} is damaged")
    for stage in index.stages:
        status = os.stat(folder / stage.file)
        if not stat.S_ISREG(status.st_mode) or status.st_size != stage.size:
            raise ValueError(f"{stage.file} has {status.st_size:,} of {stage.size:,} bytes")
    return _checkpoint(index, folder)


def _checkpoint(index: _Index, path: Path) -> Checkpoint:
    totals, stages = tuple(index.totals), tuple(index.stages)
    return Checkpoint(index.mark, index.applied, totals, index.run_id, path, stages)


def _own_hash(fields: Mapping[str, object]) -> str:
    """Of an index: makes a changed digit in it as visible as one in the weights."""
    others = {name: value for name, value in fields.items() if name != "sha256"}
    text = json.dumps(others, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _name(mark: Mark) -> str:
    boot = mark.term.boot
    if boot and not (boot.isascii() and boot.isalnum()):
        raise ValueError(f"boot {boot!r} cannot stand in a file name")
    return f"{_NAMED}{mark.t:08d}-term-{mark.term.number}" + (f"-{boot}" if boot else "")


def _file_name(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def _header(names: Sequence[str], length: int) -> bytes:
    """The header of a safetensors file that holds the vectors one after the other.

    It depends on nothing else, so a reader needs not parse it: it compares, and knows the places.
    """
    size = _ITEM * length
    entries = {
        name: {"dtype": "F32", "shape": [length], "data_offsets": [n * size, (n + 1) * size]}
        for n, name in enumerate(names)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _common_length(tensors: Mapping[str, Tensor]) -> int:
    if WEIGHTS not in tensors:
        raise ValueError(f"no {WEIGHTS} among {list(tensors)}")
    length = len(tensors[WEIGHTS])
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.shape != (length,):
            shape = tuple(tensor.shape)
            raise ValueError(f"{name} is {tensor.dtype} {shape}, not float32 ({length},)")
    return length


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    for piece in tensor.detach().split(_PIECE):
        if piece.numel():
            yield memoryview(piece.cpu().contiguous().numpy()).cast("B")


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a new file, to the disk; returns its SHA-256."""
    digest = hashlib.sha256()
    with open(path, "xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _verify(file: FileIO, stage: StageFile) -> None:
    if hashlib.file_digest(file, "sha256").hexdigest() != stage.sha256:
        raise ValueError("it is damaged (its SHA-256 is not the one in checkpoint.json)")
    if os.pread(file.fileno(), len(stage.header), 0) != stage.header:
        raise ValueError("its vectors do not lie where this version looks for them")


def _read_into(descriptor: int, tensor: Tensor, place: int) -> None:
    """Fill ``tensor`` from ``place`` on. A memory map would let a failing disk kill the process."""
    if not tensor.numel():
        return
    view = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        read = os.preadv(descriptor, [view[done:]], place + done)
        if not read:
            raise ValueError("it was cut while it was open")
        done += read


def _delete(path: Path) -> OSError | None:
    """Remove a folder with all in it, if it is there; the link alone where it is one."""
    try:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    return None


def _hold(folder: Path) -> int:
    """A descriptor of ``folder`` that shows others, until it is closed, that it is in use."""
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks: a start beside us would clean it away
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


@contextmanager
def _unusable(path: object, advice: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CheckpointUnusable(f"{path} cannot be used: {_reason(error)}; {advice}") from error


def _reason(error: Exception) -> str:
    """Why, in a few words that come from us or the system: file names in it may be anybody's."""
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        return f"{INDEX} is damaged: {field}: {first['msg']}"[:200]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def _shown(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else repr(text)
