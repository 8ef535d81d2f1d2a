"""Regenerates ``configs/<arch>/moe_gemm.csv``.

    python tune/moe_gemm.py                # on a GPU: its architecture's table, measured
    python tune/moe_gemm.py --arch gfx950  # without one: that table by the model

Whatever else ``aiter-mx tune moe_gemm`` takes may follow.
"""

from shipped import tune

if __name__ == "__main__":
    tune("moe_gemm", ["wide-6144", "gpt-oss-120b"])
