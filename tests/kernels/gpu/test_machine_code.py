"""Loops are found in machine code, with what stands in them."""

from tests.kernels.gpu import machine_code
from tests.kernels.gpu.machine_code import SPILL, TENSOR


def sass(lines: list[str]) -> str:
    """What `cuobjdump -sass` prints of instructions, which are 16 bytes long."""
    return "\n".join(f"        /*{16 * i:04x}*/                   {line} ;   /* 0x0 */" for i, line in enumerate(lines))


POLL = ["LDG.E.STRONG.SYS R1, [R2.64]", "ISETP.GE.AND P0, PT, R1, R2, PT", "@!P0 BRA {}"]


def test_loops_of_a_step_with_a_wait_and_a_loop_in_it():
    step = ["FMUL R1, R1, R2"] * 10 + POLL + ["LDL R1, [R1]"] * 2
    inner = ["@P0 HMMA.1688.F32.TF32 R4, R8, R2, R4", "LDS.128 R1, [R2]", "MUFU.EX2 R1, R1", "@P1 BRA 0x120"]
    lines = ["STL [R1], R2"] * 3 + step + inner + ["IADD3 R1, R1, R2, RZ"] * 20 + ["BRA 0x30", "EXIT", "BRA 0x2b0"]
    lines[15] = POLL[2].format("0xd0")
    kernel, outer, product = machine_code.sass(sass(lines))
    assert kernel.instructions == len(lines) and kernel.count(SPILL) == 5
    assert (outer.first, outer.last, outer.before) == (3, 42, 10)
    assert outer.count("FMUL") == 10 and outer.count(TENSOR) == 1 and outer.count(r"LDS\.128") == 1
    assert product.operations == {"HMMA.1688.F32.TF32": 1, "LDS.128": 1, "MUFU.EX2": 1, "BRA": 1}
    found = [kernel, outer, product]
    assert machine_code.hottest(found) == [product, outer]
    assert machine_code.in_loops(found, SPILL) == 2
    arrival = "@P3 REDG.E.ADD.STRONG.GPU [R4.64], R3"
    lines[34] = arrival  # and 8 instructions are behind it
    assert machine_code.sass(sass(lines))[1].before == 18
    lines[10] = arrival
    assert machine_code.sass(sass(lines))[1].before == 2


def test_a_loop_without_products_does_not_hide_the_step_around_it():
    inner = ["FADD R1, R1, R2"] * 30 + ["@P1 BRA 0x30"]
    lines = ["MOV R1, R2"] * 3 + inner + ["HMMA.1688.F32.TF32 R4, R8, R2, R4", "BRA 0x10", "EXIT"]
    _, outer, _ = found = machine_code.sass(sass(lines))
    assert machine_code.hottest(found) == [outer]


def test_a_kernel_without_a_loop():
    (kernel,) = found = machine_code.sass(sass(["FMUL R1, R1, R2", "EXIT", "BRA 0x20"]))
    assert kernel.instructions == 3 and not machine_code.hottest(found) and not machine_code.in_loops(found, "FMUL")


def test_loops_of_amd():
    body = ["\tv_mfma_f32_16x16x4_f32 a[0:3], v1, v2, a[0:3]", "\tscratch_load_dword v1, off, off"]
    lines = ["\ts_mov_b32 s1, 0", ".LBB0_1:", *body, "\ts_cbranch_scc1 .LBB0_1", "\ts_branch .LBB0_2", ".LBB0_2:"]
    kernel, loop = machine_code.rocm("\n".join([*lines, "\ts_endpgm"]))
    assert kernel.instructions == 6 and loop.instructions == 3
    assert loop.count(TENSOR) == loop.count(SPILL) == 1
