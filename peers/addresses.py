"""Multiaddrs: checked where a person typed them, so that errors are precise, and taken apart."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from swarm.errors import AddressError, BootstrapError
from swarm.types import PeerId

logger = logging.getLogger(__name__)

PREFLIGHT_S = 5.0
_HOST = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}
_NAMED = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}


def check_listen(addresses: Sequence[str]) -> None:
    """Raise AddressError for a listen address that is malformed or cannot be bound.

    p2pd itself would share a TCP port in use with its owner and say nothing.
    """
    for address in addresses:
        parts = _parse("listen", address)
        family, host = _host(parts)
        if family is None or not ("tcp" in parts or "udp" in parts):
            raise AddressError(
                f"listen address {address!r}: needs an IP address and a port; "
                "write it like /ip4/0.0.0.0/tcp/31337"
            )
        _check_free(address, family, host, parts)


def check_announce(addresses: Sequence[str]) -> None:
    """Raise AddressError for an announce address that nobody could dial."""
    for address in addresses:
        parts = _parse("announce", address)
        if "0" in (parts.get("tcp"), parts.get("udp")):
            raise AddressError(
                f"announce address {address!r}: port 0 cannot be dialled; "
                "give the port that others reach, and listen on a fixed one"
            )


def split_peer(address: str) -> tuple[PeerId, str]:
    """The peer id and the rest of a full address like ``/ip4/1.2.3.4/tcp/31337/p2p/12D3...``.

    Raises:
        AddressError: malformed, or without an id or anything to dial.
    """
    parts = _parse("peer", address)
    transport, _, peer = str(Multiaddr(address)).rpartition("/p2p/")
    if "p2p" not in parts or not transport or "/" in peer:
        raise AddressError(
            f"peer address {address!r}: must end in /p2p/PEER_ID; "
            "copy the whole line that the coordinator prints"
        )
    return peer, transport


async def check_bootstrap(addresses: Sequence[str]) -> None:
    """Raise AddressError if one of the peers' ``addresses`` is malformed, and BootstrapError if
    there are some and nobody answers at any of them. Within ``PREFLIGHT_S`` seconds."""
    transports = [split_peer(address)[1] for address in addresses]
    problems = await asyncio.gather(*(preflight(transport) for transport in transports))
    if addresses and all(problems):
        raise nobody_reached(dict(zip(addresses, map(str, problems), strict=True)))


async def reachable(addresses: Sequence[str]) -> list[str]:
    """Those of the peers' ``addresses`` at which somebody answers, now. Malformed ones are not."""

    async def answers(address: str) -> bool:
        try:
            return await preflight(split_peer(address)[1]) is None
        except AddressError:
            return False

    found = await asyncio.gather(*(answers(address) for address in addresses))
    return [address for address, yes in zip(addresses, found, strict=True) if yes]


def nobody_reached(problems: Mapping[str, str]) -> BootstrapError:
    """The error for bootstrap addresses none of which works, with what is wrong with each."""
    lines = (f"{address}: {problem}" for address, problem in problems.items())
    return BootstrapError(f"the swarm cannot be entered: {' | '.join(lines)}")


async def enter(addresses: Sequence[str], why_not: Callable[[str], Awaitable[str | None]]) -> None:
    """Connect to all of ``addresses``, with ``why_not``, which says what was wrong with one.

    Raises:
        BootstrapError: there are some and none works. For each other that does not: a warning.
    """
    if not addresses:
        return
    problems = await asyncio.gather(*(why_not(address) for address in addresses))
    dead = {
        address: problem
        for address, problem in zip(addresses, problems, strict=True)
        if problem is not None
    }
    if len(dead) == len(addresses):
        raise nobody_reached(dead)
    for address, problem in dead.items():
        logger.warning("a bootstrap peer cannot be reached: %s: %s", address, problem)


async def preflight(address: str) -> str | None:
    """Why nobody can be reached by TCP at ``address``, and what to do; None if somebody can.

    Takes at most ``PREFLIGHT_S`` seconds. Addresses without TCP are not judged.
    """
    parts = _parse("peer", address)
    family, host = _host(parts)
    if family is None:
        names = [(known, parts[kind]) for kind, known in _NAMED.items() if kind in parts]
        family, host = names[0] if names else (None, "")
    if family is None or "tcp" not in parts or "p2p-circuit" in parts:
        return None
    try:
        async with asyncio.timeout(PREFLIGHT_S):
            _, writer = await asyncio.open_connection(host, int(parts["tcp"]), family=family)
    except TimeoutError:
        return (
            f"no answer from {host} within {PREFLIGHT_S:g} s; is that machine up, "
            "and does its firewall let this port through?"
        )
    except socket.gaierror as error:
        return f"host name {host!r} is not known ({error.strerror}); check its spelling"
    except OSError as error:
        return _why_not(error, host, parts["tcp"])
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return None


def host_and_port(address: str) -> tuple[str, int]:
    """The host (an IP address or a name) and TCP port of a multiaddr.

    Raises:
        ValueError: it is not an address for TCP.
    """
    parts = _parse("peer", address)
    for kind in (*_HOST, *_NAMED):
        if kind in parts and "tcp" in parts and "p2p-circuit" not in parts:
            return parts[kind], int(parts["tcp"])
    raise ValueError(f"{address!r} is not an address for TCP")


def multiaddr_bytes(address: str) -> bytes:
    """A multiaddr as it travels."""
    return Multiaddr(address).to_bytes()


def multiaddr_text(data: bytes) -> str:
    """A multiaddr that came from somebody. Raises ValueError if it is none."""
    try:
        return str(Multiaddr(data))
    except (MultiaddrError, ValueError, LookupError) as error:
        raise ValueError(f"not a multiaddr: {error}") from error


def is_loopback(address: str) -> bool:
    """Whether only this machine can dial ``address``."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def _parse(role: str, address: str) -> dict[str, str]:
    """The protocols of a multiaddr and their values. Raises AddressError that quotes it."""
    try:
        return {protocol.name: value or "" for protocol, value in Multiaddr(address).items()}
    except (MultiaddrError, ValueError, LookupError) as error:
        reason = str(error).partition("': ")[2].partition(" (string: ")[0] or str(error)
        raise AddressError(
            f"{role} address {address!r}: not a multiaddr ({reason}); "
            "write it like /ip4/127.0.0.1/tcp/31337"
        ) from error


def _host(parts: dict[str, str]) -> tuple[socket.AddressFamily | None, str]:
    for kind, family in _HOST.items():
        if kind in parts:
            return family, parts[kind]
    return None, ""


def _check_free(
    address: str, family: socket.AddressFamily, host: str, parts: dict[str, str]
) -> None:
    is_tcp = "tcp" in parts
    port = int(parts["tcp" if is_tcp else "udp"])
    kind = socket.SOCK_STREAM if is_tcp else socket.SOCK_DGRAM
    with socket.socket(family, kind) as probe:
        if is_tcp:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} is in use; stop the program that has it, or give another"
            elif error.errno == errno.EACCES:
                reason = f"port {port} is not open to this user; give one above 1023"
            else:
                reason = f"cannot be bound ({error.strerror}); give an address of this machine"
            raise AddressError(f"listen address {address!r}: {reason}") from error


def _why_not(error: OSError, host: str, port: str) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused: nothing listens on port {port} of {host}; is it running?"
    return f"no way to {host} ({error.strerror or error}); check the address and this network"
