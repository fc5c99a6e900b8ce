"""The tiles of `chain_wide`: a product's sums in registers, its operands in blocks from memory.

    sums(r, n) = sum_k message(r, k) right(k, n) / 2^exponent

`right` is a matrix or its transpose, of linear entries or logarithms. Sums of a block are formed by tensor cores, and
added as IEEE has it: tensor cores truncate, which over thousands of terms would be a bias.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .chains import Operands
from .meeting import counter_of, take_ticket
from .scaled import exponent_of, halves, linear, multiply, target
from .tiles import widened

# states from which on a step takes longer than a launch
_APART = 2048

# integers that kernels are not compiled for: sizes of batches, and strides of all axes but one
ANY = ["v", "g", "m", "first", "slots"] + [f"stride_{of}{axis}" for of in "xbd" for axis in "vgm"]


class Tile(NamedTuple):
    """A program's sequences and states, how many summands it loads at a time, and how it is compiled."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


WIDE = Tile(32, 64, 32, 8, 3)
WIDER = Tile(32, 128, 32, 8, 3)
# for at most 16 sequences of a set
FEW = Tile(16, 64, 32, 4, 3)
DOUBLE = Tile(32, 64, 16, 8, 3)
# where entries are loaded one by one, which takes registers for their addresses; in a loop of its own kernel, as the
# first cache holds what is loaded in less than 16 bytes, and does not see what others have stored since
ODD = Tile(32, 32, 16, 8, 3)


class Layout(NamedTuple):
    """What the kernels of a chain are compiled for, in one argument.

    `parts` programs have all columns of a row; `together`: they are of one launch and meet; `kept`: messages of all
    steps are, not only of two. Strides are those of a matrix; `width_x`, `width_bulk` and `width_out` divide all others
    of x, matrices, and the gradient of x, but the last.
    """

    c: int
    rows: int
    columns: int
    depth: int
    stages: int
    parts: int
    together: bool
    kept: bool
    log_params: bool
    precision: str
    stride_k: int
    stride_j: int
    width_x: int
    width_bulk: int
    width_out: int


@triton.jit
def place(counters_ptr, ends_ptr, m, v, L: tl.constexpr):
    """The set, the first sequence, the part and the counter of a program, and the steps of its sequences."""
    if L.together:
        program = take_ticket(counters_ptr)
    else:
        program = tl.program_id(0)
    group = program // L.parts
    blocks = tl.cdiv(m, L.rows)
    z, row = (group // blocks).to(tl.int64), (group % blocks).to(tl.int64) * L.rows
    members = tl.arange(0, L.rows)
    ends = tl.zeros_like(members) + v
    if ends_ptr is not None:
        ends = tl.load(ends_ptr + z * m + row + members, mask=members < m - row, other=1).to(tl.int32)
    return z, row, program % L.parts, counter_of(counters_ptr, group), ends


@triton.jit
def product(left_ptr, right_ptr, bound_ptr, inside, there, stride_k, stride_n, count, L: tl.constexpr):
    """The tile's sums: rows of messages that are `inside`, columns of `right` that are `there`, k below `count`.

    The exponent is loaded as a tile: a number would keep `right` from going from shared memory to tensor cores
    without a second way through shared memory, in halves.
    """
    DTYPE: tl.constexpr = left_ptr.dtype.element_ty
    ROWS: tl.constexpr = L.rows
    COLUMNS: tl.constexpr = L.columns
    # bound to names, without which Triton 3.6 does not know them as constants
    LOG_PARAMS: tl.constexpr = L.log_params
    PRECISION: tl.constexpr = L.precision
    NOTHING: tl.constexpr = float("-inf") if LOG_PARAMS else 0.0
    exponent = tl.load(bound_ptr + tl.zeros((1, 1), tl.int32), mask=count > 0, other=0) >> 1
    depth = tl.arange(0, L.depth)
    left_ptr += tl.arange(0, ROWS)[:, None] * L.c + depth[None, :]
    right_ptr += depth[:, None] * stride_k + tl.arange(0, COLUMNS)[None, :] * stride_n
    sums = tl.zeros((ROWS, COLUMNS), DTYPE)
    for k in tl.range(0, count, L.depth, num_stages=L.stages):
        along = (depth < L.c - k) | (L.c % L.depth == 0)
        a = tl.load(left_ptr, mask=inside[:, None] & along[None, :], other=0.0, cache_modifier=".cg")
        p = tl.load(right_ptr, mask=along[:, None] & there[None, :], other=NOTHING)
        high, low = halves(linear(widened(p, DTYPE), exponent, LOG_PARAMS), PRECISION)
        sums += multiply(a, high, low, PRECISION)
        left_ptr += L.depth
        right_ptr += L.depth * stride_k
    return sums


@triton.jit
def slot(i, L: tl.constexpr):
    """Where the messages of step i lie."""
    if L.kept:
        return i
    else:
        return i % 2


@triton.jit
def stored(ptr, inside, L: tl.constexpr):
    """What all parts of a row have stored: (rows, parts)."""
    parts = tl.arange(0, triton.next_power_of_2(L.parts))
    ptr += tl.arange(0, L.rows)[:, None] * L.parts + parts[None, :]
    return tl.load(ptr, mask=inside[:, None] & (parts < L.parts)[None, :], other=0.0, cache_modifier=".cg")


@triton.jit
def shift_from(top):
    """The shift that brings a message whose largest entry was `top` to 2^TARGET."""
    if top.dtype == tl.float64:
        return tl.minimum(tl.maximum(exponent_of(top) - target(True), -900), 900)
    else:
        return tl.minimum(tl.maximum(exponent_of(top) - target(False), -100), 100)


def tile_of(chain: Operands, width_x: int) -> Tile:
    """The tile for a chain: of 500 sequences with 512 or 1,024 states, a device has one for each multiprocessor."""
    _, _, m, c = chain.shape
    if width_x != 4 or 4 not in launch.widths(chain.bulk):
        return ODD
    if chain.double:
        return DOUBLE
    if m <= FEW.rows:
        return FEW
    return WIDE if c < 640 or launch.chip(chain.x) == "gfx942" else WIDER


def layout(
    chain: Operands, messages: Tensor, tile: Tile | None, together: bool | None, out: Tensor | None = None
) -> tuple[Layout, int, dict[str, Any]]:
    """What the kernels are compiled for, their programs, and their warps and stages; what is None is chosen."""
    (v, g, m, c), (stride_k, stride_j) = chain.shape, chain.strides[6:]
    *strides, last = chain.x.stride()
    width_x = launch.common_width(c, *strides) if last == 1 else 1  # so many entries one load can take
    tile = tile or tile_of(chain, width_x)
    parts = triton.cdiv(c, tile.columns)
    if together is None:
        fits = tile != ODD and c < _APART and parts <= launch.processors(chain.x)
        together = fits and chain.x.device.type == "cuda"
    fixed = Layout(
        c, tile.rows, tile.columns, tile.depth, tile.stages, parts, together, len(messages) == v,
        chain.log_params, chain.precision, stride_k, stride_j, width_x, max(launch.widths(chain.bulk)),
        1 if out is None else launch.common_width(c, *out.stride()[:-1]),
    )  # fmt: skip
    return fixed, g * triton.cdiv(m, tile.rows) * parts, launch.all_registers(tile.warps) | {"num_stages": tile.stages}
