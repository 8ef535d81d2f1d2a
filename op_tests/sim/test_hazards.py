"""Wait states: each rule of docs/simulator.md by itself, and against what clang leaves."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aiter_mx.jit.toolchain import llvm_tool
from aiter_mx.sim.disasm import Instruction, disassemble, parse_line
from aiter_mx.sim.faults import HazardError
from aiter_mx.sim.hazards import Hazard, find_hazards
from aiter_mx.sim.isa.salu import BRANCHES
from aiter_mx.sim.program import SimOptions
from op_tests.sim.tools import launch, program

DPP = "quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf"
SCALED_16 = "v_mfma_scale_f32_16x16x128_f8f6f4"
SCALED_32 = "v_mfma_scale_f32_32x32x64_f8f6f4"
FP8_16 = f"{SCALED_16} v[0:3], v[8:15], v[16:23], v[0:3], v30, v31 op_sel_hi:[0,0,0]"
FP4_16 = f"{SCALED_16} v[0:3], v[8:11], v[16:19], v[0:3], v30, v31 op_sel_hi:[0,0,0] cbsz:4 blgp:4"
FP8_32 = f"{SCALED_32} v[0:15], v[16:23], v[24:31], v[0:15], v50, v51 op_sel_hi:[0,0,0]"
BF16_16 = "v_mfma_f32_16x16x32_bf16 v[0:3], v[8:11], v[16:19], v[0:3]"
F32_16 = "v_mfma_f32_16x16x4_f32 v[0:3], v8, v16, v[0:3]"
F32_4 = "v_mfma_f32_4x4x1_16b_f32 v[0:3], v8, v16, v[0:3]"
F16_4 = "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[8:9], v[16:17], v[0:3]"


def reading(c: str, a: str = "v[32:39]", scale: str = "v60") -> str:
    """A scaled product with other registers."""
    return f"{SCALED_16} v[40:43], {a}, v[48:55], {c}, {scale}, v61 op_sel_hi:[0,0,0]"


RULES = [  # first, second, wait states between them
    # A vector result
    ("v_add_u32 v1, v2, v3", f"v_mov_b32_dpp v4, v1 {DPP}", 2),
    ("v_add_u32 v4, v2, v3", f"v_mov_b32_dpp v4, v1 {DPP}", 0),  # the old value, of its own lane
    ("v_add_u32 v5, v2, v3", f"v_add_u32_dpp v4, v1, v5 {DPP}", 0),  # the second source, likewise
    ("v_add_u32 v1, v2, v3", "v_permlane32_swap_b32 v1, v4", 2),
    ("v_add_u32 v4, v2, v3", "v_permlane16_swap_b32 v1, v4", 2),
    ("v_add_u32 v1, v2, v3", "v_readfirstlane_b32 s0, v1", 1),
    ("v_add_u32 v1, v2, v3", "v_readlane_b32 s0, v1, 5", 1),
    ("v_add_u32 v1, v2, v3", "v_add_u32 v4, v1, v1", 0),
    ("v_exp_f32 v1, v2", "v_add_f32 v4, v1, v1", 1),
    ("v_exp_f32 v1, v2", "v_rcp_f32 v4, v1", 0),
    ("v_rcp_f16 v1, v2", "global_store_dword v[8:9], v1, off", 0),
    ("v_add_u32_sdwa v1, v2, v3 dst_sel:BYTE_1 src0_sel:DWORD src1_sel:DWORD",
     "v_add_u32 v4, v1, v1", 1),
    ("v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]", "v_mov_b32 v1, v4", 1),
    ("v_cvt_pk_fp8_f32 v1, v2, v3", "v_mov_b32 v4, v1", 0),
    ("v_cvt_scalef32_pk_fp8_f32 v1, v2, v3, v4 op_sel:[0,0,0,1]", "v_mov_b32 v4, v1", 1),
    ("v_cvt_scalef32_pk_fp4_f32 v1, v2, v3, v4 op_sel:[0,0,1,0]", "v_mov_b32 v4, v1", 1),
    ("v_cvt_scalef32_pk_fp4_f32 v1, v2, v3, v4 op_sel:[0,0,0,1]", "v_mov_b32 v1, v4", 1),
    ("v_cvt_scalef32_pk_fp4_f32 v1, v2, v3, v4", "v_mov_b32 v4, v1", 0),
    ("v_dot4_i32_i8 v1, v2, v3, v4", "v_add_u32 v5, v1, v1", 3),
    ("v_dot4_i32_i8 v1, v2, v3, v4", "ds_write_b32 v5, v1", 3),
    ("v_dot4_i32_i8 v1, v2, v3, v4", "v_mov_b32 v1, 0", 3),
    ("v_dot4_i32_i8 v1, v2, v3, v4", "v_dot4_i32_i8 v5, v6, v7, v1", 0),
    ("v_dot4_i32_i8 v1, v2, v3, v4", "v_dot4_i32_i8 v5, v1, v7, v8", 3),
    ("v_dot2c_f32_f16 v1, v2, v3", "v_dot2c_f32_f16 v1, v4, v5", 0),
    # A scalar register that a vector instruction wrote
    ("v_readfirstlane_b32 s0, v1", "v_add_u32 v2, s0, v3", 2),
    ("v_cmp_lt_u32 vcc, v1, v2", "v_cndmask_b32 v3, v4, v5, vcc", 2),
    ("v_add_co_u32 v1, vcc, v2, v3", "v_addc_co_u32 v1, vcc, v2, v3, vcc", 2),
    ("v_cmp_lt_u32 s[2:3], v1, v2", "v_cndmask_b32 v3, v4, v5, s[2:3]", 2),
    ("v_cmp_lt_u32 vcc, v1, v2", "s_and_b64 s[0:1], vcc, exec", 0),
    ("v_div_scale_f32 v1, vcc, v2, v3, v4", "v_div_fmas_f32 v5, v6, v7, v8", 4),
    ("v_readfirstlane_b32 s0, v1", "v_readlane_b32 s1, v2, s0", 4),
    ("v_readfirstlane_b32 s0, v1", "global_load_dword v2, v3, s[0:1]", 5),
    ("v_readfirstlane_b32 s4, v1", "buffer_load_dword v2, v3, s[0:3], s4 offen", 5),
    ("v_readfirstlane_b32 s4, v1", "s_load_dword s0, s[4:5], 0", 0),
    ("v_cmpx_lt_u32 vcc, v1, v2", f"v_mov_b32_dpp v4, v3 {DPP}", 5),
    ("v_cmpx_lt_u32 vcc, v1, v2", BF16_16, 4),
    ("v_cmpx_lt_u32 vcc, v1, v2", "v_readfirstlane_b32 s0, v3", 4),
    ("v_cmpx_lt_u32 vcc, v1, v2", "v_permlane32_swap_b32 v4, v3", 4),
    ("v_cmpx_lt_u32 vcc, v1, v2", "v_mov_b32 v4, v3", 0),
    # Scalar registers and modes
    ("s_mov_b32 m0, s0", "buffer_load_dwordx4 v1, s[0:3], 0 offen lds", 1),
    ("s_add_u32 m0, m0, s0", "global_load_lds_dwordx4 v[2:3], off", 1),
    ("s_mov_b32 m0, s0", "ds_read_b32 v1, v2", 0),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0",
     "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 6, 2), 0", 2),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0", "s_getreg_b32 s0, hwreg(HW_REG_MODE)", 2),
    # A store's data
    ("global_store_dwordx4 v[8:9], v[0:3], off", "v_mov_b32 v2, 0", 2),
    ("global_store_dwordx2 v[8:9], v[0:1], off", "v_mov_b32 v1, 0", 0),
    ("buffer_store_dwordx3 v[0:2], v8, s[0:3], 0 offen", "v_mov_b32 v2, 0", 2),
    ("buffer_store_dwordx4 v[0:3], v8, s[0:3], s4 offen", "v_mov_b32 v2, 0", 1),
    ("global_store_dwordx4 v[8:9], v[0:3], off", "global_load_dword v2, v[8:9], off", 0),
    # Operands of a matrix product
    ("v_mov_b32 v9, v1", FP8_16, 2),
    ("v_mov_b32 v3, v1", FP8_16, 2),
    ("v_mov_b32 v30, v1", FP8_16, 2),  # a scale
    ("v_accvgpr_read_b32 v9, a1", FP8_16, 2),
    ("v_mov_b32 v12, v1", FP4_16, 0),  # not an operand
    # Its result
    *((product, "v_add_f32 v2, v2, v40", states)
      for product, states in ((FP8_16, 12), (FP4_16, 8), (FP8_32, 20), (BF16_16, 8), (F32_16, 10),
                              (F32_4, 4), (F16_4, 5))),
    (FP8_16, "global_store_dwordx4 v[40:41], v[0:3], off", 12),
    (FP8_16, "ds_write_b128 v40, v[0:3]", 12),
    (FP8_16, "v_accvgpr_write_b32 a0, v0", 12),
    (FP8_16, "v_mov_b32 v1, 0", 12),
    (F32_16, "v_mov_b32 v1, 0", 10),
    (FP8_16, "ds_read_b32 v1, v40", 12),
    (FP8_16, "v_mov_b32 v9, 0", 0),  # A and B may be overwritten
    ("v_mfma_f32_16x16x32_bf16 v[0:3], v[8:11], v[16:19], v[4:7]", "v_mov_b32 v5, 0", 3),
    ("v_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], v[32:47]", "ds_read_b32 v33, v60", 7),
    (f"{SCALED_32} v[0:15], v[16:23], v[24:31], v[32:47], v50, v51 op_sel_hi:[0,0,0]",
     "v_mov_b32 v32, 0", 15),
    ("v_mfma_f32_16x16x4_f32 v[0:3], v8, v16, v[4:7]", "v_mov_b32 v5, 0", 0),
    # Its result in another one
    (FP8_16, reading("v[0:3]"), 0),
    (F16_4, reading("v[0:3]"), 2),
    (FP8_32, reading("v[4:7]"), 18),
    (FP8_16, reading("v[2:5]"), 10),
    (FP8_16, "v_mfma_f32_16x16x4_f32 v[40:43], v44, v45, v[2:5]", 10),
    (F16_4, "v_mfma_f32_16x16x4_f32 v[40:43], v44, v45, v[2:5]", 3),
    (F32_16, reading("v[2:5]"), 0),
    (F32_16, "v_mfma_f32_16x16x4_f32 v[40:43], v44, v45, v[2:5]", 8),
    (FP8_16, reading("0", a="v[2:9]"), 12),
    (FP8_16, reading("0", scale="v1"), 12),
    (F32_16, reading("0", a="v[2:9]"), 10),
    (FP8_16, FP8_16, 0),
]  # fmt: skip


def assembled(lines: list[str]) -> list[Instruction]:
    """The instructions of a text."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "k.o"
        command = [str(llvm_tool("llvm-mc")), "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx950"]
        subprocess.run(
            [*command, "-filetype=obj", "-o", str(out)],
            input="\n".join(lines) + "\n", text=True, check=True,
        )  # fmt: skip
        return disassemble(out.read_bytes())


def hazards(code: list[Instruction]) -> dict[int, Hazard]:
    number = {ins.address: i for i, ins in enumerate(code)}
    leaders = {0}
    for i, ins in enumerate(code):
        if ins.mnemonic in BRANCHES:
            leaders |= {i + 1, number[ins.branch_target]}
    return find_hazards(code, sorted(leader for leader in leaders if leader < len(code)))


@pytest.fixture(scope="module")
def pairs() -> list[list[Instruction]]:
    """Both instructions of each rule."""
    code = assembled([line for first, second, _ in RULES for line in (first, second)])
    return [code[i : i + 2] for i in range(0, len(code), 2)]


def with_states(pair: list[Instruction], states: int) -> list[Instruction]:
    nop = parse_line("\ts_nop 0  // 000000000000: BF800000")
    assert nop is not None
    return [pair[0], *[nop] * states, pair[1]]


@pytest.mark.parametrize("n", range(len(RULES)), ids=lambda n: f"{n}: {'; '.join(RULES[n][:2])}")
def test_a_rule_asks_for_its_wait_states_and_no_more(
    n: int, pairs: list[list[Instruction]]
) -> None:
    states = RULES[n][2]
    assert not hazards(with_states(pairs[n], states))
    for found in range(states):
        hazard = hazards(with_states(pairs[n], found))[found + 1]
        assert (hazard.producer, hazard.needed, hazard.found) == (0, states, found)


def test_an_s_nop_counts_one_more_than_it_says_and_anything_else_one() -> None:
    def found(*between: str) -> int | None:
        code = assembled([FP8_16, *between, "v_add_f32 v2, v2, v40"])
        hazard = hazards(code).get(len(between) + 1)
        return hazard.found if hazard else None

    assert found("s_nop 10") == 11
    assert found("s_nop 11") is None
    assert found("s_nop 7", "v_mov_b32 v60, 0", "s_waitcnt vmcnt(0)", BF16_16.replace(
        "v[0:3]", "v[64:67]")) == 11  # fmt: skip


def test_a_product_in_between_waits_for_the_one_before_it() -> None:
    other = BF16_16.replace("v[0:3]", "v[64:67]")

    def found(*between: str) -> Hazard | None:
        code = assembled([FP8_16, other, *between, "v_add_f32 v2, v2, v40"])
        return hazards(code).get(len(code) - 1)

    assert found("s_nop 10") is None
    cautious = found("s_nop 3")  # 7 passes of waiting, the product, 4 states
    assert cautious and (cautious.rule, cautious.found) == ("mfma-between", 5)
    short = found("s_nop 2")
    assert short and (short.rule, short.found) == ("mfma-write-back", 11)
    plain = hazards(assembled([FP8_16, "s_nop 6", "v_add_f32 v2, v2, v40"]))[2]
    assert (plain.rule, plain.found) == ("mfma-result", 7)


def test_a_register_written_again_is_that_of_the_last_writer() -> None:
    code = [FP8_16, "s_nop 11", "v_mov_b32 v2, 0", "v_add_f32 v2, v2, v40"]
    assert not hazards(assembled(code))
    narrow = F16_4.replace("v[8:9], v[16:17]", "v[48:49], v[50:51]").replace("v[0:3]", "v[4:7]")
    code = [FP8_32, "s_nop 15", "s_nop 1", narrow, "s_nop 4", "v_add_f32 v4, v5, v40"]
    assert not hazards(assembled(code))


def test_wait_states_are_counted_along_branches_and_round_loops() -> None:
    loop = ["loop:", "v_add_u32 v32, v33, v33", "s_nop 0", BF16_16.replace("v[8:", "v[32:", 1)
            .replace("11]", "35]"), "v_mov_b32 v36, v37", "s_cbranch_scc1 loop"]  # fmt: skip
    (hazard,) = hazards(assembled(loop)).values()
    assert (hazard.producer, hazard.needed, hazard.found) == (0, 2, 1)
    loop[2] = "s_nop 1"
    assert not hazards(assembled(loop))
    loop[1] = "v_add_u32 v32, v33, v0"  # the product's result, one round later
    (hazard,) = hazards(assembled(loop)).values()
    assert (hazard.producer, hazard.needed, hazard.found) == (2, 8, 2)
    around = ["v_exp_f32 v1, v2", "s_cbranch_scc0 after", "s_nop 0", "after:",
              "v_add_f32 v3, v1, v1"]  # fmt: skip
    assert not hazards(assembled(around))  # the branch is one
    around[0:2] = ["v_readfirstlane_b32 s0, v2", "s_cbranch_scc0 after"]
    around[-1] = "v_add_u32 v3, s0, v1"
    (hazard,) = hazards(assembled(around)).values()
    assert (hazard.needed, hazard.found) == (2, 1)
    around[1] = "s_branch after"
    around[2] = "s_nop 7"
    assert hazards(assembled(around))
    ended = [FP8_16, "s_endpgm", "v_add_f32 v2, v2, v2"]
    code = assembled(ended)
    assert not find_hazards(code, [0, 2])


def test_clang_leaves_just_as_many_after_each_matrix_product() -> None:
    kernels = program("hazards.cu")
    functions = kernels.code_object.functions.items()
    products = {name: at for name, at in functions if name.startswith(("p_", "s_"))}
    assert len(products) == 27
    for name, (begin, size) in products.items():
        code = [ins for ins in kernels.listing if begin <= ins.address < begin + size]
        at = next(i for i, ins in enumerate(code) if ins.mnemonic.startswith("v_mfma"))
        assert code[at + 1].mnemonic == "s_nop" and not hazards(code), name
        (states,) = code[at + 1].operands
        fewer = replace(states, value=states.value - 1)
        code[at + 1] = replace(code[at + 1], operands=(fewer,), text=f"s_nop {fewer.value}")
        (hazard,) = hazards(code).values()
        assert hazard.producer == at and hazard.needed - hazard.found == 1, name


def run(kernel: str, *more: int, options: SimOptions | None = None) -> bool:
    """Whether the result is right."""
    data, out = np.arange(64, dtype=np.uint32) * 5, np.zeros(64, np.uint32)
    launch(program("hazards.cu"), kernel, 1, 64, [data, out, *more], access="rw", options=options)
    return bool((out == data[np.arange(64) ^ 1] + 1).all())


def test_an_instruction_that_comes_too_soon_is_reported_when_it_is_reached() -> None:
    with pytest.raises(HazardError) as caught:
        run("too_soon")
    assert "kernel too_soon, workgroup (0, 0, 0), wave 0: 'v_mov_b32_dpp" in str(caught.value)
    assert "1 wait state too soon after 'v_add_u32" in str(caught.value)
    assert str(caught.value).endswith("2 must lie between them, and 1 does")
    assert run("in_time")
    assert run("too_soon", options=SimOptions(strict=False))
    run("not_reached", 0)
    with pytest.raises(HazardError, match=r"2 wait states too soon .* and 0 do"):
        run("not_reached", 1)
