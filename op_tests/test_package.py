"""The package as a user gets it: importing it does nothing, and its wheel carries what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import aiter_mx
from aiter_mx import codec, numerics
from aiter_mx.kernels.registry import ops

CHECKOUT = Path(__file__).parents[1]

IMPORT = """
import json, logging, os, sys, threading, time
environment, path, threads = dict(os.environ), list(sys.path), threading.active_count()
started = time.perf_counter()
import aiter_mx
seconds = time.perf_counter() - started
print(json.dumps({
    "seconds": seconds,
    "heavy": sorted({"torch", "triton", "pandas", "hip", "cuda", "typer"} & set(sys.modules)),
    "environment": dict(os.environ) == environment,
    "path": sys.path == path,
    "threads": threading.active_count() == threads,
    "loggers": [n for n, l in logging.root.manager.loggerDict.items() if getattr(l, "handlers", 0)],
    "names": sorted(set(aiter_mx.__all__) - set(dir(aiter_mx))),
}))
"""

USE = """
import json, sys, torch, aiter_mx
from aiter_mx.paths import configs_dir, csrc_dir
generator = torch.Generator().manual_seed(7)
x, w = (torch.randn(rows, 96, generator=generator) for rows in (3, 40))
(xq, xs), (wq, ws) = aiter_mx.quantize(x), aiter_mx.quantize(w)
expected = aiter_mx.dequantize(xq, xs).double() @ aiter_mx.dequantize(wq, ws).double().T
got = aiter_mx.linear(xq, xs, wq, ws, out_dtype=torch.float32)
print(json.dumps({
    "package": aiter_mx.__file__,
    "csrc": str(csrc_dir()),
    "configs": str(configs_dir()),
    "error": float((got - expected).norm() / expected.norm()),
}))
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=CHECKOUT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder into which the wheel alone is installed."""
    site = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(site), str(wheel), cwd=site)
    return site


def test_importing_is_quick_and_does_nothing():
    runs = [json.loads(run(sys.executable, "-c", IMPORT, cwd=CHECKOUT)) for _ in range(3)]
    assert min(found.pop("seconds") for found in runs) < 0.2  # others may use the machine meanwhile
    assert runs[0] == {
        "heavy": [],
        "environment": True,
        "path": True,
        "threads": True,
        "loggers": [],
        "names": [],
    }


def test_no_module_takes_the_name_of_something_public():
    """Importing ``aiter_mx.x`` sets ``aiter_mx.x``, whatever function had that name."""
    modules = {path.stem for path in (CHECKOUT / "aiter_mx").iterdir()}
    assert not modules & set(aiter_mx.__all__)


def test_every_public_name_resolves():
    for name in aiter_mx.__all__:
        assert getattr(aiter_mx, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'linaer'"):
        aiter_mx.linaer  # noqa: B018, the access is what is tested


def test_wheel_carries_every_source_and_table_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for room in ("csrc", "configs"):
        files = [path for path in (CHECKOUT / room).rglob("*") if path.is_file()]
        assert files
        missing = {f"aiter_mx/{path.relative_to(CHECKOUT)}" for path in files} - names
        assert not missing
    others = (path for path in (CHECKOUT / "aiter_mx").rglob("*") if path.is_file())
    expected = {
        str(path.relative_to(CHECKOUT)) for path in others if "__pycache__" not in path.parts
    }
    assert expected <= names
    strangers = [name for name in names if not name.startswith("aiter_mx")]
    assert not strangers


def test_installed_wheel_works_from_any_folder(installed, tmp_path):
    environment = {"PYTHONPATH": str(installed), "AITER_MX_CACHE_DIR": str(tmp_path / "cache")}
    found = json.loads(run(sys.executable, "-c", USE, cwd=tmp_path, **environment))
    assert found.pop("error") < 1e-6
    for path in found.values():
        assert Path(path).is_relative_to(installed)
        assert Path(path).exists()


def test_installed_wheel_compiles_its_kernels(installed, tmp_path):
    environment = {"PYTHONPATH": str(installed), "AITER_MX_CACHE_DIR": str(tmp_path / "cache")}
    build = ("build", "--arch", "gfx950", "--shape", "2x40x96", "--out-dtype", "fp32")
    out = run(sys.executable, "-m", "aiter_mx.cli", *build, cwd=tmp_path, **environment)
    assert "1 compiled" in out


def test_command_is_an_entry_point(installed):
    assert (installed / "bin" / "aiter-mx").is_file()


def test_every_op_can_be_the_first_that_is_asked_for() -> None:
    """Kernels of one op may be another's too; whose module is imported first must not matter."""
    script = (
        "import os, sys, torch\n"  # once, as it takes longest
        "for op in sys.argv[1:]:\n"
        "    if (child := os.fork()) == 0:\n"
        "        from aiter_mx.kernels.registry import kernels_of\n"
        "        kernels_of(op)\n"
        "        os._exit(0)\n"
        "    if os.waitpid(child, 0)[1]:\n"
        "        sys.exit(f'{op} cannot be the first')\n"
    )
    subprocess.run([sys.executable, "-c", script, *ops()], check=True)


def test_routes_are_found_without_torch():
    script = (
        "import sys, aiter_mx\n"
        "shape = dict(M=3, N=64, K=64)\n"
        "found = [aiter_mx.explain('linear', arch=a, **shape) for a in ('gfx950', 'sm_90a')]\n"
        "print(len([route.reason for route in found]), 'torch' in sys.modules)"
    )
    assert run(sys.executable, "-c", script, cwd=CHECKOUT).split() == ["2", "False"]


def test_names_that_need_no_torch_are_those_of_its_dtypes_and_formats():
    assert {n: dtype.itemsize for n, dtype in codec.DTYPES.items()} == numerics.DTYPE_BYTES
    assert (tuple(codec.FORMATS), tuple(codec.ROUNDING)) == (numerics.PAYLOADS, numerics.MODES)
