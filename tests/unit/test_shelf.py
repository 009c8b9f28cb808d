"""A node's copy on its own disk: whole or not there, and only what fits is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peers import shelf as shelf_module
from peers.shelf import Shelf
from peers.sources import Copy
from swarm.types import Mark, Term

RUN = "0" * 32
NAMES = ("weights", "exp_avg")


def copy_at(t: int, length: int = 40) -> Copy:
    vectors = {name: torch.randn(length) for name in NAMES}
    return Copy(Mark(Term(3, "aa"), t), t - 1, ({"p": t}, {}), vectors)


def equal(a: Copy | None, b: Copy) -> bool:
    return (
        a is not None
        and (a.mark, a.applied, a.totals) == (b.mark, b.applied, b.totals)
        and all(torch.equal(a.vectors[name], b.vectors[name]) for name in NAMES)
    )


def test_what_was_put_is_got_and_only_the_newest_stays(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "kept", RUN, 1)
    assert shelf.get(40, NAMES) is None
    for t in (5, 6):
        copy = copy_at(t)
        shelf.put(copy)
        assert equal(Shelf(tmp_path / "kept", RUN, 1).get(40, NAMES), copy)
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize("stop", [0, 7, 100, 300])
def test_a_cut_file_is_not_used(stop: int, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, RUN, 0)
    shelf.put(copy_at(5))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:stop])
    assert shelf.get(40, NAMES) is None


def test_what_is_of_another_size_is_not_used(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, RUN, 0)
    shelf.put(copy_at(5))
    assert shelf.get(41, NAMES) is None
    assert shelf.get(40, (*NAMES, "exp_avg_sq")) is None


def test_a_full_disk_leaves_the_older_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf(tmp_path, RUN, 0)
    first = copy_at(5)
    shelf.put(first)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shelf_module, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        shelf.put(copy_at(6))
    assert equal(shelf.get(40, NAMES), first)
