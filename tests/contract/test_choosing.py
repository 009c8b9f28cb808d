"""Which transport a process gets: the one asked for, or one that starts here, and it says so."""

import logging

import pytest

from dht.identity import Identity
from peers import p2pd_daemon
from peers.choosing import Opening, opened
from peers.p2pd import P2pdTransport
from peers.pylibp2p import PyLibp2pTransport
from peers.transport import TransportKind
from peers.wire import DEFAULT_LIMITS
from swarm.errors import AddressError, BootstrapError, IdentityError, NetworkError

pytestmark = pytest.mark.anyio

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
KINDS = (TransportKind.P2PD, TransportKind.PYLIBP2P)
TYPES = {TransportKind.P2PD: P2pdTransport, TransportKind.PYLIBP2P: PyLibp2pTransport}


@pytest.fixture
def anyio_backend():
    return "asyncio"


def opening(path, *, listen=LOOPBACK, announce=(), join=(), twin=None):
    return Opening(path, listen, announce, join, DEFAULT_LIMITS, twin)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_one_asked_for_has_the_peer_id_of_the_key(tmp_path, caplog, kind):
    identity, _ = Identity.load_or_create(tmp_path / "key")
    with caplog.at_level(logging.INFO, logger="swarm"):
        async with opened(kind, opening(tmp_path / "key")) as transport:
            assert type(transport) is TYPES[kind]
            assert transport.peer == transport.p2p.peer_id.to_base58() == identity.peer_id
            assert transport.addresses()[0].endswith(f"/p2p/{identity.peer_id}")
    assert "as asked" in caplog.text


async def test_auto_is_p2pd_where_it_runs(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="swarm"):
        async with opened(TransportKind.AUTO, opening(tmp_path / "key")) as transport:
            assert type(transport) is P2pdTransport
    assert "transport: p2pd" in caplog.text


BINARIES = {
    "missing": (None, "No such file"),
    "not executable": (b"#!/bin/sh\n", "Permission denied"),
    "of another platform": (b"\x00\x01\x02", "Exec format error"),
    "of another library": (b"#!/bin/sh\necho version GLIBC_9 not found; exit 1\n", "GLIBC_9"),
}


@pytest.fixture(params=BINARIES)
def broken(request, tmp_path, monkeypatch):
    """A p2pd that does not run; gives what shall be said of it."""
    content, said = BINARIES[request.param]
    if content is not None:
        binary = tmp_path / "p2pd"
        binary.write_bytes(content)
        binary.chmod(0o644 if request.param == "not executable" else 0o755)
    monkeypatch.setattr(p2pd_daemon, "files", lambda package: tmp_path)
    return said


async def test_auto_does_without_a_p2pd_that_does_not_run_and_says_why(tmp_path, caplog, broken):
    async with opened(TransportKind.AUTO, opening(tmp_path / "key")) as transport:
        assert type(transport) is PyLibp2pTransport
    (line,) = [record.getMessage() for record in caplog.records if record.name == "swarm"]
    assert line.startswith("transport: py-libp2p, since p2pd does not run here")
    assert broken in line


async def test_p2pd_that_was_asked_for_and_does_not_run_is_an_error(tmp_path, broken):
    with pytest.raises(NetworkError, match=broken) as caught:
        async with opened(TransportKind.P2PD, opening(tmp_path / "key")):
            pass
    assert "--transport pylibp2p" in str(caught.value)


async def test_another_version_of_libp2p_is_refused_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("peers.libp2p_parts.VERSION", "9.9.9")
    with pytest.raises(NetworkError, match=r"pip install libp2p==9\.9\.9"):
        async with opened(TransportKind.PYLIBP2P, opening(tmp_path / "key")):
            pass


@pytest.mark.parametrize("kind", TransportKind)
@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"listen": ("/ip4/127.0.0.1",)}, AddressError, "needs an IP address and a port"),
        ({"listen": ("nonsense",)}, AddressError, "nonsense"),
        ({"announce": ("/ip4/203.0.113.7/tcp/0",)}, AddressError, "port 0 cannot be dialled"),
        ({"join": ("/ip4/127.0.0.1/tcp/1",)}, AddressError, "must end in /p2p/PEER_ID"),
        (
            {"join": (f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}",)},
            BootstrapError,
            "connection refused",
        ),
    ],
)
async def test_what_the_user_got_wrong_is_said_alike(tmp_path, kind, how, error, said):
    with pytest.raises(error, match=said):
        async with opened(kind, opening(tmp_path / "key", **how)):
            pass


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
async def test_a_key_that_lives_elsewhere_is_refused(tmp_path, first, second):
    key = tmp_path / "key"
    async with (
        opened(first, opening(tmp_path / "bootstrap")) as bootstrap,
        opened(second, opening(key, join=bootstrap.addresses())) as original,
    ):
        again = opening(key, join=bootstrap.addresses(), twin=original.peer)
        with pytest.raises(IdentityError, match="a live process elsewhere uses this key"):
            async with opened(second, again):
                pass
        other = Identity.load_or_create(tmp_path / "other")[0].peer_id
        free = opening(tmp_path / "other", join=bootstrap.addresses(), twin=other)
        async with opened(second, free) as another:
            assert another.peer == other


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_announced_takes_the_place_of_where_it_listens(tmp_path, kind):
    announced = "/ip4/203.0.113.7/tcp/17969"
    async with opened(kind, opening(tmp_path / "key", announce=(announced,))) as transport:
        assert transport.addresses() == [f"{announced}/p2p/{transport.peer}"]


@pytest.mark.parametrize("kind", KINDS)
async def test_listening_everywhere_offers_the_addresses_of_this_machine(tmp_path, kind):
    """With the port that was bound, and loopback only if there is nothing else."""
    async with opened(kind, opening(tmp_path / "key", listen=("/ip4/0.0.0.0/tcp/0",))) as node:
        addresses = node.addresses()
    assert addresses
    assert all("/0.0.0.0/" not in address and "/tcp/0/" not in address for address in addresses)
    loopback = [address for address in addresses if address.startswith("/ip4/127.")]
    assert loopback in ([], addresses)
