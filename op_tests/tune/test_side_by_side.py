"""Our decode kernels beside published ones: the saved table, and how its lines are made."""

from __future__ import annotations

import pandas as pd

from aiter_mx.sim.timing.model import predict
from tune.side_by_side import PUBLISHED_US, ROWS, SAVED, SHAPES, line, ours


def test_a_line_has_the_counts_of_all_launches() -> None:
    kernel, launches = ours(2, 96, 512)
    twice = line((2, 96, 512), "ours", (kernel, launches * 2), 1.5)
    assert (twice["M"], twice["launches"], twice["published_us"]) == (2, 2, 1.5)
    ((report, model),) = launches
    assert float(str(twice["predicted_us"])) == round(2 * predict(model).us, 2)
    assert float(str(twice["waits"])) == round(2 * report.latencies / model.groups, 1)


def test_the_saved_table_has_both_sides_of_every_shape() -> None:
    saved = pd.read_csv(SAVED).set_index(["N", "K", "M", "whose"])
    assert len(saved) == 2 * len(SHAPES) * len(ROWS) and saved.index.is_unique
    for (N, K, M), us in PUBLISHED_US.items():
        published = saved.loc[(N, K, M, "published")]
        assert published.published_us == us
        assert abs(published.predicted_us / us - 1) < 0.25
    predicted = saved.predicted_us.unstack()
    assert (predicted.ours < predicted.published).all()
