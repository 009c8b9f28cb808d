"""What is to be simulated, as people write it: a TOML file, resolved to a ``World``.

Everything has a default: an empty file is 16 peers that train the paper's model for an hour.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from swarm.errors import ConfigError
from swarm.manifest_sections import Section, text, whole
from swarm.manifest_sections import number as number
from swarm.manifest_sections import one_of as one_of
from swarm.manifest_text import first_error, shown
from swarm.sim.models import MODELS
from swarm.sim.population import Span, renewal, replay, steady
from swarm.sim.scenario_sections import (
    NAME,
    NAMED,
    Balancing,
    Churn,
    Delays,
    Peers,
    Pipeline,
    Stage,
    Step,
    Times,
    Wiring,
)
from swarm.sim.traces import HOUR_S, Trace, read_trace
from swarm.sim.world import Latency, Machine, StageWork, World

MEGABIT = 1e6 / 8
MEGABYTE = 1e6
GIB = 1 << 30
MAX_LIST = 1 << 10

T = TypeVar("T", bound=Section)


class Scenario(Section):
    """A scenario, whole. ``world`` makes numbers of it."""

    name: str = text("scenario", NAME, NAMED, 64)
    mode: Literal["microbatch", "fluid"] = one_of("microbatch", "microbatch", "fluid")
    seed: int = whole(0, 0, (1 << 63) - 1)
    duration_s: float = number(0.0, 0, 1e8)
    """Virtual time; 0: as long as the trace, an hour without one."""
    sample_every_s: float = number(60.0, 0.1, 86400)
    pipeline: Pipeline = Pipeline.model_validate({})
    stage: Annotated[tuple[Stage, ...], Field(strict=False)] = Field(
        default=(),
        max_length=MAX_LIST,
        json_schema_extra={"allowed": f"at most {MAX_LIST} [[stage]] tables"},
    )
    peers: Annotated[tuple[Peers, ...], Field(strict=False)] = Field(
        default=(Peers(),),
        max_length=MAX_LIST,
        json_schema_extra={"allowed": f"at most {MAX_LIST} [[peers]] tables"},
    )
    step: Step = Step()
    latency: Delays = Delays()
    churn: Churn = Churn.model_validate({})
    rebalancing: Balancing = Balancing.model_validate({})
    wiring: Wiring = Wiring.model_validate({})
    times: Times = Times()

    @model_validator(mode="after")
    def _check(self) -> Self:
        stages = len(self.stage) or self.pipeline.stages
        if not sum(group.count for group in self.peers):
            raise ConfigError("peers", 0, "at least one peer, in all groups together")
        for index, group in enumerate(self.peers):
            if group.stage >= stages:
                raise ConfigError(
                    f"peers.{index}.stage", group.stage, f"-1 or a stage from 0 to {stages - 1}"
                )
        return self

    # -- reading ----------------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path, changes: Mapping[str, object] | None = None) -> Scenario:
        """Read a TOML file; a trace is looked for beside it. ``changes`` by dotted path.

        Raises:
            ConfigError: one line, for whatever is wrong.
        """
        path = Path(path)
        try:
            source = path.read_text(encoding="utf-8")
            tree = tomllib.loads(source)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            allowed = f"a readable TOML file ({reason.lower()})"
            raise ConfigError("scenario", str(path), allowed) from None
        except (ValueError, RecursionError) as error:
            why = str(error).splitlines()[0]
            raise ConfigError("scenario", str(path), f"TOML ({why})") from None
        churn = tree.get("churn")
        if isinstance(churn, dict) and isinstance(churn.get("file"), str) and churn["file"]:
            churn["file"] = str(path.parent / churn["file"])
        return cls.from_tree(tree, changes)

    @classmethod
    def from_tree(cls, tree: object, changes: Mapping[str, object] | None = None) -> Scenario:
        """Validate plain dicts, lists and scalars. Raises ConfigError for the first problem."""
        if isinstance(tree, dict):
            tree = dict(tree)
            for name, value in (changes or {}).items():
                _set(tree, name, value)
            for name, kind in (("stage", Stage), ("peers", Peers)):
                if isinstance(tree.get(name), list):
                    tree[name] = [_item(kind, f"{name}.{i}", t) for i, t in enumerate(tree[name])]
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise first_error(error, cls) from None

    # -- resolving --------------------------------------------------------------------------

    def world(self) -> World:
        """The same scenario always gives the same world.

        Raises:
            DataError: the trace cannot be read.
        """
        delays, wiring, churn = self.latency, self.wiring, self.churn
        trace = read_trace(churn.file, unit=churn.unit) if churn.kind == "trace" else None
        duration_s = self.duration_s or (trace.end_s if trace else HOUR_S)
        return World(
            stages=self._stages(),
            machines=tuple(self._machines(trace, duration_s)),
            duration_s=duration_s,
            seed=self.seed,
            microbatches=self.step.microbatches,
            microbatch=self.step.microbatch,
            latency=Latency(
                delays.default_ms / 1e3, {(a, b): ms / 1e3 for a, b, ms in delays.between}
            ),
            rebalancing=self.rebalancing.rule,
            rebalance_s=self.rebalancing.period_s,
            gain=self.rebalancing.gain,
            wiring=wiring.rule,
            announce_s=self.times.announce_s,
            silence_s=self.times.silence_s,
            window=wiring.window,
            relayed=wiring.relayed,
            trainer_region=wiring.trainer_region,
            trainer_bytes_per_s=wiring.trainer_mbps * MEGABIT,
            sample_every_s=min(self.sample_every_s, duration_s),
            name=self.name,
        )

    def _stages(self) -> tuple[StageWork, ...]:
        batch, pipeline = self.step.microbatch, self.pipeline
        if not self.stage:
            layers = MODELS[pipeline.model]
            return (layers.stage(batch, pipeline.codec, pipeline.averaging),) * pipeline.stages
        return tuple(
            StageWork(
                forward_tflop=batch * s.forward_tflop,
                backward_tflop=batch * (s.backward_tflop or 2 * s.forward_tflop),
                output_bytes=round(batch * s.output_mb * MEGABYTE),
                gradient_bytes=round(batch * (s.gradient_mb or s.output_mb) * MEGABYTE),
                vector_bytes=round(s.vector_mb * MEGABYTE),
                state_bytes=round(s.state_mb * MEGABYTE),
                memory_bytes=round(s.memory_gib * GIB),
            )
            for s in self.stage
        )

    def _machines(self, trace: Trace | None, duration_s: float) -> list[Machine]:
        rng = random.Random(f"{self.seed}/machines")
        counts = [group.count for group in self.peers]
        if self.churn.kind == "none" and not self.churn.peers:
            groups = [group for group in self.peers for _ in range(group.count)]
            spans = steady(len(groups))
        else:
            spans = self._spans(trace, self.churn.peers or sum(counts), duration_s, rng)
            groups = rng.choices(self.peers, counts, k=len(spans))
        return [
            _machine(number, group, span, self.churn.drains, rng)
            for number, (group, span) in enumerate(zip(groups, spans, strict=True))
        ]

    def _spans(
        self, trace: Trace | None, peers: int, until_s: float, rng: random.Random
    ) -> list[Span]:
        churn = self.churn
        if trace is not None:
            return replay(trace, peers, rng, until_s=until_s)
        if churn.kind == "none":
            return steady(peers)
        return renewal(
            peers, rng, until_s=until_s, lifetime_s=churn.lifetime_s, arrival_s=churn.arrival_s
        )


def _machine(number: int, group: Peers, span: Span, drains: bool, rng: random.Random) -> Machine:
    return Machine(
        peer=f"peer-{number:06d}",
        tflops=group.tflops * (1 + group.spread * rng.uniform(-1, 1)),
        memory_bytes=round(group.memory_gib * GIB) or None,
        up_bytes_per_s=group.up_mbps * MEGABIT,
        down_bytes_per_s=group.down_mbps * MEGABIT,
        region=group.region,
        arrives_s=span.arrives_s,
        leaves_s=span.leaves_s,
        drains=drains and span.leaves_s < inf,
        stage=group.stage if group.stage >= 0 else None,
    )


def _item(kind: type[T], path: str, tree: object) -> T:
    """One table of a list, so that an error names the field in it."""
    if not isinstance(tree, dict):
        allowed = "a table with " + ", ".join(kind.model_fields)
        raise ConfigError(path, shown(tree), allowed)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        found = first_error(error, kind)
        raise ConfigError(f"{path}.{found.field}", found.given, found.allowed) from None


def _set(tree: dict[str, object], path: str, value: object) -> None:
    *tables, name = path.split(".")
    for part in tables:
        inner = tree.get(part, {})
        if not isinstance(inner, dict):
            return  # which is told when all of it is validated
        tree[part] = inner = dict(inner)
        tree = inner
    tree[name] = value
