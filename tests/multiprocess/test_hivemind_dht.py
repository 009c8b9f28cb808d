"""The hivemind adapter over real p2pd processes on loopback: identity, attacks, ways to fail."""

import asyncio
import contextlib
import os

import pytest

from dht import hivemind_dht
from dht.hivemind_dht import (
    MAX_SUBKEYS,
    P2P,
    DHTNode,
    EnvelopeValidator,
    HivemindDirectory,
    _BoundedStorage,
)
from dht.identity import Identity
from dht.records import PeerRecord, PeerState, encode, stage_key
from swarm.errors import BootstrapError

DHTID, DHTRecord = hivemind_dht.DHTID, hivemind_dht.DHTRecord
KEY = stage_key("a" * 32, 0)
ALICE, MALLORY = Identity.generate(), Identity.generate()
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"


def value_of(identity: Identity, sequence: int = 0, **how) -> bytes:
    record = PeerRecord(
        peer=identity.peer_id,
        run_id="a" * 32,
        boot="0" * 16,
        stage=0,
        state=PeerState.READY,
        version="1",
        sequence=sequence,
    )
    # Some are made when the tests are collected, which may be long before they are used.
    return encode(record, identity, **{"ttl_s": 3600.0} | how)


class Daemons(contextlib.AsyncExitStack):
    """Starts p2pd processes and directories; ends them all with the test."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: list[int] = []

    async def start(self, addresses=(), **how) -> P2P:
        p2p = await P2P.create(initial_peers=addresses, nat_port_map=False, auto_nat=False, **how)
        self.pids.append(p2p._child.pid)
        self.push_async_callback(p2p.shutdown)
        return p2p

    async def directory(self, addresses=()) -> tuple[HivemindDirectory, list[str]]:
        p2p = await self.start(addresses)
        directory = await HivemindDirectory.create(p2p, addresses)
        self.push_async_callback(directory.close)
        return directory, await addresses_of(p2p)


async def addresses_of(p2p: P2P) -> list[str]:
    return [str(address) for address in await p2p.get_visible_maddrs()]


def run(test) -> None:
    """Run ``test(daemons)``; afterwards no p2pd of it is left."""

    async def main() -> list[int]:
        async with asyncio.timeout(60), Daemons() as daemons:
            await test(daemons)
        return daemons.pids

    for pid in asyncio.run(main()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_p2pd_runs_on_our_key_file_and_reports_its_peer_id(tmp_path):
    identity, _ = Identity.load_or_create(tmp_path / "identity.key")

    async def test(daemons):
        p2p = await daemons.start(
            identity_path=str(tmp_path / "identity.key"), check_if_identity_free=False
        )
        assert p2p.peer_id.to_base58() == identity.peer_id

    run(test)


GOOD = value_of(ALICE)


def attack(value: bytes, *, subkey: str | None, life_s: float = 60.0) -> list[dict[str, bytes]]:
    """What two honest nodes find under KEY, where one has announced GOOD for 30 s and then a node
    without scruples stores ``value``, which lives longer and so takes the place of GOOD there.
    """
    views = []

    async def test(daemons):
        first, addresses = await daemons.directory()
        second, _ = await daemons.directory(addresses)
        assert await first.announce(KEY, ALICE.peer_id, GOOD, ttl_s=30)
        hostile = await DHTNode.create(
            p2p=await daemons.start(addresses), initial_peers=addresses, record_validator=None
        )
        expiry = hivemind_dht.get_dht_time() + life_s
        await hostile.store(KEY, value, expiry, subkey=subkey)
        there = (await hostile.get(KEY, latest=True)).value
        assert value == (there if subkey is None else there[subkey].value), "it is stored there"
        views.append(await first.lookup(KEY))
        views.append(await second.lookup(KEY))
        await hostile.shutdown()

    run(test)
    return views


def test_a_value_signed_by_its_subkey_is_found_whoever_stored_it():
    value = value_of(ALICE, 1)
    assert attack(value, subkey=ALICE.peer_id) == [{ALICE.peer_id: value}] * 2


@pytest.mark.parametrize(
    ("value", "how"),
    [
        (b"noise", {"subkey": ALICE.peer_id}),
        (value_of(MALLORY), {"subkey": ALICE.peer_id}),
        (value_of(ALICE), {"subkey": MALLORY.peer_id}),
        (value_of(ALICE, 1), {"subkey": None}),
        (value_of(ALICE, 1, ttl_s=60.0), {"subkey": ALICE.peer_id, "life_s": 3600.0}),
    ],
    ids=["noise", "forged", "replayed", "no subkey", "kept alive"],
)
def test_what_is_not_signed_for_its_place_neither_shows_nor_hides_what_is(value, how):
    assert attack(value, **how) == [{ALICE.peer_id: GOOD}] * 2


def dht_record(**changes):
    """A good record as hivemind shows it to validators, but for ``changes``."""
    dumps = hivemind_dht.msgpack.packb
    fields = {
        "key": DHTID.generate(source=KEY).to_bytes(),
        "subkey": dumps(ALICE.peer_id),
        "value": dumps(value_of(ALICE, ttl_s=60.0, made_at=1000.0)),
        "expiration_time": 1060.0,
    }
    return DHTRecord(**(fields | changes))


def test_the_validator_accepts_what_is_signed_for_the_place():
    assert EnvelopeValidator().validate(dht_record())


@pytest.mark.parametrize(
    "changes",
    [
        {"key": DHTID.generate(source=KEY + "0").to_bytes()},
        {"subkey": hivemind_dht.msgpack.packb(MALLORY.peer_id)},
        {"subkey": hivemind_dht.msgpack.packb(None)},
        {"subkey": b""},
        {"subkey": b"\xc1"},
        {"subkey": b"\x00" * 300},
        {"value": b""},
        {"value": value_of(ALICE)},
        {"value": hivemind_dht.msgpack.packb("text")},
        {"value": hivemind_dht.msgpack.packb(b"x" * 100_000)},
        {"expiration_time": 1062.0},
        {"expiration_time": float("nan")},
        {"expiration_time": float("inf")},
        {"expiration_time": "never"},
    ],
)
def test_the_validator_refuses_all_else(changes):
    assert not EnvelopeValidator().validate(dht_record(**changes))


def test_a_node_keeps_a_bounded_number_of_subkeys_for_others():
    storage = _BoundedStorage()
    key, expiry = DHTID.generate(source=KEY), hivemind_dht.get_dht_time() + 1000
    for subkey in range(MAX_SUBKEYS):
        assert storage.store_subkey(key, subkey, b"x", expiry)
    assert not storage.store_subkey(key, "one more", b"x", expiry)
    assert storage.store_subkey(key, 0, b"newer", expiry + 1)
    assert len(storage.get(key).value) == MAX_SUBKEYS


def test_what_is_not_a_valid_envelope_or_too_old_is_not_announced(caplog):
    async def test(daemons):
        directory, _ = await daemons.directory()
        alice = ALICE.peer_id
        assert not await directory.announce(KEY, alice, b"noise", ttl_s=60)
        assert not await directory.announce(KEY, alice, value_of(MALLORY), ttl_s=60)
        old = value_of(ALICE, made_at=hivemind_dht.get_dht_time() - 400, ttl_s=300)
        assert not await directory.announce(KEY, alice, old, ttl_s=60)
        assert await directory.lookup(KEY) == {}

    run(test)
    assert "not msgpack" in caplog.text
    assert "sign anew for each announcement" in caplog.text


@pytest.mark.parametrize(
    "address", ["", "nonsense", "/ip4/127.0.0.1/tcp/4001", "12D3KooW", f"{NOBODY}x"]
)
def test_a_malformed_bootstrap_address_is_named(address):
    async def test(daemons):
        with pytest.raises(BootstrapError) as caught:
            await HivemindDirectory.create(None, [address])
        assert repr(address) in str(caught.value)
        assert "/p2p/12D3KooW..." in str(caught.value)

    run(test)


def test_if_no_bootstrap_peer_answers_each_is_named_with_what_failed():
    async def test(daemons):
        p2p = await daemons.start()
        with pytest.raises(BootstrapError) as caught:
            await HivemindDirectory.create(p2p, [NOBODY])
        assert NOBODY + " (" in str(caught.value)
        assert "\n" not in str(caught.value)
        # nothing is left behind: the same p2pd can serve a directory
        directory = await HivemindDirectory.create(p2p, [])
        await directory.close()

    run(test)


def test_one_bootstrap_peer_that_answers_is_enough(caplog):
    async def test(daemons):
        first, addresses = await daemons.directory()
        p2p = await daemons.start(addresses)
        second = await HivemindDirectory.create(p2p, [NOBODY, *addresses])
        await second.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=60)
        assert (await first.lookup(KEY)).keys() == {ALICE.peer_id}
        await second.close()

    run(test)
    assert f"no answer from {NOBODY} (" in caplog.text


def test_a_peer_that_serves_no_directory_is_no_way_in():
    async def test(daemons):
        other = await daemons.start()
        addresses = await addresses_of(other)
        p2p = await daemons.start(addresses)
        with pytest.raises(BootstrapError, match="no answer from"):
            await HivemindDirectory.create(p2p, addresses)

    run(test)


@pytest.mark.parametrize(("shift", "words"), [(600, "600 s ahead of"), (-600, "600 s behind")])
def test_a_wrong_clock_is_noticed_at_the_start(monkeypatch, shift, words):
    right = hivemind_dht.get_dht_time

    async def test(daemons):
        _, addresses = await daemons.directory()
        p2p = await daemons.start(addresses)
        monkeypatch.setattr(hivemind_dht, "get_dht_time", lambda: right() + shift)
        with pytest.raises(BootstrapError, match=f"clock is {words} that of 1 peer"):
            await HivemindDirectory.create(p2p, addresses)

    run(test)


def test_a_node_that_forgot_all_peers_finds_back_by_itself(monkeypatch):
    monkeypatch.setattr(hivemind_dht, "TOUCH_PERIOD_ALONE_S", 0.0)

    async def test(daemons):
        first, addresses = await daemons.directory()
        second, _ = await daemons.directory(addresses)
        await first.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=60)
        await second.lookup(KEY)  # now the first node knows the second and the other way round
        for directory in (first, second):  # as hivemind does with peers that do not answer
            protocol = directory._node.protocol
            protocol.storage.clear()
            for node_id in list(protocol.routing_table.uid_to_peer_id):
                del protocol.routing_table[node_id]
        value = value_of(ALICE, 1)
        await second.announce(KEY, ALICE.peer_id, value, ttl_s=60)
        assert await first.lookup(KEY) == {ALICE.peer_id: value}

    run(test)


def test_closing_ends_even_if_p2pd_has_gone(monkeypatch):
    monkeypatch.setattr(hivemind_dht, "ANSWER_LIMIT_S", 0.2)

    async def test(daemons):
        p2p = await daemons.start()
        directory = await HivemindDirectory.create(p2p, [])
        await p2p.shutdown()
        await directory.close()

    run(test)


def test_a_lookup_that_never_ends_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr(hivemind_dht, "OPERATION_LIMIT_S", 0.05)

    async def test(daemons):
        directory, _ = await daemons.directory()

        async def never(*args, **kwargs):
            await asyncio.Event().wait()

        monkeypatch.setattr(directory._node, "get", never)
        monkeypatch.setattr(directory._node, "store", never)
        assert await directory.lookup(KEY) == {}
        assert not await directory.announce(KEY, ALICE.peer_id, value_of(ALICE), ttl_s=60)

    run(test)
    assert "lookup of" in caplog.text
