"""Microbatches through a replica: accepted, decoded, computed, pushed on, and receipted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from torch import Tensor

from peers import messages as msg
from peers.host import Host
from peers.rpc import run_hop
from peers.stage import Passed, StageOwner
from peers.tensors import RAW, Expected, pack, unpack
from peers.turns import Turns
from swarm.codecs import get_codec
from swarm.core import flight
from swarm.core.backoff import Backoff
from swarm.core.hop import Hop, Outcome, Tell
from swarm.core.intake import Intake, Job, Kind
from swarm.manifest import Manifest
from swarm.model.device import Copy
from swarm.types import Replica, Stamp

log = logging.getLogger("swarm.node")

BUSY_PAUSE = Backoff(first_s=0.02, cap_s=1.0)
RECEIPT_WAIT_S = 1.0
"""A receipt waits this long for the push's outcome, so that it can tell the link time."""


@dataclass(slots=True)
class _Load:
    """What came with a job: ``tensors`` on the host, ``given`` those that the stage works on."""

    message: msg.Forward | msg.Backward
    tensors: list[Tensor]
    given: list[Copy]
    arrived: float


@dataclass(slots=True)
class _Pass:
    """A pass that has been computed. ``origin``: the forward that a backward belongs to;
    ``output``: what is sent on, on its way to the host."""

    job: Job
    load: _Load
    passed: Passed
    output: Copy | None
    alive: bool
    origin: msg.Forward | None
    started: float
    ended: float


@dataclass(slots=True)
class _Sent:
    """How the push of an output went. ``link_s`` is of the last call alone, without pauses."""

    encode_s: float = 0.0
    link_s: float = 0.0
    sent_bytes: int = 0
    over: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True)
class Counters:
    """What this replica did: for its own log and its announcements.

    ``busy_s``: computing what was counted, forward and backward. ``queue_s``: the time that all
    training passes waited to be computed.
    """

    passes: int = 0
    counted: int = 0
    busy_s: float = 0.0
    queue_s: float = 0.0
    last_work: float | None = None


class Passes:
    """The replica's side of a journey. ``wake`` is called when there is something to run."""

    def __init__(self, host: Host, *, wake: Callable[[], None]) -> None:
        manifest, stage = host.manifest, host.stage
        self._host, self._manifest, self._stage, self._me = host, manifest, stage, host.me
        self._caller, self._executor, self._tasks = host.caller, host.executor, host.tasks
        self._rng, self._device = host.rng, stage.device
        self._wake = wake
        self._turns = Turns()
        limits = manifest.limits
        self._last = manifest.stages.count - 1
        self.intake = Intake(stage.stage, self._last, queue=limits.queue, contexts=limits.contexts)
        self.counters = Counters()
        self.on_pass: Callable[[float], object] = lambda seconds: None
        """Told how long each pass took, in seconds."""
        self.paused = False
        """No new work is taken: it is *busy*. What is here already is finished."""
        self.under_way = 0
        """Passes that are being computed, or whose output is being sent on."""
        self._loads: dict[tuple[Kind, Stamp], _Load] = {}
        self._origins: dict[Stamp, msg.Forward] = {}
        self._forward_s: dict[Stamp, float] = {}
        self._expected = _expected(manifest, stage)

    # -- in ---------------------------------------------------------------------------------

    async def offered(
        self, message: msg.Forward | msg.Backward, payload: list[memoryview]
    ) -> msg.Message:
        """Answer a push; an accepted one is decoded before the answer goes out."""
        if message.stage != self._stage.stage:
            return msg.Refused(reason=f"stage {message.stage} is not served here")
        if isinstance(message, msg.Forward) and len(message.route) != self._last - message.stage:
            return msg.Refused(reason=f"route: {len(message.route)} lists for the later stages")
        if message.ahead and not self._manifest.step.delay:
            return msg.Refused(reason="this run has no delayed updates (step.delay = 0)")
        if not self._comes_from_the_path(message):
            return msg.Refused(reason="the sender is not on this microbatch's path")
        if self.paused and isinstance(message, msg.Forward):
            return msg.Busy(reason="its owner uses the machine")
        kind = Kind(message.kind)
        now = anyio.current_time()
        job = Job(kind, message.attempt, now + message.ttl_s)
        # Decoding checks shapes; a bad payload must not become an accepted attempt.
        tensors, given = await self._decode(kind, message, payload)
        reply = self.intake.offer(job, message.tries, now)
        self._free()
        if reply.outcome is not Outcome.ACCEPTED:
            busy = reply.outcome is Outcome.BUSY
            return (msg.Busy if busy else msg.Refused)(reason=reply.reason)
        key = (kind, message.stamp)
        if self.intake.decoded(*key) and key not in self._loads:
            self._loads[key] = _Load(message, tensors, given, now)
            if isinstance(message, msg.Forward):
                self._origins[message.stamp] = message
            self._wake()
        return msg.Ok()

    def _comes_from_the_path(self, message: msg.Forward | msg.Backward) -> bool:
        """The first stage takes work from the trainer alone, a backward comes from the route."""
        if isinstance(message, msg.Forward):
            return message.stage > 0 or message.sender.peer == self._host.trainer
        origin = self._origins.get(message.stamp)
        return origin is None or message.sender in origin.route[0]

    async def _decode(
        self, kind: Kind, message: msg.Forward | msg.Backward, payload: list[memoryview]
    ) -> tuple[list[Tensor], list[Copy]]:
        """The tensors; those that are computed with are on their way to the device."""
        expected = self._expected[kind]
        # Targets only pass through, but for the last stage.
        wanted = len(expected) if self._stage.stage == self._last else 1

        def unpacked() -> tuple[list[Tensor], list[Copy]]:
            tensors = unpack(message.tensors, payload, expected)
            return tensors, [self._device.to_device(tensor) for tensor in tensors[:wanted]]

        quick = all(want.codec == RAW or get_codec(want.codec).lossless for want in expected)
        if quick and not self._device.copies:
            return unpacked()
        return await self._executor.side(unpacked)

    def leave(self) -> None:
        """The stage is at no mark: nothing can be done until it is."""
        self.intake.leave()
        self._free()

    # -- through ----------------------------------------------------------------------------

    def next_pass(self) -> Callable[[], Awaitable[None]] | None:
        job = self.intake.next(anyio.current_time())
        self._free()
        return None if job is None else partial(self._run, job)

    async def _run(self, job: Job) -> None:
        load = self._loads.pop((job.kind, job.attempt.stamp))
        started = anyio.current_time()
        self.under_way += 1
        output: Copy | None = None
        try:
            passed, output = await self._executor.lane(
                self._work(job), partial(self._compute, job, load)
            )
        except Exception as error:
            # Whatever a model makes of its input, a target out of range say, ends that pass alone.
            what = (str(error).splitlines() or [type(error).__name__])[0]
            reason = f"stage {self._stage.stage}: {what[:200]}"
            log.error("a pass failed: %s", reason)
            log.debug("where it came from", exc_info=error)
            self._tasks.start_soon(self._tell_failed, job, reason, [])
            self.intake.cancel(job.attempt.stamp)
            passed = Passed(None, "failed")
        ended = anyio.current_time()
        self._count(job, passed, queue_s=max(0.0, started - load.arrived), took_s=ended - started)
        self.counters.last_work = ended
        self.on_pass(ended - started)
        alive = self.intake.finished(job)
        origin = self._origins.get(job.attempt.stamp)
        self._free()
        if passed.verdict == "failed":
            self.under_way -= 1
        else:
            done = _Pass(job, load, passed, output, alive, origin, started, ended)
            self._tasks.start_soon(self._send_on, done)

    def _count(self, job: Job, passed: Passed, *, queue_s: float, took_s: float) -> None:
        counters, stamp = self.counters, job.attempt.stamp
        took_s += self._forward_s.pop(stamp, 0.0)
        counters.passes += 1
        if not job.attempt.evaluation:
            counters.queue_s += queue_s
        if passed.verdict == flight.COUNTED:
            counters.counted += 1
            counters.busy_s += took_s
        elif job.kind is Kind.FORWARD:
            self._forward_s[stamp] = took_s

    def _work(self, job: Job) -> str:
        if job.kind is Kind.FORWARD and self._stage.stage == self._last:
            return "evaluate" if job.attempt.evaluation else "forward_backward"
        return str(job.kind)

    def _compute(self, job: Job, load: _Load) -> tuple[Passed, Copy | None]:
        """The pass, and its output as it leaves the device: nobody waits for that here."""
        attempt = job.attempt
        given = [copy.wait() for copy in load.given]
        if job.kind is Kind.BACKWARD:
            passed = self._stage.backward(attempt, given[0])
        elif self._stage.stage == self._last:
            passed = self._stage.forward_backward(attempt, given[0], given[1])
        else:
            keep = self.intake.leaves_context(attempt)
            passed = self._stage.forward(attempt, given[0], keep=keep)
        return passed, None if passed.output is None else self._device.to_host(passed.output)

    # -- out --------------------------------------------------------------------------------

    async def _send_on(self, done: _Pass) -> None:
        """Push the output on, and send the receipt once it is known how that went."""
        try:
            await self._send_output(done)
        finally:
            self.under_way -= 1

    async def _send_output(self, done: _Pass) -> None:
        hop = self._hop(done)
        sent = _Sent()
        if hop is not None:
            self._tasks.start_soon(self._push, done, hop, sent)
            with anyio.move_on_after(RECEIPT_WAIT_S):
                await sent.over.wait()
        job = done.job
        await self._host.tell_trainer(
            msg.Receipt(
                run=self._manifest.run_id,
                stamp=job.attempt.stamp,
                m=job.attempt.m,
                stage=self._stage.stage,
                boot=self._me.boot,
                pass_="backward" if self._work(job) != "forward" else "forward",
                verdict=done.passed.verdict,
                queue_s=max(0.0, done.started - done.load.arrived),
                compute_s=max(0.0, done.ended - done.started),
                encode_s=sent.encode_s,
                link_s=sent.link_s,
                sent_bytes=sent.sent_bytes,
                queued=self.intake.queued,
                loss=done.passed.loss,
                busy=hop.busy_answers if hop is not None else 0,
                skipped=hop.unreachable[:16] if hop is not None else [],
                blame=done.load.message.sender if done.passed.blame_sender else None,
            ),
            tries=2,
        )

    def _hop(self, done: _Pass) -> Hop | None:
        """Where the output goes, if anywhere."""
        job, message = done.job, done.load.message
        if done.output is None or not done.alive:
            return None
        if self._goes_forward(job):
            candidates = message.route[0] if isinstance(message, msg.Forward) else []
        elif self._stage.stage > job.attempt.lowest and done.origin is not None:
            candidates = [done.origin.sender]
        else:
            return None
        return Hop(candidates, job.expires_at, BUSY_PAUSE, self._rng)

    def _goes_forward(self, job: Job) -> bool:
        return job.kind is Kind.FORWARD and self._stage.stage < self._last

    async def _push(self, done: _Pass, hop: Hop, sent: _Sent) -> None:
        began = anyio.current_time()
        metas, payload = await self._encode(done)
        sent.encode_s = anyio.current_time() - began
        sent.sent_bytes = sum(part.nbytes for part in payload)

        async def send(replica: Replica, tries: int) -> tuple[Outcome, str]:
            async def push() -> tuple[Outcome, str]:
                called = anyio.current_time()
                if called >= done.job.expires_at:
                    return Outcome.REFUSED, "its time was up before its turn came"
                message = self._onward(done, replica, tries, metas)
                outcome = await self._caller.push(replica.peer, message, payload)
                sent.link_s = anyio.current_time() - called
                return outcome

            return await self._turns.take(replica.peer, sent.sent_bytes, push)

        end = await run_hop(hop, send)
        sent.over.set()
        if isinstance(end, Tell):
            await self._tell_failed(done.job, end.reason, hop.unreachable[:16])

    async def _encode(self, done: _Pass) -> tuple[list[msg.TensorMeta], list[memoryview]]:
        output = done.output
        assert output is not None
        wire, forward = self._manifest.wire, self._goes_forward(done.job)
        codec: str = wire.activations if forward else wire.gradients
        # Targets travel with the activation.
        others = [(tensor, RAW) for tensor in done.load.tensors[1:]] if forward else []

        def packed() -> tuple[list[msg.TensorMeta], list[memoryview]]:
            return pack([(output.wait(), codec), *others])

        if get_codec(codec).lossless and not self._device.copies:
            return packed()
        return await self._executor.side(packed)

    def _onward(
        self, done: _Pass, replica: Replica, tries: int, metas: list[msg.TensorMeta]
    ) -> msg.Message:
        """The message of the next hop, forward or backward."""
        job, load = done.job, done.load
        common: dict[str, Any] = {
            "run": self._manifest.run_id,
            "to": replica.boot,
            "stamp": job.attempt.stamp,
            "mark": job.attempt.mark,
            "m": job.attempt.m,
            "mask": job.attempt.mask,
            "ahead": job.attempt.ahead,
            "sender": self._me,
            "tries": tries,
            "ttl_s": max(0.0, job.expires_at - anyio.current_time()),
            "tensors": metas,
        }
        if self._goes_forward(job) and isinstance(load.message, msg.Forward):
            return msg.Forward(
                stage=self._stage.stage + 1,
                route=load.message.route[1:],
                **common,
            )
        return msg.Backward(stage=self._stage.stage - 1, **common)

    async def _tell_failed(self, job: Job, reason: str, skipped: list[Replica]) -> None:
        await self._host.tell_trainer(
            msg.Failed(
                run=self._manifest.run_id,
                stamp=job.attempt.stamp,
                m=job.attempt.m,
                boot=self._me.boot,
                reason=reason[:500],
                skipped=skipped,
            ),
            tries=2,
        )

    def _free(self) -> None:
        for stamp in self.intake.take_freed():
            for kind in Kind:
                self._loads.pop((kind, stamp), None)
            self._origins.pop(stamp, None)
            self._forward_s.pop(stamp, None)
            self._stage.forget(stamp)


def _expected(manifest: Manifest, stage: StageOwner) -> dict[Kind, list[Expected]]:
    """What exactly a forward and a backward for this stage must bring."""
    model, size, wire = stage.model, manifest.batch.microbatch, manifest.wire
    inputs = model.input_spec
    codec = RAW if model.is_first else wire.activations
    target = stage.spec.target
    return {
        Kind.FORWARD: [
            Expected(inputs.batch_shape(size), inputs.dtype, codec),
            Expected(target.batch_shape(size), target.dtype, RAW),
        ],
        Kind.BACKWARD: [
            Expected(model.output_spec.batch_shape(size), model.output_spec.dtype, wire.gradients)
        ],
    }
