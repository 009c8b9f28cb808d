"""What the subcommands of ``swarm`` do once their arguments are in order; all but ``node``."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dht.identity import Identity
from peers.account import Account, in_words, make_account
from peers.coordinator import PROMPT, Coordinator, Plan, Result, plan_run, stand_by_for
from peers.entering import LOOPBACK, Entry
from peers.export import export_model, load_model
from peers.kills import Kills
from peers.leading import Start
from peers.local import run_local
from peers.plots import plot_run
from peers.rundir import RunDirectory
from peers.running import run_command, set_up_logging
from peers.showing import NOWHERE, Showing, Shown
from peers.starting import console, user_errors
from peers.status import Monitor
from peers.transport import TransportKind
from peers.view import LiveView
from swarm.errors import UserError
from swarm.manifest import Manifest
from swarm.model.sampling import generate
from swarm.reference import ReferenceRun, StepResult, run_reference

ONE_THREAD = 1
"""As a node has by default. Threads of torch wait for each other by spinning: where other
processes want the cores too, two took over ten times as long as one."""


def run_local_command(
    manifest: Manifest,
    *,
    out: Path | None,
    replicas: int,
    allow: Sequence[str],
    kills: Kills | None = None,
    transport: TransportKind = TransportKind.AUTO,
    shown: Shown = NOWHERE,
) -> None:
    set_up_logging()
    with user_errors():
        showing = Showing(shown, manifest)
        plan = plan_run(manifest, allow)
        torch.set_num_threads(ONE_THREAD)
        out = RunDirectory.create(out, name=plan.manifest.name).path
    with (
        tempfile.TemporaryDirectory(prefix="swarm-") as keys,
        showing,
        LiveView(console) as view,
    ):
        key = Path(keys) / "coordinator.key"
        entry = Entry(identity=key, listen=(LOOPBACK,), transport=transport)
        Identity.load_or_create(entry.identity)
        monitor = Monitor(view)
        showing.on(monitor)
        result, killed = run_command(
            partial(
                run_local,
                plan,
                replicas=replicas,
                out=out,
                monitor=monitor,
                entry=entry,
                kills=kills,
            )
        )
    _tell_result(result)
    _tell_account(make_account(result.steps, plan.manifest), None if kills is None else killed)


def run_coordinator_command(
    manifest: Manifest,
    *,
    out: Path | None,
    entry: Entry,
    allow: Sequence[str],
    standbys: Sequence[str] = (),
    start: Start = Start.FRESH,
    shown: Shown = NOWHERE,
) -> None:
    """Lead the run of ``manifest``; ``start`` RESUME: that of the run directory ``out``."""
    set_up_logging()
    with user_errors():
        showing = Showing(shown, manifest)
        plan = plan_run(manifest, allow, standbys)
        if start is Start.RESUME and out is not None:
            entry = replace(entry, known=tuple(RunDirectory(out).read_peers()))
    torch.set_num_threads(ONE_THREAD)
    with showing, LiveView(console) as view:
        monitor = Monitor(view)
        showing.on(monitor)
        coordinator = Coordinator(
            plan, out=out, monitor=monitor, on_open=_print_join_line, start=start
        )
        try:
            result = run_command(partial(coordinator.run, entry))
        except SystemExit:
            if coordinator.directory is not None:
                console.print(
                    "the nodes wait for a trainer; go on with: swarm coordinator --resume "
                    f"{coordinator.directory.path}",
                    soft_wrap=True,
                )
            raise
    if result.sha256:
        _tell_result(result)


def run_standby_command(
    *,
    out: Path | None,
    entry: Entry,
    run: str,
    allow: Sequence[str],
    shown: Shown = NOWHERE,
) -> None:
    """Stand by for the run that is found at ``entry.join``."""
    set_up_logging()
    with user_errors():
        showing = Showing(shown, None)
    torch.set_num_threads(ONE_THREAD)
    with showing, LiveView(console) as view:
        monitor = Monitor(view)
        showing.on(monitor)
        stand_by = partial(
            stand_by_for,
            entry,
            run_id=run,
            out=out,
            allow=allow,
            monitor=monitor,
            on_open=_print_standby_line,
        )
        result = run_command(stand_by)
    if result.sha256:
        _tell_result(result)


def _print_standby_line(manifest: Manifest, addresses: list[str]) -> None:
    del addresses
    console.print(
        f"standing by for run {manifest.name} ({manifest.run_id}): takes over when its trainer "
        f"has not been heard for {manifest.periods.lease_s:g} s",
        soft_wrap=True,
    )


def _print_join_line(manifest: Manifest, addresses: list[str]) -> None:
    joins = " ".join(f"--join {address}" for address in addresses)
    console.print(
        f"run {manifest.name} ({manifest.run_id}) is open. On each volunteer's machine:\n\n"
        f"    swarm node {joins}\n",
        soft_wrap=True,
    )
    if all("/ip4/127." in address or "/ip6/::1/" in address for address in addresses):
        console.print(
            "These addresses reach this machine only; listen on others with "
            "--listen /ip4/0.0.0.0/tcp/PORT",
            style="yellow",
        )


def run_reference_command(manifest: Manifest, *, out: Path | None, allow: Sequence[str]) -> None:
    with user_errors():
        plan = plan_run(manifest, allow)
        torch.set_num_threads(ONE_THREAD)
        directory = RunDirectory.create(out, name=f"{plan.manifest.name}-reference")
        directory.write_manifest(plan.manifest)
    with _progress() as progress:
        run = run_command(partial(_train_reference, plan, directory, progress))
    for stage, model in enumerate(run.stages):
        directory.write_weights(stage, model.tensors(), {"stage": str(stage)})
    plot_run(directory.read_metrics(), directory.plot_path, plan.manifest.name)
    directory.write_summary({"steps": len(run.results), "weights_sha256": run.sha256})
    _tell(directory, run.sha256)


async def _train_reference(plan: Plan, directory: RunDirectory, progress: Progress) -> ReferenceRun:
    """In a thread, so that Ctrl-C is heard at once and never in the middle of a computation."""
    task = progress.add_task("", total=plan.manifest.run.steps)
    stop = threading.Event()

    def on_step(result: StepResult) -> None:
        directory.append_metrics(_reference_metrics(result))
        rate = result.samples / result.seconds
        progress.update(
            task, advance=1, description=f"loss {result.loss:.4f}  {rate:.1f} samples/s"
        )

    async def stop_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            stop.set()

    train = partial(
        run_reference,
        plan.manifest,
        steps=plan.manifest.run.steps,
        clock=time.perf_counter,
        allow=plan.allow,
        on_step=on_step,
        stop=stop.is_set,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop_when_cancelled)
        run = await anyio.to_thread.run_sync(train)
        tasks.cancel_scope.cancel()
    return run


def run_export_command(run: Path, *, out: Path, allow: Sequence[str]) -> None:
    say = partial(console.print, soft_wrap=True, markup=False)
    with user_errors():
        sha256 = export_model(run, out, allow=allow, say=say)
    console.print(f"weights SHA-256 {sha256}\nthe model is in {out}", soft_wrap=True)


def run_generate_command(
    model: Path, *, prompt: str, count: int, temperature: float, seed: int, allow: Sequence[str]
) -> None:
    with user_errors():
        loaded = load_model(model, allow)
        if loaded.manifest.model.kind != "gpt":
            raise UserError(f"{model} is no text model: its kind is {loaded.manifest.model.kind}")
        if not prompt:
            raise UserError("--prompt: got ''; allowed: at least one character")
    torch.set_num_threads(ONE_THREAD)
    text = generate(
        loaded.stages,
        prompt.encode(),
        count=count,
        sequence=loaded.manifest.model.sequence,
        seed=seed,
        temperature=temperature,
    )
    _print_text(prompt.encode() + text)


def _reference_metrics(result: StepResult) -> dict[str, object]:
    metrics: dict[str, object] = {
        name: getattr(result, name)
        for name in ("step", "loss", "samples", "seconds", "lr", "norm", "skipped")
    }
    if result.eval_loss is not None:
        metrics["eval_loss"] = result.eval_loss
    return metrics


def _progress() -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
        console=console,
    )


def _tell_result(result: Result) -> None:
    if result.sample:
        console.print("\nA sample of the model's text:", style="bold")
        _print_text(PROMPT + result.sample)
    _tell(result.directory, result.sha256)


def _tell_account(account: Account, killed: int | None) -> None:
    console.print(in_words(account, killed), soft_wrap=not console.is_terminal)
    if account.wrong:
        console.print("not every microbatch was counted exactly once:", style="bold red")
    for line in account.wrong:
        console.print(f"  {line}", style="red", soft_wrap=True)


def _print_text(data: bytes) -> None:
    """What a model wrote may hold anything, control characters too."""
    text = data.decode("utf-8", "replace")
    console.print(
        "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text),
        markup=False,
        soft_wrap=True,
    )


def _tell(directory: RunDirectory, sha256: str) -> None:
    console.print(f"\nweights SHA-256 {sha256}")
    console.print(f"metrics, plot and weights are in {directory.path}", soft_wrap=True)
