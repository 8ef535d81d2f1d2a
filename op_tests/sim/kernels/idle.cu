// Instructions that do nothing, each beside one of its kind that is needed.

KERNEL(64) nops(const u32* in, u32* out) {
    u32 x = in[lane_id()], y;
    asm volatile("s_nop 3\n" // nothing comes before it
                 "v_add_u32_e32 %1, 1, %1\n"
                 "s_nop 1\n" // DPP reads what was just written
                 "v_mov_b32_dpp %0, %1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf\n"
                 : "=&v"(y), "+v"(x));
    out[lane_id()] = y;
}

// A nop that is needed where the branch is taken alone.
KERNEL(64) nop_of_one_path(const u32* in, u32* out, int skips) {
    u32 x = in[lane_id()], y;
    asm volatile("s_cmp_eq_u32 %2, 0\n"
                 "s_cbranch_scc1 1f\n"
                 "v_add_u32_e32 %1, 1, %1\n"
                 "1:\n"
                 "s_nop 2\n"
                 "v_mov_b32_dpp %0, %1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf\n"
                 : "=&v"(y), "+v"(x)
                 : "s"(skips)
                 : "scc");
    out[lane_id()] = y;
}

KERNEL(64) waits(const u32* in, u32* out) {
    u32 x, y;
    const u32* at = in + lane_id();
    asm volatile("global_load_dword %0, %2, off\n"
                 "global_load_dword %1, %2, off offset:256\n"
                 "s_waitcnt vmcnt(2)\n" // no more are
                 "s_waitcnt vmcnt(1)\n"
                 "v_mov_b32_e32 %0, %0\n"
                 "s_waitcnt vmcnt(0)\n"
                 "s_waitcnt vmcnt(0) lgkmcnt(0)\n" // none is left
                 : "=&v"(x), "=&v"(y)
                 : "v"(at));
    out[lane_id()] = x + y;
}

// Each round waits for the load of the round before.
KERNEL(64) waits_in_a_loop(const u32* in, u32* out, int rounds) {
    u32 x = 0;
    const u32* at = in + lane_id();
    asm volatile("1:\n"
                 "s_waitcnt vmcnt(0)\n"
                 "global_load_dword %0, %2, off\n"
                 "s_sub_u32 %1, %1, 1\n"
                 "s_cmp_lg_u32 %1, 0\n"
                 "s_cbranch_scc1 1b\n"
                 "s_waitcnt vmcnt(0)\n"
                 : "+v"(x), "+s"(rounds)
                 : "v"(at)
                 : "scc");
    out[lane_id()] = x;
}

KERNEL(64) m0_set(const u32* in, u32* out, int reads) {
    u32 x = 0;
    asm volatile("s_mov_b32 m0, 5\n" // set again before it is read
                 "s_mov_b32 m0, 7\n"
                 "s_cmp_eq_u32 %1, 0\n"
                 "s_cbranch_scc1 1f\n"
                 "v_mov_b32_e32 %0, m0\n"
                 "1:\n"
                 "s_mov_b32 m0, 9\n" // not read at all
                 : "+v"(x)
                 : "s"(reads)
                 : "scc");
    out[lane_id()] = in[lane_id()] + x;
}

KERNEL(64) results(const u32* in, u32* out) {
    u32 x = in[lane_id()];
    asm volatile("v_mov_b32_e32 v60, 1\n" // overwritten
                 "v_mov_b32_e32 v60, 2\n"
                 "v_add_u32_e32 v61, 1, v60\n" // for the next one alone, which is not read
                 "v_add_u32_e32 v62, 1, v61\n"
                 "v_add_u32_e32 %0, v60, %0\n"
                 : "+v"(x)
                 :
                 : "v60", "v61", "v62");
    out[lane_id()] = x;
}

// What is overwritten in some lanes alone is read in the others.
KERNEL(64) result_of_some_lanes(const u32* in, u32* out) {
    u32 x = in[lane_id()];
    u64 all;
    asm volatile("v_mov_b32_e32 v60, 1\n"
                 "s_mov_b64 %1, exec\n"
                 "s_mov_b64 exec, 0xff\n"
                 "v_mov_b32_e32 v60, 2\n"
                 "s_mov_b64 exec, %1\n"
                 "v_add_u32_e32 %0, v60, %0\n"
                 : "+v"(x), "=&s"(all)
                 :
                 : "v60");
    out[lane_id()] = x;
}
