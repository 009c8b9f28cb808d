"""Checkpoints on disk: whole or not there, whatever happens, and the newest one is found."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import random
import shutil
import stat
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from peers import checkpoints
from peers.checkpoints import CheckpointNotWritten, CheckpointStore, CheckpointUnusable
from swarm.errors import SwarmError, UserError
from swarm.types import FRESH, Mark, Term

RUN = "0123456789abcdef0123456789abcdef"
NAMES = ("weights", "exp_avg", "exp_avg_sq")
LENGTHS = (37, 12)
TOTALS = ({"12D3KooWpeer": 5, "12D3KooWother": 3}, {"12D3KooWpeer": 8})


def mark(t: int, number: int = 1, boot: str = "00000000000000aa") -> Mark:
    return Mark(Term(number, boot), t)


def vectors(at: Mark, stage: int) -> dict[str, torch.Tensor]:
    """A function of mark and stage, so that what is loaded can be checked bit by bit."""
    generator = torch.Generator().manual_seed(at.term.number * 10_000 + at.t * 10 + stage)
    return {name: torch.randn(LENGTHS[stage], generator=generator) for name in NAMES}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path, said) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", RUN, say=said.append)


def write(store: CheckpointStore, at: Mark) -> checkpoints.Checkpoint:
    with store.write(at, at.t, TOTALS) as writer:
        for stage in range(len(LENGTHS)):
            writer.add_stage(stage, vectors(at, stage))
        return writer.finish()


def is_whole(store: CheckpointStore, checkpoint: checkpoints.Checkpoint) -> bool:
    """Its stages load, and with the bits that belong to its mark."""
    for stage in range(len(LENGTHS)):
        loaded, expected = store.load_stage(checkpoint, stage), vectors(checkpoint.mark, stage)
        if not all(torch.equal(loaded[name], expected[name]) for name in NAMES):
            return False
    return checkpoint.totals == TOTALS and checkpoint.applied == checkpoint.mark.t


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# -- what is written is what is read ---------------------------------------------------------


def test_bits_come_back_with_the_rest_of_the_state(store):
    odd = torch.tensor([-0.0, float("nan"), float("inf"), 1e-45, 3.0])
    with store.write(mark(120, 3), 118, [{"peer": 7}]) as writer:
        writer.add_stage(0, {"exp_avg": -odd, "weights": odd})
        checkpoint = writer.finish()
    assert checkpoint == store.newest()
    assert (checkpoint.mark, checkpoint.applied) == (mark(120, 3), 118)
    assert (checkpoint.totals, checkpoint.run_id) == (({"peer": 7},), RUN)
    assert checkpoint.path == store.folder / "step-00000120-term-3-00000000000000aa"
    loaded = store.load_stage(checkpoint, 0)
    assert list(loaded) == ["weights", "exp_avg"]
    for name, expected in (("weights", odd), ("exp_avg", -odd)):
        assert torch.equal(loaded[name].view(torch.int32), expected.view(torch.int32))


def test_the_files_are_safetensors(store):
    checkpoint = write(store, mark(1))
    for stage, length in enumerate(LENGTHS):
        with safe_open(checkpoint.path / f"stage-{stage}.safetensors", framework="pt") as file:
            assert set(file.keys()) == set(NAMES)
            for name in NAMES:
                assert file.get_slice(name).get_shape() == [length]
                assert torch.equal(file.get_tensor(name), vectors(mark(1), stage)[name])


def test_making_the_object_touches_nothing_and_an_absent_folder_is_empty(store):
    assert store.newest() is None
    assert store.all() == []
    store.clean()
    assert not store.folder.exists()


def test_a_fresh_run_has_a_name_too(store):
    assert write(store, FRESH).path.name == "step-00000000-term-0"
    assert is_whole(store, store.newest())


def test_vectors_longer_than_a_piece_and_none_at_all(store, monkeypatch):
    monkeypatch.setattr(checkpoints, "_PIECE", 4)
    with store.write(mark(1), 1, [{}, {}]) as writer:
        writer.add_stage(1, {"weights": torch.arange(11.0)[::2]})
        writer.add_stage(0, {"weights": torch.empty(0), "exp_avg": torch.empty(0)})
        checkpoint = writer.finish()
    assert store.load_stage(checkpoint, 1)["weights"].tolist() == [0, 2, 4, 6, 8, 10]
    assert [len(vector) for vector in store.load_stage(checkpoint, 0).values()] == [0, 0]


def test_pieces_are_read_alone_and_in_order_even_after_pruning(store):
    checkpoint = write(store, mark(1))
    reader = store.open_stage(checkpoint, 0)
    assert (reader.length, reader.names) == (37, NAMES)
    shutil.rmtree(checkpoint.path)
    for start, stop in ((0, 37), (0, 1), (36, 37), (5, 20), (7, 7)):
        pieces = reader.piece(start, stop)
        assert len(pieces) == len(NAMES)
        for name, piece in zip(NAMES, pieces, strict=True):
            assert torch.equal(piece, vectors(mark(1), 0)[name][start:stop])
    for start, stop in ((-1, 3), (5, 4), (0, 38)):
        with pytest.raises(ValueError, match="there are 37"):
            reader.piece(start, stop)
    reader.close()


def test_permissions_follow_the_umask(store):
    before = os.umask(0o027)
    try:
        checkpoint = write(store, mark(1))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in checkpoint.path.iterdir()}
    assert set(modes.values()) == {0o640}
    assert stat.S_IMODE(checkpoint.path.stat().st_mode) == 0o750


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"exp_avg": torch.zeros(2)}, "no weights"),
        ({"weights": torch.zeros(2, 2)}, r"weights is torch.float32 \(2, 2\)"),
        ({"weights": torch.zeros(2), "exp_avg": torch.zeros(3)}, r"exp_avg .* \(3,\)"),
        ({"weights": torch.zeros(2, dtype=torch.float64)}, "torch.float64"),
    ],
)
def test_only_flat_float32_vectors_of_one_length(store, tensors, why):
    with store.write(mark(1), 1, [{}]) as writer, pytest.raises(ValueError, match=why):
        writer.add_stage(0, tensors)
    assert names_in(store.folder) == set()


def test_each_stage_once_and_all_of_them_and_only_until_the_end(store):
    with store.write(mark(1), 1, TOTALS) as writer:
        writer.add_stage(1, vectors(mark(1), 1))
        for stage in (1, 2, -1):
            with pytest.raises(ValueError, match=f"stage {stage} is not to be written"):
                writer.add_stage(stage, vectors(mark(1), 1))
        with pytest.raises(ValueError, match="1 of 2 stages"):
            writer.finish()
        writer.add_stage(0, vectors(mark(1), 0))
        assert is_whole(store, writer.finish())
        with pytest.raises(ValueError, match="ended"):
            writer.finish()
    with pytest.raises(ValueError, match="not any more"):
        writer.add_stage(0, vectors(mark(1), 0))


def test_bad_arguments_leave_nothing(store):
    with pytest.raises(ValueError, match="keep 0"):
        CheckpointStore(store.folder, RUN, keep=0, say=print)
    with pytest.raises(ValueError, match=r"boot '\.\./aa'"):
        store.write(mark(1, 1, "../aa"), 1, TOTALS)
    assert not store.folder.exists()


def test_an_abandoned_one_leaves_nothing_and_is_never_seen(store):
    write(store, mark(1))
    writer = store.write(mark(2), 2, TOTALS)
    for stage in range(len(LENGTHS)):
        writer.add_stage(stage, vectors(mark(2), stage))
        assert store.newest().mark == mark(1)
    writer.abandon()
    writer.abandon()
    assert names_in(store.folder) == {store.newest().path.name}
    with pytest.raises(KeyError), store.write(mark(3), 3, TOTALS):
        raise KeyError
    assert names_in(store.folder) == {store.newest().path.name}


# -- which one is the newest, and which ones stay --------------------------------------------


def test_the_term_counts_before_the_step(store):
    marks = [mark(90, 2), mark(120, 1), mark(100, 1), mark(90, 2, "00000000000000bb")]
    big = CheckpointStore(store.folder, RUN, keep=9, say=print)
    for at in marks:
        write(big, at)
    assert [checkpoint.mark for checkpoint in big.all()] == sorted(marks)
    assert big.newest().mark == mark(90, 2, "00000000000000bb")
    assert all(is_whole(big, checkpoint) for checkpoint in big.all())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_older_ones_are_pruned(store, keep):
    store = CheckpointStore(store.folder, RUN, keep=keep, say=print)
    for t in range(1, 6):
        write(store, mark(t))
        expected = [mark(at) for at in range(max(1, t - keep + 1), t + 1)]
        assert [checkpoint.mark for checkpoint in store.all()] == expected
    assert len(names_in(store.folder)) == keep


def test_what_was_just_written_stays_even_if_it_is_the_oldest(store):
    store = CheckpointStore(store.folder, RUN, keep=2, say=print)
    for at in (mark(5, 2), mark(6, 2), mark(9, 1)):
        checkpoint = write(store, at)
    assert is_whole(store, checkpoint)
    assert [one.mark for one in store.all()] == [mark(9, 1), mark(5, 2), mark(6, 2)]


def test_one_mark_written_again_never_leaves_a_moment_without_it(store):
    for number in range(1, 12):
        checkpoint = write(store, mark(1))
        assert store.all() == [checkpoint]
        assert names_in(store.folder) == {checkpoint.path.name}, number
    with store.write(mark(1), 7, TOTALS) as writer:
        for stage in range(len(LENGTHS)):
            writer.add_stage(stage, vectors(mark(1), stage))
        writer.finish()
    assert store.newest().applied == 7


def test_a_damaged_one_in_the_way_is_stepped_around(store, said):
    (store.folder / "step-00000001-term-1-00000000000000aa").mkdir(parents=True)
    assert is_whole(store, write(store, mark(1)))
    assert is_whole(store, store.newest())
    assert any("is not used: it has no checkpoint.json" in line for line in said)


def test_those_of_another_run_are_neither_used_nor_removed(store, said):
    other = CheckpointStore(store.folder, "f" * 32, keep=1, say=print)
    write(other, mark(50))
    for t in range(1, 6):
        write(store, mark(t))
    assert store.newest().mark == mark(5)
    assert other.newest().mark == mark(50)
    assert sum(f"it is of another run, '{'f' * 32}'" in line for line in said) == 1


def test_anything_may_lie_in_the_folder(store, said):
    checkpoint = write(store, mark(1))
    folder = store.folder
    good = (checkpoint.path / "checkpoint.json").read_bytes()
    (folder / "step-9-file").write_text("x")
    (folder / "step-9-none").symlink_to("step-9-none")
    os.mkdir(os.fsencode(folder) + b"/step-9-\xff\n\x1b[2J")
    (folder / ".hidden").mkdir()
    (folder / "notes.txt").write_text("precious")
    for name, content in {
        "empty": b"",
        "deep": b"[" * 100_000,
        "list": b"[]",
        "utf16": good.decode().encode("utf-16"),
        "nan": good.replace(b'"applied": 1', b'"applied": NaN'),
        "format": good.replace(b'"format": 1', b'"format": 2'),
        "long": b" " * (checkpoints._MAX_INDEX_BYTES + 1),
    }.items():
        (folder / f"step-9-{name}").mkdir()
        (folder / f"step-9-{name}" / "checkpoint.json").write_bytes(content)
    (folder / "step-9-fifo").mkdir()
    os.mkfifo(folder / "step-9-fifo" / "checkpoint.json")
    shutil.copytree(checkpoint.path, folder / "step-9-fifo2")
    (folder / "step-9-fifo2" / "stage-0.safetensors").unlink()
    os.mkfifo(folder / "step-9-fifo2" / "stage-0.safetensors")
    before = names_in(folder)

    assert store.newest() == checkpoint
    write(store, mark(2))
    store.clean()
    assert names_in(folder) == before | {store.newest().path.name}
    damaged = [name for name in before if name.startswith("step-9")]
    assert len(said) == len(damaged) == 12  # each is mentioned once
    assert all(line.isprintable() and len(line) < 600 for line in said)


def test_a_checkpoint_may_be_linked_in(store, tmp_path):
    checkpoint = write(store, mark(1))
    checkpoint.path.rename(tmp_path / "elsewhere")
    checkpoint.path.symlink_to(tmp_path / "elsewhere")
    assert is_whole(store, store.newest())
    for t in range(2, 6):
        write(store, mark(t))
    assert names_in(store.folder) == {one.path.name for one in store.all()}
    assert (tmp_path / "elsewhere" / "checkpoint.json").exists()


def test_a_folder_that_is_a_file_is_said(tmp_path):
    (tmp_path / "file").touch()
    store = CheckpointStore(tmp_path / "file", RUN, say=print)
    for call in (store.newest, store.clean):
        with pytest.raises(UserError, match=r"file cannot be used: Not a directory"):
            call()
    with pytest.raises(CheckpointNotWritten, match=r"File exists; older checkpoints are kept"):
        store.write(mark(1), 1, TOTALS)


# -- damage ----------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_seen(store):
    older, newer = write(store, mark(1)), write(store, mark(2))
    for path in sorted(newer.path.iterdir()):
        whole = path.read_bytes()
        for size in range(len(whole)):
            os.truncate(path, size)
            assert store.newest() == older, (path.name, size)
            path.write_bytes(whole)
        path.write_bytes(whole + b"\0")
        assert store.newest() == older, path.name
        path.unlink()
        assert store.newest() == older, path.name
        path.write_bytes(whole)
        assert store.newest() == newer


def test_a_changed_bit_of_the_index_is_seen(store):
    older, newer = write(store, mark(1)), write(store, mark(2))
    rng = random.Random(7)
    path = newer.path / "checkpoint.json"
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert store.newest() == older, place


def test_a_changed_bit_of_a_stage_is_seen_when_it_is_opened(store):
    checkpoint = write(store, mark(1))
    rng = random.Random(7)
    path = checkpoint.path / "stage-1.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        assert store.newest() == checkpoint
        with pytest.raises(CheckpointUnusable) as caught:
            store.load_stage(checkpoint, 1)
        assert f"{path} cannot be used: it is damaged" in str(caught.value)
        assert f"remove {checkpoint.path}" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["stages"][0].update(file="../../passwd"),
        lambda index: index["stages"].reverse(),
        lambda index: index["stages"][0].update(length=10**12),
        lambda index: index["stages"][0].update(names=["exp_avg", "weights", "exp_avg_sq"]),
        lambda index: index["stages"][0].update(names=["weights"] * 3),
        lambda index: index["totals"].pop(),
        lambda index: index["totals"][0].update(peer=-1),
        lambda index: index.update(mark=[1, "../aa", 1]),
        lambda index: index.update(applied="3"),
        lambda index: index.update(more=1),
    ],
)
def test_an_index_that_does_not_add_up_is_refused_even_with_its_right_hash(store, change):
    checkpoint = write(store, mark(1))
    path = checkpoint.path / "checkpoint.json"
    index = json.loads(path.read_bytes())
    change(index)
    path.write_text(json.dumps(index | {"sha256": checkpoints._own_hash(index)}))
    assert store.newest() is None


def test_a_stage_that_is_gone_or_cut_while_open_is_said(store):
    checkpoint = write(store, mark(1))
    path = checkpoint.path / "stage-0.safetensors"
    reader = store.open_stage(checkpoint, 0)
    os.truncate(path, 300)
    with pytest.raises(CheckpointUnusable, match=r"stage-0.* it was cut while it was open"):
        reader.piece(0, 37)
    reader.close()
    path.unlink()
    with pytest.raises(UserError, match=r"stage-0.* No such file"):
        store.load_stage(checkpoint, 0)


def test_another_layout_is_refused_even_with_the_right_hash(store, monkeypatch):
    real = checkpoints._header
    monkeypatch.setattr(checkpoints, "_header", lambda *what: real(*what).replace(b"}}", b"} }"))
    checkpoint = write(store, mark(1))
    monkeypatch.setattr(checkpoints, "_header", lambda *what: real(*what).replace(b"}}", b"} } "))
    with pytest.raises(CheckpointUnusable, match="do not lie where"):
        store.load_stage(checkpoint, 0)


# -- a kill or an error at every single operation --------------------------------------------

SYSTEM = {"posix", "fcntl", "_io", "io"}
HARMLESS = {"fspath", "urandom"}


@contextmanager
def before_each_operation(act: Callable[[], None]):
    """Calls ``act`` before every call of the system's or a file's functions in the block."""

    def profile(frame, event, function):
        if event != "c_call" or function.__name__ in HARMLESS:
            return
        if function.__module__ in SYSTEM or isinstance(function.__self__, io.IOBase):
            act()

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def plant(content: dict[str, bytes | None], folder: Path) -> Path:
    folder.mkdir()
    for name, data in content.items():
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)
    return folder


def test_a_kill_before_any_operation_leaves_the_old_or_the_new_one(store, tmp_path, said):
    for t in (1, 2, 3):
        write(store, mark(t))
    states = [tree(store.folder)]

    def look() -> None:
        if (now := tree(store.folder)) != states[-1]:
            states.append(now)

    with before_each_operation(look):
        write(store, mark(4))
    look()

    newest = []
    for number, state in enumerate(states):
        left = CheckpointStore(plant(state, tmp_path / f"{number}"), RUN, say=said.append)
        newest.append(left.newest().mark)
        assert len(left.all()) >= 3
        assert all(is_whole(left, checkpoint) for checkpoint in left.all())
        left.clean()
        assert names_in(left.folder) == {checkpoint.path.name for checkpoint in left.all()}
    assert newest == sorted(newest)
    assert newest[0] == mark(3)
    assert newest[-1] == mark(4)
    # 3 files made and filled, the folder made and named; one hidden, emptied of 3 files, removed
    assert len(states) == 1 + (1 + 3 * 2 + 1) + (1 + 3 + 1)
    assert set(said) == {"a checkpoint was being written when the process ended; removed"}
    assert len(said) == 1 + 3 * 2  # in the states with a folder that had no name yet


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError(errno.ENOSPC, "No space left"), ": No space left; older"), (KeyError("x"), "'x'")],
)
def test_an_error_of_any_operation_leaves_the_old_or_the_new_one(tmp_path, error, reason):
    """ENOSPC stands for what a disk can do, KeyError for anything else that ends the writing."""
    original = CheckpointStore(tmp_path / "original", RUN, say=print)
    for t in (1, 2, 3):
        write(original, mark(t))
    content = tree(original.folder)
    outcomes = set()
    for number in range(10_000):
        said: list[str] = []
        store = CheckpointStore(plant(content, tmp_path / f"{number}"), RUN, say=said.append)
        left = number

        def fail() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise error

        outcome = "written"
        try:
            with before_each_operation(fail):
                write(store, mark(4))
        except (CheckpointNotWritten, KeyError) as raised:
            outcome = f"{raised}"
        unfinished = reason in outcome
        assert unfinished or outcome == "written"
        assert store.newest().mark in ((mark(3), mark(4)) if unfinished else (mark(4),)), number
        assert len(store.all()) >= 3
        assert all(is_whole(store, checkpoint) for checkpoint in store.all()), number
        hidden = {name for name in names_in(store.folder) if name.startswith(".")}
        assert all(name.startswith(".old-") for name in hidden), number
        store.clean()
        assert not any(name.startswith(".") for name in names_in(store.folder))
        outcomes.add((unfinished, store.newest().mark.t))
        if left >= 0:
            break
        shutil.rmtree(store.folder)
    assert number > 50
    assert left >= 0
    assert {(True, 3), (False, 4)} <= outcomes


def test_all_is_on_the_disk_before_it_is_named_and_named_before_others_go(store, monkeypatch):
    for t in (1, 2, 3):
        write(store, mark(t))
    log: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "unlink")}

    def fsync(descriptor: int) -> None:
        log.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        real["fsync"](descriptor)

    def rename(old: Path, new: Path) -> None:
        log.append(("rename", Path(new).name[:7]))
        real["rename"](old, new)

    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        log.append(("unlink", ""))
        real["unlink"](path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "unlink", unlink)
    write(CheckpointStore(store.folder / "new" / "folder", RUN, say=print), mark(4))
    assert log[0] == ("fsync", "new")
    log.clear()
    write(store, mark(4))
    temporary = log[3][1]
    assert temporary.startswith(".tmp-step-00000004")
    assert log == [
        ("fsync", "stage-0.safetensors"),
        ("fsync", "stage-1.safetensors"),
        ("fsync", "checkpoint.json"),
        ("fsync", temporary),
        ("rename", "step-00"),
        ("fsync", "checkpoints"),
        ("rename", ".old-st"),
        ("fsync", "checkpoints"),
        *[("unlink", "")] * 3,
    ]


# -- a full disk -----------------------------------------------------------------------------


def test_a_stage_that_does_not_fit_is_not_begun(store, monkeypatch):
    older = write(store, mark(1))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 500, 500))
    writer = store.write(mark(2), 2, TOTALS)
    with pytest.raises(CheckpointNotWritten) as caught:
        writer.add_stage(0, vectors(mark(2), 0))
    size = older.stages[0].size
    assert isinstance(caught.value, SwarmError)
    assert (caught.value.path.name, caught.value.needed) == ("stage-0.safetensors", size)
    assert f"stage-0.safetensors of {size:,} bytes: No space left" in str(caught.value)
    with pytest.raises(ValueError, match="not any more"):
        writer.add_stage(0, vectors(mark(2), 0))
    assert names_in(store.folder) == {older.path.name}
    assert is_whole(store, store.newest())


# -- what killed writers left ----------------------------------------------------------------


def test_leftovers_go_at_the_start_and_are_mentioned_once(store, said):
    write(store, mark(1))
    for number in range(2):
        left = store.folder / f".tmp-step-00000002-term-1-aa-{number}"
        left.mkdir()
        (left / "stage-0.safetensors").write_text("x")
    (store.folder / ".old-step-00000000-term-0-ab").mkdir()
    store.clean()
    assert said == ["a checkpoint was being written when the process ended; removed"]
    assert names_in(store.folder) == {store.newest().path.name}
    store.clean()
    assert len(said) == 1


def test_what_is_being_written_is_not_cleaned_away(store, said):
    writer = store.write(mark(1), 1, TOTALS)
    CheckpointStore(store.folder, RUN, say=said.append).clean()
    for stage in range(len(LENGTHS)):
        writer.add_stage(stage, vectors(mark(1), stage))
    assert is_whole(store, writer.finish())
    assert said == []


def test_a_file_system_without_locks_will_do(store, monkeypatch):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert is_whole(store, write(store, mark(1)))
    (store.folder / ".tmp-step-00000002-term-1-aa-0").mkdir()
    store.clean()
    assert names_in(store.folder) == {store.newest().path.name}


def test_what_cannot_be_removed_is_said(store, said, monkeypatch):
    def rmtree(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    write(store, mark(1))
    left = store.folder / ".tmp-step-00000002-term-1-aa-0"
    left.mkdir()
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    store.clean()
    assert said == [f"cannot remove {left}: Permission denied"]


def test_what_cannot_be_pruned_is_said_and_the_new_one_stands(store, said, monkeypatch):
    def rename(old: Path, new: Path) -> None:
        if Path(new).name.startswith(".old-"):
            raise PermissionError(errno.EACCES, "Permission denied", str(old))
        real(old, new)

    real = os.rename
    monkeypatch.setattr(os, "rename", rename)
    for t in (1, 2, 3, 4):
        write(store, mark(t))
    oldest = store.all()[0]
    assert (oldest.mark, store.newest().mark) == (mark(1), mark(4))
    assert said == [f"cannot remove checkpoint {oldest.path}: Permission denied"]
