"""Vectors of eight floats, for loops that numba compiles: what LLVM makes of a loop over few states takes them singly.

A vector is of the dtype of the array that it comes from; `+`, `-` and `*` take vectors and numbers, and a product and a
sum may become one operation. Arrays are flat and contiguous. Behind a row's last entry, `n` from the place on, nothing
is read and nothing written.
"""

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_model

LANES = 8

_FLOATS = {types.float32: ir.FloatType(), types.float64: ir.DoubleType()}


class Vector(types.Type):
    """The type of a vector of float32 or float64."""

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


@register_model(Vector)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, _vector(vector.dtype))


def _vector(dtype: Any) -> ir.VectorType:
    return ir.VectorType(_FLOATS[dtype], LANES)


def _all(builder: Any, value: Any) -> Any:
    """A number in all lanes."""
    vector = ir.VectorType(value.type, LANES)
    none = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, none, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))


def _lanes(context: Any, builder: Any, value: Any, given: Any, dtype: Any) -> Any:
    """A vector or a number as a vector of some dtype."""
    if not isinstance(given, Vector):
        return _all(builder, context.cast(builder, value, given, dtype))
    if given.dtype == dtype:
        return value
    convert = builder.fpext if dtype == types.float64 else builder.fptrunc
    return convert(value, _vector(dtype))


def _row(context: Any, builder: Any, array: Any, value: Any, at: Any, n: Any) -> tuple[Any, Any, str]:
    """Where a row's vector lies, which lanes are the row's, and how LLVM names its type."""
    vector, short = _vector(array.dtype), ir.IntType(32)
    place = builder.gep(context.make_array(array)(context, builder, value).data, [at])
    lane = ir.Constant(ir.VectorType(short, LANES), list(range(LANES)))
    some = builder.icmp_signed("<", lane, _all(builder, builder.trunc(n, short)))
    return builder.bitcast(place, vector.as_pointer()), some, f"v{LANES}f{array.dtype.bitwidth}"


def _full(builder: Any, n: Any) -> Any:
    """Whether a vector ends before its row does. If so no mask is needed, which is slow to write under."""
    return builder.icmp_signed(">=", n, ir.Constant(n.type, LANES))


def _call(builder: Any, name: str, result: Any, args: list[Any], flags: tuple[str, ...] = ()) -> Any:
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args, fastmath=flags)


def _aligned(array: Any) -> Any:
    return ir.Constant(ir.IntType(32), array.dtype.bitwidth // 8)


@intrinsic
def borrowed(typing: Any, arrays: Any) -> Any:
    """An array, or all in a tuple, without a share in its memory, which its owner holds meanwhile.

    In a loop, counting the shares takes longer than a step.
    """

    def borrow(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        if hasattr(kind, "types"):
            parts = zip(kind.types, cgutils.unpack_tuple(builder, value), strict=True)
            return context.make_tuple(builder, kind, [borrow(context, builder, *part) for part in parts])
        if not isinstance(kind, types.Array):
            return value
        found = context.make_array(kind)(context, builder, value)
        found.meminfo, found.parent = (ir.Constant(part.type, None) for part in (found.meminfo, found.parent))
        return found._getvalue()

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return borrow(context, builder, arrays, args[0])

    return arrays(arrays), generate


@intrinsic
def entry(typing: Any, array: Any, at: Any) -> Any:
    """The entry at a place, which is not negative: no test is made."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array_type = signature.args[0]
        return builder.load(builder.gep(context.make_array(array_type)(context, builder, args[0]).data, [args[1]]))

    return array.dtype(array, types.intp), generate


def _masked_load(builder: Any, place: Any, some: Any, name: str, array: Any, rest: Any) -> Any:
    operands = [place, _aligned(array), some, rest]
    return _call(builder, f"llvm.masked.load.{name}.p0{name}", _vector(array.dtype), operands)


def _masked_store(builder: Any, place: Any, some: Any, name: str, array: Any, value: Any) -> None:
    operands = [value, place, _aligned(array), some]
    _call(builder, f"llvm.masked.store.{name}.p0{name}", ir.VoidType(), operands)


@intrinsic
def load(typing: Any, array: Any, at: Any, n: Any, rest: Any) -> Any:
    """The entries from a place on, `n` at most, and the `rest`, a number, in the lanes behind them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, some, name = _row(context, builder, array, *args[:3])
        other = _lanes(context, builder, args[3], rest, array.dtype)
        with builder.if_else(_full(builder, args[2]), likely=True) as (full, part):
            with full:
                all_, here = builder.load(place, align=array.dtype.bitwidth // 8), builder.block
            with part:
                few, there = _masked_load(builder, place, some, name, array, other), builder.block
        found = builder.phi(all_.type)
        found.add_incoming(all_, here)
        found.add_incoming(few, there)
        return found

    return Vector(array.dtype)(array, types.intp, types.intp, rest), generate


@intrinsic
def load_few(typing: Any, array: Any, at: Any, n: Any, rest: Any) -> Any:
    """The same where `n` is mostly less than a vector has: without a branch."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, some, name = _row(context, builder, array, *args[:3])
        return _masked_load(builder, place, some, name, array, _lanes(context, builder, args[3], rest, array.dtype))

    return Vector(array.dtype)(array, types.intp, types.intp, rest), generate


@intrinsic
def store(typing: Any, array: Any, at: Any, n: Any, vector: Any) -> Any:
    """Write a vector, in the array's dtype, to a place, `n` entries at most."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, some, name = _row(context, builder, array, *args[:3])
        value = _lanes(context, builder, args[3], vector, array.dtype)
        with builder.if_else(_full(builder, args[2]), likely=True) as (full, part):
            with full:
                builder.store(value, place, align=array.dtype.bitwidth // 8)
            with part:
                _masked_store(builder, place, some, name, array, value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vector), generate


@intrinsic
def store_few(typing: Any, array: Any, at: Any, n: Any, vector: Any) -> Any:
    """The same where `n` is mostly less than a vector has: also half of one is written without a mask."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, some, name = _row(context, builder, array, *args[:3])
        value, align = _lanes(context, builder, args[3], vector, array.dtype), array.dtype.bitwidth // 8
        is_half = builder.icmp_signed("==", args[2], ir.Constant(args[2].type, LANES // 2))
        with builder.if_else(_full(builder, args[2])) as (full, part):
            with full:
                builder.store(value, place, align=align)
            with part, builder.if_else(is_half) as (half, other):
                with half:
                    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES // 2), list(range(LANES // 2)))
                    low = builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), lanes)
                    builder.store(low, builder.bitcast(place, low.type.as_pointer()), align=align)
                with other:
                    _masked_store(builder, place, some, name, array, value)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, vector), generate


@intrinsic
def fetch(typing: Any, array: Any, at: Any) -> Any:
    """Ask for the cache line of a place, which may lie outside of the array, for later."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(context.make_array(array)(context, builder, args[0]).data, [args[1]])
        byte, short = ir.IntType(8).as_pointer(), ir.IntType(32)
        to_read, closely, data = (ir.Constant(short, number) for number in (0, 2, 1))
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [builder.bitcast(place, byte), to_read, closely, data])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


@intrinsic
def everywhere(typing: Any, array: Any, value: Any) -> Any:
    """A number in all lanes, as an array has them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _lanes(context, builder, args[1], value, array.dtype)

    return Vector(array.dtype)(array, value), generate


@intrinsic(prefer_literal=True)
def lane(typing: Any, vector: Any, k: Any) -> Any:
    """The k-th entry in all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [k.literal_value] * LANES)
        return builder.shuffle_vector(args[0], args[0], lanes)

    return vector(vector, k), generate


@intrinsic
def turned(typing: Any, rows: Any) -> Any:
    """A square matrix's rows, a tuple of vectors, as its columns."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        found, lanes = cgutils.unpack_tuple(builder, args[0]), range(LANES)
        for half in (1, 2, 4):  # of each square of 2 by 2 such parts, the two off the diagonal change places
            upper = [lane - half + LANES if lane & half else lane for lane in lanes]
            lower = [lane + LANES if lane & half else lane + half for lane in lanes]
            for k in lanes:
                if not k & half:
                    pair = found[k], found[k + half]
                    orders = (ir.Constant(ir.VectorType(ir.IntType(32), LANES), order) for order in (upper, lower))
                    found[k], found[k + half] = (builder.shuffle_vector(*pair, order) for order in orders)
        return context.make_tuple(builder, rows, found)

    return rows(rows), generate


@intrinsic
def is_wide(typing: Any, array: Any) -> Any:
    """Whether an array is of float64, whose vectors take two registers each: known where a loop is compiled."""
    wide = array.dtype == types.float64

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return context.get_constant(types.boolean, wide)

    return types.boolean(array), generate


@intrinsic
def wide(typing: Any, vector: Any) -> Any:
    """The same in float64."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _lanes(context, builder, args[0], vector, types.float64)

    return Vector(types.float64)(vector), generate


def _arithmetic(function: Any, operation: str) -> None:
    """Let one of Python's operators have vectors; of two dtypes, a vector's, and the wider one, is the result's."""

    @infer_global(function)
    class _Signature(AbstractTemplate):
        def generic(self, args: Any, kws: Any) -> Any:
            vectors = [given.dtype for given in args if isinstance(given, Vector)]
            return signature(Vector(max(vectors, key=lambda dtype: dtype.bitwidth)), *args) if vectors else None

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = signature.return_type.dtype
        x, y = (_lanes(context, builder, *pair, dtype) for pair in zip(args, signature.args, strict=True))
        return getattr(builder, operation)(x, y, flags=("contract",))

    for kinds in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(function, *kinds)(generate)


for _function, _operation in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul")):
    _arithmetic(_function, _operation)


@intrinsic
def where(typing: Any, reached: Any, vector: Any) -> Any:
    """The vector where another is not zero, and 0 where it is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        some = builder.fcmp_unordered("!=", args[0], ir.Constant(args[0].type, [0.0] * LANES))
        return builder.select(some, args[1], ir.Constant(args[1].type, [0.0] * LANES))

    return vector(reached, vector), generate


@intrinsic
def two_to(typing: Any, rounded: Any) -> Any:
    """`2^k` of numbers or vectors in float64 whose last bits are the integer k."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, whole = args[0].type, ir.IntType(64)
        lanes = isinstance(given, ir.VectorType)
        kind = ir.VectorType(whole, LANES) if lanes else whole
        bias, places = (ir.Constant(kind, [number] * LANES if lanes else number) for number in (1023, 52))
        return builder.bitcast(builder.shl(builder.add(builder.bitcast(args[0], kind), bias), places), given)

    return rounded(rounded), generate


@intrinsic
def flushed(typing: Any, value: Any, looked_at: Any, flush: Any) -> Any:
    """A vector, or a number, and 0 where another one is below a number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if isinstance(value, Vector):
            least = _lanes(context, builder, args[2], flush, looked_at.dtype)
        else:
            least = context.cast(builder, args[2], flush, looked_at)
        less = builder.fcmp_ordered("<", args[1], least)
        return builder.select(less, context.get_constant_null(value), args[0])

    return value(value, looked_at, flush), generate


def _chosen(relation: str) -> tuple[Any, Any]:
    """What chooses between two vectors entry by entry, and among the entries of one.

    Of a NaN and a number it may choose either.
    """

    def choose(builder: Any, a: Any, b: Any) -> Any:
        return builder.select(builder.fcmp_ordered(relation, a, b), a, b)

    @intrinsic
    def entries(typing: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return choose(builder, *args)

        return a(a, a), generate

    @intrinsic
    def one(typing: Any, vector: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found, short = args[0], ir.IntType(32)
            for half in (4, 2, 1):
                lanes = ir.Constant(ir.VectorType(short, LANES), [(lane + half) % LANES for lane in range(LANES)])
                found = choose(builder, found, builder.shuffle_vector(found, found, lanes))
            return builder.extract_element(found, ir.Constant(short, 0))

        return vector.dtype(vector), generate

    return entries, one


(larger, largest), (smaller, least) = _chosen(">"), _chosen("<")


@intrinsic
def total(typing: Any, vector: Any) -> Any:
    """The sum of the entries, in any order."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero, name = ir.Constant(_FLOATS[vector.dtype], -0.0), f"v{LANES}f{vector.dtype.bitwidth}"
        return _call(builder, f"llvm.vector.reduce.fadd.{name}", zero.type, [zero, args[0]], ("reassoc",))

    return vector.dtype(vector), generate
