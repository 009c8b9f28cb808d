"""The manifest: round trips, the run id, and one line for whatever is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.manifest import CANONICAL_BYTES, Manifest, default_manifest

OWN = """
name = "digits"
trainers = ["12D3KooWabc"]
[model]
kind = "tests.digits_model:mlp"
[model.args]
hidden = 16
rates = [0.5, 1e-30]
text = "quote \\" back \\\\ tab \\t del \\u007f é"
"odd key.x" = true
[data]
source = "python:tests.digits_model:digits"
"""


def line(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        Manifest.from_toml(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    return str(caught.value)


@pytest.mark.parametrize("manifest", [Manifest(), default_manifest(), Manifest.from_toml(OWN)])
def test_round_trips(manifest: Manifest) -> None:
    assert Manifest.from_toml(manifest.to_toml()) == manifest
    assert Manifest.from_canonical(manifest.canonical()) == manifest


def test_arguments_of_an_own_model_keep_type_and_text() -> None:
    manifest = Manifest.from_toml(OWN)
    assert manifest.model.args == tomllib.loads(OWN)["model"]["args"]
    assert Manifest.from_toml(manifest.to_toml()).model.args == manifest.model.args


def test_load_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(OWN, encoding="utf-8")
    assert Manifest.load(path) == Manifest.from_toml(OWN)


def test_the_run_id_follows_content_not_layout() -> None:
    one = Manifest.from_toml("seed = 3\n[batch]\nmicrobatch = 4\nmicrobatches = 2")
    other = Manifest.from_toml("# the same\nbatch = {microbatches = 2, microbatch = 4}\nseed = 3")
    assert one.run_id == other.run_id
    assert len(one.run_id) == 32
    assert one.run_id != one.changed({"seed": 4}).run_id


def test_whole_numbers_do_for_floats() -> None:
    whole, point = (Manifest.from_toml(f"[optimizer]\nlr = {lr}") for lr in ("1", "1.0"))
    assert whole.canonical() == point.canonical()


def test_changed_makes_a_validated_copy() -> None:
    manifest = Manifest()
    assert manifest.changed({"run.steps": 5, "name": "x"}).run.steps == 5
    assert manifest.run.steps != 5
    with pytest.raises(ConfigError, match=r"run\.steps: got 0"):
        manifest.changed({"run.steps": 0})


def test_cuts_say_the_count() -> None:
    stages = Manifest.from_toml("[stages]\ncuts = [3, 5]").stages
    assert (stages.count, stages.cuts) == (3, (3, 5))


@pytest.mark.parametrize(
    ("text", "field", "given", "allowed"),
    [
        ("sede = 3", "sede", "3", "did you mean 'seed'?"),
        ("[model]\nheds = 3", "model.heds", "3", "did you mean 'heads'? there are kind, d_model"),
        ("[mdl]\nx = 1", "mdl", "'a table'", "there are name, seed"),
        ('"a\\nb" = 1', "'a\\nb'", "1", "no field of this name"),
        ("[model]\nheads = 'a'", "model.heads", "'a'", "a whole number from 1 to 1024"),
        ("[model]\nheads = true", "model.heads", "True", "a whole number from 1 to 1024"),
        ("[model]\nd_model = 99999999999", "model.d_model", "99999999999", "1 to 65536"),
        ("model = 3", "model", "3", "a table with kind, d_model"),
        ("[model]\nd_model = 130", "model.d_model", "130", "a multiple of model.heads = 4"),
        ("[model]\nautocast = 'fp16'", "model.autocast", "'fp16'", "'none' or 'bf16'"),
        ("[model]\nkind = 'os.system'", "model.kind", "'os.system'", "'gpt' or 'module:function'"),
        ("[model.args]\nx = 1", "model.args", "['x']", "nothing, with kind = 'gpt'"),
        ("[model]\nkind = 'a:b'\n[model.args]\nx = [[1]]", "model.args.x", "[[1]]", "scalars"),
        ("[model]\ntied = true\n[stages]\ncount = 2", "model.tied", "True", "false when stages"),
        ("[model]\nd_model = 65536\nlayers = 1000", "model", "parameters'", "limits.parameters"),
        ("[model]\nvocabulary = 255", "model.vocabulary", "255", "from 256"),
        ("[stages]\ncuts = [5, 3]", "stages.cuts", "[5, 3]", "rising"),
        ("[stages]\ncuts = [0, 3]", "stages.cuts", "[0, 3]", "from 1"),
        ("[stages]\ncuts = [3, 8]", "stages.cuts", "[3, 8]", "from 1 to 7"),
        ("[stages]\ncuts = [3, 'a']", "stages.cuts.1", "'a'", "a list of layer numbers"),
        ("[stages]\ncuts = 3", "stages.cuts", "3", "a list of layer numbers"),
        ("[stages]\ncount = 3\ncuts = [4]", "stages.count", "3", "2 (or leave it out)"),
        ("[stages]\ncount = 9", "stages.count", "9", "at most 8"),
        ("[batch]\nmicrobatch = 65536", "limits.payload_bytes", "268435456", "at least"),
        (
            "[model]\nvocabulary = 16777216\nd_model = 4",
            "limits.working_bytes",
            "4294967296",
            "at least 68719476736",
        ),
        ("[optimizer]\nkind = 'lion'", "optimizer.kind", "'lion'", "'adamw' or 'sgd'"),
        ("[optimizer]\nlr = nan", "optimizer.lr", "nan", "a number from 0 to 1000"),
        ("[optimizer]\nlr = -1", "optimizer.lr", "-1", "a number from 0 to 1000"),
        ("[optimizer]\nbetas = [0.9, 1.0]", "optimizer.betas.1", "1.0", "two numbers"),
        ("[optimizer]\nmomentum = 0.9", "optimizer.momentum", "0.9", "0 with kind = 'adamw'"),
        (
            "[optimizer]\ntotal_steps = 5\nwarmup_steps = 5",
            "optimizer.total_steps",
            "5",
            "more than warmup_steps = 5",
        ),
        ("[wire]\naveraging = 'zip'", "wire.averaging", "'zip'", "'fp32' or 'bf16' or 'int8'"),
        (
            "[wire]\naveraging = 'bf16'\n[reproducible]\nenabled = true",
            "wire.averaging",
            "'bf16'",
            "'fp32' with reproducible.enabled = true",
        ),
        ("[reproducible]\nscale = 5", "reproducible.scale", "5", "a power of two, e.g. 4 or 8"),
        ("[data]\nsource = 'web'", "data.source", "'web'", "'stdlib', 'text:PATH'"),
        ("[data]\nsha256 = 'ab'", "data.sha256", "'ab'", "64 hexadecimal digits"),
        ("[periods]\nlease_s = 2", "periods.lease_s", "2.0", "more than periods.renew_s = 3"),
        ("trainers = ['a b']", "trainers.0", "'a b'", "a peer id"),
        ("name = '../x'", "name", "'../x'", "letters"),
        (f"name = '{'x' * 9999}'", "name", "xxx", "at most 64"),
        ("seed = 1.5", "seed", "1.5", "a whole number"),
        ("seed = 99999999999999999999", "seed", "99999999999999999999", "a whole number"),
        ("a = ", "manifest", "'the given text'", "TOML"),
        (f"seed = {'9' * 5000}", "manifest", "'the given text'", "TOML"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, field: str, given: str, allowed: str) -> None:
    message = line(text)
    assert message.startswith(f"{field}: got ")
    got, _, rest = message.partition("; allowed: ")
    assert given in got
    assert allowed in rest


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, why in ((tmp_path / "no", "no such file"), (tmp_path, "directory"), (binary, "UTF")):
        with pytest.raises(ConfigError, match=f"(?i){why}") as caught:
            Manifest.load(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"3",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"seed": NaN}',
        b"x" * (CANONICAL_BYTES + 1),
        Manifest().canonical() + b" ",
        Manifest().canonical().replace(b'"seed":0', b'"seed":-1'),
        Manifest().canonical().replace(b'"name":"run"', b'"name":"\\ud800"'),
    ],
)
def test_bytes_from_the_network_are_refused_unless_canonical(data: bytes) -> None:
    with pytest.raises(ConfigError) as caught:
        Manifest.from_canonical(data)
    assert len(str(caught.value)) < 500


def test_a_manifest_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Manifest().seed = 3  # type: ignore[misc]


def test_parameters_are_counted_as_the_model_has_them() -> None:
    from swarm.model.registry import build_layer, model_spec

    for tied in (False, True):
        manifest = Manifest.from_tree({"model": {"d_model": 8, "layers": 2, "tied": tied}})
        spec = model_spec(manifest)
        layers = [build_layer(manifest, spec, index) for index in range(len(spec.layers))]
        total = sum(p.numel() for layer in layers for p in layer.parameters())
        assert manifest.model.parameters == total - (256 * 8 if tied else 0)
