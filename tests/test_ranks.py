"""The time and the bytes that cuts over ranks are predicted to take, and what a plan says about them."""

import re

import pytest
import torch

from logchain.plan import plan
from logchain.schedules.choose import Where
from logchain.schedules.cost_counts import Size
from logchain.schedules.ranks import Cut, Link, cuts
from logchain.transitions import Banded
from tests.benchmarks.run import on_threads

# links where nothing but the number of collectives counts, or nothing of them
SLOW, FREE = Link(1e3, float("inf")), Link(0.0, float("inf"))


def predicted(link: Link, n: int = 1, c: int = 4, gradients: bool = True) -> list[Cut]:
    """The cuts over three ranks of 3000 variables."""
    size = Size(9000, 1, n, c, True, 8, False, False, gradients, False)
    return cuts(size, (3000, 3000, 3000), Where("cpu", 1).constants, link)


def test_bytes_go_around_a_ring():
    assert Link(1, 1).seconds(3, 4) == 12
    assert Link(2, 10).seconds(30, 2) == 5
    assert Link().seconds(100, 1) == 0


@pytest.mark.parametrize(
    "gradients, expected",
    [(False, {"vectors": 2, "products": 1, "overlapped": 3}), (True, {"vectors": 3, "products": 1, "overlapped": 5})],
)
def test_each_cut_has_its_collectives(gradients, expected):
    """A header, messages of 4 states with their scale in two parts, the counts of a matrix and p0, and statuses."""
    beside = 104 + 8 * (3 + 6 + 4 * 4 + 4) * gradients
    sent = {"vectors": 8 * 8, "products": 8 * 19, "overlapped": 8 * 8}
    for cut in predicted(FREE, gradients=gradients):
        assert cut.bytes == beside + expected[cut.name] * sent[cut.name]
    around = 2 * 1e3  # a collective over three ranks
    others = {cut.name: cut.seconds for cut in predicted(FREE, gradients=gradients)}
    for cut in predicted(SLOW, gradients=gradients):
        assert cut.seconds - others[cut.name] == pytest.approx(around * (1 + gradients + expected[cut.name]))


def test_blocks_are_for_links_without_latency():
    of_vectors = {
        link: [cut.blocks for cut in predicted(link, n=600, c=64) if cut.name == "vectors"] for link in (SLOW, FREE)
    }
    assert of_vectors == {SLOW: [1, 6, 24], FREE: [24, 6, 1]}


SHAPES = (3, 20_000, 16), (1, 16, 16), (16,)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_plan_has_all_cuts(gradients):
    with on_threads(1):
        found = plan(*SHAPES, gradients=gradients, world_size=3, bandwidth=1e8, latency=1e-3)
    assert {cut.name for cut in found.cuts} == {"vectors", "products", "overlapped"}
    assert list(found.cuts) == sorted(found.cuts, key=lambda cut: cut.seconds)
    for cut in found.cuts:
        assert cut.speedup == found.seconds / cut.seconds
    quick = plan(*SHAPES, gradients=gradients, world_size=3, bandwidth=1e12, latency=1e-9)
    assert quick.cuts[0].seconds < found.cuts[0].seconds


def test_the_table_has_them_too():
    found = plan(*SHAPES, world_size=2)
    lines = str(found).splitlines()
    start = lines.index("over 2 ranks:") + 1
    for cut, line in zip(found.cuts, lines[start:], strict=False):
        assert re.match(rf"  {cut.name}: .*, {cut.speedup:.2g} x, a rank sends .*B$", line)
    assert "ranks" not in str(plan(*SHAPES)) and plan(*SHAPES).cuts == ()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sequences_for_every_rank_are_not_to_be_cut(ranks):
    found = plan(*SHAPES, world_size=ranks)
    assert (found.advice != "") == (ranks <= 3) == ("3 sequences: each rank takes some of them" in str(found))


def test_a_structure_has_no_cuts():
    with pytest.raises(NotImplementedError, match="^world_size: expected None with a structure, got 2$"):
        plan(SHAPES[0], Banded(torch.rand(1, 16), [0]), SHAPES[2], world_size=2)
