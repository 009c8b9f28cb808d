"""From the manifest to a model: the built-in GPT, or a function named by import path."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Collection

import torch
from torch import nn

from swarm.core.partition import cuts_into_stages, layers_into_stages
from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.model.gpt import gpt
from swarm.model.spec import ModelSpec


def model_spec(manifest: Manifest, allow: Collection[str] = ()) -> ModelSpec:
    """The model of a run.

    A kind ``module:function`` is imported and called with ``model.args`` only if ``allow`` holds
    that very text, since it runs code.

    Raises:
        ConfigError: it is not allowed, cannot be imported, fails, or returns no usable model.
    """
    kind = manifest.model.kind
    if kind == "gpt":
        return gpt(manifest.model)
    if kind not in allow:
        raise ConfigError(
            "model.kind",
            kind,
            "'gpt'; a model of one's own runs code on this machine: "
            f"if you trust it, start with --allow-model {kind}",
        )
    module, _, function = kind.partition(":")
    try:
        spec = getattr(importlib.import_module(module), function)(**manifest.model.args)
    except Exception as error:
        # The owner's code may raise anything; whatever it is, it is the owner's to mend.
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError("model.kind", kind, f"a function that returns a ModelSpec ({why})") from (
            error
        )
    _check_spec(kind, spec)
    return spec


def stage_layers(manifest: Manifest, spec: ModelSpec) -> list[range]:
    """Which layers each stage has: by ``stages.cuts``, else ``stages.count`` by cost.

    Raises:
        ConfigError: the model has too few layers, or a cut lies where it cannot be.
    """
    layers, stages = len(spec.layers), manifest.stages
    if stages.count > layers:
        raise ConfigError("stages.count", stages.count, f"at most {layers}, the model's layers")
    if stages.cuts:
        if stages.cuts[-1] >= layers:
            raise ConfigError(
                "stages.cuts", list(stages.cuts), f"layer numbers from 1 to {layers - 1}"
            )
        ranges = cuts_into_stages(layers, stages.cuts)
    else:
        ranges = layers_into_stages([layer.cost for layer in spec.layers], stages.count)
    for stage in ranges:
        _check_stage(spec, stage)
    return ranges


def build_layer(manifest: Manifest, spec: ModelSpec, index: int) -> nn.Module:
    """Layer ``index`` with its initial weights: a function of (seed, index) alone."""
    digest = hashlib.sha256(f"layer {manifest.seed} {index}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return spec.layers[index].build()


def _check_spec(kind: str, spec: object) -> None:
    if not isinstance(spec, ModelSpec):
        given = f"a {type(spec).__name__} from {kind}"
        raise ConfigError("model.kind", given, "a function that returns a ModelSpec")
    if not spec.layers or spec.loss_terms < 1:
        raise ConfigError("model.kind", kind, "a ModelSpec with layers and loss_terms of 1 or more")
    if any(not layer.cost >= 0 for layer in spec.layers):
        raise ConfigError("model.kind", kind, "a ModelSpec whose costs are 0 or more")
    for tensor in (spec.input, spec.target, *(layer.output for layer in spec.layers)):
        try:
            tensor.torch_dtype  # noqa: B018  raises for an unknown name
        except ValueError as error:
            raise ConfigError("model.kind", kind, f"known dtypes ({error})") from None


def _check_stage(spec: ModelSpec, stage: range) -> None:
    if stage.stop < len(spec.layers) and spec.layers[stage.stop - 1].output.dtype != "float32":
        given = f"{spec.layers[stage.stop - 1].output.dtype} after layer {stage.stop - 1}"
        raise ConfigError("stages.cuts", given, "cuts where the model's tensors are float32")
    for index in stage:
        for tie in spec.layers[index].ties:
            if tie.layer not in stage or tie.layer >= index:
                given = f"layer {index} tied to layer {tie.layer}"
                raise ConfigError("stages.cuts", given, "ties to earlier layers of the same stage")
