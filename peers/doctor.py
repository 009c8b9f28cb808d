"""``swarm doctor``: what may keep this machine from serving, looked at step by step.

Each check says what was found and, unless all is well, what to do. One that needs another to have
passed is skipped if that failed, with the reason.
"""

from __future__ import annotations

import logging
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path

from dht.envelope import wall_clock
from dht.records import PeerRecord
from peers.addresses import is_loopback, preflight, split_peer
from peers.entering import Entered, Entry, entered, wire_limits
from peers.running import expected_error
from peers.versions import installed
from peers.wire import Limits
from swarm.errors import AddressError, SwarmError
from swarm.manifest import Manifest

logger = logging.getLogger("swarm.doctor")

GIB = 1 << 30
ENOUGH_DISK = 2 * GIB
ENOUGH_FILES = 1024
SKEW_S = 5.0
"""Records say when they were made, and may be this old by the time they are read."""


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Check:
    """``found``: what is; ``todo``: what to do about it, empty if nothing."""

    name: str
    verdict: Verdict
    found: str
    todo: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def fail(name: str, found: str, todo: str) -> Check:
    return Check(name, Verdict.FAIL, found, todo)


def warn(name: str, found: str, todo: str) -> Check:
    return Check(name, Verdict.WARN, found, todo)


def skip(name: str, why: str) -> Check:
    return Check(name, Verdict.SKIP, why)


# -- this machine ---------------------------------------------------------------------------------


def machine(folder: Path) -> Iterator[Check]:
    """All that needs no network and no torch. ``folder``: where the key lies."""
    yield python(sys.version_info[:3])
    yield disk(shutil.disk_usage(_existing(folder)).free, folder)
    yield disk(shutil.disk_usage(tempfile.gettempdir()).free, Path(tempfile.gettempdir()))
    yield files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _existing(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def python(version: Sequence[int]) -> Check:
    found = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if tuple(version[:2]) < (3, 11):
        return fail("python", found, "install Python 3.11 or newer")
    return ok("python", found)


def disk(free: int, folder: Path) -> Check:
    name, found = f"disk {folder}", f"{free / GIB:.1f} GiB free"
    if free < ENOUGH_DISK:
        return warn(name, found, f"free some: {ENOUGH_DISK / GIB:.0f} GiB are wanted there")
    return ok(name, found)


def files(limit: int) -> Check:
    """Open files: each connection is one."""
    if limit != resource.RLIM_INFINITY and limit < ENOUGH_FILES:
        todo = f"raise it before you start: ulimit -n {4 * ENOUGH_FILES}"
        return warn("open files", f"at most {limit}", todo)
    return ok("open files", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit}")


def compute(wish: str) -> Check:
    """Torch, and that it computes on the device that was asked for."""
    try:
        import torch

        from peers.balance import free_memory
        from peers.device import choose_device

        device = choose_device(wish)
        x = torch.ones(8, 8, device=device.torch_device, requires_grad=True)
        (x @ x).sum().backward()
        assert x.grad is not None
        right = bool((x.grad == 16).all())
    except SwarmError as error:
        return fail("torch", installed("torch"), str(error))
    except Exception as error:
        logger.error("torch does not work: %s", error)
        logger.debug("where it came from", exc_info=error)
        todo = "install the build of torch for this machine: https://pytorch.org/get-started"
        return fail("torch", f"{installed('torch')}: {error}", todo)
    if not right:
        return fail(
            "torch", "computes wrongly", "install another build of torch, or use --device cpu"
        )
    free = free_memory() if device.memory_bytes is None else device.memory_bytes
    return ok("torch", f"{torch.__version__} on {device.words}, {free / GIB:.1f} GiB free")


# -- the way in -----------------------------------------------------------------------------------


async def way_in(join: Sequence[str]) -> AsyncIterator[Check]:
    """Each address to join by, as far as a bare connection shows."""
    for address in join:
        try:
            peer, transport = split_peer(address)
        except AddressError as error:
            yield fail("address", address, str(error))
            continue
        problem = await preflight(transport)
        if problem is not None:
            yield fail(f"port of {peer[-6:]}", transport, problem)
        else:
            yield ok(f"port of {peer[-6:]}", f"{transport} answers")


def seen_from_outside(addresses: Sequence[str], announced: Sequence[str]) -> Check:
    """What others are told to dial. That they can is not tried: it takes somebody else to."""
    name, found = "own addresses", ", ".join(address.partition("/p2p/")[0] for address in addresses)
    if announced:
        return ok(name, f"{found} (as announced)")
    hosts = [address.split("/")[2] for address in addresses if address.startswith("/ip")]
    if not hosts or all(is_loopback(address) for address in addresses):
        todo = "listen where others reach it: --listen /ip4/0.0.0.0/tcp/31000"
        return warn(name, found or "none", todo)
    if all(ip_address(host).is_private for host in hosts):
        todo = (
            "others on this network reach it; for the internet map a TCP port on the router and "
            "tell its address: --listen /ip4/0.0.0.0/tcp/31000 "
            "--announce /ip4/PUBLIC.ADDRESS/tcp/PORT"
        )
        return warn(name, f"{found}: private", todo)
    return ok(name, found)


def clock(offsets: Sequence[float], announce_s: float) -> Check:
    """``offsets``: how much older than our clock the newest record of each peer claims to be.

    A record is between 0 and ``announce_s`` old if both clocks are right.
    """
    if not offsets:
        return skip("clock", "nobody has announced anything to compare with")
    middle = sorted(offsets)[len(offsets) // 2]
    early, late = -SKEW_S, announce_s + SKEW_S
    if early <= middle <= late:
        return ok("clock", f"agrees with {len(offsets)} peers within {announce_s + SKEW_S:.0f} s")
    behind = middle < early
    by = early - middle if behind else middle - late
    todo = "set the clock, and let it be kept: timedatectl set-ntp true"
    return fail(
        "clock", f"at least {by:.0f} s {'behind' if behind else 'ahead of'} the swarm", todo
    )


# -- all of it ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the node would be started with."""

    entry: Entry
    run: str = ""
    device: str = "auto"
    memory_bytes: int = 0
    allow: frozenset[str] = frozenset()


BEYOND = ("handshake", "own addresses", "run", "clock", "stage")


async def examine(wishes: Wishes) -> AsyncIterator[Check]:
    """Every check, in order, as it is done."""
    entry = wishes.entry
    for check in machine(entry.identity.parent):
        yield check
    yield compute(wishes.device)
    reached = False
    async for check in way_in(entry.join):
        reached = reached or check.verdict is Verdict.OK
        yield check
    if not reached:
        for name in BEYOND:
            yield skip(name, "nobody answers at any address")
        return
    found: list[Check] = []
    try:
        async with entered(entry, Limits()) as swarm:
            found += [c async for c in _inside(swarm, wishes)]
    except (SwarmError, ExceptionGroup) as error:
        known = expected_error(error)
        if known is None:
            raise
        failed = next((name for name in BEYOND if name not in {c.name for c in found}), "leaving")
        found.append(fail(failed, str(known), "mend that, then run swarm doctor again"))
    done = {check.name for check in found}
    for check in found:
        yield check
    for name in BEYOND:
        if name not in done:
            yield skip(name, "the check before it failed")


async def _inside(swarm: Entered, wishes: Wishes) -> AsyncIterator[Check]:
    from peers.balance import look
    from peers.finding import learn_run

    entry = wishes.entry
    name = type(swarm.transport).__name__.removesuffix("Transport")
    yield ok("handshake", f"by {name}, as {swarm.identity.peer_id}")
    yield seen_from_outside(swarm.addresses, entry.announce)
    manifest = await learn_run(swarm, entry.join, wishes.run)
    swarm.limit(wire_limits(manifest))
    yield ok("run", f"{manifest.name} ({manifest.run_id}), {manifest.stages.count} stages")
    records = await look(swarm.directory, manifest)
    now = wall_clock()
    yield clock([now - record.sequence / 1e6 for record in records], manifest.periods.announce_s)
    yield _stage(manifest, records, wishes)


def _stage(manifest: Manifest, records: Sequence[PeerRecord], wishes: Wishes) -> Check:
    """Which stages fit, and what serving takes."""
    from peers.balance import free_memory
    from peers.device import choose_device
    from swarm.model.needs import stage_memories
    from swarm.model.registry import model_spec

    try:
        memories = stage_memories(manifest, model_spec(manifest, wishes.allow))
        device = choose_device(wishes.device, reproducible=manifest.reproducible.enabled)
    except SwarmError as error:
        return fail("stage", "cannot be told", str(error))
    free = free_memory() if device.memory_bytes is None else device.memory_bytes
    return fitting(
        [memory.least for memory in memories],
        [memory.total(memory.full) for memory in memories],
        wishes.memory_bytes or free,
        [sum(record.stage == stage for record in records) for stage in range(len(memories))],
    )


def fitting(least: Sequence[int], full: Sequence[int], have: int, replicas: Sequence[int]) -> Check:
    """Bytes that each stage takes at least, and at full speed; and how many serve it."""
    fits = [stage for stage, need in enumerate(least) if need <= have]
    room = f"{have / GIB:.2f} GiB"
    if not fits:
        todo = (
            f"the smallest takes {min(least) / GIB:.2f} GiB: use a machine with more memory, or "
            "ask for a run with more stages"
        )
        return fail("stage", f"none fits into {room}", todo)
    lacking = min(fits, key=lambda stage: replicas[stage])
    slow = " (with activation checkpointing, more slowly)" if full[lacking] > have else ""
    found = (
        f"{', '.join(map(str, fits))} fit into {room}; of these stage {lacking} has the fewest "
        f"replicas ({replicas[lacking]}){slow}"
    )
    return ok("stage", found)


def cheap(folder: Path, say: Callable[[str], None]) -> None:
    """What ``swarm node`` looks at when it starts: only what is wrong is said."""
    for check in machine(folder):
        if check.verdict in (Verdict.WARN, Verdict.FAIL):
            say(f"{check.name}: {check.found}; {check.todo}")


def exit_code(checks: Sequence[Check]) -> int:
    """0: a node can be started here; 1: something has to be mended first."""
    return int(any(check.verdict is Verdict.FAIL for check in checks))


def plain(checks: Sequence[Check]) -> dict[str, object]:
    """For ``--json``."""
    return {
        "ok": not exit_code(checks),
        "checks": [
            {"name": c.name, "verdict": str(c.verdict), "found": c.found, "todo": c.todo}
            for c in checks
        ],
    }
