"""Export to ONNX: log-partitions and best paths of dense matrices, as loops over any number of variables."""

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import BOOL, DOUBLE, INT64, graph, script
from onnxscript import opset18 as op

__all__ = ["translations"]

_INFINITY, _NAN = math.inf, math.nan


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """The `custom_translation_table` of `torch.onnx.export(..., dynamo=True)` for log-partitions and best paths.

    With it, a module that calls `logchain.product`, `log_prob` or `viterbi`, or `nn.LinearChainCRF.viterbi` or
    `nn.HMM.log_prob`, is exported with any number of sequences and of variables: the recursion is the operator Scan of
    ONNX. Arithmetic is float64 in logarithms, summed without compensation. The results are those of torch: exactly -inf
    for impossible sequences, NaN only for sequences with NaN; among best paths that differ by rounding alone, another
    one may be taken. A length out of range makes its result NaN, and its states -1.

    Raises:
        ImportError: on import of `logchain.onnx`, without the packages onnx and onnxscript.
        NotImplementedError: in the export of `topk_paths`. Structures, gradients (`marginals`) and draws have no
            translation: torch reports the name of the operator.

    Cost: `v c^2` per sequence, in v dependent steps; memory `c^2` per sequence, and `v c` for best paths.

    >>> from logchain.nn import HMM
    >>> hmm, data = HMM(2, "gaussian").eval(), torch.zeros(3, 5)
    >>> axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    >>> program = torch.onnx.export(
    ...     hmm, (data,), dynamo=True, dynamic_shapes=(axes,), custom_translation_table=translations(), verbose=False
    ... )
    >>> len(program.model.graph.outputs)  # program.save("hmm.onnx") writes the file
    1
    """
    operators: Any = torch.ops.logchain
    return {
        operators.log_norm.default: _log_norm,
        operators.best_paths.default: _best_paths,
        operators.checked.default: lambda values, size, name: op.Identity(values),
    }


def _log_norm(x: Any, bulk: Any, p0: Any, lengths: Any, log_params: bool, *_: Any) -> list[Any]:
    return [_sum_of_paths(*_steps_first(x, bulk, p0, lengths, log_params))]  # without messages for gradients


def _best_paths(x: Any, bulk: Any, p0: Any, lengths: Any, log_params: bool, k: int | None) -> tuple[Any, Any]:
    if k is not None:
        raise NotImplementedError(f"topk_paths: expected viterbi in an export to ONNX, got k = {k}; export viterbi")
    states, unknown = _best_path(*_steps_first(x, bulk, p0, lengths, log_params))
    return op.Transpose(states, perm=[*range(1, len(x.shape) - 1), 0]), unknown


def _steps_first(x: Any, bulk: Any, p0: Any, lengths: Any, log_params: bool) -> tuple[Any, Any, Any, Any]:
    """x (v, *B, c), bulk (s, *B or less, c, c) and p0 as float64 logarithms, and lengths (*B), () where all have v.

    A length out of range makes its sequence NaN.
    """
    batch, lead = len(x.shape) - 2, len(bulk.shape) - 3
    v = op.Squeeze(op.Shape(x, start=batch, end=batch + 1))
    x, bulk, p0 = (op.Cast(operand, to=DOUBLE.dtype) for operand in (x, bulk, p0))
    bulk, p0 = (bulk, p0) if log_params else (op.Log(bulk), op.Log(p0))
    x = op.Transpose(x, perm=[batch, *range(batch), batch + 1])
    if lengths is not None:
        valid = op.And(op.GreaterOrEqual(lengths, 1), op.LessOrEqual(lengths, v))
        x = op.Where(op.Unsqueeze(valid, [-1]), x, op.CastLike(_NAN, x))
        lengths = op.Where(valid, lengths, v)
    return x, op.Transpose(bulk, perm=[lead, *range(lead), lead + 1, lead + 2]), p0, v if lengths is None else lengths


@script(default_opset=op)
def _sum_of_paths(x: DOUBLE[...], bulk: DOUBLE[...], p0: DOUBLE[...], lengths: INT64[...]) -> DOUBLE[...]:
    # by hand: ReduceLogSumExp of onnxruntime underflows below -745
    v, s = op.Squeeze(op.Shape(x, start=0, end=1)), op.Squeeze(op.Shape(bulk, start=0, end=1))
    zero = op.CastLike(0.0, x)

    @graph()
    def step(message, potential, index):
        terms = op.Unsqueeze(message, [-1]) + op.Gather(bulk, op.Mod(index - 1, s), axis=0)
        top = op.ReduceMax(terms, [-2], keepdims=1)
        top = op.Where(op.IsInf(top), zero, top)
        moved = op.Log(op.ReduceSum(op.Exp(terms - top), [-2], keepdims=0)) + op.Squeeze(top, [-2])
        after = op.Where(index == 0, message, moved) + potential
        return op.Where(op.Unsqueeze(index < lengths, [-1]), after, message)

    message = op.Scan(op.Expand(p0, op.Shape(x, start=1)), x, op.Range(0, v, 1), body=step, num_scan_inputs=2)
    top = op.ReduceMax(message, [-1], keepdims=1)
    top = op.Where(op.IsInf(top), zero, top)
    return op.Log(op.ReduceSum(op.Exp(message - top), [-1], keepdims=0)) + op.Squeeze(top, [-1])


@script(default_opset=op)
def _best_path(x: DOUBLE[...], bulk: DOUBLE[...], p0: DOUBLE[...], lengths: INT64[...]) -> tuple[INT64[...], BOOL[...]]:
    """The states (v, *B), and whether sequences are unknown (*B)."""
    v, s, c = op.Squeeze(op.Shape(x, start=0, end=1)), op.Shape(bulk, start=0, end=1), op.Shape(x, start=-1)
    steps, same = op.Range(0, v, 1), op.Range(0, op.Squeeze(c), 1)
    zero, infinity, nan = op.CastLike(0.0, x), op.CastLike(_INFINITY, x), op.CastLike(_NAN, x)
    identity = op.Where(op.Unsqueeze(same, [1]) == same, zero, -infinity)  # leads into the first step

    @graph()
    def step(message, potential, index):
        matrix = op.Where(index == 0, identity, op.Gather(bulk, op.Mod(index - 1, op.Squeeze(s)), axis=0))
        terms = op.Unsqueeze(message, [-1]) + matrix
        arrivals = terms + op.Unsqueeze(potential, [-2])
        unknown = op.ReduceSum(op.Where(arrivals < infinity, zero, nan), [-2, -1], keepdims=0)
        after = op.ReduceMax(arrivals, [-2], keepdims=0) + op.Unsqueeze(unknown, [-1])
        inside = op.Unsqueeze(index < lengths, [-1])
        next_message = op.Where(inside, after, message)
        choice = op.Where(inside, op.ArgMax(terms, axis=-2, keepdims=0), same)
        return next_message, choice

    start = op.Expand(p0, op.Shape(x, start=1))
    last, choices = op.Scan(start, x, steps, body=step, num_scan_inputs=2)
    unknown = op.IsNaN(op.ReduceSum(last, [-1], keepdims=0))
    possible = op.And(op.Not(unknown), op.ReduceMax(last, [-1], keepdims=0) > -infinity)

    @graph()
    def back(state, choice, index):
        earlier = op.Squeeze(op.GatherElements(choice, op.Unsqueeze(state, [-1]), axis=-1), [-1])
        known = op.Where(op.And(possible, index < lengths), state, op.CastLike(-1, state))
        return earlier, known

    final = op.ArgMax(last, axis=-1, keepdims=0)
    first, states = op.Scan(
        final, choices, steps, body=back, num_scan_inputs=2, scan_input_directions=[1, 1], scan_output_directions=[1]
    )
    return states, unknown
