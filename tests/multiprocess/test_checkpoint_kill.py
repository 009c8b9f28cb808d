"""Real processes write checkpoints and are killed, or run into a full disk, in the middle of it."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import random
import resource
import signal
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from peers import checkpoints
from peers.checkpoints import Checkpoint, CheckpointNotWritten, CheckpointStore
from swarm.types import Mark, Term

RUN = "0123456789abcdef0123456789abcdef"
STAGES, LENGTH, KEEP = 2, 4096, 3
NAMES = ("weights", "exp_avg", "exp_avg_sq")
"""A checkpoint has 98 kB."""
KILLS, IN_THE_MIDDLE, LIMIT = 20, 5, 200
AMPLE_S = 60.0


def store_in(folder: Path, said: list[str]) -> CheckpointStore:
    return CheckpointStore(folder, RUN, keep=KEEP, say=said.append)


def vectors(at: Mark, stage: int) -> dict[str, torch.Tensor]:
    start = at.t * 100.0 + stage * 10
    return {name: torch.arange(LENGTH) + start + n for n, name in enumerate(NAMES)}


def write(store: CheckpointStore, at: Mark) -> Checkpoint:
    with store.write(at, at.t, [{"peer": at.t}] * STAGES) as writer:
        for stage in range(STAGES):
            writer.add_stage(stage, vectors(at, stage))
        return writer.finish()


def check(store: CheckpointStore, checkpoint: Checkpoint) -> None:
    assert checkpoint.applied == checkpoint.mark.t
    for stage in range(STAGES):
        loaded = store.load_stage(checkpoint, stage)
        expected = vectors(checkpoint.mark, stage)
        assert list(loaded) == list(NAMES)
        assert all(torch.equal(loaded[name], expected[name]) for name in NAMES)


@pytest.fixture(scope="module")
def processes():
    """Starts processes that have torch already: they fork from one that imported it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "peers.checkpoints"])
    return context


@contextmanager
def child(processes, target: Callable[..., None], *arguments: object):
    """A process that runs ``target(connection, *arguments)``, and our end of the connection."""
    ours, theirs = processes.Pipe()
    process = processes.Process(target=target, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def answer(connection: Connection) -> Any:
    assert connection.poll(AMPLE_S), "no word from the process"
    return connection.recv()


# -- SIGKILL ---------------------------------------------------------------------------------


def write_for_ever(connection: Connection, folder: Path) -> None:
    said: list[str] = []
    store = store_in(folder, said)
    store.clean()
    connection.send(said)
    newest = store.newest()
    t = newest.mark.t if newest else 0
    while True:
        t += 1
        write(store, Mark(Term(1, "aa"), t))


def test_whatever_the_moment_of_the_kill_the_newest_checkpoint_is_whole(processes, tmp_path):
    rng = random.Random(11)
    folder = tmp_path / "checkpoints"
    said: list[str] = []
    store = store_in(folder, said)
    marks = [write(store, Mark(Term(1, "aa"), 0)).mark]
    cut = False
    in_the_middle = 0
    while len(marks) <= KILLS or in_the_middle < IN_THE_MIDDLE:
        assert len(marks) <= LIMIT, "the kills never come in the middle of a checkpoint"
        with child(processes, write_for_ever, folder) as (process, connection):
            assert len(answer(connection)) == cut, "leftovers are mentioned once"
            time.sleep(rng.uniform(0, 0.05))
            os.kill(process.pid, signal.SIGKILL)
            process.join(AMPLE_S)
            assert process.exitcode == -signal.SIGKILL
        cut = any(path.name.startswith(".tmp-") for path in folder.iterdir())
        in_the_middle += cut
        whole = store.all()
        assert len(whole) >= min(KEEP, whole[-1].mark.t + 1)
        for checkpoint in whole:
            check(store, checkpoint)
        marks.append(whole[-1].mark)
    assert marks == sorted(marks)
    assert said == [], "nothing that bears a name is damaged"
    store.clean()
    write(store, Mark(Term(1, "aa"), marks[-1].t + 1))
    assert {path.name for path in folder.iterdir()} == {one.path.name for one in store.all()}
    assert len(store.all()) == KEEP


# -- a full disk -----------------------------------------------------------------------------


def write_until_it_fails(store: CheckpointStore, connection: Connection) -> None:
    """Sends what came of it: the error, the names of all that is left."""
    t = 0
    while t < 1000:
        t += 1
        try:
            write(store, Mark(Term(1, "aa"), t))
        except CheckpointNotWritten as error:
            names = [path.name for path in store.folder.iterdir()]
            newest = store.newest()
            assert newest is not None
            check(store, newest)
            connection.send((str(error), error.needed, newest.mark.t - t, names))
            return
    connection.send(("", 0, 0, []))


def write_with_a_bound_on_files(connection: Connection, folder: Path) -> None:
    store = store_in(folder, [])
    write(store, Mark(Term(1, "aa"), 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # of 49 kB
    write_until_it_fails(store, connection)


def test_a_file_that_the_system_cuts_short_leaves_the_older_checkpoint(processes, tmp_path):
    folder = tmp_path / "checkpoints"
    with child(processes, write_with_a_bound_on_files, folder) as (_, connection):
        error, needed, lag, names = answer(connection)
    assert "File too large; older checkpoints are kept" in error
    assert needed > STAGES * 20_000
    assert lag == -1
    assert names == ["step-00000000-term-1-aa"]
    said: list[str] = []
    store = store_in(folder, said)
    check(store, store.newest())
    assert said == []


def mount_small_disk(folder: Path, size: int) -> None:
    """A disk of ``size`` bytes that only this process sees, and that goes with it; or OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    call("unshare", 0x10000000 | 0x00020000)  # CLONE_NEWUSER | CLONE_NEWNS
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    call("mount", b"none", os.fsencode(folder), b"tmpfs", 0, f"size={size}".encode())


def write_on_a_small_disk(connection: Connection, folder: Path, believe: bool) -> None:
    folder.mkdir()
    try:
        mount_small_disk(folder, 400_000)
    except OSError as error:
        connection.send(str(error))
        return
    if not believe:
        usage = namedtuple("usage", "total used free")
        checkpoints.shutil.disk_usage = lambda path: usage(1 << 40, 0, 1 << 40)
    # Three checkpoints fill three quarters of it; what else lies there leaves no room for a fourth.
    store = store_in(folder / "checkpoints", [])
    for t in range(-KEEP, 0):
        write(store, Mark(Term(0, "aa"), t + KEEP))
    free = os.statvfs(folder)
    (folder / "metrics.jsonl").write_bytes(b"x" * (free.f_bavail * free.f_frsize - 70_000))
    write_until_it_fails(store, connection)


@pytest.mark.parametrize("believe", [True, False], ids=["seen beforehand", "in mid-write"])
def test_a_full_disk_leaves_the_older_checkpoints(processes, tmp_path, believe):
    with child(processes, write_on_a_small_disk, tmp_path / "disk", believe) as (_, connection):
        result = answer(connection)
    if isinstance(result, str):
        pytest.skip(f"no small disk can be mounted here: {result}")
    error, needed, _, names = result
    assert f"{os.strerror(errno.ENOSPC)}; older checkpoints are kept" in error
    assert needed > 0
    assert sorted(names) == [f"step-{t:08d}-term-0-aa" for t in range(KEEP)]
