"""The loops of machine code, and how often each operation stands in them.

A loop is what lies between a backward branch and where it leads; what stands in it is counted once, also what a branch
may leave out. Loops of a few instructions that wait for another program are in the count of the loop around them only.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

# what multiplies tiles, and what moves spilled registers
TENSOR = r"U?[DHQI]G?MMA\b|UTC\w*MMA\b|v_s?mfma_"
SPILL = r"STL\b|LDL\b|scratch_(?:load|store)_"

# by what a program tells others that it has come so far
_ARRIVAL = r"REDG?\b|ATOMG?\b|global_atomic_"

# shorter loops wait for another program
_SHORT = 24

_SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_LABEL = re.compile(r"^(\.L\w+):")
_ROCM = re.compile(r"^\s+((?:[svd]|ds|global|buffer|flat|scratch)_\w+)(?: (\.L\w+))?")


@dataclass(frozen=True)
class Loop:
    """Instructions `first` to `last` of a kernel; the first loop of all is the kernel itself."""

    first: int
    last: int
    operations: dict[str, int] = field(default_factory=dict)
    before: int = 0  # instructions between an arrival and the loop that waits for those of other programs

    @property
    def instructions(self) -> int:
        """All of one turn."""
        return sum(self.operations.values())

    def count(self, pattern: str) -> int:
        """The instructions whose name begins like this."""
        return sum(number for name, number in self.operations.items() if re.match(pattern, name))

    def holds(self, other: "Loop") -> bool:
        """Whether the other loop is a part of it."""
        return self != other and self.first <= other.first and other.last <= self.last


def sass(text: str) -> list[Loop]:
    """The loops of what `cuobjdump -sass` prints."""
    names, places, branches = [], {}, []
    for match in _SASS.finditer(text):
        address, name, rest = match.groups()
        places[int(address, 16)] = len(names)
        if name.split(".")[0] in ("BRA", "JMP") and (to := re.search(r"0x[0-9a-f]+", rest)):
            branches.append((len(names), int(to[0], 16)))
        names.append(name)
    return _loops(names, [(place, places[to]) for place, to in branches if to in places])


def rocm(text: str) -> list[Loop]:
    """The loops of what LLVM wrote for an AMD device."""
    names, places, branches = [], {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            places[label[1]] = len(names)
        elif match := _ROCM.match(line):
            if "branch" in match[1]:
                branches.append((len(names), match[2]))
            names.append(match[1])
    return _loops(names, [(place, places[to]) for place, to in branches if to in places])


def _loops(names: list[str], branches: list[tuple[int, int]]) -> list[Loop]:
    """The kernel, and its loops, by where they begin."""
    ends: dict[int, int] = {}
    for place, to in branches:
        if to < place:  # an endless loop of one instruction is where machine code ends
            ends[to] = max(place, ends.get(to, 0))
    short = {first for first, last in ends.items() if last - first < _SHORT and not _tensor(names[first : last + 1])}
    found = [Loop(0, len(names) - 1, dict(Counter(names)))]
    for first, last in sorted(ends.items()):
        if first not in short:
            found.append(Loop(first, last, dict(Counter(names[first : last + 1])), _before(names, first, last, short)))
    return found


def _before(names: list[str], first: int, last: int, short: set[int]) -> int:
    """The instructions of a loop that stand before its first wait and behind the arrival, around the loop's end."""
    wait = min((place for place in short if first <= place <= last), default=None)
    if wait is None:
        return 0
    arrivals = [place for place in range(first, last + 1) if re.match(_ARRIVAL, names[place])]
    ahead = [place for place in arrivals if place < wait]
    if ahead:
        return wait - ahead[-1] - 1
    return wait - first + (last - arrivals[-1] if arrivals else 0)


def _tensor(names: list[str]) -> bool:
    return any(re.match(TENSOR, name) for name in names)


def hottest(loops: list[Loop]) -> list[Loop]:
    """The innermost loop with most tensor-core instructions, or most instructions, and then those around it."""
    candidates = [loop for loop in loops[1:] if loop.count(TENSOR)] or loops[1:]
    innermost = [loop for loop in candidates if not any(loop.holds(other) for other in candidates)]
    if not innermost:
        return []
    chosen = max(innermost, key=lambda loop: (loop.count(TENSOR), loop.instructions))
    around = [loop for loop in loops[1:] if loop.holds(chosen)]
    return [chosen, *sorted(around, key=lambda loop: loop.instructions)]


def in_loops(loops: list[Loop], pattern: str) -> int:
    """The instructions in any loop whose name begins like this."""
    outermost = [loop for loop in loops[1:] if not any(other.holds(loop) for other in loops[1:])]
    return sum(loop.count(pattern) for loop in outermost)
