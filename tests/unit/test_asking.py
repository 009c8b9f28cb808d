"""Which run a swarm trains is learned from any of its peers, whatever they answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import trio
import trio.testing

from dht.identity import Identity
from dht.memory import MemoryDirectory, MemoryDirectoryStore
from dht.records import RunRecord, encode
from peers import messages as msg
from peers.asking import learn_run
from peers.entering import Entered
from peers.memory import MemoryNetwork, MemoryTransport
from peers.transport import Frame
from swarm.errors import BootstrapError
from swarm.manifest import Manifest
from swarm.types import PeerId

ONE = Manifest.from_tree({"name": "one"})
TWO = Manifest.from_tree({"name": "two"})
STATUS = msg.Status(boot="aa", role="node")
Reply = tuple[msg.Message, bytes]
SILENT = None


def member_of(manifest: Manifest) -> Reply:
    return STATUS, manifest.canonical()


async def learn(
    tmp_path: Path, peers: Mapping[str, Reply | None], run_id: str = "", announced: bool = False
) -> Manifest:
    """What one learns who enters through ``peers`` and asks them."""
    store = MemoryDirectoryStore()
    me, _ = Identity.load_or_create(tmp_path / "me.key")
    async with MemoryNetwork() as network:
        directory = MemoryDirectory(store)
        if announced:
            owner, _ = Identity.load_or_create(tmp_path / "owner.key")
            record = RunRecord(peer=owner.peer_id, run_id=ONE.run_id, manifest=ONE.canonical())
            value = encode(record, owner)
            await directory.announce(record.key, owner.peer_id, value, ttl_s=300)
        for name, reply in peers.items():
            if reply is not SILENT:
                await MemoryTransport(network, name).serve(answering(*reply))
        transport = MemoryTransport(network, me.peer_id)
        swarm = Entered(me, "aa", transport, directory)
        join = [f"/ip4/192.0.2.1/tcp/1/p2p/{name}" for name in peers]
        try:
            return await learn_run(swarm, join, run_id)
        except BootstrapError as error:
            found = error  # raised outside of the network, which would put it into a group
    raise found


def answering(reply: msg.Message, payload: bytes) -> Callable[[PeerId, Frame], Awaitable[Frame]]:
    async def handle(sender: PeerId, frame: Frame) -> Frame:
        asked = msg.parse_request(frame.header)
        assert isinstance(asked, msg.Question)
        assert asked.run == ""
        return Frame(msg.header(reply), [memoryview(payload)] if payload else [])

    return handle


def run(*args: object, **options: object) -> Manifest:
    async def main() -> Manifest:
        return await learn(*args, **options)  # type: ignore[arg-type]

    return trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


BAD: dict[str, Reply | None] = {
    "silent": SILENT,
    "refuses": (msg.Refused(reason="no"), b""),
    "says nothing": (STATUS, b""),
    "says nonsense": (STATUS, b"{}{"),
    "another answer": (msg.Ok(), ONE.canonical()),
}


def test_a_peer_knows_its_run_when_nobody_announces_it(tmp_path: Path) -> None:
    assert run(tmp_path, {"node": member_of(ONE)}) == ONE


@pytest.mark.parametrize("case", BAD)
def test_one_good_answer_is_enough(tmp_path: Path, case: str) -> None:
    assert run(tmp_path, {"bad": BAD[case], "good": member_of(ONE)}) == ONE


@pytest.mark.parametrize("case", BAD)
def test_without_a_good_answer_the_announced_run_is_taken(tmp_path: Path, case: str) -> None:
    assert run(tmp_path, {"bad": BAD[case]}, announced=True) == ONE


@pytest.mark.parametrize("case", BAD)
def test_without_any_run_the_error_is_one_line(tmp_path: Path, case: str) -> None:
    with pytest.raises(BootstrapError, match="no run is announced in it"):
        run(tmp_path, {"bad": BAD[case]})


def test_of_several_runs_one_is_chosen_by_its_id(tmp_path: Path) -> None:
    both = {"a": member_of(ONE), "b": member_of(TWO)}
    assert run(tmp_path, both, TWO.run_id) == TWO
    with pytest.raises(BootstrapError, match="choose with --run") as caught:
        run(tmp_path, both)
    assert ONE.run_id in str(caught.value)
    assert TWO.run_id in str(caught.value)
