"""The groups of `gpu_day` that compare every GPU kernel with float64, on a device or in Triton's interpreter."""

import contextlib
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

import logchain
from logchain import kernels
from logchain.kernels.chain import Chain
from logchain.kernels.gpu import backward, chains, forward, scaled
from logchain.kernels.plain import backward as plain_backward
from logchain.kernels.plain import forward as plain_forward
from tests.kernels.gpu import steps

DRY = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if DRY else "cuda"
F32, F64, HALF = torch.float32, torch.float64, torch.bfloat16

# which sequences share matrices: all, all and one matrix for all steps, none, those of two sets
SHARED, ONE, SEPARATE, SETS = "shared", "one", "separate", "sets"

Call = Callable[[], Any]


def say(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def wait() -> None:
    if not DRY:
        torch.cuda.synchronize()


def small(*sizes: int) -> tuple[int, ...]:
    """Sizes n, v and c, in a dry run tiny ones."""
    return tuple(map(min, sizes, (5, 6, 20))) if DRY else sizes


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def operands(n: int, v: int, c: int, kind: str, dtype=F32, spread=1.0, lengths=False, log=False) -> Chain:
    g, m = (n, 1) if kind == SEPARATE else (2, n // 2) if kind == SETS else (1, n)
    bulk = random(1 if kind == ONE else v - 1, g, c, c, seed=1).abs() + 0.01
    if spread > 1:  # from each state to itself or the next one, so that unlikely states may be the only way
        bulk *= torch.ones(c, c, device=DEVICE).triu().tril(1)
    bulk /= bulk.sum(-1, keepdim=True)
    p0 = random(g, m, c, seed=2).abs() + 0.01
    bulk, p0 = (bulk.log(), p0.log()) if log else (bulk, p0)
    ends = 1 + torch.arange(n, device=DEVICE).view(g, m, 1) * 7 % v if lengths else None
    x = (spread * random(v, g, m, c, seed=n + v + c)).to(dtype)
    return Chain(x, bulk.to(dtype), p0.to(dtype), ends, log, F64 if dtype == F64 else F32, by_log=True)


def public_operands(n: int, v: int, c: int, kind: str, dtype=F32, spread=1.0) -> list[Tensor]:
    """x [n, v, c], bulk and p0 [c] of public functions, which require gradients."""
    chain = operands(n, v, c, kind, dtype, spread)
    x, bulk = chain.x.reshape(v, n, c).transpose(0, 1), chain.bulk.transpose(0, 1)
    tensors = x, bulk if kind == SEPARATE else bulk[0], chain.p0.reshape(n, c)[0]
    return [tensor.contiguous().requires_grad_() for tensor in tensors]


def chain_results(chain: Chain, weight: Tensor, module: Any, gradient_module: Any, **options: Any) -> list[Tensor]:
    """The log-partitions, the gradients of all operands, and the flagged sequences."""
    keep = chain.new(chain.v, chain.g, chain.m, chain.c)
    grad_x, grad_bulk = torch.empty_like(chain.x), torch.empty_like(chain.bulk, dtype=chain.dtype)
    for memory in (keep, grad_x, grad_bulk):
        memory.fill_(math.nan)
    kept, _ = module.forward(chain, keep=keep, **options)
    grad_p0 = gradient_module.backward(chain, kept, weight, None, grad_x, grad_bulk)
    return [kept.log_norm, grad_x, grad_bulk, grad_p0, kept.recomputed]


def error(result: Tensor, expected: Tensor) -> float:
    """The largest error, relative to numbers beyond 1; infinite for NaN in one of both."""
    a, b = result.detach().double(), expected.detach().double()
    off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs() / b.abs().clamp(min=1.0))
    return float(off.nan_to_num(math.inf, math.inf).max()) if off.numel() else 0.0


def check(group: str, case: str, call: Call, reference: Call, bound: float, repeats: int = 6) -> None:
    """One row: errors of results, whether repeated calls agree to the last bit, seconds of the first call."""
    row, start = {"group": group, "case": case}, time.monotonic()
    try:
        results = call()
        wait()
        row["first_s"] = round(time.monotonic() - start, 2)
        pairs = (pair for _ in range(1 if DRY else repeats) for pair in zip(results, call(), strict=True))
        row["differ"] = sum(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
        row["errors"] = [float(f"{error(*pair):.2e}") for pair in zip(results, reference(), strict=True)]
        row["ok"] = not row["differ"] and all(off <= bound for off in row["errors"])
    except Exception as problem:
        row |= failure(problem)
        say(**row)
        if not DRY and isinstance(problem, RuntimeError) and "CUDA error" in str(problem):
            os._exit(7)  # the context is lost
        return
    say(**row)


def failure(problem: Exception) -> dict[str, Any]:
    text = f"{type(problem).__name__}: {' '.join(str(problem).split())[-300:]}"
    return {"ok": False, "problem": text, "where": traceback.format_exc(limit=-3)[-600:]}


def schedule(halved: bool) -> Any:
    """A context in which scans are halved wherever they can be, or nowhere."""
    return patch.multiple(chains, _SHORT=3, num_processors=lambda device: 10**9 if halved else 0)


def halves(chain: Chain) -> bool:
    return chains.meets(chain.v, chain.g, chain.m, chain.c, chain.dtype, chain.x.device)


def chain_case(
    group: str, n: int, v: int, c: int, kind: str, name: str = "", flags: bool | None = None, **options: Any
) -> None:
    """Rows of both schedules; `flags`: whether sequences should be flagged."""
    n, v, c = small(n, v, c)
    chain = operands(n, v, c, kind, **options)
    weight, expected, flagged = random(chain.g, chain.m).double().abs() + 0.5, [], []

    def call() -> list[Tensor]:
        *results, flags = chain_results(chain, weight, forward, backward, halved=halves(chain))
        flagged.append(flags)
        return [forward.forward(chain)[0].log_norm, *results]

    def reference() -> list[Tensor]:
        if not expected:
            wide = {name: getattr(chain, name).double() for name in ("x", "bulk", "p0")}
            exact = replace(chain, **wide, dtype=F64)
            expected.extend(chain_results(exact, weight, plain_forward, plain_backward)[:-1])
        return [expected[0], *expected]

    narrow = chain.x.dtype == HALF or torch.get_float32_matmul_precision() != "highest"
    bound = 1e-10 * v if chain.dtype == F64 else 1e-2 if narrow else 2e-5 + 2e-6 * v
    for halved in (False, True):
        with schedule(halved):
            if halved and not halves(chain):
                continue
            case = " ".join(f"n={n} v={v} c={c} {kind} {name} {'halved' if halved else ''}".split())
            check(group, case, call, reference, bound)
            if flags is not None and flagged:
                count = int(flagged[-1].sum())
                say(group=group, case=f"{case}, flagged", flagged=count, ok=(count > 0) == flags)


def timed(call: Call, seconds: float = 0.06) -> float:
    """The median of a call's milliseconds; a single one of a slow call."""
    for _ in range(2):
        if (spent := _events([call])[0]) > 400:
            return spent
    count = max(5, min(200, int(1e3 * seconds / max(spent, 1e-3))))
    return statistics.median(_events([call] * count))


def _events(calls: list[Call]) -> list[float]:
    events = []
    for call in calls:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        events.append((before, after))
    wait()
    return [before.elapsed_time(after) for before, after in events]


def graphed(call: Call) -> Call:
    """A call as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


@triton.jit
def exp_kernel(x_ptr, y_ptr, N: tl.constexpr):
    at = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(y_ptr + at, scaled.exp(tl.load(x_ptr + at)))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, PRECISION: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    sums = tl.zeros((64, 64), tl.float32)
    tl.store(out_ptr + at, scaled.multiply(tl.load(a_ptr + at), tl.load(b_ptr + at), sums, PRECISION))


@triton.jit
def barrier_kernel(out_ptr, rounds):
    """What a program writes, its other threads read after a barrier."""
    at, i = out_ptr + tl.program_id(0) * 1024, tl.arange(0, 1024)
    for _ in range(rounds):
        tl.debug_barrier()
        other = tl.load(at + (i + 517) % 1024)
        tl.debug_barrier()
        tl.store(at + i, other + 1.0)


def dot(a: Tensor, b: Tensor, precision: str) -> Tensor:
    out = torch.empty_like(a)
    dot_kernel[(1,)](a, b, out, PRECISION=precision)
    return out


def probe() -> None:
    if not DRY:
        probe_device()
    x = -60 * torch.rand(2**14 if DRY else 2**20, device=DEVICE)
    y = torch.empty_like(x)
    exp_kernel[(len(x) // 1024,)](x, y, N=1024)
    off = y.double() / x.double().exp() - 1
    most = float(off.abs().max())
    mean = float(off.mean())  # the argument of exp2 is rounded
    say(group="probe", case="exp", mean=mean, most=most, ok=most < 4e-6 and abs(mean) < 2e-7)
    a, b = torch.rand(2, 64, 64, device=DEVICE)
    for precision, bound in (("ieee", 2e-6), ("tf32x3", 2e-6), ("tf32", 2e-3)):
        off = dot(a, b, precision).double() / (a.double() @ b.double()) - 1
        most = float(off.abs().max())
        say(group="probe", case=f"dot {precision}", mean=float(off.mean()), most=most, ok=most < bound)
    ratio = float(dot(torch.full_like(a, 2.0**-120), torch.full_like(a, 2.0**100), "tf32x3")[0, 0]) * 2.0**14
    say(group="probe", case="small factors", ratio=ratio, ok=abs(ratio - 1) < 1e-3)
    out, rounds = torch.zeros(64 * 1024, device=DEVICE), 5 if DRY else 1000
    barrier_kernel[(4 if DRY else 64,)](out, rounds)
    say(group="probe", case="memory after a barrier", ok=bool((out[: 4 * 1024] == rounds).all()))


def probe_device() -> None:
    p = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    say(group="probe", case="device", name=p.name, processors=p.multi_processor_count, **versions, ok=True)
    for size, case in ((2**28, "copy from memory"), (2**21, "copy in L2")):
        a, b = torch.empty(2, size, device="cuda")
        rate = 2 * a.nbytes / timed(graphed(lambda a=a, b=b: a.copy_(b))) / 1e9
        say(group="probe", case=case, tb_s=round(rate, 2), ok=True)
    one = torch.zeros(1, device="cuda")

    def hundred() -> None:
        for _ in range(100):
            one.add_(1.0)

    eager, graph = (round(10 * timed(call), 2) for call in (hundred, graphed(hundred)))
    say(group="probe", case="a launch", eager_us=eager, graph_us=graph, ok=True)


def shared() -> None:
    for n, v, c in ((500, 40, 200), (32, 128, 64), (100, 40, 16), (64, 20, 256), (40, 30, 7), (17, 9, 1), (40, 2, 33)):
        for kind in (SHARED, ONE):
            chain_case("shared", n, v, c, kind, flags=False)
    chain_case("shared", 60, 30, 100, SETS)
    chain_case("shared", 5000, 20, 64, SHARED, "many programs")


def variants() -> None:
    for kind in (SHARED, ONE, SEPARATE):
        chain_case("variants", 50, 30, 100, kind, "lengths", lengths=True)
        chain_case("variants", 50, 30, 40, kind, "logarithms", log=True)
        chain_case("variants", 20, 30, 40, kind, "float64", dtype=F64)
    chain_case("variants", 20, 12, 200, SHARED, "float64", dtype=F64)
    for kind in (SHARED, SEPARATE):
        chain_case("variants", 50, 30, 64, kind, "bfloat16", dtype=HALF)
    torch.set_float32_matmul_precision("high")
    chain_case("variants", 50, 30, 100, SHARED, "single TF32")


def separate() -> None:
    for n, v, c in ((8, 128, 64), (300, 20, 64), (32, 25, 20), (8, 20, 100), (4, 20, 200), (66, 12, 256), (200, 12, 3)):
        chain_case("separate", n, v, c, SEPARATE, flags=False)
    chain_case("separate", 1, 200, 64, SEPARATE, "a single sequence")


def wide() -> None:
    """More states than one program holds; in a dry run, more than 16."""
    with patch.object(chains, "_WIDE", 16) if DRY else contextlib.nullcontext():
        for n, v, c, kind in ((500, 8, 512, SHARED), (64, 6, 1024, SHARED), (9, 8, 512, ONE), (3, 6, 300, SEPARATE)):
            chain_case("wide", n, v, c, kind, flags=False)
        chain_case("wide", 40, 8, 300, SHARED, "lengths", lengths=True)
        chain_case("wide", 40, 6, 300, SHARED, "logarithms", log=True)
        chain_case("wide", 20, 6, 300, SHARED, "float64", dtype=F64)


def flagged() -> None:
    """Sequences that underflow, which are recomputed in logarithms."""
    for n, v, c, kind in ((40, 12, 70, SHARED), (40, 12, 20, ONE), (8, 12, 33, SEPARATE), (20, 6, 300, SHARED)):
        chain_case("flagged", n, v, c, kind, "far apart", spread=80.0, flags=True)


def compare(group: str, case: str, call: Call, leaves: list[Tensor], bound: float = 1e-4) -> None:
    """A row of a public function, compared with torch operations in float64."""

    def reference() -> list[Tensor]:
        with kernels.use("plain"):
            return call([leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves])

    check(group, case, lambda: call(leaves), reference, bound)


def product(leaves: list[Tensor], strategy: str = "auto") -> list[Tensor]:
    """The public product, with gradients if the operands require them."""
    if leaves[0].requires_grad:
        return steps.run(logchain.product, leaves, strategy=strategy)
    return [logchain.product(*leaves, strategy=strategy)]


def paths() -> None:
    def call(leaves: list[Tensor], lengths: Tensor | None) -> list[Tensor]:
        with torch.no_grad():
            states, score = logchain.viterbi(*leaves, lengths=lengths)
            wide = [leaf.double() for leaf in leaves]
            weight = logchain.log_prob(*wide, states, lengths=lengths) + logchain.product(*wide, lengths=lengths)
            return [score, weight]

    sizes = (500, 40, 200, SHARED), (10, 30, 33, SHARED), (8, 64, 64, SEPARATE), (1, 300, 16, ONE), (4, 8, 600, SHARED)
    for *size, kind in sizes:
        n, v, c = small(*size)
        lengths = 1 + torch.arange(n, device=DEVICE) * 7 % v if size[0] == 10 else None
        leaves = public_operands(n, v, c, kind)
        compare("paths", f"n={n} v={v} c={c} {kind}", partial(call, lengths=lengths), leaves, 1e-5)


def log_products() -> None:
    sizes = (500, 16), (300, 32), (64, 64), (16, 128), (8, 256), (4, 512), (5, 33), (3, 130)
    for n, c in ((2, 16), (2, 33)) if DRY else sizes:
        for spread in (1.0, 60.0):
            leaves = [leaf.requires_grad_() for leaf in (spread * random(2, n, c, c)).unbind()]
            case = f"n={n} c={c}{' far apart' if spread > 1 else ''}"
            compare("matmul", case, partial(steps.run, logchain.matmul), leaves, 2e-4)


def tree() -> None:
    for n, s, c in ((2, 5, 9),) if DRY else ((8, 256, 64), (2, 9, 33), (2, 5, 130), (4, 64, 16)):
        stack = random(n, s, c, c)
        for function in (logchain.matrix_product, logchain.prefix_products):
            call = partial(steps.run, function)
            compare("tree", f"{function.__name__} n={n} s={s} c={c}", call, [stack.clone().requires_grad_()])
        in_place = lambda leaves: [logchain.matrix_product(leaves[0].clone(), inplace=True)]  # noqa: E731
        compare("tree", f"in place n={n} s={s} c={c}", in_place, [stack])


def long() -> None:
    """Single sequences, in segments or sequentially."""
    for *size, kind in ((1, 3_000, 16, ONE), (1, 1_500, 4, SHARED), (1, 1_000, 32, ONE)):
        n, v, c = small(*size)
        for strategy in ("segments", "sequential"):
            call = partial(product, strategy=strategy)
            compare("long", f"v={v} c={c} {kind} {strategy}", call, public_operands(n, v, c, kind))


def public() -> None:
    """Public functions must not wait for the device, and a CUDA graph must replay them."""
    for name in ("separate", "matmul") if DRY else steps.STEPS:
        function, operands = steps.STEPS[name]
        call = partial(steps.run, function)
        leaves = [operand.to(DEVICE).requires_grad_() for operand in operands()]
        compare("public", name, call, leaves)
        if not DRY:
            row = {"group": "public", "case": f"{name}, without waiting, in a graph"}
            try:
                with steps.waiting_raises():
                    expected = call(leaves)
                results: list[list[Tensor]] = []
                graphed(lambda call=call, leaves=leaves, results=results: results.append(call(leaves)))()
                row["ok"] = all(map(torch.equal, results[-1], expected))
            except Exception as problem:
                row |= failure(problem)
            say(**row)


def hang() -> None:
    say(group="hang", case="before", ok=True)
    time.sleep(3600)


def wrong() -> None:
    """Log-potentials of the reference that are off by a thousandth."""
    potentials = plain_forward.potentials

    def off(chain: Chain, step: int) -> tuple[Tensor, Tensor]:
        x, shift = potentials(chain, step)
        return x, shift + 1e-3

    with patch.object(plain_forward, "potentials", off):
        chain_case("wrong", 2, 3, 4, SHARED)


GROUPS: dict[str, Call] = {
    "probe": probe, "shared": shared, "variants": variants, "separate": separate, "wide": wide, "flagged": flagged,
    "paths": paths, "matmul": log_products, "tree": tree, "long": long, "public": public, "hang": hang, "wrong": wrong,
}  # fmt: skip


def prepare() -> None:
    """Choose the kernels for all tensors, without a fallback."""
    torch.manual_seed(0)
    kernels.use("triton")
    if DRY:
        from tests.kernels.gpu import interpreter

        interpreter.install()
        sys.modules["logchain.kernels.cpu"] = None  # type: ignore[assignment]  # as without the C library
        kernels.on_gpu = lambda tensor: True
