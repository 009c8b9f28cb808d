"""The four pipeline stages that SWARM's authors measured, and what a link allows each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.sim.world import StageWork

BITS = 8
MEGABIT = 1e6 / BITS
"""Bytes."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A stage of ``blocks`` transformer blocks, ``width`` wide, for one sequence of ``tokens``.

    ``value_bytes``: how many bytes one number of an activation takes on the wire.
    """

    name: str
    width: int
    blocks: int
    tokens: int
    value_bytes: int

    @property
    def forward_tflop(self) -> float:
        """Of one sequence: the matrices of a block, and its attention."""
        d, s = self.width, self.tokens
        return 2 * self.blocks * (12 * s * d * d + 2 * s * s * d) / 1e12

    @property
    def backward_tflop(self) -> float:
        """The forward once more (activations are not kept), and twice as much for gradients."""
        return 3 * self.forward_tflop

    @property
    def boundary_bytes(self) -> int:
        """An activation, or its gradient, between two stages."""
        return self.tokens * self.width * self.value_bytes

    def work(self, *, relayed: bool = False) -> StageWork:
        """``relayed``: the simulator adds the second forward pass of that pipeline by itself."""
        return StageWork(
            forward_tflop=self.forward_tflop,
            backward_tflop=self.backward_tflop - (self.forward_tflop if relayed else 0),
            output_bytes=self.boundary_bytes,
            gradient_bytes=self.boundary_bytes,
        )


LAYERS: tuple[Layer, ...] = (
    Layer("base", 768, 1, 512, 2),
    Layer("xxlarge", 4096, 1, 512, 2),
    Layer("GPT-3", 12288, 1, 2048, 2),
    Layer("Ours", 4096, 16, 2048, 1),
)
"""fp16 on the wire; "Ours" is the paper's name for 16 shared blocks and 8 bits."""

LATENCIES_MS = (0, 10, 50, 100, 200)

PAPER_UTILISATION: Mapping[str, tuple[float, ...]] = {
    "base": (0.180, 0.118, 0.0488, 0.0278, 0.0153),
    "xxlarge": (0.321, 0.289, 0.201, 0.149, 0.101),
    "GPT-3": (0.821, 0.793, 0.703, 0.602, 0.485),
    "Ours": (0.895, 0.872, 0.795, 0.715, 0.592),
}
"""By latency as in ``LATENCIES_MS``, as quoted by readers of the paper."""

PEER_TO_PEER = (2, 2)
RELAYED = (3, 2)
"""Activations that a middle stage receives and sends for one microbatch. Relayed by the trainer,
the backward pass brings the stage's inputs once more."""


def compute_s(layer: Layer, tflops: float) -> float:
    """Seconds of computing for one sequence, forward and backward, at ``tflops`` TFLOP/s."""
    return (layer.forward_tflop + layer.backward_tflop) / tflops


def link_s(layer: Layer, bytes_per_s: float, activations: tuple[int, int]) -> float:
    """Seconds that the busier direction of a full-duplex link takes for one sequence."""
    return max(activations) * layer.boundary_bytes / bytes_per_s


def utilisation_limit(
    layer: Layer, tflops: float, bytes_per_s: float, activations: tuple[int, int] = PEER_TO_PEER
) -> float:
    """The share of its time that a middle stage can compute, 0 to 1, latency being hidden.

    1 where computing takes longer than sending, else as the link allows.
    """
    busy = compute_s(layer, tflops)
    return busy / max(busy, link_s(layer, bytes_per_s, activations))
