"""``swarm plan``: predictions that can be checked by hand, and what cannot be planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from peers.cli import app
from swarm.errors import ConfigError
from swarm.manifest import Manifest
from swarm.model.memory import Plan
from swarm.model.registry import model_spec
from swarm.model.spec import ModelSpec
from swarm.sim.plan import (
    best_cut,
    count_of,
    forecast,
    microbatch_sizes,
    more_peers,
    read_peers,
    share_of_fp32,
)

TINY = {
    "model.d_model": 16,
    "model.layers": 3,
    "model.heads": 2,
    "model.sequence": 8,
    "batch.microbatch": 4,
    "batch.microbatches": 16,
}


def manifest(stages: int, **more: object) -> Manifest:
    changes = {name.replace("__", "."): value for name, value in more.items()}
    return Manifest.from_tree({}).changed({**TINY, "stages.count": stages, **changes})


def peers(count: int = 2, tflops: float = 1e-6, **more: object) -> dict:
    group = {"count": count, "tflops": tflops, "up_mbps": 1e5, "down_mbps": 1e5, **more}
    return {"peers": [group], "latency": {"default_ms": 0}}


def work_s(m: Manifest, spec: ModelSpec, tflops: float = 1e-6) -> float:
    """Of a whole step at one machine."""
    samples = m.batch.microbatch * m.batch.microbatches
    return samples * sum(layer.cost for layer in spec.layers) / (tflops * 1e12)


def test_one_machine_takes_as_long_as_its_work():
    m = manifest(1)
    spec = model_spec(m)
    found = forecast(m, spec, peers(1))
    assert found.step_s == pytest.approx(work_s(m, spec), rel=0.02)
    assert found.samples_per_s == pytest.approx(64 / found.step_s)


def test_two_stages_take_that_of_the_slower_one_and_the_pipeline():
    m = manifest(2)
    spec = model_spec(m)
    found = forecast(m, spec, peers(2))
    costs = [sum(spec.layers[i].cost for i in layers) for layers in found.layers]
    slower = work_s(m, spec) * max(costs) / sum(costs)
    assert slower < found.step_s < slower * (1 + 2 / m.batch.microbatches) + 0.01 * slower


def test_a_slow_link_decides():
    m = manifest(2)
    spec = model_spec(m)
    up = 0.1
    found = forecast(m, spec, peers(2, tflops=1.0, up_mbps=up))
    boundary = spec.layers[0].output.nbytes(m.batch.microbatch) * m.batch.microbatches
    assert found.step_s == pytest.approx(boundary * 8 / (up * 1e6), rel=0.1)
    assert found.sent_bytes == pytest.approx(boundary, rel=0.2)
    small = forecast(
        manifest(2, wire__activations="int8", wire__gradients="int8"),
        spec,
        peers(2, tflops=1.0, up_mbps=up),
    )
    assert small.step_s < 0.3 * found.step_s


def test_codecs_shrink_what_travels():
    assert share_of_fp32("fp32") == 1
    assert share_of_fp32("bf16") == 0.5
    assert 0.25 < share_of_fp32("int8") < 0.27


def test_what_cannot_be_planned_is_said():
    m = manifest(3)
    with pytest.raises(ConfigError, match="as many as there are peers"):
        forecast(m, model_spec(m), peers(2))
    with pytest.raises(ConfigError, match="a stage takes at least"):
        forecast(m, model_spec(m), peers(3, memory_gib=1e-6))


def test_the_proposal_is_the_best_of_those_tried_and_fits():
    m = manifest(1)
    cuts, best = best_cut(m, model_spec(m), peers(3))
    assert [len(cut.layers) for cut in cuts] == [1, 2, 3]
    assert best.samples_per_s >= max(cut.samples_per_s for cut in cuts)
    assert best.manifest.batch.microbatch * best.manifest.batch.microbatches == 64
    least = min(min(x.total(Plan(0, checkpointing=True)) for x in c.memories) for c in cuts)
    with pytest.raises(ConfigError):
        best_cut(m, model_spec(m), peers(3, memory_gib=least / 8 / (1 << 30)))


def test_sizes_of_microbatches_keep_the_samples_of_a_step():
    assert microbatch_sizes(manifest(2)) == [
        {"batch.microbatch": 1, "batch.microbatches": 64},
        {"batch.microbatch": 2, "batch.microbatches": 32},
        {"batch.microbatch": 8, "batch.microbatches": 8},
    ]


def test_one_more_is_of_the_first_kind():
    given = {"peers": [{"count": 2, "tflops": 1.0}, {"count": 3}]}
    assert count_of(given) == 5
    assert more_peers(given)["peers"][0] == {"count": 3, "tflops": 1.0}
    assert count_of(more_peers({"peers": [{}]})) == 17


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("peers = 3", "a \\[\\[peers\\]\\] table"),
        ("[[peers]]\ntflops = -1", "peers.0.tflops"),
        ("[churn]\nkind = 'none'", "alone"),
        ("[[peers", "readable TOML"),
        ("[latency]\ndefault_ms = 3", "table for each kind"),
    ],
)
def test_a_file_that_is_wrong_is_said(tmp_path: Path, text: str, words: str):
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_peers(path)
    with pytest.raises(ConfigError, match="readable TOML"):
        read_peers(tmp_path / "missing.toml")


def test_the_command(tmp_path: Path):
    run, machines = tmp_path / "run.toml", tmp_path / "peers.toml"
    run.write_text(manifest(2).to_toml())
    machines.write_text("[[peers]]\ncount = 2\ntflops = 1e-6\n")
    runner = CliRunner()
    done = runner.invoke(app, ["plan", str(run), "--peers", str(machines), "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["asked"]["stages"] == 2
    assert found["best"]["samples_per_s"] >= found["asked"]["samples_per_s"]
    shown = runner.invoke(app, ["plan", str(run), "--peers", str(machines)]).output
    assert "proposed" in shown
    assert "cuts = [" in shown
    assert runner.invoke(app, ["plan", str(run), "--measure"]).output.startswith("tflops = 0.0")
    for words in (["plan", str(run)], ["plan", str(run), "--measure", "--peers", str(machines)]):
        assert runner.invoke(app, words).exit_code == 2
