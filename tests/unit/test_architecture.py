"""The house rules that a machine can check: who may import whom, and what nobody may call.

Imports go rightwards only: scripts -> peers -> dht -> swarm. swarm/ knows no sockets, threads,
processes or event loops; swarm/core the standard library alone, beside the shared nouns and errors.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("scripts", "peers", "dht", "swarm")
CORE = "swarm.core"
CORE_MAY_IMPORT = (CORE, "swarm.types", "swarm.errors")
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
TORCH_PICKLES = {"torch.load", "torch.save"}
EVALUATORS = {"eval", "exec", "__import__"}
# Clocks, sources of chance, and the world outside: decisions get what they need as arguments.
WORLDLY = {
    *("time", "datetime", "calendar", "sched", "secrets", "uuid", "os", "io", "pathlib"),
    *("queue", "urllib", "http", "tempfile", "shutil", "glob", "logging"),
}
# What no module of swarm/ touches, not even outside the core: it decides, others act.
ACTING = {
    *("socket", "ssl", "select", "selectors", "asyncio", "anyio", "trio", "threading"),
    *("multiprocessing", "concurrent", "subprocess", "signal"),
}
# Libraries that are mended where they are used: each is imported in one place, with the mends.
ONLY_IN = {
    "libp2p": "peers.libp2p_parts",
    "hivemind.p2p": "dht.hivemind_p2p",
    "hivemind.proto.p2pd_pb2": "dht.hivemind_p2p",
}
Sources = Mapping[str, str]
"""Source text by dotted module name."""


def read_sources(root: Path = ROOT) -> dict[str, str]:
    sources = {}
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            sources[name] = path.read_text(encoding="utf-8")
    return sources


def violations(sources: Sources) -> list[str]:
    """Every breach of a rule, as ``module:line: what``; and the import cycles."""
    packages = {name.rpartition(".")[0] for name in sources}
    modules = {name: Module(name, text, name in packages) for name, text in sources.items()}
    found = [breach for module in modules.values() for breach in module.breaches(sources)]
    graph = {name: set(module.dependencies(sources)) for name, module in modules.items()}
    cycle = find_cycle(graph)
    return [*found, f"import cycle: {' -> '.join(cycle)}"] if cycle else found


class Module:
    """One parsed source file and the rules that a single file can break."""

    def __init__(self, name: str, text: str, is_package: bool = False) -> None:
        self.name = name
        self.layer = name.partition(".")[0]
        self.in_core = name == CORE or name.startswith(CORE + ".")
        self.tree = ast.parse(text, name)
        self.package = name if is_package else name.rpartition(".")[0]

    def imports(self, tree: ast.AST | None = None) -> Iterator[tuple[int, str, str]]:
        """(line, module, name or "") of each import, lazy ones too; relative ones resolved."""
        for node in ast.walk(tree or self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = self.package.split(".")
                    above = parts[: len(parts) - node.level + 1]
                    base = ".".join([*above, base] if base else above)
                yield from ((node.lineno, base, alias.name) for alias in node.names)

    def dependencies(self, sources: Sources) -> Iterator[str]:
        """Modules of this project that must be loaded for this one, apart from its packages."""
        for_types = {
            found
            for node in ast.walk(self.tree)
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for part in node.body
            for found in self.imports(part)
        }
        for found in self.imports():
            target = f"{found[1]}.{found[2]}" if f"{found[1]}.{found[2]}" in sources else found[1]
            if found not in for_types and target in sources:
                yield target

    def breaches(self, sources: Sources) -> Iterator[str]:
        for line, module, name in self.imports():
            for breach in self._import_breaches(sources, module, name):
                yield f"{self.name}:{line}: {breach}"
        for node in ast.walk(self.tree):
            for breach in self._use_breaches(node):
                yield f"{self.name}:{getattr(node, 'lineno', 0)}: {breach}"

    def _import_breaches(self, sources: Sources, module: str, name: str) -> Iterator[str]:
        top = module.partition(".")[0]
        full = f"{module}.{name}" if name else module
        if top == "tests":
            yield f"{self.layer} may not import tests"
        if top in LAYERS and LAYERS.index(top) < LAYERS.index(self.layer):
            yield f"{self.layer} may not import {top}"
        if top in UNPICKLERS:
            yield f"{top} runs code that it is given"
        if full in TORCH_PICKLES:
            yield f"{full} pickles"
        for library, place in ONLY_IN.items():
            if self.name != place and f"{full}.".startswith(f"{library}."):
                yield f"{library} is imported in {place} alone"
        if self.layer == "swarm" and top in ACTING:
            yield f"swarm may not import {top}: it decides, others act"
        if self.in_core:
            yield from self._core_import_breaches(sources, module, full)

    def _core_import_breaches(self, sources: Sources, module: str, full: str) -> Iterator[str]:
        top = module.partition(".")[0]
        target = full if full in sources else module
        if top in LAYERS:
            if not any(target == ok or target.startswith(ok + ".") for ok in CORE_MAY_IMPORT):
                yield f"{CORE} may not import {target}"
        elif top not in sys.stdlib_module_names:
            yield f"{CORE} may not import {top}: not of the standard library"
        elif top in WORLDLY:
            yield f"{CORE} may not import {top}: a clock, chance or the world outside"
        if top == "random" and full not in ("random", "random.Random"):
            yield f"{CORE} may not use {full}: take a random.Random"

    def _use_breaches(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Attribute):
            used = ast.unparse(node)
            if used in TORCH_PICKLES:
                yield f"{used} pickles"
            if self.in_core and used.startswith("random.") and used != "random.Random":
                yield f"{CORE} may not use {used}: take a random.Random"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in EVALUATORS or called.removeprefix("builtins.") in EVALUATORS:
                yield f"{called} runs code that it is given"
            if self.in_core and called in ("random.Random", "Random") and not node.args:
                yield f"{CORE} may not make an unseeded random.Random"
        if (
            isinstance(node, ast.keyword)
            and node.arg == "allow_pickle"
            and ast.unparse(node.value) != "False"
        ):
            yield "allow_pickle runs code that it is given"


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Some cycle as a path that ends where it began, or nothing."""
    done: set[str] = set()
    path: list[str] = []

    def visit(node: str) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        path.append(node)
        for target in sorted(graph[node]):
            if cycle := visit(target):
                return cycle
        path.pop()
        done.add(node)
        return []

    for node in sorted(graph):
        if cycle := visit(node):
            return cycle
    return []


def test_the_house_is_in_order():
    assert violations(read_sources()) == []


def test_every_layer_is_read():
    names = set(read_sources())
    assert {"swarm.types", "swarm.core", "dht.directory", "peers.transport"} <= names
    assert any(name.startswith("scripts.") for name in names)


@pytest.mark.parametrize(
    ("module", "text", "breach"),
    [
        ("swarm.data", "import dht", "swarm may not import dht"),
        ("swarm.data", "def f():\n    from peers.wire import x", "swarm may not import peers"),
        ("dht.records", "from peers import wire", "dht may not import peers"),
        ("dht.records", "from ..peers import wire", "dht may not import peers"),
        ("peers.node", "import scripts.node", "peers may not import scripts"),
        ("peers.node", "from tests.unit import fakes", "peers may not import tests"),
        ("swarm.data", "import socket", "others act"),
        ("swarm.core.step", "import threading", "others act"),
        ("swarm.core.step", "import torch", "not of the standard library"),
        ("swarm.core.step", "from numpy import array", "not of the standard library"),
        ("swarm.core.step", "from swarm.codecs import x", "may not import swarm.codecs"),
        ("swarm.core.step", "from swarm import manifest", "may not import swarm"),
        ("swarm.core.step", "from ..codecs import x", "may not import swarm.codecs"),
        ("swarm.core.step", "import time", "may not import time"),
        ("swarm.core.step", "from time import monotonic", "may not import time"),
        ("swarm.core.step", "import os", "may not import os"),
        ("swarm.core.step", "import random\nx = random.random()", "use random.random"),
        ("swarm.core.step", "from random import shuffle", "use random.shuffle"),
        ("swarm.core.step", "import random\nr = random.Random()", "unseeded"),
        ("swarm.core", "import time", "may not import time"),
        ("peers.state", "import pickle", "pickle runs code"),
        ("peers.state", "from pickle import loads", "pickle runs code"),
        ("peers.state", "import torch\ntorch.load('x')", "torch.load pickles"),
        ("peers.state", "from torch import load", "torch.load pickles"),
        ("peers.state", "import numpy\nnumpy.load('x', allow_pickle=True)", "allow_pickle"),
        ("peers.node", "import libp2p", "in peers.libp2p_parts alone"),
        ("scripts.node", "from libp2p.peer.id import ID", "in peers.libp2p_parts alone"),
        ("dht.hivemind_dht", "from hivemind.p2p import P2P", "in dht.hivemind_p2p alone"),
        ("peers.p2pd", "from hivemind import p2p", "in dht.hivemind_p2p alone"),
        ("peers.p2pd", "from hivemind.proto import p2pd_pb2", "in dht.hivemind_p2p alone"),
        ("scripts.node", "eval('1')", "eval runs code"),
        ("scripts.node", "exec('x = 1')", "exec runs code"),
        ("scripts.node", "import builtins\nbuiltins.exec('x')", "builtins.exec runs code"),
    ],
)
def test_a_breach_is_seen(module, text, breach):
    found = violations({module: text})
    assert len(found) >= 1
    assert found[0].startswith(f"{module}:")
    assert breach in found[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("scripts.node", "import peers, dht, swarm, torch, time"),
        ("peers.stage", "model.eval()\nimport torch\ntorch.compile"),
        ("dht.records", "from swarm.types import Mark"),
        ("peers.libp2p_parts", "from libp2p.peer.id import ID"),
        ("dht.hivemind_p2p", "from hivemind.p2p import P2P"),
        ("dht.hivemind_dht", "from hivemind.dht import DHTNode\nimport libp2pish"),
        ("dht.records", "import numpy\nnumpy.load('x', allow_pickle=False)"),
        ("swarm.core.step", "from swarm.types import Mark\nfrom swarm.core.ledger import Ledger"),
        ("swarm.core.step", "from . import ledger\nfrom ..errors import SwarmError"),
        ("swarm.core.step", "import random\nr: random.Random = random.Random(7)"),
        ("swarm.core.step", "from random import Random\nimport heapq, dataclasses"),
    ],
)
def test_what_is_allowed_is_not_a_breach(module, text):
    assert violations({module: text}) == []


def test_cycles_are_seen_through_packages_and_lazy_imports():
    sources = {
        "swarm": "",
        "swarm.a": "from swarm import b",
        "swarm.b": "def f():\n    import swarm.c",
        "swarm.c": "from .a import x",
    }
    assert violations(sources) == ["import cycle: swarm.a -> swarm.b -> swarm.c -> swarm.a"]


def test_a_package_may_gather_its_modules_and_types_may_point_back():
    sources = {
        "swarm.model": "from swarm.model.gpt import GPT",
        "swarm.model.gpt": "from swarm.model import layers",
        "swarm.model.layers": (
            "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from swarm.model.gpt import GPT"
        ),
    }
    assert violations(sources) == []
