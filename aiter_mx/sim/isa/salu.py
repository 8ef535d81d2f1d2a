"""Scalar arithmetic; ``scc`` is the condition code, ``exec`` the lane mask."""

from __future__ import annotations

from aiter_mx.sim.isa.tables import Rule, family, table

_LOGIC = family(
    """
s_and_{s} {t} {t}{t} a & b; scc = r != 0
s_or_{s} {t} {t}{t} a | b; scc = r != 0
s_xor_{s} {t} {t}{t} a ^ b; scc = r != 0
s_andn2_{s} {t} {t}{t} a & ~b; scc = r != 0
s_orn2_{s} {t} {t}{t} a | ~b; scc = r != 0
s_nand_{s} {t} {t}{t} ~(a & b); scc = r != 0
s_nor_{s} {t} {t}{t} ~(a | b); scc = r != 0
s_xnor_{s} {t} {t}{t} ~(a ^ b); scc = r != 0
s_not_{s} {t} {t} ~a; scc = r != 0
s_mov_{s} {t} {t} a
s_cmov_{s} {t} {t} scc ? a : d
s_cselect_{s} {t} {t}{t} scc ? a : b
s_lshl_{s} {t} {t}u a << (b & {bits}); scc = r != 0
s_lshr_{s} {t} {t}u a >> (b & {bits}); scc = r != 0
s_bfm_{s} {t} uu ((({c})1 << (a & {bits})) - 1) << (b & {bits})
s_ff1_i32_{s} u {t} a ? (u32)__builtin_ctzll(a) : ~0u
s_flbit_i32_{s} u {t} a ? (u32)__builtin_clzll(a) - (63 - {bits}) : ~0u
s_ff0_i32_{s} u {t} ({c})~a ? (u32)__builtin_ctzll(({c})~a) : ~0u
s_bcnt1_i32_{s} u {t} (u32)__builtin_popcountll(a); scc = r != 0
s_bcnt0_i32_{s} u {t} (u32)__builtin_popcountll(({c})~a); scc = r != 0
s_bitset0_{s} {t} u d & ~(({c})1 << (a & {bits}))
s_bitset1_{s} {t} u d | ({c})1 << (a & {bits})
s_bitcmp0_{s} - {t}u scc = !(a >> (b & {bits}) & 1)
s_bitcmp1_{s} - {t}u scc = a >> (b & {bits}) & 1
""",
    s="b32|b64",
    t="u|U",
    c="u32|u64",
    bits="31|63",
)

_COMPARE = family(
    """
s_cmp_{v}_i32 - ii scc = a {o} b
s_cmp_{v}_u32 - uu scc = a {o} b
s_cmpk_{v}_i32 - ik scc = a {o} b
s_cmpk_{v}_u32 - uk scc = a {o} b
""",
    v="eq|lg|gt|ge|lt|le",
    o="==|!=|>|>=|<|<=",
)

SALU: dict[str, Rule] = table(
    "\n".join(
        (
            _LOGIC,
            _COMPARE,
            """
s_cmp_eq_u64 - UU scc = a == b
s_cmp_lg_u64 - UU scc = a != b
s_add_u32 u uu a + b; scc = r < a
s_sub_u32 u uu a - b; scc = a < b
s_addc_u32 u uu a + b + scc; scc = (u64)a + b + scc >> 32
s_subb_u32 u uu a - b - scc; scc = (u64)a < (u64)b + scc
s_add_i32 u uu a + b; scc = (~(a ^ b) & (a ^ r)) >> 31
s_sub_i32 u uu a - b; scc = ((a ^ b) & (a ^ r)) >> 31
s_addk_i32 u k d + (u32)a; scc = (~(d ^ (u32)a) & (d ^ r)) >> 31
s_mulk_i32 u k d * (u32)a
s_movk_i32 u k (u32)a
s_cmovk_i32 u k scc ? (u32)a : d
s_mul_i32 u uu a * b
s_mul_hi_u32 u uu (u32)((u64)a * b >> 32)
s_mul_hi_i32 u ii (u32)((i64)a * b >> 32)
s_min_u32 u uu a < b ? a : b; scc = a < b
s_max_u32 u uu a > b ? a : b; scc = a > b
s_min_i32 i ii a < b ? a : b; scc = a < b
s_max_i32 i ii a > b ? a : b; scc = a > b
s_abs_i32 u u (i32)a < 0 ? 0 - a : a; scc = r != 0
s_absdiff_i32 u ii (u32)(a > b ? (i64)a - b : (i64)b - a); scc = r != 0
s_ashr_i32 u iu (u32)(a >> (b & 31)); scc = r != 0
s_ashr_i64 U Iu (u64)(a >> (b & 63)); scc = r != 0
s_bfe_u32 u uu extract(a, b & 31, b >> 16 & 127); scc = r != 0
s_bfe_i32 u uu (u32)extract_signed((u64)a, b & 31, b >> 16 & 127, 32); scc = r != 0
s_bfe_u64 U Uu extract(a, b & 63, b >> 16 & 127); scc = r != 0
s_bfe_i64 U Uu (u64)extract_signed(a, b & 63, b >> 16 & 127, 64); scc = r != 0
s_lshl1_add_u32 u uu (a << 1) + b; scc = ((u64)a << 1) + b >> 32 != 0
s_lshl2_add_u32 u uu (a << 2) + b; scc = ((u64)a << 2) + b >> 32 != 0
s_lshl3_add_u32 u uu (a << 3) + b; scc = ((u64)a << 3) + b >> 32 != 0
s_lshl4_add_u32 u uu (a << 4) + b; scc = ((u64)a << 4) + b >> 32 != 0
s_sext_i32_i8 u u (u32)(i32)(i8)a
s_sext_i32_i16 u u (u32)(i32)(i16)a
s_brev_b32 u u reverse_bits(a)
s_brev_b64 U U (u64)reverse_bits((u32)a) << 32 | reverse_bits((u32)(a >> 32))
s_pack_ll_b32_b16 u uu (a & 0xffff) | b << 16
s_pack_lh_b32_b16 u uu (a & 0xffff) | (b & 0xffff0000u)
s_pack_hh_b32_b16 u uu a >> 16 | (b & 0xffff0000u)
s_flbit_i32 u u (u32)leading_signs((i32)a)
s_flbit_i32_i64 u I a == 0 || a == -1 ? ~0u : (u32)__builtin_clrsbll(a) + 1
""",
        )
    )
)

# What EXEC becomes: `a` the source, `e` the old EXEC. The destination gets the old EXEC
# (saveexec) or the new one (wrexec).
SAVE_EXEC = {
    "s_and_saveexec_b64": "a & e",
    "s_or_saveexec_b64": "a | e",
    "s_xor_saveexec_b64": "a ^ e",
    "s_andn2_saveexec_b64": "a & ~e",
    "s_orn2_saveexec_b64": "a | ~e",
    "s_andn1_saveexec_b64": "~a & e",
    "s_orn1_saveexec_b64": "~a | e",
    "s_nand_saveexec_b64": "~(a & e)",
    "s_nor_saveexec_b64": "~(a | e)",
    "s_xnor_saveexec_b64": "~(a ^ e)",
    "s_andn1_wrexec_b64": "~a & e",
    "s_andn2_wrexec_b64": "a & ~e",
}

# Without effect on what a functional model computes.
IGNORED = {
    "s_nop", "s_setprio", "s_wakeup", "s_sleep", "s_inst_prefetch", "s_icache_inv", "s_dcache_wb",
    "s_sethalt", "s_ttracedata", "s_set_gpr_idx_off", "buffer_wbinvl1", "v_nop", "s_clause",
    "s_incperflevel", "s_decperflevel",
}  # fmt: skip

# Branches by the condition under which they are taken.
BRANCHES = {
    "s_branch": "1",
    "s_cbranch_scc0": "!w->scc",
    "s_cbranch_scc1": "w->scc",
    "s_cbranch_vccz": "!s64(w, VCC)",
    "s_cbranch_vccnz": "s64(w, VCC)",
    "s_cbranch_execz": "!w->exec",
    "s_cbranch_execnz": "w->exec",
}
