"""Regenerates ``configs/<arch>/linear.csv``.

    python tune/linear.py                # on a GPU: its architecture's table, measured
    python tune/linear.py --arch gfx950  # without one: that table by the model

Whatever else ``aiter-mx tune linear`` takes may follow.
"""

from shipped import tune

if __name__ == "__main__":
    tune("linear", ["wide-6144", "minilm-l6"])
