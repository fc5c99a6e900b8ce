"""Named changes of the sources that the tests have to see: `python -m tests.mutants [NAME...]` says which they see.

Each is one replacement in one file of a copy of the repository, where the rows of the tests that are to see it are
run. A change of the C sources is compiled for the level of this machine.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
C, PLAIN, GPU = "kernels/cpu/c/", "kernels/plain/", "kernels/gpu/"
RANKS, EQUAL = "logchain/distributed/", "tests/distributed/test_one_process.py -k "


class Mutant(NamedTuple):
    """In `file`, `new` takes the place of `old`; `rows` are arguments of pytest for tests that see it.

    `narrow`: a change of the C sources is compiled for the least level, whose vectors are narrow.
    """

    name: str
    file: str
    old: str
    new: str
    rows: str
    narrow: bool = False


def table(rows: str) -> str:
    """The arguments of pytest for some rows of the contract's table."""
    return f'tests/test_contract.py -k "{rows}"'


VALUES, LENGTHS = "values_and_gradients", "lengths_are"
MESSAGES = "tests/transitions/test_queries.py -k 'of_its_matrices and messages'"
FACTORS = "tests/kernels/test_factor_search.py"
FAR = "tests/kernels/test_structures.py -k paths_far_below"
STRUCTURES = "tests/kernels/test_structures.py -k 'arcs or bands or sizes'"
BEST = "tests/kernels/test_structure_paths.py -k 'lowest or known'"
STACKS = "tests/test_matrix_product.py -k 'contract or verdicts or grow or fall'"
OF_FEW = "tests/test_marginals.py -k few_states"
SEGMENTS, DURATION = "tests/transitions/test_durations.py -k ", "logchain/transitions/duration.py"
SEARCH = "tests/kernels/cpu/test_adversary.py -k 'found or searched or level'"

# What a random search sees. That a matrix's largest entry is not looked at stays unseen: matrices of which it lies far
# from 1 have been rescaled, and the rest is less than the guard bits.
SEARCHED = [
    ("zeros are always believed", "step.h", "return matrix->low < least_safe_entry();",
     "return 0 * (matrix->low < least_safe_entry());"),
    ("the last sum is not looked at", "forward.h", "(sum > 0 && sum < (double)TRUSTED)",
     "(sum > 0 && sum < 0 * (double)TRUSTED)"),
    ("the threshold is 2^20 lower", "scale.h", "power_of_two(TOP - DEEPEST + GUARD)",
     "power_of_two(TOP - DEEPEST + GUARD - 20)"),
    ("backward messages are not tested", "backward.h", "inexact |= is_inexact(", "inexact |= 0 & is_inexact("),
    ("what rescaling loses is forgotten", "step.h", "if (low == 0) a->low = 0;", "if (low < 0) a->low = 0;"),
    ("sums of one sequence of few states are believed", "few_loops.h", "return !low &&", "return (!low || 1) &&"),
    ("sums of few states are believed where each step has a matrix", "few_loops.h",
     "real top;\n        naturals limit = !one && raised ?",
     "real top;\n        naturals limit = !one && raised ? bounds.least[0] : 0 ?"),
    ("the largest entry that a product has seen is 0", "step.h", "a->high = real_of((whole)bits), a->has_high = 1;",
     "a->high = 0 * real_of((whole)bits), a->has_high = 1;"),
    ("what was counted is counted again", "exact_step.h", "step + 1 > a->uncounted[q]", "step + 1 > a->steps"),
    ("what was not counted is not recomputed", "backward.h", "a->uncounted[q] = step + 1", "a->uncounted[q] = 0"),
    ("starts are not looked at", "step.h", "return any(small);\n}", "return 0 * any(small);\n}"),
]  # fmt: skip

MUTANTS = [
    # torch operations
    Mutant("an ended sequence goes on", PLAIN + "forward.py",
           "            message = torch.where(chain.ended[step], before, message)\n", "",
           table(f"{LENGTHS} and plain-product")),
    Mutant("an ended sequence is scaled on", PLAIN + "forward.py",
           "            terms[1:].masked_fill_(chain.ended[step][..., 0], 0.0)\n", "",
           table(f"{LENGTHS} and plain-product")),
    Mutant("underflow is not flagged", PLAIN + "forward.py",
           "        recomputed |= _underflows(message, chain.dtype)\n", "", table(f"{VALUES} and plain-product")),
    Mutant("the message that enters is not kept", PLAIN + "forward.py", "            keep[0] = message\n",
           "            keep[0] = 0.0\n", table(f"{VALUES} and plain and (memory_budget or segments)")),
    Mutant("backward messages pass the matrix, not its transpose", PLAIN + "backward.py",
           "log_matmul.forward(x + message, matrix.mT, torch.float64)",
           "log_matmul.forward(x + message, matrix, torch.float64)", table(f"{VALUES} and plain-product")),
    Mutant("counts of a stretch belong to the step before", PLAIN + "backward.py",
           "            index = step - 1 + entered\n", "            index = step - 1\n",
           table(f"{VALUES} and plain and (memory_budget or segments)")),
    Mutant("ended sequences have posteriors", PLAIN + "backward.py", "weight.masked_fill(chain.ended[step], 0.0)",
           "weight", table(f"{LENGTHS} and plain-product")),
    Mutant("counts of one matrix are those of the first step", PLAIN + "backward.py",
           "                counts += step_counts\n", "                counts = step_counts\n",
           table("batch_axes and plain-product")),
    Mutant("a weight of 0 has a gradient of NaN", PLAIN + "backward.py",
           "(counts / weights.double()).masked_fill(counts == 0, 0.0)", "counts / weights.double()",
           table(f"{VALUES} and plain-product")),
    Mutant("best paths end at the last step", PLAIN + "viterbi.py",
           "torch.where(ended, message, after), torch.where(ended, same, choice)", "after, choice",
           table(f"{LENGTHS} and plain-viterbi")),
    Mutant("a divergence counts a matrix once for all steps", PLAIN + "entropy.py",
           "of_bulk if len(p.bulk) > 1 else of_bulk *", "of_bulk if True else of_bulk *",
           "tests/test_marginals.py -k in_blocks"),
    Mutant("an entropy keeps the counts of all steps", PLAIN + "entropy.py", "not (by_means and len(p.bulk) == 1)",
           "True", "tests/test_marginals.py -k left_to_right"),
    Mutant("an entropy by means counts a matrix once for all steps", PLAIN + "entropy.py",
           "len(p.bulk) > 1 else of_bulk * (v - 1 if", "len(p.bulk) > 1 or by_means else of_bulk * (v - 1 if",
           "tests/test_marginals.py -k left_to_right"),
    Mutant("a sequence's last message is that of the longest", PLAIN + "entropy.py",
           "    if ends is None:\n", "    if True:\n", "tests/test_marginals.py -k in_blocks"),
    Mutant("a mean of logarithms counts zeros", PLAIN + "entropy.py", "(terms * shares[steps]).nansum(-1)",
           "(terms * shares[steps]).sum(-1)", table(f"{VALUES} and plain-divergence")),
    Mutant("a divergence ignores what is forbidden", PLAIN + "entropy.py",
           "(second.log_norm - value).masked_fill(infinite, math.inf)", "second.log_norm - value",
           "tests/test_marginals.py -k forbid"),
    Mutant("a divergence loses rare paths", PLAIN + "entropy.py", "(into > 0)", "(into < 0)",
           "tests/test_marginals.py -k rare"),
    # loops in C
    Mutant("a sequence has one step more", C + "forward.h",
           "steps_of(w->a, sequence_of(w, before - 1)) <= step) before--;",
           "steps_of(w->a, sequence_of(w, before - 1)) < step) before--;", table(f"{LENGTHS} and cpu-product")),
    Mutant("an entropy ignores the weights of transitions", C + "counts.h",
           "+= (double)total(mean)", "+= 0 * (double)total(mean)", table(f"{VALUES} and cpu-entropy")),
    Mutant("an entropy counts a matrix once for all steps", C + "counts.h",
           "mean / norm * (double)(steps_of(a, q) - 1)", "mean / norm",
           "tests/test_marginals.py -k large_partitions"),
    Mutant("a mean counts emissions that were raised", C + "call.h", "if (are_logs && any", "if (0 && any",
           "tests/test_marginals.py -k far_potentials"),
    Mutant("rows before a flush are forgotten", C + "counts.h",
           "(t->flushed ? t->total[k] : 0) + (double)t->partial[k]", "(double)t->partial[k]",
           table("thousands_of_rows")),
    Mutant("counts of a single sequence have the message of its first state", C + "counts.h",
           "single ? forward[k] : 1", "single ? forward[0] : 1", table(f"{VALUES} and cpu-product")),
    Mutant("no weight of a sequence in its posteriors", C + "backward.h",
           "row_posterior(c, width, state, row, (real)a->weight[q], gradient, member)",
           "row_posterior(c, width, state, row, 1, gradient, member)", table(f"{VALUES} and cpu-product")),
    Mutant("the gradient of p0 ignores a sequence's weight", C + "backward.h", "out[j] = a->weight[q] * (logs(a)",
           "out[j] = (logs(a)", table(f"{VALUES} and cpu-product")),
    Mutant("backward messages pass the steps of matrices in order", C + "call.h",
           "a.bulk.data += (last - 1) * a.bulk.step, a.bulk.step = -a.bulk.step;", "(void)from;",
           table(f"{VALUES} and cpu-messages")),
    Mutant("backward log messages pass no transpose", C + "call.h",
           "    a.bulk.from = a.bulk.to, a.bulk.to = from;\n", "    (void)from;\n",
           table(f"{VALUES} and cpu-messages")),
    Mutant("of equal states the highest is best", C + "viterbi.h",
           "first = __builtin_elementwise_min(where_whole(sum == most, lane_numbers() + (whole)j, first), first);",
           "first = where_whole(sum == most, lane_numbers() + (whole)j, first);",
           "tests/test_paths.py -k ties"),
    Mutant("+inf is a best path", C + "viterbi.h", "bad |= ~(potential < INFINITE);",
           "bad |= ~(potential <= INFINITE);", "tests/test_paths.py"),
    Mutant("draws ignore the next state", C + "sample.h",
           "logs ? weight + load(column + k) : weight * load(column + k)",
           "logs ? weight + load(column + k) : weight", "tests/test_paths.py -k drawn"),
    Mutant("a rank's choice is that of another rank", C + "viterbi.h",
           "choices_at(b, place, step)[choice % b->ranks * b->pass.width + path[step]]",
           "choices_at(b, place, step)[path[step]]", table(f"{VALUES} and cpu-topk_paths")),
    Mutant("a row that is aligned is always believed", C + "split.h", "return !any(~(sum >= 1));",
           "return !any(~(sum >= 0));", STRUCTURES),
    Mutant("sums are by the exponent of their first term", C + "entries.h", "sum.e = larger(e[t], sum.e);",
           "sum.e = larger(sum.e, sum.e);", STRUCTURES),
    Mutant("exponents that are not exact do not matter", C + "exact_step.h",
           "    s->inexact |= s->level > -BITS || s->top > (real)EXACT;\n", "", STRUCTURES),
    Mutant("a step without states is NaN after a mask", C + "exact_step.h", " || less == -INFINITE", "",
           "tests/test_marginals.py -k masks"),
    Mutant("masks that do not matter are computed in float64", C + "exact_step.h", "s->level > -BITS ||",
           "s->level > -__builtin_inf() ||", "tests/kernels/test_structures.py -k masks"),
    *(Mutant(name, C + "structure_paths.h", old, new, "tests/kernels/test_structure_paths.py -k draws")
      for name, old, new in (
        ("a draw forgets the message", "(Split){forward.m * product.m", "(Split){0 * forward.m + product.m"),
        ("a draw forgets the weight", "forward.e + product.e", "forward.e + 0 * product.e"),
        ("the last state is drawn by the first number", "a->weight[begin + step]", "a->weight[begin]"),
        ("draws go on after the end", "log_norm - log_norm == 0 ? place->steps", "log_norm < 1e300 ? v"),
    )),
    *(Mutant(name, C + "structure_paths.h", old, new, BEST) for name, old, new in (
        ("equal paths pass any state", " | ((b.value == a.value) & (b.from < a.from))", ""),
        ("the last row of arcs of a state counts", "if (!(best.value[l] > to[j] ||", "if (!(to[j] == to[j] ||"),
        ("a best path has infinite potentials", "bad |= ~(a < INFINITE), high", "bad |= a != a, high"),
        ("best paths go on after the end", "step < a->steps; step++) path[step] = -1;",
         "step < a->steps; step++) path[step] = 0;"),
    )),
    *(Mutant(name, C + file, old, new, "tests/kernels/test_structures.py -k 'detours or sizes'")
      for name, file, old, new in (
        ("a segment goes on in the next state", "durations.h", "(whole)(longest - 1 - r), after.e",
         "(whole)LANES, after.e"),
        ("segments that begin are counted as if by one weight", "durations.h", "splat(entering.e[s])}, high)",
         "splat(0 * entering.m[s])}, high)"),
        ("weights of segments are by the exponent of their first", "durations.h", "real high = largest(tops) - LIFT;",
         "real high = tops[0] - LIFT;"),
        ("exponents of durations do not matter", "entries.h", "? 2 * m->top : 0;", "? m->top : 0;"),
    )),
    Mutant("a best segment goes on in the next state", C + "structure_paths.h",
           "(whole)(longest - 1 - r), after.value", "(whole)LANES, after.value", BEST),
    Mutant("draws of segments ignore their durations", C + "structure_paths.h", "product.e + factor.e + forward.e",
           "product.e + 0 * factor.e + forward.e", "tests/kernels/test_structure_paths.py -k draws"),
    *(Mutant(name, C + "structure_paths.h", old, new, "tests/kernels/test_structure_paths.py -k checkpoints")
      for name, old, new in (
        ("a block of best paths begins with the last message", "if (step < last) {", "if (step < last && 0) {"),
        ("a block of best paths begins with any scale", "w->top = w->tops[block], ", ""),
    )),
    Mutant("values of bands without a source are entries of matrices", "logchain/transitions/banded.py",
           "places.masked_fill(~inside, self.states**2)", "places",
           "tests/transitions/test_queries.py -k many_entries"),
    Mutant("structures are matrices however few their entries", "logchain/operands.py",
           "if unit * self.transition.multiply_adds <", "if unit * self.transition.multiply_adds < 0 *",
           "tests/transitions/test_queries.py -k few_entries"),
    Mutant("denormal weights are 0", C + "split.h", "where(denormal, a * power_of_two(FRACTION + 1), a)",
           "where(denormal, splat(0), a)", STRUCTURES),
    *(Mutant(name, C + file, old, new, "tests/kernels/test_structure_paths.py -k messages")
      for name, file, old, new in (
        ("backward messages of structures hold their emissions", "exact.h",
         "write_whole_logs(w, s, s->sums, logs)", "write_whole_logs(w, s, s->message, logs)"),
        ("messages lack potentials that were taken out", "exact_step.h", "Sum shift = s->shift;", "Sum shift = {0};"),
        ("filtered posteriors lack the sum of a step", "exact_step.h", "(real)(1 / sum) : 0;", "(real)1 : 0;"),
    )),
    Mutant("counts of neighbors go to the first of them", C + "exact.h", " && a->counts == b->counts;", ";",
           "tests/transitions/test_queries.py -k count_uses_of_parameters"),
    Mutant("exact posteriors ignore the scale of their step", C + "exact_step.h", "s->counting.shift = -top;",
           "s->counting.shift = 0 * top;", SEARCH),
    Mutant("a difference of logarithms may be NaN", C + "matmul.h",
           "exponential(where(a == -INFINITE, a, larger(splat(LOG_DEEPEST), a - top)), NO_TAIL)",
           "exponential(a - top, NO_TAIL)", "tests/test_matmul.py"),
    *(Mutant(name, C + "tree.h", old, new, STACKS) for name, old, new in (
        ("small sums of stacks are trusted", "!any(inexact) &&", "(!any(inexact) || 1) &&"),
        ("raised entries of stacks may grow", "&& !t->grown;", "&& (!t->grown || 1);"),
        ("the least sum of stacks is 2^20 lower", "- DEEPEST + GUARD + 3)", "- DEEPEST + GUARD - 17)"),
        ("far rows of a product are 0", "flagged |= !are_zero(c, n.values + r * c);", "flagged |= 0;"),
        ("factors of sums are 1", "g *= read_some(scaled + j, 1, left, 0) / v;", "g *= 1;"),
    )),
    *(Mutant(name, C + file, old, new, SEARCH) for name, file, old, new in SEARCHED),
    Mutant("raised emissions are not asked about", C + "step.h", "return raised || sums.small ||",
           "return (raised & 0) || sums.small ||", SEARCH, narrow=True),
    # Triton
    Mutant("a message that enters meets potentials", GPU + "scan.py",
           "            x = tl.where(here_now & (i == 0), 0.0, x)\n",
           "            x = tl.where(here_now & (i == 0), 1.0, x)\n",
           table(f"{VALUES} and gpu and (memory_budget or stream)")),
    Mutant("inactive sequences are scaled on", GPU + "scan.py",
           "        taken += tl.where(active, top - TARGET + k_taken, 0).to(tl.int64)\n",
           "        taken += (top - TARGET + k_taken).to(tl.int64)\n", "tests/kernels/gpu/test_chains.py"),
    Mutant("Triton's backward scan passes no transpose", GPU + "scan.py",
           "posterior_strides, ENTERED, True, 0, STRIDE_J,\n            STRIDE_K, C,",
           "posterior_strides, ENTERED, True, 0, STRIDE_K,\n            STRIDE_J, C,",
           table(f"{VALUES} and gpu-product")),
    Mutant("exact sequences pass the first matrix at all steps", GPU + "exact.py",
           "            p_ptr += p_strides[0]\n", "", table(f"{VALUES} and gpu-product")),
    Mutant("no weight in exact posteriors", GPU + "exact.py", "shares / tl.where(total == 0.0, 1.0, total) * weight)",
           "shares / tl.where(total == 0.0, 1.0, total))", table(f"{VALUES} and gpu-product")),
    # schedules
    Mutant("boundaries of segments are not verified", "logchain/schedules/segments.py",
           "    _verified(cut, leaving, entering, 1, leave)\n", "",
           "tests/test_schedules.py"),
    Mutant("backward boundaries of segments are not verified", "logchain/schedules/segments.py",
           "        if not _verified(cut, before, guesses, -1, before_segment):\n", "        if False:\n",
           "tests/test_schedules.py"),
    Mutant("products of segments have no scale", "logchain/schedules/segments.py",
           "_sum(start.scale, shift, from_first.", "_sum(start.scale, 0 * shift, from_first.",
           table(f"{VALUES} and gpu-segments")),
    Mutant("messages between segments enter the segment after", "logchain/schedules/segments.py",
           "        before_segments(extra[1:])\n", "        before_segments(extra[:-1])\n",
           table(f"{VALUES} and gpu-segments")),
    Mutant("a tree multiplies past a sequence's end", "logchain/autograd/tree.py",
           "        bulk = torch.where(padding[..., None, None], identity.log() if log_params else identity, bulk)\n",
           "", table(f"{LENGTHS} and cpu-tree")),
    Mutant("a tree loses the largest weights", "logchain/autograd/tree.py",
           "torch.cat([*tops, last[..., 0]], -1)", "torch.cat([tops[0], last[..., 0]], -1)",
           table(f"{VALUES} and cpu-tree")),
    Mutant("negative initial weights are taken", "logchain/operands.py",
           "(*compress(transition.parameters, shared), p0)]", "compress(transition.parameters, shared)]",
           "tests/test_arguments.py -k raised_with_its_place"),
    Mutant("negative weights of durations are taken", DURATION,
           "not log_params:\n            self._check_signs(", "log_params:\n            self._check_signs(",
           SEGMENTS + "wrong_arguments"),
    Mutant("durations of half precision are added in it", "logchain/operands.py",
           "wide = self.transition.map(lambda parameter: parameter.to(self.dtype))", "wide = self.transition",
           SEGMENTS + "half_precision"),
    Mutant("gradients of a path are rounded to half precision", "logchain/log_prob.py",
           "t.to(operands.dtype) if t.numel() <= operands.x.numel() else t", "t",
           "tests/test_corners.py -k half_precision_are_rounded_once"),
    Mutant("a family without a maximum becomes NaN", "logchain/nn/em.py",
           "        if not loss.isfinite():", "        if False:",
           "tests/nn/test_durations.py -k without_a_maximum"),
    Mutant("raised emissions before an impossible step are filtered", C + "forward.h",
           "a->out.filtered && member->raised", "0 && member->raised",
           "tests/test_corners.py -k filtered_posteriors_of_low_emissions"),
    Mutant("negative weights of a step are numbers", C + "split.h",
           "return ~(a >= (logarithms ? -INFINITE : 0));", "(void)logarithms; return a != a;",
           "tests/test_arguments.py -k negative_sum_of_one_step"),
    Mutant("segments may disagree by a tenth", "logchain/schedules/segments.py",
           "(distance <= 2 * (chain.c + 8) * torch.finfo(chain.dtype).eps)", "(distance <= 0.1)",
           "tests/test_schedules.py -k no_wrong"),
    Mutant("ends within segments are one step early", "logchain/schedules/segments.py",
           "(ends - first.view(-1, 1, 1, 1))", "(ends - 1 - first.view(-1, 1, 1, 1))",
           table(f"{LENGTHS} and cpu and segments")),
    Mutant("impossible sequences have gradients within a budget", "logchain/schedules/checkpoints.py",
           "residuals._replace(log_norm=norms)", "residuals",
           "tests/test_memory_budget.py -k any_length"),
    Mutant("pieces within a budget ignore where they begin", "logchain/schedules/checkpoints.py",
           "(chain.ends - start).clamp(0 if i > 0 else 1, stop - start)",
           "chain.ends.clamp(0 if i > 0 else 1, stop - start)", "tests/test_memory_budget.py -k any_length"),
    Mutant("packed counts forget all sequences but the first", "logchain/chain.py",
           "torch.stack(list(values)).sum(0)", "values[0]", "tests/test_packed.py"),
    Mutant("gradients of matrices of a single step are not written", "logchain/autograd/dense_operators.py",
           "if operands.packed or chain.v == 1:", "if operands.packed:",
           "tests/test_arguments.py -k no_matrix_or_an_unused"),
    Mutant("forward derivatives of gradients have no first ones", "logchain/autograd/dense_operators.py",
           "[a + b if need else a for a, b, need", "[a if need else a for a, b, need", "tests/autograd -k hessians"),
    Mutant("log messages of few states lack the matrix's scale", C + "few_loops.h",
           "shift_after(l, shift, step + 1 - begin)", "shift_after(l, shift, step - begin)", OF_FEW),
    Mutant("log messages of few states lack a power of two", C + "few_loops.h",
           "step - begin) + l->matrix_exponent", "step - begin) - l->matrix_exponent - 1", OF_FEW),
    # structures
    Mutant("messages of structures go on after the end", "logchain/autograd/scan.py",
           "        values = torch.where(inside, values, last.values)\n", "", MESSAGES),
    Mutant("messages of structures pass no transpose", "logchain/autograd/scan.py",
           ".mT.apply(message.values + potential, LOG)", ".apply(message.values + potential, LOG)",
           table(f"{VALUES} and plain-messages")),
    Mutant("second derivatives lack the weight", "logchain/autograd/scan.py",
           "weight.to(value.dtype), create_graph", "(weight * 0 + 1).to(value.dtype), create_graph",
           "tests/autograd -k 'hessians or derivatives'"),
    Mutant("counts of structures are those of the first piece", "logchain/autograd/logarithms.py",
           "        total += gradient\n", "        total.copy_(gradient)\n",
           "tests/transitions/test_queries.py -k 'of_its_matrices and product and user'"),
    Mutant("posteriors of structures ignore the weight", "logchain/autograd/logarithms.py",
           "steps.layout.grouped(weight.double()) if", "steps.layout.grouped(weight.double() * 0 + 1) if",
           table(f"{VALUES} and plain-banded")),
    Mutant("a last segment goes on past the end", DURATION, "if not right_censored:", "if right_censored:",
           SEGMENTS + "rolls_of_a_die"),
    Mutant("a first segment begins in the sequence before", DURATION, "cu_seqlens[:-1].long()] = True", "0] = True",
           SEGMENTS + "packed"),
    Mutant("the first segment begins nowhere", DURATION, "cat([posteriors[..., :1", "cat([0 * posteriors[..., :1",
           SEGMENTS + "expected_counts"),
    Mutant("of equal states before the highest is best", "logchain/transitions/semiring.py",
           "return torch.complex(top, labels.amax(dim))",
           "return torch.complex(top, -torch.where(labels == -math.inf, labels, -labels).amax(dim))",
           "tests/transitions/test_streams.py -k lowest_states"),
    Mutant("a transposed segment ends in its last step", DURATION, "counts[..., :-1]], -1)", "counts[..., 1:]], -1)",
           "tests/transitions/test_structures.py -k duration"),
    Mutant("weights that no sequence uses are NaN", "logchain/autograd/logarithms.py",
           "    operands = _without(operands, weight == 0)\n", "",
           "tests/kernels/test_structures.py -k nan_of_weight_zero"),
    Mutant("small sums of factors are believed", C + "weigh.h", "(low + 1 != 0 && low + 1 < limit)",
           "(low + 1 != 0 && low + 1 < limit && 0)", FACTORS),
    Mutant("messages of factors are not raised", C + "weigh.h",
           "where((scaled > 0) & (scaled < floor), splat(floor), scaled)", "scaled + 0 * floor", FAR),
    Mutant("a raised emission may be a message's largest entry", C + "weigh.h", "exponent_of((whole)tall)",
           "exponent_of((whole)heavy)", FACTORS),
    Mutant("the last sum of factors is believed", "kernels/cpu/products.py",
           "~((total >= scan.floor * 2.0**guard) & total.isfinite())",
           "~total.isfinite()", FACTORS),
    Mutant("a start that underflows is a zero", "kernels/cpu/products.py",
           "        weights.masked_fill_((values > (-math.inf if log else 0.0)) & (weights < least), least)\n", "",
           FACTORS),
    Mutant("scales of messages of factors are lost", "kernels/cpu/products.py",
           " - torch.frexp(self.powers[:steps]).exponent.sum(0)", "", FACTORS),
    Mutant("sequences of factors end at the last step", "kernels/cpu/products.py",
           "ended = scan.ends == step + 1", "ended = scan.ends > 0", FACTORS),
    Mutant("weights of factors are not raised", "kernels/cpu/scaled.py",
           "weights.masked_fill_(positive & (weights < self._floor), self._floor)",
           "weights", FACTORS),
    Mutant("recomputed sequences of factors have no gradients", "logchain/autograd/log_partition.py",
           "(saved[1] & (weight != 0))", "(saved[1] & (weight != weight))", FACTORS),
    Mutant("messages in float64 are read in float32", "kernels/cpu/sparse.py",
           "if saved[2].dtype != call.dtype:", "if False:", "tests/kernels/test_structures.py"),
    Mutant("draws from messages in float64 read operands in float32", "kernels/cpu/sparse.py",
           "p0=chain.p0.to(mantissas.dtype)", "p0=chain.p0", "tests/kernels/test_structure_paths.py -k ten_million"),
    Mutant("states without a path have weights in factors", C + "weigh.h", "(state > 0) & (source >", "(source >",
           "tests/kernels/test_structures.py -k states_without_path"),
    Mutant("rows of factors are not in the order of lengths", "kernels/cpu/products.py",
           "            order = order[index]\n", "", FACTORS),
    Mutant("counts of factors ignore the weight", "kernels/cpu/products.py",
           "        if self.shares is not None:\n", "        if False:\n", FACTORS),
    # everything above the kernels
    Mutant("posteriors of one matrix are not added up", "logchain/autograd/dense_operators.py",
           "layout.states(start).sum_to_size(p0.shape)",
           "layout.states(start).expand(layout.states(start).shape)[tuple(slice(s) for s in p0.shape)]",
           table(f"{VALUES} and cpu-sequential")),
    Mutant("paths ignore lengths", "logchain/chain.py",
           "return torch.where(torch.arange(states.shape[-1], device=states.device) < lengths[..., None], states, -1)",
           "return states.clone()", "tests/test_paths.py -k without_a_state"),
    Mutant("an impossible path of an impossible sequence is NaN", "logchain/log_prob.py",
           "    return torch.where(impossible, -torch.inf, weight - norm)\n", "    return weight - norm\n",
           table(f"{VALUES} and log_prob")),
    Mutant("smoothed posteriors look one variable less ahead", "logchain/streams/filter.py",
           "range(min(lag, n - 1) if", "range(min(lag - 1, n - 1) if",
           table(f"{VALUES} and cpu-stream")),
    Mutant("a stream forgets the scale of what was lost", "logchain/streams/filter.py",
           "    for term in after.scale:\n", "    for term in after.scale[:0]:\n",
           table(f"{VALUES} and plain-stream")),
    Mutant("unknown gradients are those of the first operand", "logchain/autograd/dense_operators.py",
           "return (*if_needed(derivatives, ctx.needs_input_grad[:4]), *(None,) * 12)",
           "return (None, *if_needed(derivatives, ctx.needs_input_grad[:4])[1:], *(None,) * 12)",
           table("derivatives_agree and cpu-product")),
    Mutant("lengths of structures are those at the backward pass", "logchain/operands.py",
           "None if self.lengths is None else self.lengths.clone()", "self.lengths",
           "tests/autograd -k 'lengths_changed and structure'"),
    Mutant("logarithms of mapped weights have infinite gradients", "kernels/numbers.py",
           "if log_params or not torch.is_grad_enabled():", "if log_params or not weights.requires_grad:",
           "tests/autograd -k mapped_weights"),
    # models
    Mutant("gaussian maximum is not centered", "logchain/nn/emissions/gaussian.py",
           "scatter = squares - _outer(sums, average)", "scatter = squares",
           "tests/nn/test_em.py -k 'reaches_the_maximum and gaussian'"),
    Mutant("gaussian draws by the transposed factor", "logchain/nn/emissions/gaussian.py",
           "scale_tril=factors[..., 0, :, :]", "scale_tril=factors[..., 0, :, :].mT",
           "tests/nn/test_emissions.py -k 'draws and gaussian'"),
    Mutant("missing features have no covariance", "logchain/nn/emissions/gaussian.py",
           "weighed.mT @ values + counts[..., None] * rest", "weighed.mT @ values",
           "tests/nn/test_em.py -k features_of_vectors"),
    Mutant("a prior of means does not pull the covariance", "logchain/nn/emissions/gaussian.py",
           "of_place[..., None] * _outer(place, place)", "0 * of_place[..., None] * _outer(place, place)",
           "tests/nn/test_em.py -k maximum_of_the_posterior"),
    Mutant("coefficients that are not trained have no effect", "logchain/nn/emissions/regression.py",
           "-before.masked_fill(free, 0.0)", "-0 * before.masked_fill(free, 0.0)",
           "tests/nn/test_em.py -k maximum_of_the_posterior"),
    Mutant("a missing row counts in a regression", "logchain/nn/emissions/regression.py",
           "weights = flow.double().masked_fill(~whole[..., None], 0.0)", "weights = flow.double()",
           "tests/nn/test_em.py -k least_squares"),
    Mutant("sums of rows are rounded to half precision", "logchain/check.py",
           "transition.map(Tensor.double), p0.double()", "transition, p0",
           "tests/test_arguments.py -k sums_in_half_precision"),
    Mutant("factors of half precision are rounded once", "logchain/check.py",
           " * len(transition.parameters)", "", "tests/test_arguments.py -k sums_of_factors"),
    Mutant("numbers of trials are those of the first states", "logchain/nn/emissions/distribution.py",
           "{name: value[at] for name, value in fixed.items()", "{name: value for name, value in fixed.items()",
           "tests/nn/test_emissions.py -k numbers_of_trials"),
    Mutant("upper triangles are free parameters", "logchain/nn/emissions/distribution.py",
           "entries.tril() if triangular else entries", "entries", "tests/nn/test_emissions.py -k count_once"),
    Mutant("parts count the parameters that they share", "logchain/nn/fitting.py",
           " and p not in counted", "", "tests/nn/test_emissions.py -k count_once"),
    Mutant("log-densities have the dtype of a family's sums", "logchain/nn/emissions/emission.py",
           "distribution.log_prob(data).to(self.dtype).masked_fill", "distribution.log_prob(data).masked_fill",
           "tests/nn/test_durations.py -k dtype_of_its_parameters"),
    Mutant("negative counts become NaN", "logchain/nn/log_weights.py",
           "if bool((counts < 0).any()):", "if False:", "tests/nn/test_em.py -k negative_counts"),
    Mutant("L-BFGS runs in half precision", "logchain/nn/em.py",
           "parameter.data = arithmetic(parameter.data)", "parameter.data = parameter.data",
           "tests/nn/test_em.py -k rounded_once"),
    Mutant("data that a trial point excludes end a fit", "logchain/nn/em.py",
           "nullcontext() if best == math.inf else suppress(ValueError)", "nullcontext()",
           "tests/nn/test_em.py -k data_are_possible"),
    Mutant("L-BFGS ends at the last parameters", "logchain/nn/em.py", "if loss < best:", "if best == math.inf:",
           "tests/nn/test_em.py -k family_of_torch"),
    Mutant("missing is not 0", "logchain/nn/emissions/emission.py",
           "torch.where(known, log_density, 0.0)", "torch.where(known, log_density, 1.0)",
           "tests/nn/test_emissions.py -k missing_entries"),
    Mutant("counts of nothing", "logchain/nn/log_weights.py", "torch.where(total > 0, before + step",
           "torch.where(total >= 0, before + step", "tests/nn/test_em.py -k without_data"),
    Mutant("conditions are not divided", "logchain/nn/data.py", "part[rows] if part.shape[:1] == (count,) else part",
           "part[: len(rows)] if part.shape[:1] == (count,) else part", "tests/nn/test_fit.py -k expected_counts"),
    Mutant("padding of covariates counts", "logchain/nn/data.py", "covariates = fill(covariates, inside)", "pass",
           "tests/nn/test_hmm.py -k 'padding or reach_emissions'"),
    Mutant("sequences of a batch are the first rows", "logchain/nn/data.py", "(starts - counts.cumsum(0) + counts)",
           "(counts - counts.cumsum(0))", "tests/nn/test_hmm.py -k fit_of_a_list"),
    Mutant("concatenated sequences are one", "logchain/nn/data.py", "[0, *accumulate(self.sizes)]",
           "[0, sum(self.sizes)]", "tests/nn/test_hmm.py -k lists_and_concatenated"),
    Mutant("transitions lead into first rows of packed steps", "logchain/nn/hmm_steps.py",
           "repeat_interleave(packed.diff()) - 1).clamp(min=0)", "repeat_interleave(packed.diff())).clamp(max=2)",
           "tests/nn/test_hmm.py -k lists_and_concatenated"),
    Mutant("the first covariate drives a transition", "logchain/nn/hmm_steps.py",
           "covariates.narrow(axis, 1, v - 1)", "covariates.narrow(axis, 0, v - 1)",
           "tests/nn/test_hmm.py -k 'sums_over_paths and per'"),
    Mutant("first rows of packed covariates count", "logchain/nn/hmm_steps.py",
           "return fill(covariates, inner.to(covariates.device))", "return covariates",
           "tests/nn/test_hmm.py -k 'lists_and and covariates'"),
    Mutant("known states exclude themselves", "logchain/nn/hmm_steps.py", "x.masked_fill(excluded & (states",
           "x.masked_fill(~excluded & (states", "tests/nn/test_hmm.py -k known_states"),
    Mutant("log-likelihoods of steps add up the past", "logchain/nn/expectations.py",
           "torch.where(impossible, totals, totals - before)", "totals", "tests/nn/test_hmm.py -k filtered_states"),
    Mutant("a forecast starts at the last step of the batch", "logchain/nn/data.py",
           "rows.take_along_dim(self.lengths[..., None, None] - 1, -2)[..., 0, :]", "rows[..., -1, :]",
           "tests/nn/test_hmm.py -k forecasts"),
    Mutant("a part of a vector is imputed by its mean alone", "logchain/nn/expectations.py",
           "means + (covariance @ errors[..., None])[..., 0]", "means", "tests/nn/test_hmm.py -k part_of_a_vector"),
    Mutant("sorted states keep the rows of transitions", "logchain/nn/state_order.py", "order, -1, -2)",
           "order, -1)", "tests/nn/test_hmm.py -k sorted_states"),
    Mutant("sorted states keep their durations", "logchain/nn/state_order.py", "_permute(part.logits, order, -2)",
           "pass", "tests/nn/test_hmm.py -k 'sorted_states and durations'"),
    Mutant("sorted states keep categories", "logchain/nn/state_order.py", "-1 if id(tensor) in last else",
           "0 if id(tensor) in last else", "tests/nn/test_hmm.py -k sorted_states"),
    Mutant("a fit ends where one gain is small", "logchain/nn/fitting.py",
           "return slower and gains[1] ** 2 / (gains[0] - gains[1]) < self.tolerance", "return slower",
           "tests/nn/test_fit.py -k gains_fall_slowly"),
    Mutant("mini-batches count priors in full", "logchain/nn/fitting.py",
           "return len(rows) / len(self.data) if self.moving and rows is not None else 1.0", "return 1.0",
           "tests/nn/test_fit.py -k priors_count_once"),
    Mutant("what is set through data is overwritten", "logchain/nn/parameters.py",
           "_fingerprint(parameter, dtype) == fingerprint", "True",
           "tests/nn/test_fit.py -k nobody_set"),
    Mutant("one sequence of a module is several", "logchain/nn/chain_model.py",
           "if sequences.batch_axes is None:", "if False:", "tests/nn/test_fit.py -k one_sequence_of_a_module"),
    Mutant("warnings point into the library", "logchain/nn/fitting.py",
           "stacklevel = 3 if", "stacklevel = 2 if", "tests/nn/test_fit.py -k warns_at_the_call"),
    Mutant("what is not trained is fitted", "logchain/nn/parameters.py", "            parameter.copy_(value)\n",
           "            pass\n", "tests/nn/test_fit.py -k one_frozen"),
    Mutant("constants of logits have errors", "logchain/nn/standard_errors.py", "(gauges if of is None",
           "(0 if of is None", "tests/nn/test_fit.py -k errors_equal_closed"),
    Mutant("stationary by the transposed matrix", "logchain/nn/hmm_steps.py", "remaining[..., :k, k] / leaving",
           "remaining[..., k, :k] / leaving", "tests/nn/test_hmm.py -k 'likelihoods and stationary'"),
    Mutant("sums over all arcs", "logchain/nn/log_weights.py",
           "return self._sums(LINEAR, weights)", "return weights.sum(-1, keepdim=True)",
           "tests/nn/test_transitions.py -k em_step_of_arcs"),
    Mutant("a prior gives weight where no arc is", "logchain/nn/log_weights.py",
           "counts = self._masked(counts, 0.0)", "pass", "tests/nn/test_transitions.py -k sticky_prior"),
    Mutant("draws leave the graph", "logchain/nn/log_weights.py",
           "torch.log_softmax(self._masked(logits, -torch.inf), self.dim)", "torch.log_softmax(logits, self.dim)",
           "tests/nn/test_transitions.py -k entries_of_0_stay"),
    Mutant("durations end at the last step of the batch", "logchain/nn/hmm.py",
           "log_params=True, lengths=ends, cu_seqlens", "log_params=True, cu_seqlens",
           "tests/nn/test_durations.py -k 'likelihoods and ends'"),
    Mutant("a family takes one step of its fit", "logchain/nn/em.py", "max_iter=iterations", "max_iter=1",
           "tests/nn/test_durations.py -k maximum_of_the_family"),
    Mutant("a family is not normalized", "logchain/nn/log_weights.py",
           "return self.normalized(arithmetic(self.logits))", "return arithmetic(self.logits)",
           "tests/nn/test_durations.py -k distribution_of_torch"),
    Mutant("a draw of counted steps is a state", "logchain/nn/hmm.py",
           "return paths // counted if counted > 1 else paths", "return paths",
           "tests/nn/test_durations.py -k segmentations"),
    Mutant("a segment of crf tags goes on after the last step", "logchain/nn/semi_markov_crf.py",
           "ends = sequences.ended(tags.shape[-1], tags.device) | (tags != tags.roll(-1, -1))",
           "ends = tags != tags.roll(-1, -1)",
           "tests/nn/test_crf.py -k not_read"),
    Mutant("a segment of too many steps is another tag's", "logchain/nn/semi_markov_crf.py",
           "torch.where(left < self.max_duration, tags * self.max_duration + left, -1)",
           "(tags * self.max_duration + left).clamp(max=self.num_tags * self.max_duration - 1)",
           "tests/nn/test_crf.py -k not_read"),
    Mutant("crf holes not joined", "logchain/nn/linear_chain_crf.py",
           "torch.where(inside, steps, steps + inside.shape[1])", "torch.where(inside, steps + inside.shape[1], steps)",
           "tests/nn/test_crf.py -k likelihood"),
    Mutant("packed crf rows have no end transition", "logchain/nn/tag_layout.py",
           "return torch.isin(counts, self.cu_seqlens.to(device))", "return counts < 0",
           "tests/nn/test_crf.py -k packed"),
    Mutant("crf constraints are ignored", "logchain/nn/linear_chain_crf.py",
           "if allowed is None else weights.to(dtype).masked_fill(~allowed, -torch.inf)",
           "if True else weights.to(dtype).masked_fill(~allowed, -torch.inf)",
           "tests/nn/test_crf.py -k survive"),
    Mutant("an empty sequence of a crf has the start's weight", "logchain/nn/linear_chain_crf.py",
           "torch.where(only, 0.0, -torch.inf), chain.p0)", "chain.p0, chain.p0)",
           "tests/nn/test_crf.py -k likelihood"),
    Mutant("an unknown crf tag is impossible", "logchain/nn/linear_chain_crf.py",
           " | (tags[..., None] == -1)", "",
           "tests/nn/test_crf.py -k unknown"),
    Mutant("a segment cannot begin next to an unknown tag", "logchain/nn/semi_markov_crf.py",
           "torch.where(ends, left == 0, left > 0) | free[..., None]", "torch.where(ends, left == 0, left > 0)",
           "tests/nn/test_crf.py -k unknown"),
    Mutant("a span may end unfinished", "logchain/nn/bio.py",
           "prefix not in unfinished for", "True for",
           "tests/nn/test_crf.py -k taggings"),
    Mutant("a tag of another type continues a span", "logchain/nn/bio.py",
           " and before[1] == after[1]", "",
           "tests/nn/test_crf.py -k taggings"),
    Mutant("circuit scale lost", "logchain/nn/chain_circuit.py",
           "product(chain.x - top, chain.bulk, chain.p0).double() + top.double().sum((-2, -1))",
           "product(chain.x - top, chain.bulk, chain.p0).double()",
           "tests/nn/test_circuit.py -k 'enumeration or long_data'"),
    Mutant("expectations of a circuit are of other states", "logchain/nn/expectations.py",
           "shares.to(values), values)", "shares.to(values).flip(-1), values)",
           "tests/nn/test_circuit.py -k 'imputed'"),
    Mutant("ctc skips between equal labels", "logchain/alignment/ctc.py", "(labels[:, 1:] != labels[:, :-1]) & (state",
           "(labels[:, 1:] == labels[:, 1:]) & (state", "tests/alignment/test_ctc.py -k 'alignments'"),
    Mutant("arcs and durations end at the last step of the batch", "logchain/tensors.py",
           "if lengths is None else (lengths.flatten() - 1)", "if True else (lengths.flatten() - 1)",
           "tests/alignment/test_arcs.py -k minus_one"),
    Mutant("labels of alignments are not those of the axis", "logchain/alignment/ctc.py",
           "dim in (None, axis, axis - len(shape))", "axis == len(shape) - 2",
           "tests/alignment/test_ctc.py -k 'several_best or axis'"),
    Mutant("a mean loss divides by the number of all labels", "logchain/alignment/ctc.py",
           "loss / counts.clamp(min=1)", "loss / counts.sum().clamp(min=1)",
           "tests/alignment/test_ctc.py -k reductions"),
    Mutant("a star is the most probable class", "logchain/alignment/ctc.py",
           "LOG.sum(weights, -1)", "weights.amax(-1)", "tests/alignment/test_ctc.py -k star"),
    Mutant("spans end at their last frame", "logchain/alignment/spans.py", "end.masked_fill(~aligned, -1)",
           "(end - 1).masked_fill(~aligned, -1)", "tests/alignment/test_spans.py -k enumeration"),
    Mutant("confidence is a sum over frames", "logchain/alignment/spans.py", "share / (end - start).clamp(min=1)",
           "share", "tests/alignment/test_spans.py -k enumeration"),
    Mutant("a smaller graph of a batch has more starts and ends", "logchain/alignment/arcs.py",
           "padding_value=-math.inf", "padding_value=0.0", "tests/alignment/test_arcs.py -k batch"),
    Mutant("a lattice is cut at its longest path", "logchain/alignment/arcs.py",
           "_longest_path(arcs, start, ended) + 1", "_longest_path(arcs, start, ended)",
           "tests/alignment/test_arcs.py -k lattice"),
    Mutant("output labels are costs", "logchain/alignment/arcs.py", ".isdecimal()", ".isalpha()",
           "tests/alignment/test_refusals.py"),
    # ranks
    Mutant("lengths do not shift by the variables before a rank", RANKS + "part.py",
           "left = self.layout.grouped(whole) - start", "left = self.layout.grouped(whole)",
           EQUAL + "'only_boundaries and product'"),
    Mutant("the gradient of one matrix is not summed over ranks", RANKS + "functions.py",
           "(False, part.one_matrix, True)", "(False, False, True)", EQUAL + "'results_equal and matrix and product'"),
    Mutant("a guess is never refused", RANKS + "part.py", "if refused.any():", "if False:",
           EQUAL + "'long_chains and product'"),
    Mutant("a backward guess is never refused", RANKS + "part.py",
           "self.carry(scan, partial(disagree, self.chain), compared, -1)",
           "self.carry(scan, partial(disagree, self.chain), compared & False, -1)",
           EQUAL + "'long_chains and product'"),
    Mutant("every guess is refused", RANKS + "part.py", "if refused.any():",
           "report_boundaries(~refused)\n            if True:", EQUAL + "only_boundaries"),
    Mutant("the scale of a message that enters is lost", RANKS + "ranks.py",
           "torch.cat(gathered)", "gathered[-1]", EQUAL + "'results_equal and matrix and product'"),
    Mutant("a message enters without what lies far below", RANKS + "part.py",
           "Message(entering, ", "Message(entering.masked_fill(entering < -500, -torch.inf), ",
           EQUAL + "'results_equal and underflow and product'"),
    Mutant("no backward message follows", RANKS + "part.py",
           "backward(chain, residuals, weight, following, ", "backward(chain, residuals, weight, None, ",
           EQUAL + "'results_equal and matrix and marginals'"),
    Mutant("a sequence is impossible only if the last rank finds no path", RANKS + "functions.py",
           "part.ranks.total(last.amax(-1))", "part.ranks.total(last.amax(-1) * (part.ranks.neighbor(1) is None))",
           EQUAL + "'long_chains and nowhere and viterbi'"),
    Mutant("the error of another rank is passed over", RANKS + "ranks.py", "            if kind is not None:\n",
           "            if kind is not None and rank == self.rank:\n",
           "tests/distributed/test_errors.py -k 'raised_on_all and non-negative'"),
    Mutant("best paths keep a message that was guessed", RANKS + "functions.py", "(arrived != guess).any(-1)",
           "(arrived != guess).all(-1) & False", EQUAL + "'long_chains and viterbi'"),
    Mutant("paths drop the step into a rank from their score", RANKS + "functions.py",
           "x, p0, lengths = part.with_previous(x, p0, torch.zeros_like(x[..., :1, :]))",
           "states, p0 = states[..., 1:], torch.full_like(p0, float(not part.log_params))",
           EQUAL + "'results_equal and ties'"),
    Mutant("states past the end of a sequence are checked", RANKS + "functions.py",
           "part.lengths[..., None], paths, -1)", "part.lengths[..., None], paths, paths)",
           EQUAL + "'results_equal and lengths and log_prob'"),
    Mutant("a path that is impossible on another rank has a gradient", RANKS + "functions.py",
           "            grad = grad.masked_fill(impossible, 0.0)\n", "",
           EQUAL + "'results_equal and matrix and log_prob'"),
    Mutant("entropy counts the variable before a rank again", RANKS + "functions.py",
           "value - part.batched(previous)", "value", EQUAL + "'results_equal and matrix and entropy'"),
    Mutant("ONNX: a length out of range is read", "logchain/onnx.py", "op.LessOrEqual(lengths, v)",
           "op.GreaterOrEqual(lengths, 1)", "tests/nn/test_onnx.py -k out_of_range"),
    Mutant("ONNX: sums underflow", "logchain/onnx.py",
           "op.Exp(terms - top), [-2], keepdims=0)) + op.Squeeze(top, [-2])",
           "op.Exp(terms), [-2], keepdims=0))", "tests/nn/test_onnx.py -k underflow"),
    Mutant("ranks draw by the same numbers", RANKS + "functions.py", "int(seed) + part.ranks.rank",
           "int(seed)", EQUAL + "differ_between_ranks"),
]  # fmt: skip


def copied(into: Path) -> Path:
    """A copy of the repository, with the C libraries."""
    passing = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "build", "site")
    return Path(shutil.copytree(ROOT, into / "copy", symlinks=True, ignore=passing))


@contextmanager
def applied(mutant: Mutant, folder: Path) -> Iterator[None]:
    """The copy with the change, and without it afterwards."""
    path = folder / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: expected one place in {mutant.file}, got {source.count(mutant.old)}")
    libraries = {library: library.read_bytes() for library in (folder / "kernels" / "cpu").glob("logchain-*")}
    try:
        path.write_text(source.replace(mutant.old, mutant.new))
        if mutant.file.startswith(C):
            level = "next(iter(build.this_machine().levels))" if mutant.narrow else "library.level()"
            build = (
                "from logchain.kernels.cpu import build, library;"
                f"build.compile_library(build.this_machine(), {level}, build.HERE)"
            )
            run([sys.executable, "-c", build], folder, check=True)
        yield
    finally:
        path.write_text(source)
        for library, content in libraries.items():
            library.write_bytes(content)


def run(command: list[str], folder: Path, *, check: bool = False) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=check)


def is_caught(mutant: Mutant, folder: Path) -> bool:
    """Whether the rows fail with the change; an error in place of tests is one of this list."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with applied(mutant, folder):
        found = run([*pytest, *shlex.split(mutant.rows)], folder)
    if found.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: expected tests to run, got\n{found.stdout[-2000:]}{found.stderr[-2000:]}")
    return found.returncode == 1


def main() -> None:
    names = sys.argv[1:] or [mutant.name for mutant in MUTANTS]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder))
        for mutant in MUTANTS:
            if mutant.name in names:
                caught = is_caught(mutant, copy)
                missed += not caught
                print(f"{'caught' if caught else 'missed'}  {mutant.name}", flush=True)
    print(f"{missed} missed")
    sys.exit(missed > 0)


if __name__ == "__main__":
    main()
