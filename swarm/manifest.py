"""What a run is: model, stages, batch, optimizer, wire, data, limits.

A manifest is read from TOML by its owner, signed, and fetched from the network by everyone else,
so every size has a bound and every field says what it allows. Its canonical form is compact JSON
with sorted keys; the run id is a hash of that.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from swarm.errors import ConfigError
from swarm.manifest_sections import (
    Batch,
    Data,
    Limits,
    Model,
    Optimizer,
    Periods,
    Rebalancing,
    Reproducible,
    Run,
    Section,
    Stages,
    Start,
    Step,
    Wire,
    text,
    whole,
)
from swarm.manifest_text import emit_toml, first_error, shown

CANONICAL_BYTES = 1 << 18
"""A canonical form longer than this is refused unread."""


class Manifest(Section):
    """A run, whole. Equal canonical forms mean equal runs; ``changed`` makes variants."""

    name: str = text(
        "run", r"^[A-Za-z0-9][\w.-]*$", "at most 64 letters, digits, '_', '-', '.'", 64
    )
    seed: int = whole(0, 0, (1 << 63) - 1)
    trainers: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), max_length=64, json_schema_extra={"allowed": "a list of at most 64 peer ids"}
    )
    model: Model = Model()
    stages: Stages = Stages.model_validate({})
    batch: Batch = Batch()
    optimizer: Optimizer = Optimizer.model_validate({})
    step: Step = Step()
    wire: Wire = Wire()
    data: Data = Data()
    start: Start = Start()
    run: Run = Run()
    reproducible: Reproducible = Reproducible()
    rebalancing: Rebalancing = Rebalancing()
    limits: Limits = Limits()
    periods: Periods = Periods()

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_trainers(self)
        _check_stages(self)
        _check_sizes(self)
        if self.reproducible.enabled and self.wire.averaging != "fp32":
            raise ConfigError(
                "wire.averaging", self.wire.averaging, "'fp32' with reproducible.enabled = true"
            )
        return self

    @classmethod
    def load(cls, path: str | Path) -> Manifest:
        """Read a TOML file. Raises ConfigError, one line, for whatever is wrong."""
        try:
            source = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise ConfigError(
                "manifest", str(path), f"a readable TOML file ({reason.lower()})"
            ) from None
        return cls.from_toml(source, name=str(path))

    @classmethod
    def from_toml(cls, source: str, *, name: str = "the given text") -> Manifest:
        """Parse TOML. Raises ConfigError; ``name`` is what it calls the text."""
        try:
            tree = tomllib.loads(source)
        except (ValueError, RecursionError) as error:
            why = str(error).splitlines()[0]
            raise ConfigError("manifest", name, f"TOML ({why})") from None
        return cls.from_tree(tree)

    @classmethod
    def from_tree(cls, tree: object) -> Manifest:
        """Validate plain dicts, lists and scalars. Raises ConfigError for the first problem."""
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise first_error(error, cls) from None

    @classmethod
    def from_canonical(cls, data: bytes) -> Manifest:
        """The inverse of ``canonical``. Raises ConfigError for anything else, whoever sent it."""
        allowed = "the canonical form of a manifest of this version"
        if len(data) > CANONICAL_BYTES:
            raise ConfigError("manifest", f"{len(data)} bytes", f"at most {CANONICAL_BYTES} bytes")
        try:
            tree = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError):
            raise ConfigError("manifest", shown(bytes(data)), allowed) from None
        manifest = cls.from_tree(tree)
        if manifest.canonical() != bytes(data):
            raise ConfigError("manifest", shown(bytes(data)), allowed)
        return manifest

    def to_toml(self) -> str:
        """TOML that ``from_toml`` reads back to an equal manifest."""
        return emit_toml(self.model_dump(mode="json"))

    def canonical(self) -> bytes:
        """Compact UTF-8 JSON with sorted keys: what is hashed and signed."""
        tree = self.model_dump(mode="json")
        return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @cached_property
    def run_id(self) -> str:
        """The first 32 hexadecimal digits of the SHA-256 of the canonical form."""
        return hashlib.sha256(self.canonical()).hexdigest()[:32]

    def changed(self, changes: Mapping[str, object]) -> Manifest:
        """A validated copy with some fields set, by dotted path, e.g. ``{"run.steps": 5}``."""
        tree = self.model_dump(mode="json")
        for path, value in changes.items():
            *tables, name = path.split(".")
            table = tree
            for part in tables:
                table = table.setdefault(part, {})
            table[name] = value
        return Manifest.from_tree(tree)


def _check_trainers(manifest: Manifest) -> None:
    for index, peer in enumerate(manifest.trainers):
        if not (0 < len(peer) <= 128 and peer.isascii() and peer.isalnum()):
            raise ConfigError(f"trainers.{index}", shown(peer), "a peer id in base58")


def _check_stages(manifest: Manifest) -> None:
    model, stages = manifest.model, manifest.stages
    total = model.total_layers
    if model.kind == "gpt" and model.tied and stages.count > 1:
        raise ConfigError("model.tied", True, "false when stages.count is more than 1")
    if total is not None and stages.count > total:
        raise ConfigError(
            "stages.count", stages.count, f"at most {total}: embedding, blocks and head"
        )
    if total is not None and stages.cuts and stages.cuts[-1] >= total:
        raise ConfigError(
            "stages.cuts", shown(list(stages.cuts)), f"layer numbers from 1 to {total - 1}"
        )


def _check_sizes(manifest: Manifest) -> None:
    model, limits = manifest.model, manifest.limits
    if model.kind != "gpt":
        return
    if model.parameters > limits.parameters:
        raise ConfigError(
            "model", f"{model.parameters} parameters", f"limits.parameters = {limits.parameters}"
        )
    tokens = manifest.batch.microbatch * model.sequence
    if 4 * tokens * model.d_model + tokens > limits.payload_bytes:
        raise ConfigError(
            "limits.payload_bytes",
            limits.payload_bytes,
            f"at least {4 * tokens * model.d_model + tokens}, one microbatch between stages",
        )
    widest = max(model.vocabulary, model.d_model * model.mlp_ratio, model.heads * model.sequence)
    if 4 * tokens * widest > limits.working_bytes:
        raise ConfigError(
            "limits.working_bytes",
            limits.working_bytes,
            f"at least {4 * tokens * widest}, the largest tensor of a microbatch",
        )


def default_manifest() -> Manifest:
    """What ``swarm local`` trains: a small byte-level GPT on the standard library's sources."""
    return Manifest.from_tree(
        {
            "name": "local",
            "stages": {"count": 3},
            "batch": {"microbatch": 4, "microbatches": 16},
            "optimizer": {"lr": 2e-3, "warmup_steps": 20, "weight_decay": 0.01},
            "run": {"steps": 100, "eval_every": 25},
        }
    )
