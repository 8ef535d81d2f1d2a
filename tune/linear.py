"""Regenerates ``configs/<arch>/linear.csv``.

    python tune/linear.py                # on a GPU: its architecture's table, measured
    python tune/linear.py --arch gfx950  # without one: that table by the model

Whatever else ``aiter-mx tune linear`` takes may follow.
"""

from shipped import tune

if __name__ == "__main__":
    models = ["wide-6144", "llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "llama-3.1-70b"]
    models += ["qwen3-235b-a22b", "llama-3.2-1b", "qwen3-32b", "llama-3.1-405b", "minilm-l6"]
    tune("linear", models, "--tp", "4,8,1,2")
