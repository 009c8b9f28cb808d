"""No message, from anyone, crashes a node or a trainer, or changes what it holds."""

from __future__ import annotations

from typing import Any

import anyio
import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers import messages as msg
from peers.tensors import RAW, pack
from peers.transport import Frame
from swarm.types import FRESH, Mark, Replica, Stamp, Term
from tests.chaos.harness import World, digits_manifest, identity, run_world

TRAINER = identity(1).peer_id
STRANGER = identity(999).peer_id
MANIFEST = digits_manifest(batch__microbatches=2)


def state_of(world: World) -> Any:
    """All that a bad message could change."""
    found: list[Any] = []
    for peer in world.peers.values():
        server, stage = peer.node.server, peer.stage
        assert server is not None
        weights = stage.model.weights.numpy().tobytes()
        sums = stage.model.accumulators.numpy().tobytes()
        held = (sorted(stage.ledger.held), stage.ledger.bar, stage.mark, stage.round)
        intake = server.passes.intake
        found += [weights, sums, held, intake.term, intake.bar, intake.queued, intake.held]
        found.append(server.orders.finished.is_set())
    trainer = world.trainer
    members = [(member.replica, member.state) for member in trainer.roster.all()]
    return [*found, members, trainer.mark, trainer.term, trainer.reign._obey_others]


class Site:
    """A swarm after one step, and valid messages for its replica of the last stage."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.peer = world.of_stage(1)[0]
        assert self.peer.node.server is not None
        self.server = self.peer.node.server
        self.mark = world.trainer.mark
        self.run = world.manifest.run_id
        self.other = world.of_stage(0)[0].node.me

    def stamp(self) -> Stamp:
        return self.world.trainer.stamps.take()

    def forward(self, **changes: Any) -> tuple[dict[str, Any], list[memoryview]]:
        model = self.peer.stage.model
        inputs = torch.zeros(model.input_spec.batch_shape(4))
        targets = torch.zeros(4, dtype=torch.int64)
        metas, payload = pack([(inputs, "fp32"), (targets, RAW)])
        message = msg.Forward(
            run=self.run,
            to=self.peer.node.me.boot,
            stamp=self.stamp(),
            mark=self.mark,
            m=0,
            mask=frozenset({0, 1}),
            stage=1,
            sender=self.other,
            ttl_s=10.0,
            route=[],
            tensors=metas,
        )
        return msg.header(message) | changes, [memoryview(b"".join(payload))]

    def control(self, kind: str) -> dict[str, Any]:
        common = {"run": self.run, "to": self.peer.node.me.boot, "stamp": self.stamp()}
        message = {
            "reset": lambda: msg.Reset(**common, mark=self.mark),
            "cancel": lambda: msg.Cancel(**common, mark=self.mark, m=0),
            "finish": lambda: msg.Finish(**common, reason="over"),
            "prepare": lambda: msg.Prepare(
                **common,
                mark=self.mark,
                stage=1,
                members=[self.peer.node.me],
                contributors=[],
                expected=frozenset(),
            ),
        }[kind]()
        return msg.header(message)


def on_site(check: Any, manifest=MANIFEST) -> None:
    """``await check(site)`` after one step; afterwards the swarm must still train."""

    async def scenario(world: World) -> None:
        await world.start_all(1)
        await world.train(1)
        await check(Site(world))
        await world.train(1)

    world = run_world(manifest, scenario)
    assert len(world.done) == 2


async def refused(site: Site, sender: str, header: dict[str, Any], payload=()) -> str:
    """The reason of the refusal; the state must be what it was."""
    before = state_of(site.world)
    reply = await site.server.handle(sender, Frame(header, list(payload)))
    await anyio.sleep(1.0)
    assert reply.header["kind"] == "refused", reply.header
    assert state_of(site.world) == before
    return reply.header["reason"]


FORWARDS: dict[str, tuple[dict[str, Any], str]] = {
    "another run": ({"run": "f" * 32}, "belongs to run"),
    "a stage not served": ({"stage": 0}, "stage 0 is not served here"),
    "a stage beyond the last": ({"stage": 7}, "stage 7 is not served here"),
    "another boot": ({"to": "0123456789abcdef"}, "another boot"),
    "an unknown kind": ({"kind": "obey"}, "kind"),
    "no kind": ({"kind": None}, "kind"),
    "a field too many": ({"please": 1}, "please"),
    "somebody else's name": ({"sender": [TRAINER, "ab"]}, "not who the message says"),
    "a huge number": ({"m": 1 << 60}, "m"),
    "a negative number": ({"m": -1}, "m"),
    "a number beyond 64 bits": ({"stamp": [1, "ab", 1 << 63]}, "stamp"),
    "a wrong type": ({"mask": "all"}, "mask"),
    "an endless life": ({"ttl_s": float("inf")}, "ttl_s"),
    "a route that leads too far": ({"route": [[], []]}, "route"),
    "a stale mark": ({"mark": [0, "", 0]}, "stale"),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_bad_microbatch_is_refused(name: str) -> None:
    changes, reason = FORWARDS[name]

    async def check(site: Site) -> None:
        header, payload = site.forward(**changes)
        assert reason in await refused(site, site.other.peer, header, payload)

    on_site(check)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"codec": "fp32", "dtype": "float32", "shape": [4, 32], "nbytes": 512} | changes


TARGETS = {"codec": "raw", "dtype": "int64", "shape": [4], "nbytes": 32}
TENSORS: dict[str, tuple[list[dict[str, Any]], str]] = {
    "wrong shape": ([tensor(shape=[4, 33]), TARGETS], "[4, 33]"),
    "wrong batch": ([tensor(shape=[2, 32], nbytes=256), TARGETS], "[2, 32]"),
    "wrong dtype": ([tensor(dtype="int64"), TARGETS], "int64"),
    "wrong codec": ([tensor(codec="int8"), TARGETS], "int8"),
    "unknown codec": ([tensor(codec="zip"), TARGETS], "zip"),
    "too long": ([tensor(nbytes=1 << 39), TARGETS], "cut"),
    "too short": ([tensor(nbytes=448), TARGETS], "bytes"),
    "too few": ([tensor()], "1 tensors, expected 2"),
    "too many": ([tensor(), TARGETS, TARGETS], "3 tensors, expected 2"),
    "far too many": ([tensor()] * 9, "tensors"),
    "none": ([], "0 tensors, expected 2"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_that_does_not_fit_is_refused(name: str) -> None:
    tensors, reason = TENSORS[name]

    async def check(site: Site) -> None:
        header, payload = site.forward(tensors=tensors)
        assert reason in await refused(site, site.other.peer, header, payload)

    on_site(check)


@pytest.mark.parametrize("keep", [0, 1, 500, 575])
def test_a_cut_payload_is_refused(keep: int) -> None:
    async def check(site: Site) -> None:
        header, payload = site.forward()
        reason = await refused(site, site.other.peer, header, [payload[0][:keep]])
        assert "bytes" in reason

    on_site(check)


@pytest.mark.parametrize("target", [-5, 10, 1 << 40])
def test_targets_that_no_model_can_take_cost_that_microbatch_alone(target: int) -> None:
    """They fit in shape and dtype, so they are found when the loss is computed."""

    async def check(site: Site) -> None:
        header, payload = site.forward()
        spoilt = bytearray(payload[0])
        spoilt[512:520] = target.to_bytes(8, "little", signed=True)
        reply = await site.server.handle(site.other.peer, Frame(header, [memoryview(spoilt)]))
        assert reply.header["kind"] == "ok"
        await anyio.sleep(5.0)
        assert not site.peer.stage.ledger.held

    on_site(check)


@pytest.mark.parametrize("kind", ["reset", "cancel", "finish", "prepare"])
def test_what_only_a_trainer_may_say_is_refused_from_others(kind: str) -> None:
    async def check(site: Site) -> None:
        for sender in (STRANGER, site.other.peer):
            assert "is not a trainer" in await refused(site, sender, site.control(kind))

    on_site(check)


@pytest.mark.parametrize("kind", ["reset", "cancel", "finish", "prepare"])
def test_a_lower_term_is_refused_with_the_higher_one(kind: str) -> None:
    async def check(site: Site) -> None:
        header = site.control(kind) | {"stamp": [0, "0" * 16, 99]}
        before = state_of(site.world)
        reply = await site.server.handle(TRAINER, Frame(header))
        assert (reply.header["kind"], reply.header["term"]) == ("refused", 1)
        assert state_of(site.world) == before

    on_site(check)


def test_microbatches_of_a_later_step_or_trainer_are_not_kept() -> None:
    async def check(site: Site) -> None:
        later = Mark(site.mark.term, site.mark.t + 1)
        for changes in (
            {"mark": [later.term.number, later.term.boot, later.t]},
            {"stamp": [2, "ff", 1]},
        ):
            header, payload = site.forward(**changes)
            before = state_of(site.world)
            reply = await site.server.handle(site.other.peer, Frame(header, payload))
            assert reply.header["kind"] == "busy"
            assert state_of(site.world) == before

    on_site(check)


def test_parts_and_sums_of_other_rounds_are_refused() -> None:
    async def check(site: Site) -> None:
        total = torch.zeros(site.peer.stage.model.length)
        metas, payload = pack([(total, RAW)])
        for kind in (msg.Part, msg.Sum):
            message = kind(
                run=site.run,
                round=Stamp(Term(1, f"{0xABC:016x}"), 1),
                piece=0,
                sender=site.other,
                tensors=metas,
            )
            reason = await refused(
                site, site.other.peer, msg.header(message), [memoryview(b"".join(payload))]
            )
            assert "round is dead" in reason

    on_site(check)


def test_state_beyond_the_vector_or_at_another_mark_is_not_given() -> None:
    async def check(site: Site) -> None:
        ask = msg.GetState(
            run=site.run, mark=site.mark, stage=site.server.host.stage.stage, start=1 << 40, count=1
        )
        assert "values" in await refused(site, TRAINER, msg.header(ask))
        reply = await site.server.handle(
            TRAINER, Frame(msg.header(ask.model_copy(update={"mark": FRESH, "start": 0})))
        )
        assert reply.header["kind"] == "at"

    on_site(check)


# -- the trainer ----------------------------------------------------------------------------------


def receipt(world: World, boot: str, **changes: Any) -> dict[str, Any]:
    message = msg.Receipt(
        run=world.manifest.run_id,
        stamp=Stamp(world.trainer.term, 1),
        m=0,
        stage=0,
        boot=boot,
        pass_="backward",
        verdict="counted",
        queue_s=0.0,
        compute_s=0.0,
        link_s=0.0,
    )
    return msg.header(message) | changes


async def trainer_refuses(world: World, sender: str, header: dict[str, Any]) -> str:
    before = state_of(world)
    reply = await world.trainer.inbox.handle(sender, Frame(header))
    assert reply.header["kind"] == "refused", reply.header
    assert state_of(world) == before
    return reply.header["reason"]


def test_the_trainer_believes_members_only() -> None:
    async def check(site: Site) -> None:
        world, boot = site.world, site.peer.node.me.boot
        peer = site.peer.peer_id
        assert "not a member" in await trainer_refuses(world, STRANGER, receipt(world, boot))
        assert "not a member" in await trainer_refuses(world, peer, receipt(world, "ab"))
        bad = receipt(world, boot, run="f" * 32)
        assert "leads run" in await trainer_refuses(world, peer, bad)
        for changes in ({"loss": float("nan")}, {"stamp": None}, {"queued": -1}, {"m": "x"}):
            await trainer_refuses(world, peer, receipt(world, boot, **changes))
        header, _ = site.forward()
        assert "not for a trainer" in await trainer_refuses(world, peer, header)
        goodbye = msg.Goodbye(run=site.run, boot="ab", reason="mischief")
        assert "not a member" in await trainer_refuses(world, peer, msg.header(goodbye))

    on_site(check)


def test_nonsense_from_a_member_does_not_disturb_a_step() -> None:
    """Receipts, votes and failures of attempts, rounds and microbatches that do not exist."""

    async def scenario(world: World) -> None:
        await world.start_all(2)
        liar = world.of_stage(0)[0].node.me
        stranger = Replica(STRANGER, "ab")
        term, run = world.trainer.term, world.manifest.run_id

        async def lie() -> None:
            for n in (0, 10**6, 2**62):
                stamp = Stamp(term, n)
                for message in (
                    msg.Vote(
                        run=run,
                        round=stamp,
                        stage=1,
                        boot=liar.boot,
                        digest="",
                        squared_norm=float("nan"),
                        finite=False,
                    ),
                    msg.Trouble(run=run, round=stamp, stage=0, boot=liar.boot, missed=[stranger]),
                    msg.Failed(
                        run=run,
                        stamp=stamp,
                        m=1 << 19,
                        boot=liar.boot,
                        reason="",
                        skipped=[stranger],
                    ),
                ):
                    reply = await world.trainer.inbox.handle(liar.peer, Frame(msg.header(message)))
                    assert reply.header["kind"] == "ok"
                header = receipt(
                    world, liar.boot, stamp=[term.number, term.boot, n], m=1 << 19, stage=1000
                )
                header |= {"blame": [STRANGER, "ab"], "verdict": "not finite", "loss": 1e300}
                reply = await world.trainer.inbox.handle(liar.peer, Frame(header))
                assert reply.header["kind"] == "ok"
                await anyio.sleep(0.01)

        world.tasks.start_soon(lie)
        await world.train(2)

    from tests.chaos.harness import reference

    manifest = digits_manifest(start__replicas=2)
    world = run_world(manifest, scenario)
    expected = [result.loss for result in reference(manifest, 2).results]
    assert [done.loss for done in world.done] == pytest.approx(expected, rel=1e-5)


# -- anything at all ------------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner)
)
KINDS = [
    "question reset forward backward cancel prepare fetch decide get_state finish part sum",
    "get_sum receipt failed vote trouble goodbye ok busy refused status holds prepared at",
]
kinds = st.sampled_from(" ".join(KINDS).split())


@st.composite
def spoilt_headers(draw: st.DrawFn) -> dict[str, Any]:
    """A header of some kind with fields that are named rightly and filled at random."""
    model = draw(st.sampled_from([*_requests(), *_replies()]))
    names = sorted(model.model_fields)
    chosen = draw(st.lists(st.sampled_from(names), unique=True))
    header = {name: draw(values) for name in chosen}
    header["kind"] = model.model_fields["kind"].default
    return header


def _requests() -> list[type[msg.Message]]:
    return list(msg.AnyRequest.__args__)  # type: ignore[attr-defined]


def _replies() -> list[type[msg.Message]]:
    return list(msg.AnyReply.__args__)  # type: ignore[attr-defined]


headers = spoilt_headers() | st.dictionaries(st.text(max_size=8), values, max_size=6)


def test_whatever_comes_is_answered_and_changes_nothing() -> None:
    """Headers at random, with the run's name and without, from the trainer and from others."""

    async def check(site: Site) -> None:
        frames: list[tuple[str, dict[str, Any], bytes]] = []

        @settings(
            max_examples=400,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            st.sampled_from([TRAINER, STRANGER, site.other.peer]),
            headers,
            st.binary(max_size=64),
            st.booleans(),
        )
        def collect(sender: str, header: dict[str, Any], payload: bytes, ours: bool) -> None:
            frames.append((sender, header | ({"run": site.run} if ours else {}), payload))

        collect()
        before = state_of(site.world)
        for sender, header, payload in frames:
            body = [memoryview(bytearray(payload))] if payload else []
            for handle in (site.server.handle, site.world.trainer.inbox.handle):
                reply = await handle(sender, Frame(header, body))
                assert reply.header["kind"] in {"refused", "status", "busy", "at", "ok"}, header
                assert len(msgpack.packb(reply.header)) < 2000
        assert state_of(site.world) == before

    on_site(check)
