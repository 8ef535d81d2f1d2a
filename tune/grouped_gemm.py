"""Regenerates ``configs/<arch>/grouped_gemm.csv``.

    python tune/grouped_gemm.py                # on a GPU: its architecture's table, measured
    python tune/grouped_gemm.py --arch gfx950  # without one: that table by the model

Whatever else ``aiter-mx tune grouped_gemm`` takes may follow.
"""

from shipped import tune

if __name__ == "__main__":
    models = ["deepseek-v3", "gpt-oss-20b", "gpt-oss-120b", "qwen3-235b-a22b", "qwen3-30b-a3b"]
    models += ["wide-6144", "wide-6144-256e"]
    tune("grouped_gemm", models, "--tp", "8,16,4")
