"""The command ``swarm``. Everything heavy is imported when a command runs, so help is quick."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.logs import FORMAT_VARIABLE, LogFormat
from peers.transport import TransportKind

if TYPE_CHECKING:
    from peers.entering import Entry

app = typer.Typer(
    name="swarm",
    help="Train one large model on many unreliable machines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

KEYS = Path("~/.swarm")


def _importable(models: list[str] | None) -> list[str] | None:
    """Code of one's own lies where one is: the installed command does not look there by itself."""
    if models and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return models


RunFile = Annotated[
    Path, typer.Argument(help="The run's manifest (TOML); see README.", metavar="run.toml")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimizer steps; overrides run.steps.")]
Out = Annotated[
    Path | None, typer.Option(help="Run directory for metrics, plot and weights.", metavar="DIR")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-model",
        help="Allow this code of yours to be run as model or data source. Repeatable.",
        metavar="module:function",
        callback=_importable,
    ),
]
Listen = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddr to listen on, e.g. /ip4/0.0.0.0/tcp/31000. Repeatable."),
]
Announce = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddr to tell others, if it differs (NAT, port mapping). Repeatable."),
]
Kind = Annotated[
    TransportKind,
    typer.Option(
        "--transport",
        help="Network layer: p2pd (hivemind's daemon), pylibp2p (no daemon), or auto: p2pd where "
        "it runs. Either works with peers on the other.",
    ),
]
Http = Annotated[
    str,
    typer.Option(
        help="Show the run in a browser: the address to serve it at, e.g. 127.0.0.1:8080.",
        metavar="HOST:PORT",
    ),
]
TensorBoardFolder = Annotated[
    Path | None,
    typer.Option(
        "--tensorboard", help="Also write the curves there, for TensorBoard.", metavar="DIR"
    ),
]
Wandb = Annotated[
    str, typer.Option(help="Also send the curves to Weights & Biases.", metavar="PROJECT")
]
Metrics = Annotated[
    str,
    typer.Option(
        help="Serve metrics for Prometheus at this address, e.g. 127.0.0.1:9100.",
        metavar="HOST:PORT",
    ),
]


def _log_format(wanted: LogFormat | None) -> LogFormat | None:
    if wanted is not None:
        os.environ[FORMAT_VARIABLE] = wanted
    return wanted


Logs = Annotated[
    LogFormat | None,
    typer.Option(
        "--log-format",
        callback=_log_format,
        help="human (the default), or json: one object a line on standard error.",
    ),
]
KeyFile = Annotated[
    Path | None, typer.Option("--identity", help="Key file; made on first use.", metavar="FILE")
]


def _version(wanted: bool) -> None:
    if wanted:
        from peers.versions import versions

        for name, text in versions().items():
            print(f"{name} {text}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the versions that matter."
        ),
    ] = False,
) -> None:
    """Train one large model on many unreliable machines."""


@app.command()
def local(
    manifest: Annotated[
        Path | None,
        typer.Argument(
            help="Manifest; default: a small GPT on Python's sources.", metavar="[run.toml]"
        ),
    ] = None,
    steps: Steps = None,
    out: Out = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Pipeline stages.")] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Node processes per stage.")] = 2,
    kill_every: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Kill a random node every so many seconds; another starts 5 s later.",
            metavar="SECONDS",
        ),
    ] = None,
    kill_seed: Annotated[
        int | None, typer.Option(help="Decides whom --kill-every kills; default: by lot.")
    ] = None,
    transport: Kind = TransportKind.AUTO,
    http: Http = "",
    metrics: Metrics = "",
    tensorboard: TensorBoardFolder = None,
    wandb: Wandb = "",
    log_format: Logs = None,
    allow_model: Allow = None,
) -> None:
    """Train on a swarm of processes on this machine, and show it.

    Starts a coordinator and stages x replicas nodes, each a process with its own identity, on
    loopback. Ctrl-C ends them all.
    """
    from peers.kills import check_kills
    from peers.starting import load_manifest, user_errors

    with user_errors():
        kills = check_kills(kill_every, kill_seed, replicas)

    changes: dict[str, object] = {"start.replicas": replicas, "trainers": []}
    if stages is not None:
        changes |= {"stages.count": stages, "stages.cuts": []}
    loaded = load_manifest(manifest, steps, changes)

    from peers.commands import run_local_command
    from peers.showing import Shown

    run_local_command(
        loaded,
        out=out,
        replicas=replicas,
        allow=allow_model or [],
        kills=kills,
        transport=transport,
        shown=Shown(http, metrics, str(tensorboard or ""), wandb),
    )


@app.command()
def coordinator(
    manifest: Annotated[
        Path | None,
        typer.Argument(help="The run's manifest (TOML); see README.", metavar="[run.toml]"),
    ] = None,
    steps: Steps = None,
    out: Out = None,
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Watch the run at --join; take it over if need be."),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Go on with the run of this run directory.", metavar="RUNDIR"),
    ] = None,
    trainer: Annotated[
        list[str] | None,
        typer.Option(
            help="Peer id of one that may stand by (swarm identity tells it). Repeatable.",
            metavar="ID",
        ),
    ] = None,
    join: Annotated[
        list[str] | None,
        typer.Option(help="Address of any peer of the run: /ip4/.../p2p/ID. Repeatable."),
    ] = None,
    run: Annotated[str, typer.Option(help="Run id, where an address leads to several.")] = "",
    listen: Listen = None,
    announce: Announce = None,
    identity: KeyFile = None,
    transport: Kind = TransportKind.AUTO,
    http: Http = "",
    metrics: Metrics = "",
    tensorboard: TensorBoardFolder = None,
    wandb: Wandb = "",
    log_format: Logs = None,
    allow_model: Allow = None,
) -> None:
    """Start a run: open a swarm, print the line that volunteers paste, train, keep the model.

    With --standby: watch over a run that another leads. With --resume: go on with one that has
    stopped, from where its nodes are, or from the newest checkpoint.
    """
    from peers.starting import check_coordinator, load_manifest

    check_coordinator(
        manifest=manifest, standby=standby, resume=resume, join=join, out=out, steps=steps
    )
    entry = _entry(identity, "coordinator.key", listen, announce, join or [], transport)
    if standby:
        from peers.commands import run_standby_command
        from peers.showing import Shown

        shown = Shown(http, metrics, str(tensorboard or ""), wandb)
        run_standby_command(out=out, entry=entry, run=run, allow=allow_model or [], shown=shown)
        return
    path = manifest if resume is None else resume / "run.toml"
    loaded = load_manifest(path, steps)

    from peers.commands import run_coordinator_command
    from peers.leading import Start
    from peers.showing import Shown

    run_coordinator_command(
        loaded,
        out=out if resume is None else resume,
        entry=entry,
        allow=allow_model or [],
        standbys=trainer or [],
        start=Start.FRESH if resume is None else Start.RESUME,
        shown=Shown(http, metrics, str(tensorboard or ""), wandb),
    )


@app.command()
def identity(
    file: Annotated[
        Path | None, typer.Option("--identity", help="Key file; made on first use.", metavar="FILE")
    ] = None,
) -> None:
    """Print the peer id of this machine's coordinator key, or of another key file."""
    from peers.starting import run_identity_command

    run_identity_command((file or KEYS / "coordinator.key").expanduser())


@app.command()
def node(
    join: Annotated[
        list[str],
        typer.Option(help="Address of the coordinator or any peer: /ip4/.../p2p/ID. Repeatable."),
    ],
    stage: Annotated[
        int | None,
        typer.Option(help="Stage to begin with; default: the one that lacks a peer most."),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Never move to a stage that needs this node more.")
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="GiB for a stage: none that takes more is served. Default: what is free.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            help="What to compute on: cpu, cuda, cuda:N, or auto: a GPU where there is one.",
        ),
    ] = "auto",
    run: Annotated[str, typer.Option(help="Run id, where an address leads to several.")] = "",
    threads: Annotated[int, typer.Option(min=1, help="Threads for computing.")] = 1,
    upload_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Send no more than this.", metavar="MBIT/S")
    ] = None,
    nice: Annotated[
        bool,
        typer.Option(
            "--nice", help="Lowest priority, and no new work while other programs are busy."
        ),
    ] = False,
    listen: Listen = None,
    announce: Announce = None,
    identity: KeyFile = None,
    transport: Kind = TransportKind.AUTO,
    metrics: Metrics = "",
    log_format: Logs = None,
    allow_model: Allow = None,
) -> None:
    """Serve one stage of a run until it is over. Ctrl-C leaves."""
    from peers.starting import run_node_command
    from peers.volunteer import NodeOptions

    entry = _entry(identity, "identity.key", listen, announce, join, transport)
    options = NodeOptions(
        replace(entry, upload_bytes_per_s=(upload_limit or 0) * 1e6 / 8),
        stage=stage,
        run=run,
        threads=threads,
        allow=frozenset(allow_model or []),
        stay=stay,
        memory_bytes=int((memory or 0) * (1 << 30)),
        device=device,
    )
    run_node_command(options, metrics=metrics, nice=nice)


@app.command()
def doctor(
    join: Annotated[
        list[str],
        typer.Option(help="Address of the coordinator or any peer: /ip4/.../p2p/ID. Repeatable."),
    ],
    memory: Annotated[
        float | None, typer.Option(min=0.001, help="GiB for a stage. Default: what is free.")
    ] = None,
    device: Annotated[str, typer.Option(help="What a node would compute on.")] = "auto",
    run: Annotated[str, typer.Option(help="Run id, where an address leads to several.")] = "",
    listen: Listen = None,
    announce: Announce = None,
    identity: KeyFile = None,
    transport: Kind = TransportKind.AUTO,
    allow_model: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, at the end.")] = False,
) -> None:
    """Look for what may keep this machine from serving, and say what to do about it.

    Takes the flags that the node would be started with. Exits with 1 if something is to be mended.
    """
    from peers.doctor import Wishes
    from peers.starting import run_doctor_command

    wishes = Wishes(
        _entry(identity, "identity.key", listen, announce, join, transport),
        run=run,
        device=device,
        memory_bytes=int((memory or 0) * (1 << 30)),
        allow=frozenset(allow_model or []),
    )
    run_doctor_command(wishes, as_json=as_json)


@app.command()
def status(
    join: Annotated[
        list[str],
        typer.Option(help="Address of the coordinator or any peer: /ip4/.../p2p/ID. Repeatable."),
    ],
    run: Annotated[str, typer.Option(help="Run id, where the addresses lead to several.")] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document on standard output.")
    ] = False,
    identity: Annotated[
        Path | None,
        typer.Option("--identity", help="Key file; default: a key for once.", metavar="FILE"),
    ] = None,
    transport: Kind = TransportKind.AUTO,
) -> None:
    """Show what a run does and who takes part, from any machine, with or without a coordinator."""
    from peers.starting import run_status_command

    run_status_command(join, run=run, as_json=as_json, identity=identity, transport=transport)


@app.command()
def top(
    join: Annotated[
        list[str],
        typer.Option(help="Address of the coordinator or any peer: /ip4/.../p2p/ID. Repeatable."),
    ],
    run: Annotated[str, typer.Option(help="Run id, where an address leads to several.")] = "",
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between looks.")] = 2.0,
    identity: Annotated[
        Path | None,
        typer.Option("--identity", help="Key file; default: a new key.", metavar="FILE"),
    ] = None,
    transport: Kind = TransportKind.AUTO,
) -> None:
    """Watch a run in the terminal, from any machine. Ctrl-C leaves."""
    from peers.starting import run_top_command

    run_top_command(join, run=run, every_s=every, identity=identity, transport=transport)


@app.command()
def reference(
    manifest: RunFile, steps: Steps = None, out: Out = None, allow_model: Allow = None
) -> None:
    """Train the same run in this one process: what a swarm's losses are compared with."""
    from peers.starting import load_manifest

    loaded = load_manifest(manifest, steps)

    from peers.commands import run_reference_command

    run_reference_command(loaded, out=out, allow=allow_model or [])


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUNDIR")],
    out: Annotated[Path, typer.Option(help="Folder for the model.", metavar="DIR")],
    allow_model: Allow = None,
) -> None:
    """Make one model of a run: model.safetensors and config.toml.

    A run that has not ended gives the model of its newest checkpoint.
    """
    from peers.commands import run_export_command

    run_export_command(run, out=out, allow=allow_model or [])


@app.command()
def generate(
    model: Annotated[Path, typer.Argument(help="A folder that export made.", metavar="MODEL")],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    count: Annotated[int, typer.Option("--bytes", min=1, help="How many bytes to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.01, max=10, help="Below 1: likelier; above: wilder.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    allow_model: Allow = None,
) -> None:
    """Write text with an exported model."""
    from peers.commands import run_generate_command

    run_generate_command(
        model,
        prompt=prompt,
        count=count,
        temperature=temperature,
        seed=seed,
        allow=allow_model or [],
    )


@app.command()
def simulate(
    scenario: Annotated[
        Path | None,
        typer.Argument(
            help="Scenario; default: 16 peers for an hour. See scripts/scenario.toml.",
            metavar="[scenario.toml]",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="microbatch, or fluid: rates, for days and many peers."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Replay who was alive when from this CSV or JSON log.", metavar="FILE"),
    ] = None,
    peers: Annotated[
        int | None,
        typer.Option(min=1, help="Peers, at the peak of the trace if there is one."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(min=1, help="Virtual seconds.", metavar="SECONDS")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="The same seed gives the same outcome.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for plots (PNG).", metavar="DIR")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the whole outcome there.", metavar="FILE")
    ] = None,
) -> None:
    """Play a swarm of simulated peers on a virtual clock; the decisions are those of real runs."""
    from peers.simulate import run_simulate_command

    changes: dict[str, object] = {
        name: value
        for name, value in (
            ("mode", mode),
            ("duration_s", duration),
            ("seed", seed),
            ("churn.peers", peers),
        )
        if value is not None
    }
    if trace is not None:
        changes |= {"churn.kind": "trace", "churn.file": str(trace)}
    run_simulate_command(scenario, changes, out=out, json_file=json_file)


@app.command()
def plan(
    manifest: RunFile,
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Machines: [[peers]] and [latency] tables as in a scenario of swarm simulate.",
            metavar="peers.toml",
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Print how fast this machine's processor is.")
    ] = False,
    allow_model: Allow = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a run on given machines, and propose how to cut it into stages.

    The simulator plays some steps of it. Speeds are TFLOP/s; --measure finds this machine's.
    """
    from peers.starting import check_plan, load_manifest

    check_plan(peers, measure)
    loaded = load_manifest(manifest, None)

    from peers.plan import run_measure_command, run_plan_command

    if peers is None:
        run_measure_command(loaded, allow=allow_model or [])
    else:
        run_plan_command(loaded, peers, allow=allow_model or [], as_json=as_json)


def _entry(
    identity: Path | None,
    default_key: str,
    listen: list[str] | None,
    announce: list[str] | None,
    join: list[str],
    transport: TransportKind,
) -> Entry:
    from peers.entering import DEFAULT_LISTEN, Entry

    return Entry(
        identity=(identity or KEYS / default_key).expanduser(),
        listen=tuple(listen or [DEFAULT_LISTEN]),
        announce=tuple(announce or []),
        join=tuple(join),
        transport=transport,
    )


def main() -> None:
    """Entry point of the console command."""
    app(prog_name="swarm")


if __name__ == "__main__":
    main()
