"""What a step moves: one activation forward and one gradient back a boundary and microbatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from peers import wire
from peers.memory import MemoryTransport
from peers.transport import Frame
from swarm.types import PeerId
from tests.chaos.harness import World, digits_manifest, run_world

STEPS, STAGES, MICROBATCHES, MICROBATCH, HIDDEN = 2, 3, 4, 64, 512
FP32_BYTES = 4 * MICROBATCH * HIDDEN
"""Of a boundary: 128 KiB."""
TARGET_BYTES = 8 * MICROBATCH
"""They travel with the activation."""
SMALL_BYTES = 2048
"""Of size is what is longer than this, header included."""
AVERAGING = ("part", "sum")
"""These move gradients between replicas of a stage, not over a boundary."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One whole frame: prefix, header and payload."""

    source: PeerId
    target: PeerId
    kind: str
    """Of the request, and for its reply "reply to" that."""
    stage: int | None
    t: int | None
    m: int | None
    nbytes: int


def frame_bytes(frame: Frame) -> int:
    return len(wire.encode_head(frame, wire.DEFAULT_LIMITS)) + frame.payload_bytes


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Sent]:
    """All frames that cross the memory transport from now on, in the order of their requests."""
    frames: list[Sent] = []
    call = MemoryTransport.call

    async def recorded(
        self: MemoryTransport, peer: PeerId, request: Frame, *, timeout_s: float
    ) -> Frame:
        header = request.header
        kind, mark = str(header["kind"]), header.get("mark")
        about = (header.get("stage"), mark and mark[-1], header.get("m"))
        frames.append(Sent(self.peer, peer, kind, *about, frame_bytes(request)))
        reply = await call(self, peer, request, timeout_s=timeout_s)
        frames.append(Sent(peer, self.peer, f"reply to {kind}", *about, frame_bytes(reply)))
        return reply

    monkeypatch.setattr(MemoryTransport, "call", recorded)
    return frames


def run(codec: str, replicas: int, sent: list[Sent]) -> dict[PeerId, int]:
    """Two steps, of which ``sent`` takes the frames; returns the stage of each replica."""
    manifest = digits_manifest(
        model__args={"hidden": HIDDEN},
        stages__count=STAGES,
        batch__microbatch=MICROBATCH,
        batch__microbatches=MICROBATCHES,
        start__replicas=replicas,
        wire__activations=codec,
        wire__gradients=codec,
        run__checkpoint_every=0,
    )
    stages: dict[PeerId, int] = {}

    async def scenario(world: World) -> None:
        await world.start_all(replicas)
        stages.update({peer.peer_id: peer.node.stage for peer in world.peers.values()})
        sent.clear()
        await world.train(STEPS)

    run_world(manifest, scenario)
    return stages


def of_size(sent: Sequence[Sent]) -> list[Sent]:
    return [frame for frame in sent if frame.nbytes > SMALL_BYTES and frame.kind not in AVERAGING]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_a_boundary_moves_one_activation_and_one_gradient_a_microbatch_and_no_more(
    codec: str, replicas: int, sent: list[Sent]
) -> None:
    stages = run(codec, replicas, sent)
    moved = Counter(
        (stages.get(f.source, -1), stages.get(f.target, -1), f.kind, f.stage, f.t, f.m)
        for f in of_size(sent)
    )
    work = [(t, m) for t in range(STEPS) for m in range(MICROBATCHES)]
    expected = Counter(
        [(to - 1, to, "forward", to, t, m) for to in range(STAGES) for t, m in work]  # -1: trainer
        + [(to + 1, to, "backward", to, t, m) for to in range(STAGES - 1) for t, m in work]
    )
    assert moved == expected


@pytest.mark.parametrize(("codec", "share"), [("fp32", 1.0), ("bf16", 0.5), ("int8", 0.25)])
def test_whole_frames_of_a_boundary_are_near_the_codec_s_share_of_fp32(
    codec: str, share: float, sent: list[Sent]
) -> None:
    """int8 has to stay within 30 % of a quarter; all are within 4 %, and never below."""
    stages = run(codec, 1, sent)
    frames = [f for f in of_size(sent) if f.source in stages]
    assert Counter(f.kind for f in frames) == {
        kind: STEPS * (STAGES - 1) * MICROBATCHES for kind in ("forward", "backward")
    }
    least = share * FP32_BYTES
    for frame in frames:
        assert least < frame.nbytes < 1.04 * least + (frame.kind == "forward") * TARGET_BYTES
