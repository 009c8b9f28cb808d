"""The tables of a manifest. Each field says what it allows, each table what does not go together.

Everything has an upper bound: a manifest comes over the network, and no typing error in it may
make a node take unbounded memory. The bounds are generous; ``limits`` are the ones to tune.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from swarm.errors import ConfigError
from swarm.manifest_text import shown

CodecName = Literal["fp32", "bf16", "int8"]
Scalar = str | bool | int | float
_Beta = Annotated[float, Field(ge=0, le=0.999999, allow_inf_nan=False)]


def whole(default: int, low: int, high: int) -> Any:
    allowed = {"allowed": f"a whole number from {low} to {high}"}
    return Field(default, ge=low, le=high, json_schema_extra={**allowed})


def number(default: float, low: float, high: float) -> Any:
    allowed = {"allowed": f"a number from {low:g} to {high:g}"}
    return Field(default, ge=low, le=high, allow_inf_nan=False, json_schema_extra={**allowed})


def text(default: str, pattern: str, allowed: str, max_length: int = 256) -> Any:
    extra = {"allowed": allowed}
    return Field(default, pattern=pattern, max_length=max_length, json_schema_extra={**extra})


def one_of(default: Any, *names: str) -> Any:
    return Field(default, json_schema_extra={"allowed": " or ".join(map(repr, names))})


def flag(default: bool) -> Any:
    return Field(default, json_schema_extra={"allowed": "true or false"})


def _codec(default: CodecName = "fp32") -> Any:
    return one_of(default, "fp32", "bf16", "int8")


class Section(BaseModel):
    """Base of all tables: frozen, no unknown field, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Model(Section):
    """The model. Sizes are those of the built-in GPT; ``args`` go to a model of one's own."""

    kind: str = text("gpt", r"^(gpt|[\w.]+:\w+)$", "'gpt' or 'module:function'")
    d_model: int = whole(128, 1, 1 << 16)
    layers: int = whole(6, 1, 1 << 10)
    """Transformer blocks; embedding and head come on top."""
    heads: int = whole(4, 1, 1 << 10)
    sequence: int = whole(128, 1, 1 << 20)
    vocabulary: int = whole(256, 256, 1 << 24)
    """At least 256: tokens are bytes."""
    mlp_ratio: int = whole(4, 1, 64)
    tied: bool = flag(False)
    autocast: Literal["none", "bf16"] = one_of("none", "none", "bf16")
    """What products of matrices are computed in; weights, sums and the optimizer stay float32."""
    args: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict,
        max_length=64,
        json_schema_extra={"allowed": "a table of at most 64 scalars or lists of scalars"},
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "gpt":
            if self.d_model % self.heads:
                raise ConfigError(
                    "model.d_model", self.d_model, f"a multiple of model.heads = {self.heads}"
                )
            if self.args:
                raise ConfigError("model.args", sorted(self.args), "nothing, with kind = 'gpt'")
        return self

    @property
    def total_layers(self) -> int | None:
        """Layers that can be cut apart, or None if only the imported model can tell."""
        return self.layers + 2 if self.kind == "gpt" else None

    @property
    def parameters(self) -> int:
        """Trainable numbers in the built-in GPT, biases and norms included; 0 for other kinds."""
        if self.kind != "gpt":
            return 0
        d, hidden = self.d_model, self.d_model * self.mlp_ratio
        block = 4 * d * d + 2 * d * hidden + 9 * d + hidden
        embedding = (self.vocabulary + self.sequence) * d
        head = 2 * d + (0 if self.tied else self.vocabulary * d)
        return embedding + self.layers * block + head


class Stages(Section):
    """How the layers are cut: ``count`` by cost, or ``cuts``, the first layer of stages 1, 2..."""

    count: int = whole(1, 1, 1 << 10)
    cuts: Annotated[tuple[int, ...], Field(strict=False)] = Field(
        default=(),
        max_length=1 << 10,
        json_schema_extra={"allowed": "a list of layer numbers, rising"},
    )

    @model_validator(mode="before")
    @classmethod
    def _count_follows_cuts(cls, data: Any) -> Any:
        if isinstance(data, dict) and "count" not in data and isinstance(data.get("cuts"), list):
            return {**data, "count": len(data["cuts"]) + 1}
        return data

    @model_validator(mode="after")
    def _check(self) -> Self:
        cuts = self.cuts
        if cuts and (cuts[0] < 1 or any(a >= b for a, b in itertools.pairwise(cuts))):
            raise ConfigError("stages.cuts", shown(list(cuts)), "layer numbers, rising, from 1")
        if cuts and self.count != len(cuts) + 1:
            raise ConfigError(
                "stages.count", self.count, f"{len(cuts) + 1} (or leave it out), as cuts say"
            )
        return self


class Batch(Section):
    """One optimizer step takes ``microbatches`` of ``microbatch`` samples each."""

    microbatch: int = whole(8, 1, 1 << 16)
    microbatches: int = whole(16, 1, 1 << 16)


class Optimizer(Section):
    """The optimizer, its schedule in steps, and the clip of the global gradient norm."""

    kind: Literal["adamw", "sgd"] = one_of("adamw", "adamw", "sgd")
    lr: float = number(1e-3, 0, 1e3)
    betas: Annotated[tuple[_Beta, _Beta], Field(strict=False)] = Field(
        default=(0.9, 0.95),
        json_schema_extra={"allowed": "a list of two numbers from 0 to 0.999999"},
    )
    eps: float = number(1e-8, 1e-12, 1)
    weight_decay: float = number(0.0, 0, 1)
    momentum: float = number(0.0, 0, 0.999999)
    """For sgd."""
    warmup_steps: int = whole(0, 0, 1 << 40)
    total_steps: int = whole(0, 0, 1 << 40)
    """Where the cosine ends; 0: constant after the warm-up."""
    min_lr_ratio: float = number(0.1, 0, 1)
    clip: float = number(1.0, 0, 1e9)
    """Largest global norm; 0: off."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "adamw" and self.momentum:
            raise ConfigError("optimizer.momentum", self.momentum, "0 with kind = 'adamw'")
        if 0 < self.total_steps <= self.warmup_steps:
            raise ConfigError(
                "optimizer.total_steps",
                self.total_steps,
                f"0 (constant) or more than warmup_steps = {self.warmup_steps}",
            )
        return self


class Step(Section):
    """``delay`` 1: a step's averaging and update run while the next step is computed.

    So each step's gradients are of the weights before the last update (delayed parameter updates,
    Ren et al., ZeRO-Offload, 2021). A replica keeps one older copy of its weights, and the sums of
    two steps. Where updates are large, above all at first, the loss falls more slowly for it.
    """

    delay: int = whole(0, 0, 1)
    delay_after: int = whole(0, 0, 1 << 40)
    """Steps that are done without delay first."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.delay_after and not self.delay:
            raise ConfigError("step.delay_after", self.delay_after, "0 with step.delay = 0")
        return self

    def delays(self, t: int) -> bool:
        """Whether step ``t`` is computed on the weights before the last update."""
        return self.delay > 0 and t >= self.delay_after


class Wire(Section):
    """Codecs of what goes between peers."""

    activations: CodecName = _codec()
    gradients: CodecName = _codec()
    averaging: CodecName = _codec()


class Data(Section):
    """The corpus. ``sha256`` empty: the owner's node fills in that of its own."""

    source: str = text(
        "stdlib",
        r"^(stdlib|text:.+|python:[\w.]+:\w+)$",
        "'stdlib', 'text:PATH' or 'python:module:function'",
        max_length=4096,
    )
    sha256: str = text("", r"^([0-9a-f]{64})?$", "64 hexadecimal digits, or empty")
    holdout: float = number(0.05, 1e-6, 0.5)
    """Share of the corpus kept for evaluation."""


class Start(Section):
    """Step 0 begins when each stage has ``replicas`` replicas."""

    replicas: int = whole(1, 1, 1 << 10)


class Run(Section):
    """How long, and how often to evaluate on held-out data (``eval_every`` 0: never)."""

    steps: int = whole(100, 1, 1 << 40)
    eval_every: int = whole(0, 0, 1 << 40)
    eval_microbatches: int = whole(4, 1, 1 << 16)
    checkpoint_every: int = whole(25, 0, 1 << 40)
    """Steps from one checkpoint to the next; 0: none."""
    checkpoints: int = whole(3, 1, 1 << 16)
    """How many are kept, the newest ones."""


class Reproducible(Section):
    """Bit-identical weights whatever the number of replicas.

    Gradients are summed as 64-bit integers of ``gradient * scale``. A microbatch's gradient must
    stay within ``2**62 / (scale * microbatches)``; rounding errs by at most ``0.5 / scale``.
    """

    enabled: bool = flag(False)
    scale: int = whole(1 << 40, 1, 1 << 60)
    threads: int = whole(1, 1, 1 << 10)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.scale & (self.scale - 1):
            below = 1 << (self.scale.bit_length() - 1)
            raise ConfigError(
                "reproducible.scale", self.scale, f"a power of two, e.g. {below} or {2 * below}"
            )
        return self


class Limits(Section):
    """What bounds memory. Counts are per replica; a replica refuses what is beyond them."""

    contexts: int = whole(64, 1, 1 << 16)
    """Microbatches whose backward is awaited."""
    graphs: int = whole(16, 0, 1 << 16)
    """Of these, kept with the autograd graph; the others keep the stage input only."""
    queue: int = whole(16, 1, 1 << 16)
    """Forwards that wait to be computed."""
    window: int = whole(0, 0, 1 << 16)
    """Microbatches that the trainer keeps in flight at most; 0: as many as pay."""
    payload_bytes: int = whole(256 << 20, 1 << 10, 1 << 31)
    """The longest payload of a message."""
    header_bytes: int = whole(1 << 20, 1 << 10, 1 << 24)
    """The longest header of a message."""
    working_bytes: int = whole(4 << 30, 1 << 20, 1 << 40)
    """The largest single tensor of a microbatch (hidden layer, logits, attention)."""
    parameters: int = whole(1 << 31, 1, 1 << 40)
    """Of the built-in GPT, all stages together."""
    state_piece: int = whole(1 << 16, 16, 1 << 24)
    """Values of each vector in one piece of a stage's state, as joiners copy it."""
    joiners: int = whole(2, 1, 1 << 10)
    """Peers that one replica gives its state to at a time; others wait."""
    join_bytes_per_s: int = whole(16 << 20, 1 << 10, 1 << 40)
    """So fast does a replica give its state to joiners, and to checkpoints."""


class Rebalancing(Section):
    """When a replica moves to a stage that needs it more."""

    enabled: bool = flag(True)
    period_s: float = number(30, 0.1, 86400)
    """How often each replica looks whether it should move."""
    gain: float = number(0.05, 0.001, 10)
    """By how much of its rate the slower of the two stages has to get faster by a move."""


class Periods(Section):
    """Times in seconds. Those called floors are raised by what is measured, never lowered."""

    announce_s: float = number(5, 0.05, 3600)
    record_ttl_s: float = number(20, 0.1, 86400)
    watch_s: float = number(2, 0.05, 3600)
    """How often the directory is looked up."""
    status_s: float = number(1, 0.05, 3600)
    renew_s: float = number(3, 0.05, 3600)
    """How often the trainer speaks to every replica, so that its lease is renewed."""
    call_s: float = number(5, 0.05, 3600)
    """Floor of the time limit of a call."""
    attempt_s: float = number(10, 0.05, 86400)
    """Floor of the time limit of an attempt."""
    silence_s: float = number(5, 0.05, 3600)
    """Floor: a replica silent for longer is removed."""
    ban_s: float = number(1, 0.01, 3600)
    """The first ban of a replica that failed; it grows on repetition."""
    lease_s: float = number(15, 0.1, 3600)
    patience_s: float = number(60, 0.1, 86400)
    drain_s: float = number(60, 0.1, 86400)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, more, less in (
            ("record_ttl_s", self.record_ttl_s, "announce_s"),
            ("lease_s", self.lease_s, "renew_s"),
            ("patience_s", self.patience_s, "lease_s"),
        ):
            if more <= getattr(self, less):
                allowed = f"more than periods.{less} = {getattr(self, less):g}"
                raise ConfigError(f"periods.{name}", more, allowed)
        return self
