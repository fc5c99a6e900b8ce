"""Programs of one launch that wait for each other: tickets, arrivals and a wait, without a cooperative launch.

Tickets number programs as they start, and a program waits only for those that share its group of tickets. All groups
but the last are complete, run, and make room for the last: so no grid is too large, and no other kernel on the device
can stop them. Counters are zeros before the launch; the first one counts tickets, and each group has one of its own.
"""

import triton
import triton.language as tl

# int32 words from one counter to the next: each has a cache line of its own
PITCH = tl.constexpr(32)


@triton.constexpr_function
def part_of(c, parts):
    """The columns of a part; a multiple of four, so that loads of four begin where a part does."""
    return (-(-c // parts) + 3) // 4 * 4


@triton.jit
def take_ticket(counters_ptr):
    """The number of programs that started before this one."""
    return tl.atomic_add(counters_ptr, 1, sem="relaxed")


@triton.jit
def counter_of(counters_ptr, group):
    """The counter of a group."""
    return counters_ptr + (1 + group) * PITCH


@triton.jit
def arrive(counter_ptr, PARTS: tl.constexpr):
    """After this, what all threads of the program have stored is there for those who `wait`; nobody waits here."""
    tl.debug_barrier()
    if PARTS > 1:
        tl.atomic_add(counter_ptr, 1, sem="release")


@triton.jit
def wait(counter_ptr, arrivals, PARTS: tl.constexpr):
    """Wait for so many arrivals; what was stored before them must be loaded past the first cache, with `.cg`."""
    if PARTS > 1:
        while tl.load(counter_ptr, volatile=True) < arrivals:
            pass
    tl.debug_barrier()


@triton.jit
def refresh(counter_ptr, PARTS: tl.constexpr):
    """After this, and a `wait`, also loads through the first cache find what was stored before the arrivals."""
    if PARTS > 1:
        tl.atomic_add(counter_ptr, 0, sem="acquire")
        tl.debug_barrier()


def words(groups: int) -> int:
    """The int32 words of the counters of so many groups."""
    return (1 + groups) * PITCH.value
