"""The tables of a scenario. Each field says what it allows, each table what does not go together.

Units are those people use: megabits per second, milliseconds, megabytes (10**6), GiB. ``scenario``
makes bytes and seconds of them.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm.errors import ConfigError
from swarm.manifest_sections import Section, flag, number, one_of, text, whole
from swarm.manifest_text import shown
from swarm.sim.traces import Unit
from swarm.sim.world import Rebalancing, WiringRule

NAME = r"^[A-Za-z0-9][\w.-]*$"
NAMED = "at most 64 letters, digits, '_', '-', '.'"

MAX_PEERS = 1_000_000


class Pipeline(Section):
    """Equal stages of a known size (see ``models``). A list of ``[[stage]]`` tables overrides it.

    ``averaging``: how the numbers of a gradient travel between the replicas of a stage.
    """

    model: Literal["base", "xxlarge", "gpt3", "ours"] = one_of(
        "ours", "base", "xxlarge", "gpt3", "ours"
    )
    stages: int = whole(4, 1, 1 << 10)
    codec: Literal["fp16", "int8"] = one_of("int8", "fp16", "int8")
    averaging: Literal["fp32", "fp16", "int8"] = one_of("fp16", "fp32", "fp16", "int8")


class Stage(Section):
    """One stage, in figures for one sample. 0: twice the forward work, as many bytes back as on."""

    forward_tflop: float = number(1.0, 1e-9, 1e9)
    backward_tflop: float = number(0.0, 0, 1e9)
    output_mb: float = number(1.0, 0, 1e6)
    """The activation that goes on to the next stage."""
    gradient_mb: float = number(0.0, 0, 1e6)
    """What goes back to the previous one."""
    vector_mb: float = number(0.0, 0, 1e9)
    """The gradient that replicas sum at the end of a step."""
    state_mb: float = number(0.0, 0, 1e9)
    """What a newcomer downloads."""
    memory_gib: float = number(0.0, 0, 1e6)
    """What a replica needs."""


class Peers(Section):
    """Machines of one kind. ``spread``: speeds differ evenly by so much up and down."""

    count: int = whole(16, 0, MAX_PEERS)
    tflops: float = number(15.0, 1e-6, 1e6)
    spread: float = number(0.0, 0, 0.95)
    memory_gib: float = number(0.0, 0, 1e6)
    """For a stage; 0: any stage fits."""
    up_mbps: float = number(200.0, 1e-3, 1e6)
    down_mbps: float = number(200.0, 1e-3, 1e6)
    region: str = text("here", NAME, NAMED, 64)
    stage: int = whole(-1, -1, (1 << 10) - 1)
    """Where they begin; -1: where they are needed most."""


class Step(Section):
    """One optimizer step takes ``microbatches`` of ``microbatch`` samples each."""

    microbatches: int = whole(256, 1, 1 << 20)
    microbatch: int = whole(1, 1, 1 << 16)


_Pair = tuple[str, str, float]


class Delays(Section):
    """One-way delays between regions, and within one. ``between``: [from, to, ms], both ways."""

    default_ms: float = number(20.0, 0, 60_000)
    between: Annotated[tuple[Annotated[_Pair, Field(strict=False)], ...], Field(strict=False)] = (
        Field(
            default=(),
            max_length=10_000,
            json_schema_extra={"allowed": 'a list of ["region", "region", milliseconds]'},
        )
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for pair in self.between:
            if not 0 <= pair[2] <= 60_000:
                raise ConfigError("latency.between", shown(list(pair)), "0 to 60000 milliseconds")
        return self


class Churn(Section):
    """Who comes and goes, if anybody.

    ``random``: lifetimes and times between arrivals are exponential with the means ``lifetime_s``
    and ``arrival_s`` (0: so that the number of peers stays about the same). ``trace``: the log
    ``file`` is replayed, scaled so that ``peers`` are alive at its peak.

    ``peers``: how many there are; 0: as many as the groups have. Machines are drawn from the groups
    in proportion to their counts.
    """

    kind: Literal["none", "random", "trace"] = one_of("none", "none", "random", "trace")
    lifetime_s: float = number(4 * 3600.0, 1, 1e9)
    arrival_s: float = number(0.0, 0, 1e9)
    file: str = text("", r"^[^\x00]*$", "a file name", 4096)
    unit: Unit = Field(
        Unit.AUTO,
        strict=False,
        json_schema_extra={"allowed": "'auto', 'seconds' or 'hours', of a CSV file's times"},
    )
    peers: int = whole(0, 0, MAX_PEERS)
    drains: bool = flag(False)
    """Whether those that go finish the step; else they go as by SIGKILL."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "trace" and not self.file:
            raise ConfigError("churn.file", "", "the file of a trace, with kind = 'trace'")
        if self.kind != "trace" and self.file:
            raise ConfigError("churn.file", shown(self.file), "nothing, unless kind = 'trace'")
        return self


class Balancing(Section):
    """Who decides on moves between stages, how often, and what a move has to gain."""

    rule: Rebalancing = Field(
        Rebalancing.OURS,
        strict=False,
        json_schema_extra={"allowed": "'ours', 'paper' (its algorithm 2) or 'none'"},
    )
    period_s: float = number(60.0, 0.1, 86400)
    gain: float = number(0.05, 0.001, 10)


class Wiring(Section):
    """Who is chosen for each hop, and how activations travel.

    ``relayed``: each goes through the trainer, whose link does ``trainer_mbps`` each way.
    ``window``: microbatches in flight; 0: as the trainer sizes it.
    """

    rule: WiringRule = Field(
        WiringRule.OURS,
        strict=False,
        json_schema_extra={"allowed": "'ours', 'paper', 'uniform' or 'least-loaded'"},
    )
    window: int = whole(0, 0, 1 << 20)
    relayed: bool = flag(False)
    trainer_region: str = text("here", NAME, NAMED, 64)
    trainer_mbps: float = number(1000.0, 1e-3, 1e6)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rule is WiringRule.STATIC:
            allowed = (
                "'ours', 'paper', 'uniform' or 'least-loaded' (static needs a table of shares)"
            )
            raise ConfigError("wiring.rule", "static", allowed)
        return self


class Times(Section):
    """``announce_s``: how old a record of the directory is, at most. ``silence_s``: after that a
    peer that is gone is found out."""

    announce_s: float = number(5.0, 0.05, 3600)
    silence_s: float = number(5.0, 0.05, 3600)
