"""The pictures of the pages: computed by the library, or drawn to show an order; the same bytes each time."""

import io
import math
from collections.abc import Callable

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

import logchain
from logchain import reference
from logchain.kernels.numbers import FLUSH
from logchain.transitions import Duration

# M. Okabe and K. Ito's colours, which can be told apart by all readers
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"

# the logarithm of the smallest positive float32
SMALLEST = math.log(2.0**-149)

# six kinds of chains, and the distance between messages below which they are the same
COLOURS, FORGOTTEN = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "black"), 1e-10


def figure(panels: int = 1, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Panels one below the other, narrow enough for the text to be read on a phone."""
    found = Figure(figsize=(5.2, height), layout="constrained")
    return found, list(np.atleast_1d(found.subplots(panels)))


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


def shift() -> Figure:
    """A forward message with and without its scale taken out."""
    v, c = 100, 8
    random = np.random.default_rng(0)
    x, bulk = random.normal(-3.0, 1.0, (v, c)), random.dirichlet(np.ones(c), (1, c))
    forward = reference.forward_backward(x, bulk, np.full(c, 1 / c)).forward
    top = forward.max(-1, keepdims=True)
    drawing, panels = figure(2, height=4.6)
    for panel, message in zip(panels, (forward, forward - top), strict=True):
        panel.fill_between(range(v), message.min(-1), message.max(-1), color=BLUE, alpha=0.5, linewidth=0)
        panel.set(xlim=(0, v - 1))
        panel.grid(alpha=0.3)
    panels[0].axhspan(forward.min(), SMALLEST, color=GREY, alpha=0.3, linewidth=0)
    panels[0].text(4, SMALLEST - 25, "exp is 0 in float32", color="#333333")
    panels[0].set(ylabel="entries of the message, nats", title="forward messages as they are")
    panels[1].set(xlabel="variable", title="the largest entry taken out")
    return drawing


def misaligned() -> Figure:
    """One shift for each row and column, and two terms that it cannot hold."""
    drawing, [terms, values] = figure(2, height=5.6)
    for points, mark, colour, name in (
        ((0, -200), "o", BLUE, "row of A"),
        ((-200, 0), "s", ORANGE, "column of B"),
        ((-200, -200), "_", "black", "their sum"),
    ):
        terms.plot((0, 1), points, mark, color=colour, label=name, markersize=30 if mark == "_" else 8, clip_on=False)
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
        "one shift a row and column": (one_shift, ORANGE, "--"),
        "the same with a clamp": (clamped, RED, ":"),
    }
    for name, (logarithms, colour, line) in curves.items():
        values.plot(gaps, logarithms.flatten(), line, color=colour, label=name, linewidth=2)
    values.set(xlabel="gap g: A = [0, -g], B = [-g, 0]", ylabel="log of the product, nats", title="in float32")
    values.legend(frameon=False, loc="lower left")
    values.grid(alpha=0.3)
    return drawing


def rescue() -> Figure:
    """Which outputs of a product of two matrices are computed again."""
    c, steps = 40, 3
    random = np.random.default_rng(0)
    # left to right, two states at most in a step, and evidence that jumps
    band = np.triu(np.tril(np.full((c, c), 1 / 3), 2))
    with np.errstate(divide="ignore"):
        stack = np.log(band) + random.normal(0.0, 60.0, (2 * steps, 1, c))
    a, b = (reference.matrix_product(half) for half in (stack[:steps], stack[steps:]))
    exact = reference.matmul(a, b)
    with logchain.rescues() as seen:
        logchain.matmul(torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32))
    with np.errstate(invalid="ignore"):
        below = (a.max(-1, keepdims=True) + b.max(-2, keepdims=True) - exact) / math.log(2)
    drawing, [sums, kinds] = figure(2, height=6.2)
    image = sums.imshow(np.where(np.isfinite(below), below, np.nan), cmap="viridis_r")
    # beside both, so that they stand under each other
    drawing.colorbar(image, ax=[sums, kinds], shrink=0.4, anchor=(0.0, 1.0), label="bits below the two shifts")
    zero = np.isneginf(exact)
    trusted = 2 * c * FLUSH[torch.float32] / torch.finfo(torch.float32).eps
    kind = np.where(zero, 0, np.where(below <= -math.log2(trusted), 1, 2))
    colours = matplotlib.colors.ListedColormap(["#DDDDDD", BLUE, ORANGE])
    kinds.imshow(kind, cmap=colours, vmin=0, vmax=2)
    names = ("zero, exactly", "from the matrix product", f"computed again: {seen.outputs}")
    for colour, name in zip(("#DDDDDD", BLUE, ORANGE), names, strict=True):
        kinds.plot([], [], "s", color=colour, label=name)
    drawing.legend(frameon=False, loc="outside lower center", ncols=2)
    sums.set(ylabel="from")
    kinds.set(xlabel="to", ylabel="from")
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
        found = logchain.marginals(*map(torch.from_numpy, (x[:v], bulk, p0))).states.numpy()
        for name, states in zip(errors, (posteriors(x[:v], bulk[0]), found), strict=True):
            errors[name].append(float(np.abs(states - exact).max()))
    drawing, [panel] = figure(height=3.2)
    for (name, values), colour, mark in zip(errors.items(), (ORANGE, BLUE), "so", strict=True):
        panel.loglog(sizes, values, marker=mark, color=colour, label=name)
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
            for first, end, colour in boxes:
                # a vector is as wide as what it covers, and thin
                height = 0.4 if colour == ORANGE else 0.75
                panel.add_patch(Rectangle((first + 0.08, step - height / 2), end - first - 0.16, height, color=colour))
        panel.set(xlim=(0, v), ylim=(v - 0.4, -0.6), xticks=[], yticks=range(0, v, 2), title=name)
        panel.spines[["top", "right", "bottom"]].set_visible(False)
    panels[1].set_ylabel("step")
    panels[2].set_xlabel("factors of the chain")
    for colour, name in ((BLUE, "a matrix"), (ORANGE, "a vector")):
        panels[2].plot([], [], "s", color=colour, label=name)
    panels[2].legend(frameon=False, loc="lower right")
    return drawing


def checkpoints() -> Figure:
    """Which messages are kept under a memory budget."""
    v, every = 25, 5
    drawing, panels = figure(3, height=2)
    kept = [i for i in range(v) if i % every == 0]
    shown = (
        ("without a budget", range(v), []),
        ("after the forward pass", kept, []),
        ("within the backward pass", kept[:4], range(16, 20)),
    )
    for panel, (title, forward, again) in zip(panels, shown, strict=True):
        for i in range(v):
            colour = BLUE if i in forward else ORANGE if i in again else "white"
            panel.add_patch(Rectangle((i + 0.1, 0), 0.8, 1, facecolor=colour, edgecolor=GREY, linewidth=0.5))
        panel.set(xlim=(0, v), ylim=(-0.1, 1.1), xticks=[], yticks=[])
        panel.set_title(title, fontsize=9)
        panel.spines[:].set_visible(False)
    panels[2].set_xlabel("one message a variable; blue are kept, orange are recomputed")
    return drawing


def forgetting() -> Figure:
    """Hilbert's metric between two messages that begin far apart, after so many steps of six kinds of chains."""
    c, steps = 16, 4000
    random = np.random.default_rng(0)
    stay, states, weights = np.eye(c), np.arange(c), random.dirichlet(np.ones(c), c)
    ahead = 0.7 * stay + 0.3 * np.eye(c, k=1)
    ahead[-1] = np.eye(c)[-1]
    band = np.triu(np.tril(weights, 1), -1)
    kinds = {
        "random, evidence": (weights, 1.0),
        "three diagonals, evidence": (band / band.sum(-1, keepdims=True), 1.0),
        "left to right, starts again with 0.001": (0.999 * ahead + 0.001 * stay[0], 1.0),
        "stays with 0.99, evidence": (0.99 * stay + 0.01 / c, 1.0),
        "stays with 0.999, weak evidence": (0.999 * stay + 0.001 / c, 0.01),
        "permutation, plus 0.001": (stay[random.permutation(c)] + 0.001, 1.0),
    }
    drawing, [panel] = figure(height=4.6)
    lines = ("-", "--", "-.", "-", "--", "-.")
    for (name, (matrix, evidence)), colour, line in zip(kinds.items(), COLOURS, lines, strict=True):
        messages, found = np.stack([np.ones(c), np.exp(-states)]), []
        for _ in range(steps):
            messages = (messages @ matrix) * np.exp(evidence * random.normal(size=c))
            messages /= messages.sum(-1, keepdims=True)
            ratios = messages[0] / messages[1]
            found.append(np.log(ratios.max() / ratios.min()))
            if found[-1] < FORGOTTEN:  # float64 has no digits left
                break
        panel.loglog(range(1, len(found) + 1), found, line, color=colour, label=name, linewidth=1.5)
    accepted = 4 * (c + 8) * 2.0**-24
    panel.axhline(accepted, color=GREY, linestyle=":")
    panel.text(steps, accepted * 1.3, "accepted in float32", color="#555555", ha="right")
    panel.set(xlabel="steps m", ylabel="Hilbert's distance d", ylim=(FORGOTTEN, 50), xlim=(1, steps))
    drawing.legend(frameon=False, loc="outside lower center", ncols=2, fontsize=8)
    panel.grid(alpha=0.3)
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
    for panel, (title, values), colour in zip(panels[1:], shown.items(), (ORANGE, BLUE), strict=True):
        panel.fill_between(range(v), state, step="mid", color=GREY, alpha=0.3, linewidth=0)
        panel.step(range(v), values, where="mid", color=colour)
        panel.set(ylabel="P(state 1)", title=title, xticks=[])
    panels[2].set(xticks=range(0, v + 1, 20), xlabel="step; grey is the state that the data were drawn from")
    for panel in panels:
        panel.set_xlim(0, v)
    return drawing


PICTURES: list[Callable[[], Figure]] = [
    chain,
    checkpoints,
    durations,
    forgetting,
    misaligned,
    offsets,
    rescue,
    schedules,
    shift,
]


def all() -> dict[str, bytes]:
    """Every picture as SVG, by name."""
    found = {}
    with matplotlib.rc_context({"svg.hashsalt": "logchain", "font.size": 9, "axes.titlesize": 9}):
        for picture in PICTURES:
            file = io.BytesIO()
            picture().savefig(file, format="svg", metadata={"Date": None})
            found[picture.__name__] = file.getvalue()
    return found
