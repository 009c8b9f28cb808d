"""Stages of known size, as the SWARM paper measures them: work, bytes, parameters.

A transformer block of width d over a sequence of length s takes about ``2 (12 s d^2 + 2 s^2 d)``
FLOP forward and twice as much backward. What goes over a boundary is ``s d`` numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.sim.world import StageWork

TERA = 1e12
OPTIMIZER_BYTES = 12
"""For each parameter: weight and two moments, 32 bits each. What a newcomer downloads."""
RESIDENT_BYTES = 16
"""The same with the sum of gradients: what a replica holds."""
NUMBER_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class Layers:
    """``count`` blocks of width ``d`` over ``sequence`` tokens. ``shared``: all have one set of
    weights."""

    count: int
    d: int
    sequence: int
    shared: bool = False

    @property
    def forward_tflop(self) -> float:
        """For one sample."""
        s, d = self.sequence, self.d
        return self.count * 2 * (12 * s * d * d + 2 * s * s * d) / TERA

    @property
    def parameters(self) -> int:
        return (1 if self.shared else self.count) * 12 * self.d * self.d

    def stage(self, microbatch: int, codec: str, averaging: str) -> StageWork:
        """As one stage of a pipeline, for microbatches of ``microbatch`` samples."""
        boundary = microbatch * self.sequence * self.d * NUMBER_BYTES[codec]
        return StageWork(
            forward_tflop=microbatch * self.forward_tflop,
            backward_tflop=2 * microbatch * self.forward_tflop,
            output_bytes=boundary,
            gradient_bytes=boundary,
            vector_bytes=self.parameters * NUMBER_BYTES[averaging],
            state_bytes=self.parameters * OPTIMIZER_BYTES,
            memory_bytes=self.parameters * RESIDENT_BYTES,
        )


MODELS: Mapping[str, Layers] = {
    "base": Layers(1, 768, 512),
    "xxlarge": Layers(1, 4096, 512),
    "gpt3": Layers(1, 12288, 2048),
    "ours": Layers(16, 4096, 2048, shared=True),
}
