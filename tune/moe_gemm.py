"""Regenerates ``configs/<arch>/moe_gemm.csv``.

    python tune/moe_gemm.py                # on a GPU: its architecture's table, measured
    python tune/moe_gemm.py --arch gfx950  # without one: that table by the model

Whatever else ``aiter-mx tune moe_gemm`` takes may follow.
"""

from shipped import tune

if __name__ == "__main__":
    models = ["wide-6144", "wide-6144-256e", "gpt-oss-120b", "gpt-oss-20b", "deepseek-v3"]
    tune("moe_gemm", [*models, "qwen3-235b-a22b"], "--tp", "4,8,2,1")
