"""The documents: they build without a warning, and their figures are those of the saved runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from aiter_mx.kernels.registry import kernels_of, ops

ROOT = Path(__file__).resolve().parent.parent


def test_figures_are_those_of_the_saved_runs() -> None:
    check = [sys.executable, "-m", "tune.figures", "--check"]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"python -m tune.figures writes them: {done.stdout}{done.stderr}"


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir"]
    done = subprocess.run(
        [*build, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 130
    links = re.findall(r"\]\(([^)#:]+)[^)]*\)", text)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_files_and_modules_that_pages_and_sources_name_are_there() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    pages += sorted(p for p in (ROOT / "aiter_mx").rglob("*.py") if "sim" not in p.parts)
    pages += sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cu", ".h"))
    rooms = "csrc|aiter_mx|op_tests|tune|configs|docs"
    missing = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        paths = re.findall(rf"(?<![\w/.@-])((?:{rooms})/[\w./-]*\w)(?![\w./<*{{-])", text)
        modules = re.findall(r"python -m ((?:aiter_mx|op_tests|tune)[\w.]*\w)", text)
        paths += [name.replace(".", "/") for name in modules]
        missing += [
            f"{page.name}: {path}"
            for path in dict.fromkeys(paths)
            if not any((ROOT / f"{path}{ending}").exists() for ending in ("", ".py"))
        ]
    assert not missing


@pytest.mark.parametrize(
    ("page", "of"),
    [
        ("docs/kernels/index.md", ops()),
        ("README.md", ("linear", "moe_gemm", "moe_align", "grouped_gemm", "quantize")),
    ],
)
def test_overviews_name_every_kernel_of_ours(page: str, of: Sequence[str]) -> None:
    overview = (ROOT / page).read_text(encoding="utf-8")
    ours = {kernel.name for op in of for kernel in kernels_of(op) if kernel.backend == "hip"}
    assert not [name for name in sorted(ours) if f"`{name}`" not in overview]
