"""Open models whose shapes tables are tuned for, by what their configuration files say.

``Model.linears`` and the rest give the shapes on one of several GPUs that share a model by tensor
parallelism, as serving engines cut it: qkv and gate_up by output features, o_proj and down by the
reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

TENSOR_PARALLEL = (1, 2, 4, 8)


@dataclass(frozen=True)
class Experts:
    """A model's mixture of experts.

    Attributes:
        count: routed experts of a layer.
        top_k: those that a token goes to.
        intermediate: their width; gate and up together are twice that.
    """

    count: int
    top_k: int
    intermediate: int


@dataclass(frozen=True)
class Model:
    """Sizes of a model's layers.

    Attributes:
        hidden: width of the residual stream.
        heads, kv_heads, head_dim: of the attention.
        intermediate: width of a dense feed-forward layer, 0 where all layers have experts.
        experts: of layers that have some.
        whole: (N, K) of other linears, which every GPU has whole.
        by_features: (N, K) of others, cut by output features.
        by_reduction: (N, K) of others, cut by the reduction.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: Experts | None = None
    whole: tuple[tuple[int, int], ...] = ()
    by_features: tuple[tuple[int, int], ...] = ()
    by_reduction: tuple[tuple[int, int], ...] = ()

    def linears(self, gpus: int) -> list[tuple[int, int]]:
        """(N, K) of the dense linears of a layer, on one of so many GPUs."""
        heads = -(-self.heads // gpus)
        kv_heads = -(-self.kv_heads // gpus)  # with more GPUs than these, each has a copy
        found = []
        if self.heads:
            found.append(((heads + 2 * kv_heads) * self.head_dim, self.hidden))
            found.append((self.hidden, heads * self.head_dim))
        if self.intermediate:
            width = self.intermediate // gpus
            found += [(2 * width, self.hidden), (self.hidden, width)]
        found += self.whole
        found += [(N // gpus, K) for N, K in self.by_features]
        found += [(N, K // gpus) for N, K in self.by_reduction]
        return found

    def expert_linears(self, gpus: int) -> list[tuple[int, int]]:
        """(N, K) of an expert's gate_up and down, on one of so many GPUs that share each expert."""
        if self.experts is None:
            return []
        width = self.experts.intermediate // gpus
        return [(2 * width, self.hidden), (self.hidden, width)]


MODELS = {
    "llama-3.2-1b": Model(2048, 32, 8, 64, 8192),
    "llama-3.2-3b": Model(3072, 24, 8, 128, 8192),
    "llama-3.1-8b": Model(4096, 32, 8, 128, 14336),
    "llama-3.1-70b": Model(8192, 64, 8, 128, 28672),
    "llama-3.1-405b": Model(16384, 128, 8, 128, 53248),
    "qwen2.5-7b": Model(3584, 28, 4, 128, 18944),
    "qwen2.5-72b": Model(8192, 64, 8, 128, 29568),
    "qwen3-8b": Model(4096, 32, 8, 128, 12288),
    "qwen3-32b": Model(5120, 64, 8, 128, 25600),
    "qwen3-30b-a3b": Model(2048, 32, 4, 128, 0, Experts(128, 8, 768)),
    "qwen3-235b-a22b": Model(4096, 64, 4, 128, 0, Experts(128, 8, 1536)),
    "mixtral-8x7b": Model(4096, 32, 8, 128, 0, Experts(8, 2, 14336)),
    "mixtral-8x22b": Model(6144, 48, 8, 128, 0, Experts(8, 2, 16384)),
    "gpt-oss-20b": Model(2880, 64, 8, 64, 0, Experts(32, 4, 2880)),
    "gpt-oss-120b": Model(2880, 64, 8, 64, 0, Experts(128, 4, 2880)),
    "deepseek-v3": Model(  # latent attention: q_a with kv_a, q_b, kv_b and o_proj
        *(7168, 0, 0, 0, 18432),
        Experts(256, 8, 2048),
        whole=((2112, 7168),),
        by_features=((24576, 1536), (32768, 512)),
        by_reduction=((7168, 16384),),
    ),
    # The class of MiniMax: dense layers of both widths, and experts as narrow as 3072.
    "wide-6144": Model(6144, 64, 4, 128, 3072, Experts(128, 4, 3072)),
    "wide-6144-256e": Model(6144, 64, 4, 128, 3072, Experts(256, 4, 3072)),
    # all-MiniLM-L6-v2, which `aiter-mx demo` runs.
    "minilm-l6": Model(384, 0, 0, 0, 0, None, ((384, 384), (1536, 384), (384, 1536))),
}
"""Names for ``aiter-mx tune --model``."""


def model_of(name: str) -> Model:
    """The model of a name. Raises ValueError where there is none; the message lists those known."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    return MODELS[name]
