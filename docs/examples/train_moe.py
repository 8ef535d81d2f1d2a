"""Train a small MoE language model twice, over MX-FP8 operands and in bf16, on Python's licences.

    python docs/examples/train_moe.py [--steps 300] [--seeds 3] [--size small|large] [--jobs 1]
                                      [--csv FILE] [--picture FILE]

All linears and experts of the one model are ``aiter_mx.nn``'s, and all of the other are torch's;
both begin with the same weights and see the same batches. Printed are the loss of both on passages
that neither trains on, and how far the gradients of each layer point the same way: the cosine of
both models' gradients, of the weights that the MX model has at that step, when tokens go to the
experts that the MX model chose, and when bf16 chooses for itself; and the cosine with the gradient
that bf16 has of the model whose forward pass rounds operands as MX does, which is what a backward
pass over MX can be held to. At the end it says whether the losses stayed together and the gradients
agreed, and fails where they did not.
``--wrong-tail`` leaves the last 32 rows of every group out of the gradient of its weights, which a
loss hides for long and the cosine does not.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import aiter_mx
from aiter_mx import autograd
from aiter_mx.nn import MxExperts, MxGroupedLinear, MxLinear

Row: TypeAlias = dict[str, float]
VOCABULARY = 256  # bytes
EVERY = 10  # steps between lines
HELD_OUT = 2  # batches, which losses are of
LEARNING_RATE, WARM_UP = 1e-3, 100  # which rises so many steps, and then falls to zero
LEAST_COSINE = 0.99
LARGEST_GAP = 0.01  # between the losses in the end


@dataclass(frozen=True)
class Size:
    """Of a model and its batches."""

    width: int
    layers: int
    heads: int
    experts: int
    top_k: int
    context: int
    batch: int


SIZES = {
    "small": Size(64, 2, 4, 4, 2, 32, 8),
    "large": Size(512, 4, 8, 16, 4, 256, 16),
}


def text() -> Tensor:
    """The bytes of what ships with Python: its licence, and its modules' sources and docstrings."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    files = [stdlib / "LICENSE.txt", *sorted(stdlib.glob("[a-d]*.py"))]
    found = b"\n".join(file.read_bytes() for file in files if file.exists())
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).long()


def by_rows(x: Tensor, w: Tensor, offs: Tensor | None) -> Tensor:
    """``x @ w.T``, or that of each group of rows with its own w."""
    if offs is None:
        return x @ w.mT
    if x.is_cuda:
        return torch._grouped_mm(x, w.mT, offs=offs[1:].int())
    groups = zip(pairwise(offs.tolist()), w, strict=True)
    return torch.cat([x[slice(*rows)] @ own.T for rows, own in groups])


def by_columns(dy: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    """``dy.T @ x``, or that of each group's rows."""
    if offs is None:
        return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        products = torch._grouped_mm(dy.contiguous().T, x, offs=offs[1:].int())
        return products.masked_fill_(offs.diff().eq(0)[:, None, None], 0.0)
    rows = [slice(*bounds) for bounds in pairwise(offs.tolist())]
    return torch.stack([dy[own].T @ x[own] for own in rows])


class Product(torch.autograd.Function):
    """A product, of operands rounded to MX if wanted, and the gradients of what was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, offs: Tensor | None, rounds: bool) -> Tensor:
        """``x [..., K]`` by ``w [N, K]``, or by that of each group, ``[G, N, K]``."""
        ctx.save_for_backward(x, w, offs)
        if rounds:
            x, w = (aiter_mx.dequantize(*aiter_mx.quantize(each), each.dtype) for each in (x, w))
        return by_rows(x, w, offs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """As of a linear."""
        x, w, offs = ctx.saved_tensors
        return by_rows(dy.contiguous(), w.mT, offs), by_columns(dy, x, offs), None, None


class RoundedLinear(nn.Linear):
    """A linear that rounds its operands, and not what comes back."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K]`` to ``[..., N]``."""
        y: Tensor = Product.apply(x, self.weight, None, True)
        return y


class PlainGroups(MxGroupedLinear):
    """The same parameters, and torch's products."""

    rounds = False

    def forward(
        self, x: Tensor, group_offs: Tensor | None = None, *, group_lens: Tensor | None = None
    ) -> Tensor:
        """A product for each group."""
        y: Tensor = Product.apply(x, self.weight, group_offs, self.rounds)
        return y


class RoundedGroups(PlainGroups):
    """These round their operands too."""

    rounds = True


class Layer(nn.Module):
    """Attention, then experts that a router chooses."""

    def __init__(self, size: Size, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.size = size
        self.norms = nn.ModuleList(nn.RMSNorm(size.width) for _ in range(2))
        # Of queries and keys, so that attention does not become as sharp as its logits can grow.
        self.qk_norms = nn.ModuleList(nn.RMSNorm(size.width // size.heads) for _ in range(2))
        self.qkv = linear(size.width, 3 * size.width, bias=False)
        self.out = linear(size.width, size.width, bias=False)
        self.router = nn.Linear(size.width, size.experts, bias=False)
        self.chosen: Tensor | None = None  # experts of each token, in the last forward pass
        self.told: Tensor | None = None  # experts to take in place of the best
        self.experts = MxExperts(size.experts, size.width, size.width)
        if linear is not MxLinear:
            groups = PlainGroups if linear is nn.Linear else RoundedGroups
            self.experts.gate_up = groups(size.experts, size.width, 2 * size.width)
            self.experts.down = groups(size.experts, size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, context, width]``."""
        B, C, H = x.shape
        qkv = self.qkv(self.norms[0](x)).view(B, C, 3, self.size.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.qk_norms[0](q), self.qk_norms[1](k)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(B, C, H))
        tokens = self.norms[1](x).reshape(B * C, H)
        shares = self.router(tokens).float().softmax(-1)
        ids = shares.topk(self.size.top_k).indices if self.told is None else self.told
        self.chosen, weights = ids, shares.gather(1, ids)
        routed = self.experts(tokens, ids, weights / weights.sum(-1, keepdim=True))
        return x + routed.view(B, C, H)


class Model(nn.Module):
    """Bytes in, scores of the next byte out."""

    def __init__(self, size: Size, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.place = nn.Embedding(size.context, size.width)
        self.layers = nn.ModuleList(Layer(size, linear) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = linear(size.width, VOCABULARY, bias=False)

    def loss(self, bytes_: Tensor) -> Tensor:
        """Mean over ``[batch, context + 1]``."""
        given, wanted = bytes_[:, :-1], bytes_[:, 1:]
        x = self.embedding(given) + self.place.weight
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float().mT, wanted)


def batches(
    size: Size, seed: int, device: torch.device, held_out: bool = False
) -> Iterator[Tensor]:
    """Passages of the text, without end: of its last tenth, or of what is before it."""
    generator, data = torch.Generator().manual_seed(seed), text()
    begin = len(data) * 9 // 10
    data = data[begin:] if held_out else data[:begin]
    inside = torch.arange(size.context + 1)
    while True:
        starts = torch.randint(len(data) - size.context, (size.batch,), generator=generator)
        yield data[starts[:, None] + inside].to(device)


class Launches(TorchDispatchMode):
    """Counts the ops of this package."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aiter_mx":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))


def gradients(model: Model, batch: Tensor) -> dict[str, Tensor]:
    """The gradient of each parameter."""
    model.zero_grad()
    model.loss(batch).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Recorder:
    """``gradients``; on a GPU they are replayed from a graph of both passes, which is faster."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[Model, bool], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}

    def __call__(self, model: Model, batch: Tensor, told: bool = False) -> dict[str, Tensor]:
        """Told: the layers know which experts to take, in tensors that are always the same."""
        if not batch.is_cuda:
            return gradients(model, batch)
        if (model, told) not in self.graphs:
            given, graph = batch.clone(), torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                gradients(model, given)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                found = gradients(model, given)
            self.graphs[model, told] = graph, given, found
        graph, given, found = self.graphs[model, told]
        given.copy_(batch)
        graph.replay()
        return found


def cosines(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """The least of the layers over MX operands, and of the routers."""
    least = {"least_cosine": 1.0, "router_cosine": 1.0}
    for name, gradient in one.items():
        if gradient.ndim == 1 or "embedding" in name or "place" in name:
            continue
        pair = (gradient.flatten().float(), other[name].flatten().float())
        kind = "router_cosine" if "router" in name else "least_cosine"
        found = float(nn.functional.cosine_similarity(*pair, dim=0))
        least[kind] = min(least[kind], found)
    return least


def compare(mx: Model, gradients_of: Recorder, plain: Model, rounding: Model, batch: Tensor) -> Row:
    """Cosines with the gradients that bf16 has of the same weights.

    Rounding lets a token that is undecided choose another expert, and an expert of few tokens then
    has another gradient altogether. So bf16 is told the experts first, and then chooses.
    """
    found, gradients_of_mx = {}, gradients_of(mx, batch)
    for name, probe, told in (
        ("told", plain, True),
        ("own_choice_cosine", plain, False),
        ("same_forward_cosine", rounding, True),
    ):
        probe.load_state_dict(mx.state_dict())
        for own, other in zip(probe.layers, mx.layers, strict=True):
            own.told = other.chosen if told else None
        found[name] = cosines(gradients_of_mx, gradients_of(probe, batch, told))
    return found.pop("told") | {name: least["least_cosine"] for name, least in found.items()}


def learning_rate(step: int, end: int) -> float:
    """Of a step, if the last is the one before ``end``."""
    return LEARNING_RATE * min((step + 1) / WARM_UP, (end - step) / max(end - WARM_UP, 1), 1.0)


def train(
    seed: int,
    steps: int,
    size: Size,
    device: torch.device,
    say: bool = True,
    end: int | None = None,
) -> list[Row]:
    """Both models side by side; a row every ten steps, and for the last one. The learning rate is
    zero at ``end``, which is after all steps if it is None."""
    pair = {}
    for name, linear in (("mx", MxLinear), ("bf16", nn.Linear)):
        torch.manual_seed(seed)
        pair[name] = Model(size, linear).to(device, torch.bfloat16)
    pair["bf16"].load_state_dict(pair["mx"].state_dict())
    probes = [Model(size, kind).to(device, torch.bfloat16) for kind in (nn.Linear, RoundedLinear)]
    unseen = list(islice(batches(size, 0, device, held_out=True), HELD_OUT))
    optimizers = {n: torch.optim.AdamW(m.parameters()) for n, m in pair.items()}
    rows, launched, gradients_of = [], Launches(), Recorder()
    for step, batch in zip(range(steps), batches(size, seed, device), strict=False):
        if step == 0:
            with launched:
                gradients(pair["mx"], batch)
        if step % EVERY == 0 or step == steps - 1:
            agree = compare(pair["mx"], gradients_of, *probes, batch)
            with torch.no_grad():
                losses = {n: fmean(m.loss(b).item() for b in unseen) for n, m in pair.items()}
            rows.append({"seed": seed, "step": step, **losses, **agree})
            if say:
                print({name: round(value, 4) for name, value in rows[-1].items()}, flush=True)
        for name, optimizer in optimizers.items():
            gradients_of(pair[name], batch)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, end or steps)
            optimizer.step()
    if say:
        print("ops of a step:", dict(launched.count))
    return rows


@contextmanager
def without_the_tail() -> Iterator[None]:
    """A mistake: in the block the last 32 rows of every group do not count."""
    right = autograd.grouped_gemm_wgrad

    def wrong(*arguments: Any, **options: Any) -> Tensor:
        *operands, offs = arguments
        lens = (offs.diff() - 32).clamp(min=0)
        return right(*operands, lens, **options)

    autograd.grouped_gemm_wgrad = wrong
    try:
        yield
    finally:
        autograd.grouped_gemm_wgrad = right


def verdict(rows: list[Row]) -> bool:
    """Print whether both models agree, of losses those of the last step."""
    seeds = sorted({row["seed"] for row in rows})
    end = max(row["step"] for row in rows)
    last = [row for row in rows if row["step"] == end]
    final = {name: [row[name] for row in last] for name in ("mx", "bf16")}
    spread = max(final["bf16"]) - min(final["bf16"])
    gaps = [abs(mx - bf16) for mx, bf16 in zip(final["mx"], final["bf16"], strict=True)]
    share = max(gap / bf16 for gap, bf16 in zip(gaps, final["bf16"], strict=True))
    cosine = min(row["same_forward_cosine"] for row in rows)
    together = share <= LARGEST_GAP and (len(seeds) == 1 or max(gaps) <= spread)
    agree = cosine >= LEAST_COSINE
    print(
        f"losses {'stay together' if together else 'PART'}: they differ by up to {share:.2%}, and"
    )
    print(f"bf16's by {spread / fmean(final['bf16']):.2%} between seeds")
    print(
        f"gradients {'agree' if agree else 'DISAGREE'}: least cosine {cosine:.4f}, given the same"
    )
    print(f"forward pass, and {min(row['least_cosine'] for row in rows):.4f} with that of bf16")
    return together and agree


def draw(rows: list[Row], path: Path) -> None:
    """Loss curves, and the cosines below."""
    from matplotlib import pyplot

    figure, (losses, below) = pyplot.subplots(2, sharex=True, figsize=(7, 6), layout="constrained")
    for seed in sorted({row["seed"] for row in rows}):
        own = [row for row in rows if row["seed"] == seed]
        steps = [row["step"] for row in own]
        for name, style in (("bf16", "--"), ("mx", "-")):
            curve = [row[name] for row in own]
            losses.plot(steps, curve, style, color=f"C{int(seed)}", label=f"{name}, seed {seed:g}")
        styles = {"same_forward_cosine": "-", "least_cosine": "--", "own_choice_cosine": ":"}
        for name, style in styles.items():
            below.plot(steps, [row[name] for row in own], style, color=f"C{int(seed)}")
    losses.set_ylabel("loss")
    losses.legend()
    below.axhline(LEAST_COSINE, color="grey", linewidth=0.5)
    below.set_ylabel("least cosine of a layer's gradients")
    below.set_xlabel("step")
    figure.savefig(path, dpi=150)


def train_seed(
    seed: int, steps: int, size: Size, device: torch.device, wrong_tail: bool
) -> list[Row]:
    """``train``, with the planted mistake if wanted."""
    with without_the_tail() if wrong_tail else nullcontext():
        return train(seed, steps, size, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--jobs", type=int, default=1, help="seeds at a time, a process each")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--wrong-tail", action="store_true")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fixed = {"steps": given.steps, "size": SIZES[given.size], "device": device}
    run = partial(train_seed, **fixed, wrong_tail=given.wrong_tail)
    if given.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
            trained = pool.map(run, range(given.seeds), chunksize=1)
    else:
        trained = [run(seed) for seed in range(given.seeds)]
    rows = [row for each in trained for row in each]
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if given.picture:
        draw(rows, given.picture)
    return 0 if verdict(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
