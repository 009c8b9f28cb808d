"""One stage's tensors: weights, optimizer state, accumulators; and what is computed with them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swarm.core.update import Update
from swarm.errors import BadMessage, ConfigError
from swarm.manifest import Manifest
from swarm.model.device import CPU, Device
from swarm.model.flat import FlatParameters
from swarm.model.norm import exact_squared_norm, squared_norm
from swarm.model.optimizer import PIECE, make_optimizer, pieces
from swarm.model.probe import all_finite, size_probe, sum_probe
from swarm.model.registry import build_layer, stage_layers
from swarm.model.spec import ModelSpec, TensorSpec

_ALIGN_BYTES = 64

OLDER = "older"
"""The name of the weights before the last update, among a stage's vectors."""


class Weights:
    """The layers of a stage, by global index, and the flat vector that their weights are in.

    ``shared``: others of the same stage, whose frozen parameters and buffers are used here too.
    """

    def __init__(
        self, modules: dict[int, nn.Module], place: torch.device, *, shared: Weights | None = None
    ) -> None:
        self.modules = modules
        named = list(_named_parameters(modules))
        self.flat = FlatParameters([(n, p) for n, p in named if p.requires_grad], place)
        if shared is not None:
            for index, module in modules.items():
                _share_fixed(shared.modules[index], module)


def _share_fixed(source: nn.Module, module: nn.Module) -> None:
    """What is not trained in ``module`` is that of ``source``, its equal, from now on."""
    for other, own in zip(source.modules(), module.modules(), strict=True):
        for name, parameter in other.named_parameters(recurse=False):
            if not parameter.requires_grad:
                setattr(own, name, parameter)
        for name, buffer in other.named_buffers(recurse=False):
            setattr(own, name, buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A forward pass that can be differentiated once: the leaf and what came of it."""

    inputs: Tensor
    output: Tensor
    parameters: list[nn.Parameter]


class StageModel:
    """Owns the tensors of one stage. Not thread-safe: one thread uses it at a time.

    ``weights`` is a flat float32 vector of ``length`` that all trainable parameters are views of;
    optimizer state and ``accumulators`` (float32, int64 in reproducible mode) are laid out alike.
    Frozen parameters and buffers stay outside.

    A step: for each microbatch ``forward`` (or ``forward_loss``), ``backward``, and if it is to
    count and ``gradient_finite``, ``accumulate``; then ``squared_norm`` and ``apply`` of the
    accumulators summed over all replicas, and ``clear_accumulators``.

    With delayed updates there are a second set of weights, those before the last update, for
    passes that are ``older``, and accumulators of the step ahead; see ``swarm.core.books``.
    """

    def __init__(
        self,
        manifest: Manifest,
        spec: ModelSpec,
        stage: int,
        *,
        device: Device = CPU,
        checkpointing: bool = False,
    ) -> None:
        """Build stage ``stage`` with initial weights that follow from the manifest alone.

        ``checkpointing``: a graph keeps the input of each layer only, and computes the rest again
        in its backward pass, to the same bits.

        Raises:
            ConfigError: the model cannot be cut as the manifest says, or has weights that are
                not float32.
        """
        ranges = stage_layers(manifest, spec)
        self.layers = ranges[stage]
        """Global indices of this stage's layers."""
        self.is_first = stage == 0
        self.is_last = stage == len(ranges) - 1
        first, last = self.layers[0], self.layers[-1]
        self.input_spec: TensorSpec = spec.input if first == 0 else spec.layers[first - 1].output
        self.output_spec: TensorSpec = spec.layers[last].output
        self._spec = spec
        self.device = device
        place = device.torch_device
        self._place = place
        self._checkpointing = checkpointing
        self._bf16 = manifest.model.autocast == "bf16"
        self._precision = _autocast(place) if self._bf16 else contextlib.nullcontext()
        batch = manifest.batch
        self._loss_terms = batch.microbatches * batch.microbatch * spec.loss_terms
        self._now = self._before = Weights(_build(manifest, spec, self.layers, place), place)
        self._delay = manifest.step.delay > 0
        if self._delay:
            again = _build(manifest, spec, self.layers, place)
            self._before = Weights(again, place, shared=self._now)
        self.length = self._now.flat.length
        self._optimizer = make_optimizer(manifest.optimizer, self.weights)
        self._scratch = self.weights.new_empty(min(PIECE, self.length))
        self._gradients: list[Tensor | None] = []
        self._scale = float(manifest.reproducible.scale) if manifest.reproducible.enabled else None
        self._bound = 2.0**62 / (batch.microbatches * manifest.reproducible.scale)
        dtype = torch.float32 if self._scale is None else torch.int64
        self.accumulators = torch.zeros(self.length, dtype=dtype, device=place)
        self._ahead = torch.zeros_like(self.accumulators) if self._delay else None

    @property
    def weights(self) -> Tensor:
        """The flat vector of the newest weights."""
        return self._now.flat.vector

    def forward(self, inputs: Tensor, *, older: bool = False) -> tuple[Tensor, Graph]:
        """Output, detached and contiguous, of ``inputs`` (microbatch, *input_spec.shape).

        Both may share memory with the graph: change neither before its backward.
        """
        graph = self._run(inputs, older)
        return graph.output.detach().contiguous(), graph

    def forward_loss(
        self, inputs: Tensor, targets: Tensor, *, older: bool = False
    ) -> tuple[float, Graph]:
        """The microbatch's part of the step's mean loss. For the last stage.

        It is the sum over this microbatch's loss terms, divided by the loss terms of the whole
        step, so the parts of all microbatches add up to the mean over the batch.
        """
        graph = self.forward_to_loss(inputs, targets, older=older)
        return self.device.read([graph.output])[0], graph

    def forward_to_loss(self, inputs: Tensor, targets: Tensor, *, older: bool = False) -> Graph:
        """``forward_loss`` that does not wait for its value: it is the graph's output."""
        graph = self._run(inputs, older)
        with torch.enable_grad():
            total = self._spec.loss(graph.output, targets.to(self._place))
            return Graph(graph.inputs, total / self._loss_terms, graph.parameters)

    def backward(self, graph: Graph, grad_output: Tensor | None) -> Tensor | None:
        """Compute this microbatch's gradient; return that of the stage input.

        ``grad_output`` has the output's shape, or is None after ``forward_loss``. The first
        stage returns None. The parameter gradient replaces the one before, and waits for
        ``accumulate``. The graph is used up.
        """
        self._gradients = []
        wanted: list[Tensor] = [] if self.is_first else [graph.inputs]
        wanted += graph.parameters
        if grad_output is not None:
            grad_output = _aligned(grad_output.detach().to(self._place))
        found: tuple[Tensor | None, ...] = (None,) * len(wanted)
        if wanted and graph.output.requires_grad:
            found = torch.autograd.grad(graph.output, wanted, grad_output, allow_unused=True)
        grad_input = None
        if not self.is_first:
            grad_input = torch.zeros_like(graph.inputs) if found[0] is None else found[0]
            grad_input = grad_input.detach().contiguous()
            found = found[1:]
        self._gradients = [None if g is None else g.detach().contiguous() for g in found]
        return grad_input

    def gradient_probe(self) -> Tensor | None:
        """A number, not read yet, that tells ``gradient_fits``; None: there is no gradient."""
        found = [gradient for gradient in self._gradients if gradient is not None]
        return sum_probe(found) if self._scale is None else size_probe(found)

    def gradient_fits(self, probe: float) -> bool:
        """Whether the gradient of the last ``backward``, whose probe this is, may be counted.

        In reproducible mode it must also be small enough for the fixed-point sum.
        """
        if self._scale is not None:
            return probe <= self._bound  # with NaN it is false
        return math.isfinite(probe) or all_finite([g for g in self._gradients if g is not None])

    def gradient_finite(self) -> bool:
        """Probe and answer in one."""
        probe = self.gradient_probe()
        return probe is None or self.gradient_fits(self.device.read([probe])[0])

    def accumulate(self, *, ahead: bool = False) -> None:
        """Add the gradient of the last ``backward`` to the accumulators, once.

        ``ahead``: to those of the step ahead.

        If this raises, the accumulators are not to be trusted: clear them.

        Raises:
            ValueError: there was no ``backward`` since the last call.
        """
        flat, sums = self._now.flat, self._ahead if ahead else self.accumulators
        if len(self._gradients) != len(flat.parameters):
            raise ValueError("no gradient to accumulate: call backward first")
        assert sums is not None
        for view, gradient in zip(flat.views(sums), self._gradients, strict=True):
            if gradient is None:
                continue
            if self._scale is None:
                view.add_(gradient)
            else:
                _add_fixed_point(view.view(-1), gradient.view(-1), self._scale)
        self._gradients = []

    def clear_accumulators(self) -> None:
        self.accumulators.zero_()

    def clear_ahead(self) -> None:
        """``clear_accumulators`` of the step ahead, if there are any."""
        if self._ahead is not None:
            self._ahead.zero_()

    def turn(self) -> None:
        """The step ahead is the present one: its accumulators are, and new ones are ahead."""
        assert self._ahead is not None
        self.accumulators, self._ahead = self._ahead, self.accumulators
        self.clear_ahead()

    def squared_norm(self, total: Tensor) -> tuple[float, bool]:
        """Sum of squares of the gradient ``total``, and whether it is finite.

        ``total`` is the sum of accumulators, of their dtype. In reproducible mode the value is
        exact but for one rounding.
        """
        floats = (self._gradient(total, piece) for piece in pieces(self.length))
        value = squared_norm(floats) if self._scale is None else exact_squared_norm(floats)
        return value, math.isfinite(value)

    def swap_accumulators(self, other: Tensor | None) -> Tensor:
        """Give the accumulators away, and go on with ``other`` (None: new ones) in their place.

        Both have the same length and dtype. Until ``clear_accumulators`` they hold anything.
        """
        given = self.accumulators
        self.accumulators = torch.empty_like(given) if other is None else other
        return given

    def apply(self, total: Tensor | None, update: Update) -> None:
        """One optimizer step with the summed accumulators ``total``, which stays as it is.

        It may be on the device or on the host, there in ``Device.room``; None if ``update`` is to
        be skipped. The graphs of passes that are not ``older`` stay good: with delayed updates
        the new weights are put where the older ones were.
        """
        whole = slice(0, self.length)
        if self._delay:
            self._before.flat.vector.copy_(self.weights)
            if not update.skip:
                self._now, self._before = self._before, self._now
        if total is not None:
            self._step(whole, total, update)

    def apply_to(self, place: slice, sums: Tensor | None, update: Update) -> None:
        """``apply`` for ``place`` of the flat vectors alone; ``sums`` is the total's part there.

        Each operation is elementwise, so any cut into places gives the same bits. No graph may be
        used afterwards.
        """
        if self._delay:
            self._before.flat.vector[place].copy_(self.weights[place])
        if sums is not None:
            self._step(place, sums, update)

    def _step(self, place: slice, sums: Tensor, update: Update) -> None:
        if update.skip:
            return
        for part in pieces(sums.numel()):
            gradient = self._gradient(sums, part).mul_(update.scale)
            piece = slice(place.start + part.start, place.start + part.stop)
            self._optimizer.step(self.weights, gradient, piece, update)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the stage, frozen ones and buffers too, by ``layers.<index>.<name>``.

        They are the stage's own memory, not copies.
        """
        named: dict[str, Tensor] = {n: p.detach() for n, p in _named_parameters(self._now.modules)}
        for index, module in self._now.modules.items():
            named |= {f"layers.{index}.{name}": b for name, b in module.named_buffers()}
        return named

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in what ``tensors()`` of an equal stage gave. All or nothing.

        Raises:
            BadMessage: a name, shape or dtype differs.
        """
        own = self.tensors()
        if own.keys() != tensors.keys():
            name = min(own.keys() ^ tensors.keys())
            raise BadMessage(f"tensor {name!r} is {'missing' if name in own else 'not known'}")
        for name, tensor in own.items():
            given = tensors[name]
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise BadMessage(
                    f"tensor {name!r} is {given.dtype} {tuple(given.shape)}, "
                    f"not {tensor.dtype} {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        if self._delay:
            self._before.flat.vector.copy_(self.weights)

    def state(self) -> dict[str, Tensor]:
        """What changes from step to step: ``weights``, then the optimizer's vectors.

        With delayed updates the weights before, ``older``, come last. Flat float32 vectors of
        ``length``, the stage's own memory, in a fixed order.
        """
        state = {"weights": self.weights, **self._optimizer.vectors}
        return {**state, OLDER: self._before.flat.vector} if self._delay else state

    def _run(self, inputs: Tensor, older: bool) -> Graph:
        weights = self._before if older else self._now
        # Always with gradients: then a forward, its recomputation and an evaluation use the same
        # kernels and give the same bits.
        with torch.enable_grad():
            leaf = _aligned(inputs.detach().to(self._place))
            if not self.is_first:
                leaf.requires_grad_()
            x = leaf
            with self._precision:
                for module in weights.modules.values():
                    x = self._through(module, x)
            if self._bf16:
                x = x.to(self.output_spec.torch_dtype)
        if tuple(x.shape) != self.output_spec.batch_shape(len(inputs)):
            given = f"an output of shape {tuple(x.shape[1:])} a sample from layer {self.layers[-1]}"
            raise ConfigError("model.kind", given, f"{self.output_spec.shape}, as its spec says")
        return Graph(leaf, x, weights.flat.parameters)

    def _through(self, module: nn.Module, x: Tensor) -> Tensor:
        if self._checkpointing:
            # Layers are pure functions, so there is no random state to keep.
            return checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)
        return module(x)

    def _gradient(self, total: Tensor, piece: slice) -> Tensor:
        """The float32 gradient of ``total[piece]``, in scratch space."""
        gradient = self._scratch[: piece.stop - piece.start]
        sums = total[piece].to(self._place, non_blocking=True)
        if self._scale is None:
            return gradient.copy_(sums)
        return gradient.copy_(sums.double().mul_(1.0 / self._scale))


def state_names(manifest: Manifest) -> tuple[str, ...]:
    """The names of a stage's vectors, see ``StageModel.state``, without building one."""
    names = ("weights", *make_optimizer(manifest.optimizer, torch.empty(0)).vectors)
    return (*names, OLDER) if manifest.step.delay else names


def _build(
    manifest: Manifest, spec: ModelSpec, layers: range, place: torch.device
) -> dict[int, nn.Module]:
    modules: dict[int, nn.Module] = {}
    for index in layers:
        modules[index] = build_layer(manifest, spec, index).to(place)
        for tie in spec.layers[index].ties:
            owner, _, attribute = tie.name.rpartition(".")
            shared = modules[tie.layer].get_parameter(tie.other)
            setattr(modules[index].get_submodule(owner), attribute, shared)
    return modules


def _autocast(place: torch.device) -> contextlib.AbstractContextManager[object]:
    # Its cache is one for all threads, and of use only where a weight is used twice.
    return torch.autocast(place.type, torch.bfloat16, cache_enabled=False)


def _named_parameters(modules: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """All parameters in order, one that is shared only once."""
    seen: set[int] = set()
    for index, module in modules.items():
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"layers.{index}.{name}", parameter


def _aligned(tensor: Tensor) -> Tensor:
    """A contiguous tensor that starts at a multiple of 64 bytes: itself, or a copy."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGN_BYTES else tensor


def _add_fixed_point(sums: Tensor, gradient: Tensor, scale: float) -> None:
    """Add ``round(gradient * scale)`` to int64 ``sums``. Exact: the scale is a power of two."""
    for piece in pieces(sums.numel()):
        sums[piece].add_(gradient[piece].double().mul_(scale).round_().to(torch.int64))
