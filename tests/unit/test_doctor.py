"""``swarm doctor``: what each check makes of what it finds, and what it tells people to do."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import anyio
import pytest

from dht.identity import Identity
from peers import doctor
from peers.doctor import Check, Verdict, Wishes
from peers.entering import LOOPBACK, Entry

GIB = doctor.GIB
PEER = "12D3KooWMzXieKFKRbDjZFPKv56x9KZMFYAbzqsd75orCu4DHf9o"


def way_in(*join: str) -> list[Check]:
    async def main() -> list[Check]:
        return [check async for check in doctor.way_in(join)]

    return anyio.run(main)


def examined(wishes: Wishes) -> list[Check]:
    async def main() -> list[Check]:
        return [check async for check in doctor.examine(wishes)]

    return anyio.run(main)


@pytest.mark.parametrize(
    ("check", "verdict", "word"),
    [
        (doctor.python((3, 10, 4)), Verdict.FAIL, "install Python 3.11"),
        (doctor.python((3, 11, 0)), Verdict.OK, ""),
        (doctor.disk(1 * GIB, Path("/x")), Verdict.WARN, "free some"),
        (doctor.disk(3 * GIB, Path("/x")), Verdict.OK, ""),
        (doctor.files(256), Verdict.WARN, "ulimit -n 4096"),
        (doctor.files(65536), Verdict.OK, ""),
        (doctor.files(resource.RLIM_INFINITY), Verdict.OK, ""),
    ],
)
def test_a_machine(check: Check, verdict: Verdict, word: str):
    assert check.verdict is verdict
    assert word in check.todo
    assert bool(check.todo) == (verdict is not Verdict.OK)


def test_torch_is_tried():
    found = doctor.compute("cpu")
    assert found.verdict is Verdict.OK
    assert "on cpu" in found.found


def test_a_device_that_is_not_there_is_said():
    found = doctor.compute("cuda:7")
    assert found.verdict is Verdict.FAIL
    assert "--device" in found.todo


def test_torch_that_breaks_is_said(monkeypatch):
    import torch

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("undefined symbol: iJIT_NotifyEvent")

    monkeypatch.setattr(torch, "ones", broken)
    found = doctor.compute("cpu")
    assert found.verdict is Verdict.FAIL
    assert "iJIT_NotifyEvent" in found.found
    assert "pytorch.org" in found.todo


def test_torch_that_computes_wrongly_is_said(monkeypatch):
    import torch

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *a, **k: ones(4, 4, requires_grad=True))
    assert doctor.compute("cpu").found == "computes wrongly"


# -- the way in ---------------------------------------------------------------------------------


def test_a_port_that_answers_one_that_does_not_and_a_name_that_is_unknown():
    with socket.create_server(("127.0.0.1", 0)) as here, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        there, dead = here.getsockname()[1], nobody.getsockname()[1]
        found = way_in(
            f"/ip4/127.0.0.1/tcp/{there}/p2p/{PEER}",
            f"/ip4/127.0.0.1/tcp/{dead}/p2p/{PEER}",
            f"/dns4/no-such-host.invalid/tcp/31000/p2p/{PEER}",
            "/ip4/127.0.0.1/tcp/31000",
        )
    assert [check.verdict for check in found] == [Verdict.OK, *[Verdict.FAIL] * 3]
    assert "nothing listens on port" in found[1].todo
    assert "check its spelling" in found[2].todo
    assert "/p2p/PEER_ID" in found[3].todo


@pytest.mark.parametrize(
    ("addresses", "announced", "verdict", "word"),
    [
        (["/ip4/127.0.0.1/tcp/1/p2p/x"], [], Verdict.WARN, "--listen /ip4/0.0.0.0"),
        (["/ip4/192.168.1.7/tcp/1/p2p/x"], [], Verdict.WARN, "map a TCP port"),
        (["/ip4/10.0.0.1/tcp/1", "/ip4/8.8.8.8/tcp/1"], [], Verdict.OK, ""),
        (["/ip4/10.0.0.1/tcp/1"], ["/ip4/8.8.8.8/tcp/1"], Verdict.OK, ""),
        ([], [], Verdict.WARN, "--listen"),
    ],
)
def test_own_addresses(addresses: list[str], announced: list[str], verdict: Verdict, word: str):
    found = doctor.seen_from_outside(addresses, announced)
    assert (found.verdict, word in found.todo) == (verdict, True)


@pytest.mark.parametrize(
    ("offsets", "verdict", "words"),
    [
        ([], Verdict.SKIP, "nobody"),
        ([0.1, 2.0, 4.9], Verdict.OK, "agrees with 3 peers"),
        ([-3600.0, -3598.0, 2.0], Verdict.FAIL, "behind the swarm"),
        ([120.0, 121.0, 3.0], Verdict.FAIL, "at least 110 s ahead of the swarm"),
        ([2.0, 3.0, 9999.0], Verdict.OK, "agrees"),  # one whose own clock is wrong
    ],
)
def test_the_clock(offsets: list[float], verdict: Verdict, words: str):
    found = doctor.clock(offsets, announce_s=5.0)
    assert (found.verdict, words in found.found) == (verdict, True)


def test_which_stage_fits():
    found = doctor.fitting([GIB, 2 * GIB], [2 * GIB, 3 * GIB], 5 * GIB // 2, [3, 1])
    assert found.verdict is Verdict.OK
    assert "0, 1 fit into 2.50 GiB; of these stage 1 has the fewest replicas (1)" in found.found
    assert "activation checkpointing" in found.found
    roomy = doctor.fitting([GIB, 2 * GIB], [2 * GIB, 3 * GIB], 9 * GIB, [3, 1])
    assert "checkpointing" not in roomy.found
    none = doctor.fitting([GIB, 2 * GIB], [2 * GIB, 3 * GIB], GIB // 2, [0, 0])
    assert none.verdict is Verdict.FAIL
    assert "the smallest takes 1.00 GiB" in none.todo


# -- all of it ----------------------------------------------------------------------------------


def entry(folder: Path, *join: str) -> Entry:
    return Entry(identity=folder / "identity.key", listen=(LOOPBACK,), join=join)


def test_where_nobody_answers_what_comes_after_is_skipped(tmp_path: Path):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{nobody.getsockname()[1]}/p2p/{PEER}"
        found = examined(Wishes(entry(tmp_path, address), device="cpu"))
    by_name = {check.name: check.verdict for check in found}
    assert by_name["torch"] is Verdict.OK
    assert all(by_name[name] is Verdict.SKIP for name in doctor.BEYOND)
    assert doctor.exit_code(found) == 1
    assert doctor.plain(found)["ok"] is False


def test_a_key_that_a_running_node_uses_is_said(tmp_path: Path):
    from dht.identity import hold

    wishes = Wishes(entry(tmp_path), device="cpu")
    Identity.load_or_create(wishes.entry.identity)
    with socket.create_server(("127.0.0.1", 0)) as here, hold(wishes.entry.identity):
        address = f"/ip4/127.0.0.1/tcp/{here.getsockname()[1]}/p2p/{PEER}"
        found = examined(Wishes(entry(tmp_path, address), device="cpu"))
    (failed,) = [check for check in found if check.verdict is Verdict.FAIL]
    assert failed.name == "handshake"
    assert "identity.key" in failed.found
    assert [check.name for check in found[-4:]] == list(doctor.BEYOND[1:])


def test_only_what_is_wrong_is_said_when_a_node_starts(monkeypatch, tmp_path: Path):
    said: list[str] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    doctor.cheap(tmp_path / "not" / "yet" / "there", said.append)
    assert [line for line in said if "open files" in line] == [
        "open files: at most 100; raise it before you start: ulimit -n 4096"
    ]
