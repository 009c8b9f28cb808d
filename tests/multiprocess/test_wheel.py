"""The wheel, installed where no checkout is: it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("swarm", "dht", "peers")


def run(*command: object, folder: Path, **environment: str) -> str:
    """What it prints. Nothing of this checkout or of our own environment is seen by it."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A copy is built, so that nothing is written into the checkout.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", folder=ROOT)
    for name in files.splitlines():
        if name.partition("/")[0] in (*PACKAGES, "pyproject.toml", "README.md"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", out, source, folder=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a fresh environment with the wheel, and with the libraries (not this project) of ours."""
    place = tmp_path_factory.mktemp("fresh") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", place, folder=place.parent)
    packages = next(place.glob("lib/python*/site-packages"))
    # The path alone: the .pth files there, which lead to the checkout, are not read.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    return place / "bin" / "python"


def test_it_holds_all_packages_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {*PACKAGES, f"{wheel.stem[:11]}.dist-info"}
    assert "peers/cli.py" in names


def test_it_trains_from_another_folder(python: Path, tmp_path: Path):
    where = run(python, "-c", "import swarm; print(swarm.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(python.parents[1])
    out = tmp_path / "out"
    command = ("local", "--steps", 3, "--replicas", 1, "--out", out)
    run(python, "-m", "swarm", *command, folder=tmp_path, HOME=str(tmp_path))
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 3
    assert (out / "model.safetensors").exists() or any(out.glob("**/*.safetensors"))


def test_it_tells_its_versions(python: Path, tmp_path: Path):
    told = run(python, "-m", "swarm", "--version", folder=tmp_path)
    names = [line.rpartition(" ")[0] for line in told.splitlines()]
    assert names[:2] == ["swarm", "wire protocol"]
    assert {"torch", "hivemind", "libp2p"} < set(names)
