"""Draws the pictures of the pages: `python .docs/pictures.py` writes them, the same bytes each time."""

import math
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

import logchain
from logchain.transitions import Duration

# M. Okabe and K. Ito's colors, which the color-blind can distinguish
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"

# the logarithm of the smallest positive float32
SMALLEST = math.log(2.0**-149)

PICTURES = Path(__file__).parent / "pages" / "pictures"


def figure(panels: int = 1, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Panels one below the other, narrow enough for the text to be read on a phone."""
    drawing = Figure(figsize=(5.2, height), layout="constrained")
    return drawing, list(np.atleast_1d(drawing.subplots(panels)))


def chain() -> Figure:
    """Which matrix leads where."""
    drawing, [panel] = figure(height=1.7)
    for i in range(4):
        panel.add_patch(Circle((i, 1), 0.22, facecolor="white", edgecolor=BLUE, linewidth=2))
        panel.text(i, 1, f"z$_{i}$", ha="center", va="center", fontsize=12)
        panel.annotate("", (i, 0.78), (i, 0.36), arrowprops={"arrowstyle": "->", "color": RED})
        panel.text(i, 0.22, f"x[{i}]", ha="center", va="center", color=RED)
        if i < 3:
            panel.annotate("", (i + 0.78, 1), (i + 0.22, 1), arrowprops={"arrowstyle": "->", "color": BLUE})
            panel.text(i + 0.5, 1.1, f"bulk[{i}]", ha="center", color=BLUE)
    panel.annotate("", (-0.22, 1), (-0.78, 1), arrowprops={"arrowstyle": "->", "color": GREEN})
    panel.text(-0.9, 1, "p0", ha="right", va="center", color=GREEN, fontsize=12)
    panel.set(xlim=(-1.3, 3.5), ylim=(0.05, 1.4), aspect="equal")
    panel.axis("off")
    return drawing


def misaligned() -> Figure:
    """One shift for each row and column, and two terms that it cannot hold."""
    drawing, [terms, values] = figure(2, height=5.6)
    for points, mark, color, name in (
        ((0, -200), "o", BLUE, "row of A"),
        ((-200, 0), "s", ORANGE, "column of B"),
        ((-200, -200), "_", "black", "their sum"),
    ):
        terms.plot((0, 1), points, mark, color=color, label=name, markersize=30 if mark == "_" else 8, clip_on=False)
    terms.axhline(SMALLEST, color=RED, linestyle="--")
    terms.text(0.5, SMALLEST - 3, "exp is 0 in float32 below", color=RED, ha="center", va="top")
    terms.set(xticks=[0, 1], xticklabels=["k = 0", "k = 1"], xlim=(-0.5, 1.5), ylabel="nats", title="terms of one sum")
    terms.legend(frameon=False, loc="center", bbox_to_anchor=(0.5, 0.72), markerscale=0.5)
    gaps = torch.linspace(0, 200, 401)
    a, b = torch.stack([torch.zeros(401), -gaps], -1)[:, None], torch.stack([-gaps, torch.zeros(401)], -1)[:, :, None]
    rows, columns = a.amax(-1, keepdim=True), b.amax(-2, keepdim=True)
    product = (a - rows).exp() @ (b - columns).exp()
    one_shift, clamped = (sums.log() + rows + columns for sums in (product, product.clamp(1e-10)))
    curves = {
        "logchain.matmul": (logchain.matmul(a, b), BLUE, "-"),
        "one shift for each row and column": (one_shift, ORANGE, "--"),
        "the same with a clamp": (clamped, RED, ":"),
    }
    for name, (logarithms, color, line) in curves.items():
        values.plot(gaps, logarithms.flatten(), line, color=color, label=name, linewidth=2)
    values.set(xlabel="gap g: A = [0, -g], B = [-g, 0]", ylabel="log of the product, nats", title="in float32")
    values.legend(frameon=False, loc="lower left")
    values.grid(alpha=0.3)
    return drawing


def offsets() -> Figure:
    """Errors of posteriors in long chains, with scales apart and without."""
    sizes, c = [2**k for k in (8, 10, 12, 14)], 6
    random = np.random.default_rng(0)
    x = random.normal(-30.0, 1.0, (sizes[-1], c)).astype(np.float32)
    bulk, p0 = random.dirichlet(np.ones(c), (1, c)).astype(np.float32), np.full(c, 1 / c, np.float32)
    errors: dict[str, list[float]] = {"messages as float32 logarithms": [], "logchain.marginals": []}
    for v in sizes:
        exact = posteriors(x[:v].astype(np.float64), bulk[0].astype(np.float64))
        ours = logchain.marginals(*map(torch.from_numpy, (x[:v], bulk, p0))).states.numpy()
        for name, states in zip(errors, (posteriors(x[:v], bulk[0]), ours), strict=True):
            errors[name].append(float(np.abs(states - exact).max()))
    drawing, [panel] = figure(height=3.2)
    for (name, values), color, mark in zip(errors.items(), (ORANGE, BLUE), "so", strict=True):
        panel.loglog(sizes, values, marker=mark, color=color, label=name)
    panel.axhline(1e-5, color=GREY, linestyle="--")
    panel.text(sizes[-1], 1.2e-5, "promised", color="#555555", va="bottom", ha="right")
    panel.set(xlabel="variables v, each of about -30 nats", ylabel="largest error of a posterior")
    panel.set_xticks(sizes, [str(v) for v in sizes])
    panel.minorticks_off()
    panel.legend(frameon=False, loc="upper left")
    panel.set_ylim(top=1)
    panel.grid(alpha=0.3)
    return drawing


def posteriors(x: np.ndarray, bulk: np.ndarray) -> np.ndarray:
    """Forward and backward messages as plain logarithms, in the dtype of x, from a uniform start."""
    v, c = x.shape
    log_bulk, forward, backward = np.log(bulk), np.zeros_like(x), np.zeros_like(x)
    forward[0] = x[0] - np.log(np.array(c, x.dtype))
    for i in range(1, v):
        forward[i] = np.logaddexp.reduce(forward[i - 1, :, None] + log_bulk, 0) + x[i]
    for i in reversed(range(v - 1)):
        backward[i] = np.logaddexp.reduce(log_bulk + (x[i + 1] + backward[i + 1]), 1)
    joint = forward + backward
    return np.exp(joint - np.logaddexp.reduce(joint, -1, keepdims=True))


def schedules() -> Figure:
    """What each schedule has multiplied after each step."""
    v = 9
    vectors = [[(0, i + 1, ORANGE)] for i in range(v)]
    segments = [[(first, first + size, ORANGE) for first in (0, 3, 6)] for size in (1, 2, 3)]
    pairs = [[(first, min(first + 2**k, v), BLUE) for first in range(0, v, 2**k)] for k in range(5)]
    drawing, panels = figure(3, height=7)
    names = ("sequential", "segments", "tree")
    for panel, name, rows in zip(panels, names, (vectors, segments, pairs), strict=True):
        for step, boxes in enumerate(rows):
            for first, end, color in boxes:
                # a vector is as wide as what it covers, and thin
                height = 0.4 if color == ORANGE else 0.75
                panel.add_patch(Rectangle((first + 0.08, step - height / 2), end - first - 0.16, height, color=color))
        panel.set(xlim=(0, v), ylim=(v - 0.4, -0.6), xticks=[], yticks=range(0, v, 2), title=name)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    panels[1].set_ylabel("step")
    panels[2].set_xlabel("factors of the chain")
    for color, name in ((BLUE, "a matrix"), (ORANGE, "a vector")):
        panels[2].plot([], [], "s", color=color, label=name)
    panels[2].legend(frameon=False, loc="lower right")
    return drawing


def durations() -> Figure:
    """Posteriors of a state whose durations are geometric, or follow the distribution that they were drawn from."""
    v, means, longest = 120, torch.tensor([12.0, 6.0]), 20
    random = np.random.default_rng(3)
    steps = torch.arange(1, longest + 1)
    lasting = torch.softmax(-((steps - means[:, None]) ** 2) / 2, -1)  # a standard deviation of one step
    drawn = [
        random.choice(longest, p=lasting[i % 2].double().numpy() / lasting[i % 2].double().sum().item()) + 1
        for i in range(v)
    ]
    state = torch.arange(v).remainder(2).repeat_interleave(torch.tensor(drawn))[:v]
    data = state + torch.from_numpy(random.normal(0.0, 1.0, v))
    x = -((data[:, None] - torch.arange(2)) ** 2).float() / 2
    stay = 1 - 1 / means
    geometric = torch.stack([torch.stack([stay[0], 1 - stay[0]]), torch.stack([1 - stay[1], stay[1]])])
    explicit, p0 = Duration(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), lasting), torch.tensor([1.0, 0.0])
    chain = explicit.arguments(x, p0, right_censored=True)._asdict()
    segments = explicit.marginal_segments(logchain.marginals(**chain, transitions="full"))
    shown = {
        "geometric durations": logchain.marginals(x, geometric, p0).states[:, 1],
        "durations of 12 and 6 steps, give or take one": segments.states[:, 1],
    }
    drawing, panels = figure(3, height=4.6)
    panels[0].plot(data, ".", color=GREY)
    panels[0].set(ylabel="data", xticks=[])
    for panel, (title, values), color in zip(panels[1:], shown.items(), (ORANGE, BLUE), strict=True):
        panel.fill_between(range(v), state, step="mid", color=GREY, alpha=0.3, linewidth=0)
        panel.step(range(v), values, where="mid", color=color)
        panel.set(ylabel="P(state 1)", title=title, xticks=[])
    panels[2].set(xticks=range(0, v + 1, 20), xlabel="step; grey is the state that the data were drawn from")
    for panel in panels:
        panel.set_xlim(0, v)
    return drawing


if __name__ == "__main__":
    with matplotlib.rc_context({"svg.hashsalt": "logchain", "font.size": 9, "axes.titlesize": 9}):
        for picture in (chain, durations, misaligned, offsets, schedules):
            picture().savefig(PICTURES / f"{picture.__name__}.svg", metadata={"Date": None})
