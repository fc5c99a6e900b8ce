"""Sequences with matrices of their own, at the pace of memory: launches of `own_forward` and `own_backward`.

Operands: `chains`, with m = 1. Numerics: `scaled` and `own_step`. A sequence with a sum that may be inexact is
doubtful, and its results mean nothing.

Cost: g (v - 1) c^2 multiply-adds and as many entries of matrices, each read once, or twice for a gradient of more than
64 states; one matrix for all steps is held if it fits. Up to 64 states a program has a sequence: its message and a
matrix stay in registers, and the next matrix is on its way. Above, PARTS programs with some columns each (backwards:
rows) share a sequence where there are fewer sequences than processors, and meet once a step. What a program has of a
matrix is one tile, loaded a step ahead, or a sequence of tiles, loaded asynchronously.
"""

import torch
import triton
from torch import Tensor

from . import launch
from .chains import Operands, Room, room
from .meeting import part_of, words
from .own_backward import SLOTS, backward_kernel
from .own_forward import forward_kernel
from .own_step import Form

# states up to which a program has a sequence, with messages in registers
NARROW = 64

# the entries of the largest tile that is held, and of one of several, by whether they are float64
_HELD = {False: 16384, True: 8192}
_TILE = {False: 4096, True: 1024}


def parts_of(chain: Operands) -> int:
    """The programs that share a sequence; one where they run one after the other, in the interpreter."""
    c = chain.shape[3]
    if chain.x.device.type != "cuda" or c <= NARROW:
        return 1
    most, fewest = triton.cdiv(c, 8), triton.cdiv(c, 256)
    return max(fewest, min(most, launch.processors(chain.x) // chain.shape[1]))


def prepared(chain: Operands, parts: int, same: bool, *, end: bool = False) -> tuple[Room, Tensor | None]:
    """Room for a launch, and the bounds of matrices that it needs.

    They are those of one matrix for all steps, if `same`. Otherwise several parts need those of some rows of the first
    matrix, or of the last one if `end`, which tell them how much a first step grows a message.
    """
    bulk = chain.bulk
    if not same:
        bulk = bulk[-1:] if end else bulk[:1]
        bulk = bulk[:, :, :: max(1, chain.shape[3] // 64)] if parts > 1 else bulk[:0]
    ready = room(chain, words(chain.shape[1]), bulk=bulk)
    return ready, ready.bound if len(bulk) else None


def forward(
    chain: Operands, messages: Tensor, log_norm: Tensor, error: Tensor | None = None, *, parts: int | None = None,
    programs: int | None = None,
) -> Tensor:  # fmt: skip
    """Which sequences are doubtful (g, 1), after messages and the log-partitions (g, 1) of the others are written.

    Arguments are those of `chain_forward.forward`, but that `parts` share a sequence.
    """
    v, g, m, _ = chain.shape
    assert m == 1
    parts = parts_of(chain) if parts is None else parts
    same = len(chain.bulk) == 1 and v > 2
    (ready, bound), (form, options) = prepared(chain, parts, same), forms(chain, parts, same)
    xv, xg, _, xc, bv, bg, *_ = chain.strides
    launch.run(
        forward_kernel, (programs or g * parts,), chain.x, chain.bulk, bound, ready.level, chain.start, chain.ends,
        messages, log_norm, error, ready.doubt, ready.counters, v, g, len(messages), xv, xg, xc, bv, bg,
        FORM=form, **options,
    )  # fmt: skip
    return ready.doubt


def backward(
    chain: Operands, messages: Tensor, redone: Tensor, log_norm: Tensor, weight: Tensor, *, grad_x: Tensor | None,
    grad_start: Tensor, r: Tensor | None, final: Tensor | None, grad_bulk: Tensor | None = None, by_log: bool = False,
    parts: int | None = None, programs: int | None = None,
) -> Tensor:  # fmt: skip
    """Which sequences are doubtful (g, 1), after the gradients of the others are written; `redone` ones are left out.

    Arguments are those of `chain_backward.backward`, but that `parts` share a sequence, and that matrices have a
    gradient: where they are not one for all steps, `grad_bulk` is memory for it (v - 1, g, c, c), each matrix
    contiguous; `by_log` if it is that of the logarithms of linear matrices. It is exactly 0 where a matrix leads
    nowhere. r, then None, is divided by 2^TARGET and has the bound of one matrix for all steps.
    """
    v, g, m, c = chain.shape
    assert m == 1 and messages.shape == chain.x.shape and messages.is_contiguous() and grad_start.is_contiguous()
    assert r is None or r.is_contiguous() and len(chain.bulk) == 1
    if grad_bulk is not None:
        assert r is None and len(grad_bulk) == v - 1 == len(chain.bulk)
        assert c == 1 or grad_bulk.stride()[2:] == (c, 1)
    parts = parts_of(chain) if parts is None else parts
    same = len(chain.bulk) == 1 and grad_bulk is None
    (ready, bound), (w, shares) = prepared(chain, parts, same, end=True), scratch(chain, parts)
    out, kind = (r, "r") if r is not None else (grad_bulk, "logs" if by_log or chain.log_params else "entries")
    form, options = forms(chain, parts, same, "" if out is None else kind, backwards=True)
    xv, xg, _, xc, bv, bg, *_ = chain.strides
    dv, dg, _, dc = (0, 0, 0, 0) if grad_x is None else grad_x.stride()
    ov, og = (0, 0) if out is None else out.stride()[:2]
    launch.run(
        backward_kernel, (programs or g * parts,), chain.x, chain.bulk, bound, ready.level, chain.ends, messages,
        redone, log_norm, weight.contiguous(), final, grad_x, grad_start, out, w, shares, ready.doubt, ready.counters,
        v, g, xv, xg, xc, bv, bg, dv, dg, dc, ov, og, FORM=form, **options,
    )  # fmt: skip
    return ready.doubt


def scratch(chain: Operands, parts: int) -> tuple[Tensor, Tensor]:
    """Memory for w, and for shares of nu with their exponents."""
    _, g, _, c = chain.shape
    w = torch.empty(SLOTS.value, g, c, dtype=chain.dtype, device=chain.x.device)
    return w, torch.empty(SLOTS.value, g, parts, 2, dtype=torch.float64, device=chain.x.device)


def forms(
    chain: Operands, parts: int, same: bool, out: str = "", *, backwards: bool = False
) -> tuple[Form, dict[str, int]]:
    """What a kernel is compiled for, with the warps and stages of a program."""
    c, double, counts = chain.shape[3], chain.double, out in ("entries", "logs")
    whole = triton.next_power_of_2(c)
    columns = whole if parts == 1 else triton.next_power_of_2(part_of(c, parts))
    # what else registers hold: several parts count a step later, beside the next matrix
    room_for = _HELD[double] // (1 if not counts else 4 if double else 2 if parts > 1 else 1)
    if whole * columns <= room_for:
        words = whole * columns * (2 if double else 1)
        rows, warps, stages = whole, 1 if words <= 1024 else 4 if words <= 4096 else 8, 1
    else:
        rows, warps, stages = max(1, min(whole // 2, _TILE[double] // columns)), 8 if counts or double else 4, 3
    stride_k, stride_j = chain.strides[6:]
    source, column = (stride_j, stride_k) if backwards else (stride_k, stride_j)
    widths = launch.common_width(*chain.x.stride()[:2]), max(launch.widths(chain.bulk))
    form = Form(c, parts, same, chain.log_params, out, rows, columns, source, column, *widths)
    return form, {"num_warps": warps, "num_stages": stages}
