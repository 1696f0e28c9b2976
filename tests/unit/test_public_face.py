"""The names that are public: documented, importable, and there without what they need."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import kvshm
from kvshm.client.cache_client import CacheClient
from tests.support.cache_server import NHD, layers, running_server
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_public_name_is_documented() -> None:
    listed = re.findall(r"`kvshm\.(\w+)`", (ROOT / "docs" / "api.md").read_text())
    assert len(set(listed)) == len(listed)
    assert sorted(listed) == sorted({*kvshm.__all__, "strategies"})


def test_the_documentation_uses_public_names_only() -> None:
    for page in PAGES:
        for name in re.findall(r"\bkvshm\.(\w+)", page.read_text()):
            is_module = find_spec(f"kvshm.{name}") is not None
            assert name in kvshm.__all__ or is_module or name in ("git", "py"), f"{page.name} names kvshm.{name}"


def test_every_public_name_is_there() -> None:
    for name in kvshm.__all__:
        assert getattr(kvshm, name) is not None
        assert name in dir(kvshm)


WITHOUT_PYZMQ = """
import importlib.util, inspect, pydoc, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "zmq" else real(name, *more)
sys.modules["zmq"] = None
import kvshm
names = [name for name, _ in inspect.getmembers(kvshm)]
assert "CacheClient" not in names and "CPUCacheContext" in names
assert "CPUCacheContext" in pydoc.render_doc(kvshm)
exec("from kvshm import *")
try:
    kvshm.CacheClient
except ImportError as error:
    print(error)
"""


def test_the_package_can_be_inspected_without_pyzmq() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYZMQ], capture_output=True, text=True, check=False, env=environment()
    )
    assert (done.stdout, done.stderr) == ("kvshm.CacheClient needs pyzmq: pip install 'kvshm[server]'\n", "")


def test_what_is_owned_says_what_it_is() -> None:
    arrays = layers()
    context = kvshm.CPUCacheContext(arrays, 6, NHD)
    assert repr(context) == "CPUCacheContext(2 layers of NL_X_TWO_NB_BS_NH_HS, 31 blocks, chunks of 6 tokens)"
    context.close()
    assert repr(context).endswith("tokens, closed)")
    with running_server(capacity=1 << 16) as server:
        assert repr(server) == f"CacheServer(65536 bytes, chunks of 6 tokens, at {server.endpoint})"
        with CacheClient(server.endpoint) as client:
            assert repr(client) == f"CacheClient('{server.endpoint}', not connected)"
            engine = client.register(arrays, "llama", layout_hints=NHD, world_size=2, worker_id=1)
            assert repr(client) == f"CacheClient('{server.endpoint}', up)"
            text = f"Engine(instance {engine.instance_id}, model 'llama', worker 1 of 2, lmcache_driven, registered)"
            assert repr(engine) == text
            engine.unregister()
            assert repr(engine).endswith("lmcache_driven, over)")
    assert repr(server) == "CacheServer(65536 bytes, chunks of 6 tokens, not running)"
