"""The first moments of a command, without anything heavy: what is wrong is said at once."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from rich.console import Console
from rich.text import Text

from peers.courtesy import be_nice
from peers.device import check_device
from peers.doctor import Check, Verdict, Wishes, cheap, examine, exit_code
from peers.doctor import plain as plain_checks
from peers.entering import LOOPBACK, Entry
from peers.http import HttpAddress, bound, serve_app
from peers.logs import LogFormat, log_format, tell
from peers.running import CANNOT_START, Leave, run_command, set_up_logging
from peers.screen import clean
from peers.transport import TransportKind
from peers.volunteer import NodeOptions, serve
from swarm.errors import UserError
from swarm.manifest import Manifest, default_manifest

if TYPE_CHECKING:
    from peers.node import Node

console = Console(highlight=False)


@contextmanager
def user_errors() -> Iterator[None]:
    """One line and exit code 2 for what the user can mend."""
    try:
        yield
    except UserError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"error: {error}", markup=False)
        raise SystemExit(CANNOT_START) from None


def load_manifest(
    path: Path | None, steps: int | None, changes: Mapping[str, object] | None = None
) -> Manifest:
    """The manifest at ``path`` (None: the default one) with what the flags change in it."""
    with user_errors():
        manifest = default_manifest() if path is None else Manifest.load(path)
        changes = dict(changes or {}) | ({} if steps is None else {"run.steps": steps})
        return manifest.changed(changes) if changes else manifest


def check_coordinator(
    *,
    manifest: Path | None,
    standby: bool,
    resume: Path | None,
    join: Sequence[str] | None,
    out: Path | None,
    steps: int | None,
) -> None:
    """Exit with one line if these do not go together."""
    with user_errors():
        ways = [manifest is not None, standby, resume is not None]
        if sum(ways) != 1:
            raise UserError(
                "give exactly one of: a manifest (run.toml), --standby with --join ADDRESS, or "
                "--resume RUNDIR"
            )
        if standby and not join:
            raise UserError("--standby needs --join ADDRESS: where a peer of the run is")
        if standby and steps is not None:
            raise UserError("--steps is for the start of a run; a standby takes it as it is")
        if resume is not None:
            if not (resume / "run.toml").exists():
                raise UserError(f"--resume {resume}: no run directory, it has no run.toml")
            if out is not None or steps is not None:
                raise UserError("--resume goes on as the run began: leave --out and --steps out")


def check_plan(peers: Path | None, measure: bool) -> None:
    """Exit with one line unless exactly one of them is asked for."""
    with user_errors():
        if measure == (peers is not None):
            raise UserError("give either --peers peers.toml, or --measure for this machine's speed")


def run_identity_command(path: Path) -> None:
    from dht.identity import Identity

    with user_errors():
        found, created = Identity.load_or_create(path)
    if created:
        console.print(f"new key in {path}: keep a copy", soft_wrap=True)
    console.print(found.peer_id, soft_wrap=True)


def run_node_command(options: NodeOptions, *, metrics: str = "", nice: bool = False) -> None:
    """``metrics``: where to serve them; empty: nowhere. ``nice``: see ``peers.courtesy``."""
    with user_errors():
        check_device(options.device)
        sock = HttpAddress.parse(metrics, "--metrics").bind("--metrics") if metrics else None
    set_up_logging()
    say: Callable[[str], None] = partial(console.print, markup=False, soft_wrap=True)
    if log_format() is LogFormat.JSON:
        say = partial(tell, logging.getLogger("swarm.node"), "state")
    cheap(options.entry.identity.parent, say)
    leave = Leave()
    reason = run_command(partial(_serve_beside, options, leave, say, sock, nice), leave)
    say(f"finished: {reason}")


async def _serve_beside(
    options: NodeOptions,
    leave: Leave,
    say: Callable[[str], None],
    sock: socket.socket | None,
    nice: bool,
) -> str:
    """``serve``, with what goes on beside it."""
    nodes: list[Node] = []
    watchers: list[Callable[[Node], None]] = []
    paused = False

    def pause(wanted: bool) -> None:
        nonlocal paused
        paused = wanted
        for node in nodes[-1:]:
            node.pause(wanted)

    def watch(node: Node) -> None:
        nodes[:] = [node]
        node.paused = paused
        for watcher in watchers:
            watcher(node)

    async with anyio.create_task_group() as tasks:
        if sock is not None:
            from peers.metrics import NodeMetrics, application

            metrics = NodeMetrics()
            watchers.append(metrics.watch)
            say(f"metrics: http://{bound(sock)}/metrics")
            tasks.start_soon(serve_app, application(metrics), sock)
        if nice:
            tasks.start_soon(be_nice, pause, say)
        reason = await serve(replace(options, watch=watch), leave, say)
        tasks.cancel_scope.cancel()
    return reason


def run_doctor_command(wishes: Wishes, *, as_json: bool) -> None:
    """One line a check, as it is done; exits with 1 if one failed."""
    with user_errors():
        check_device(wishes.device)
    set_up_logging()
    logging.getLogger("swarm").setLevel(logging.CRITICAL)  # each check says it itself
    checks: list[Check] = []

    async def main() -> None:
        async for check in examine(wishes):
            checks.append(check)
            if not as_json:
                _show_check(check)

    run_command(main)
    if as_json:
        sys.stdout.write(json.dumps(plain_checks(checks), indent=2) + "\n")
    else:
        bad = sum(check.verdict is Verdict.FAIL for check in checks)
        console.print("a node can be started here" if not bad else f"{bad} to mend", style="bold")
    raise SystemExit(exit_code(checks))


STYLES = {
    Verdict.OK: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.SKIP: "dim",
}


def _show_check(check: Check) -> None:
    line = Text(f"{check.verdict:<5}", STYLES[check.verdict])
    line.append(clean(f"{check.name}: {check.found}"), "default not bold")
    console.print(line, soft_wrap=True)
    if check.todo:
        console.print(Text(clean(f"     -> {check.todo}"), "yellow"), soft_wrap=True)


def run_top_command(
    join: Sequence[str],
    *,
    run: str,
    every_s: float,
    identity: Path | None,
    transport: TransportKind,
) -> None:
    """Drawn over and over in a terminal; elsewhere one report after the other."""
    set_up_logging()
    _say_less()
    from rich.live import Live

    from peers.report import Report
    from peers.top import Looks, page, watch

    leave = Leave()
    with asking_entry(join, identity, transport) as entry, ExitStack() as stack:
        live: Live | None = None

        def show(report: Report, looks: Looks) -> None:
            nonlocal live
            drawn = page(report, looks, console.width)
            if not console.is_terminal:
                console.print(drawn)
                return
            if live is None:  # not before: an error of the beginning belongs on the usual screen
                live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
            live.update(drawn, refresh=True)

        run_command(
            partial(watch, entry, run_id=run, every_s=every_s, show=show, leave=leave), leave
        )


def _say_less() -> None:
    """Who only looks has no news of its own (that a key was made, which is gone soon)."""
    if "SWARM_LOG_LEVEL" not in os.environ:
        logging.getLogger("swarm").setLevel(logging.WARNING)


@contextmanager
def asking_entry(
    join: Sequence[str], identity: Path | None, transport: TransportKind
) -> Iterator[Entry]:
    """For one who only asks: with a key for the occasion, unless it has one."""
    with tempfile.TemporaryDirectory(prefix="swarm-") as keys:
        key = Path(keys) / "status.key" if identity is None else identity.expanduser()
        yield Entry(identity=key, listen=(LOOPBACK,), join=tuple(join), transport=transport)


def run_status_command(
    join: Sequence[str],
    *,
    run: str,
    as_json: bool,
    identity: Path | None,
    transport: TransportKind = TransportKind.AUTO,
) -> None:
    set_up_logging()
    _say_less()
    # Imported here: a node, which starts with this module too, has no use for it.
    from peers.asking import ask
    from peers.report import as_json as plain
    from peers.report_view import render

    with asking_entry(join, identity, transport) as entry:
        report = run_command(partial(ask, entry, run))
    if as_json:
        sys.stdout.write(json.dumps(plain(report), indent=2) + "\n")
    else:
        console.print(render(report))
