"""How a process enters a swarm: identity, transport, directory, and the run that is found there."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from dht.directory import Directory
from dht.identity import Identity, hold
from dht.records import RunRecord, decode_all, runs_key
from peers.addresses import check_announce, check_bootstrap, check_listen, reachable
from peers.choosing import Opening, opened
from peers.limited import LimitedTransport
from peers.transport import Transport, TransportKind
from peers.wire import Limits
from swarm.errors import BootstrapError, ConfigError, SwarmError
from swarm.manifest import Manifest
from swarm.types import Boot

log = logging.getLogger("swarm")

FIND_RUN_S = 12.0
"""How long to look for the run's manifest once the swarm has been entered."""

DEFAULT_LISTEN = "/ip4/0.0.0.0/tcp/0"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
"""For those whom nobody has to reach from another machine."""


@dataclass(frozen=True, slots=True)
class Entry:
    """How to enter: the options that node and coordinator share.

    ``known``: addresses of an earlier session; those that nobody answers at are left out.
    ``upload_bytes_per_s``: what it sends at most; 0: no limit.
    """

    identity: Path
    listen: tuple[str, ...] = (DEFAULT_LISTEN,)
    announce: tuple[str, ...] = ()
    join: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    transport: TransportKind = TransportKind.AUTO
    upload_bytes_per_s: float = 0.0


@dataclass(slots=True)
class Entered:
    """A process inside a swarm."""

    identity: Identity
    boot: Boot
    transport: Transport
    directory: Directory
    addresses: list[str] = field(default_factory=list)
    limit: Callable[[Limits], None] = lambda limits: None
    """Bounds the frames that are sent and taken, once the run is known."""


def new_boot() -> Boot:
    return secrets.token_hex(8)


@asynccontextmanager
async def entered(entry: Entry, limits: Limits) -> AsyncIterator[Entered]:
    """Enter the swarm, and leave it at the end.

    Raises:
        IdentityError, AddressError, BootstrapError: one line that says what to do.
    """
    check_listen(entry.listen)
    check_announce(entry.announce)
    await check_bootstrap(entry.join)
    join = (*entry.join, *await reachable(entry.known))
    identity, created = Identity.load_or_create(entry.identity)
    if created:
        log.info("new identity %s in %s: keep a copy", identity.peer_id, entry.identity)
    with hold(entry.identity):
        twin = None if created else identity.peer_id
        opening = Opening(entry.identity, entry.listen, entry.announce, join, limits, twin)
        async with opened(entry.transport, opening) as transport:
            # Imported here: hivemind takes seconds, and errors in flags should not wait for it.
            from dht.hivemind_dht import HivemindDirectory

            directory = await HivemindDirectory.create(transport.p2p, join)
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_fail_when_gone, transport.gone)
                    yield Entered(
                        identity,
                        new_boot(),
                        _limited(transport, entry.upload_bytes_per_s),
                        directory,
                        transport.addresses(),
                        transport.limit,
                    )
                    tasks.cancel_scope.cancel()
            finally:
                with anyio.CancelScope(shield=True), anyio.move_on_after(3):
                    await directory.close()


def _limited(transport: Transport, bytes_per_s: float) -> Transport:
    return LimitedTransport(transport, bytes_per_s) if bytes_per_s else transport


async def _fail_when_gone(gone: Callable[[], Awaitable[str]]) -> None:
    raise SwarmError(f"no peer can be reached any more: {await gone()}; start again")


async def find_run(swarm: Entered, join: Sequence[str], run_id: str = "") -> Manifest:
    """The manifest of the run that this swarm trains.

    The run of the peer in a ``join`` address is preferred; ``run_id`` picks one of several.

    Raises:
        BootstrapError: none was found, or several.
    """
    deadline = anyio.current_time() + FIND_RUN_S
    owners = {address.rsplit("/p2p/", 1)[-1] for address in join}
    while True:
        found, _ = decode_all(await swarm.directory.lookup(runs_key()), key=runs_key())
        runs = [run for run in found if isinstance(run, RunRecord)]
        if run_id:
            runs = [run for run in runs if run.run_id == run_id]
        elif len(runs) > 1:
            runs = [run for run in runs if run.peer in owners] or runs
        if len({run.run_id for run in runs}) == 1:  # whoever can lead it announces it
            return _checked(runs[0])
        if anyio.current_time() >= deadline:
            break
        await anyio.sleep(0.3)
    where = ", ".join(join)
    if runs:
        names = ", ".join(sorted({run.run_id for run in runs}))
        raise BootstrapError(
            f"{where}: several runs are announced there; choose with --run: {names}"
        )
    wanted = f"run {run_id}" if run_id else "no run"
    raise BootstrapError(
        f"{where}: the swarm answers, but {wanted} is {'not ' if run_id else ''}announced in it; "
        "is its coordinator up?"
    )


def _checked(record: RunRecord) -> Manifest:
    manifest = Manifest.from_canonical(record.manifest)
    if manifest.run_id != record.run_id:
        raise ConfigError("run", record.run_id, f"the hash of its manifest, {manifest.run_id}")
    return manifest


def wire_limits(manifest: Manifest) -> Limits:
    """The longest header and payload that peers of this run send or take."""
    return Limits(
        header_bytes=manifest.limits.header_bytes, payload_bytes=manifest.limits.payload_bytes
    )
