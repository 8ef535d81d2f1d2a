"""Writes the tables of figures in README.md and docs/ from the CSVs in docs/measured/.

    python -m tune.figures           # writes them
    python -m tune.figures --check   # exits with 1 where one is not what the CSVs say

A table stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``. Every figure in prose
belongs in such a table, so that no document can say what no benchmark wrote.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from tune import figures_kernels as kernels
from tune import figures_uses as uses
from tune.figures_shared import ROOT

_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURES: dict[str, Callable[[], str]] = {
    each.__name__: each
    for each in (
        kernels.linear,
        kernels.moe,
        kernels.grouped,
        kernels.quantize,
        kernels.zoo,
        kernels.every_m,
        kernels.summary,
        kernels.moe_layers,
        kernels.hand_overs,
        kernels.variants,
        kernels.few_rows,
        kernels.blocks,
        kernels.values,
        kernels.promoted,
        uses.training,
        uses.host,
        uses.routes,
        uses.perplexity,
        uses.model,
        uses.capacity,
        uses.invariance,
        uses.distributed,
        uses.warmup,
    )
}


def filled(text: str) -> str:
    """``text`` with every table of figures made anew.

    Raises:
        KeyError: a marker names no table.
    """
    return _BLOCK.sub(lambda found: f"{found[1]}\n{FIGURES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    check = parser.parse_args().check
    stale = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(after, encoding="utf-8")
    if stale:
        print(f"{'stale' if check else 'written'}: {', '.join(stale)}")
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
