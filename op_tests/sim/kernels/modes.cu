// Modes and registers that hand-written code uses and compilers do not.

typedef int i32x4 __attribute__((ext_vector_type(4)));

// Lanes add in bits: VSKIP leaves out the vector instructions between, for the bits that are set.
KERNEL(64) skipped(const u32* in, u32* out, u32 bits) {
    u32 x = in[lane_id()];
    asm volatile("s_setvskip %1, 0\n v_add_u32 %0, %0, 1\n s_setvskip 0, 0\n"
                 "s_setvskip %1, 3\n v_add_u32 %0, %0, 8\n v_add_u32 %0, %0, 16\n"
                 "s_setvskip 0, 0\n"
                 "v_add_u32 %0, %0, 64"
                 : "+v"(x)
                 : "s"(bits));
    out[lane_id()] = x;
}
// VSKIP that is still on at a branch, and a register that nothing but a skipped instruction writes.
KERNEL(64) skipped_far(const u32* in, u32* out, u32 bits) {
    u32 x = in[lane_id()], y;
    asm volatile("s_setvskip %2, 0\n s_branch 1f\n 1: v_mov_b32 %0, %1\n s_setvskip 0, 0\n s_nop 1"
                 : "=&v"(y)
                 : "v"(x), "s"(bits));
    out[lane_id()] = y;
}
// The source is the register that M0 picks, of four.
KERNEL(64) indexed(const u32* in, u32* out, u32 index) {
    const u32* at = in + lane_id();
    u32 x;
    asm volatile("global_load_dword v20, %1, off\n global_load_dword v21, %1, off offset:256\n"
                 "global_load_dword v22, %1, off offset:512\n s_waitcnt vmcnt(0)\n"
                 "s_set_gpr_idx_on %2, gpr_idx(SRC0)\n v_mov_b32 %0, v20\n s_set_gpr_idx_off\n"
                 "v_add_u32 %0, %0, 1"
                 : "=&v"(x)
                 : "v"(at), "s"(index)
                 : "v20", "v21", "v22", "v23", "m0");
    out[lane_id()] = x;
}
// 160 vector registers and none of the accumulators: the last ones may be called either.
KERNEL(64) beyond(const u32* in, u32* out) {
    u32 x = in[lane_id()];
    asm volatile("v_mov_b32 v159, %0\n v_mov_b32 v10, 5\n v_add_u32 %0, v159, v10"
                 : "+v"(x)
                 :
                 : "v10", "v159");
    out[lane_id()] = x;
}
// Records of `stride` bytes, `records` of them.
KERNEL(64) by_index(const u32* in, u32* out, u32 stride, u32 records) {
    u64 base = (u64)in;
    i32x4 descriptor = {(int)base, (int)((u32)(base >> 32) | stride << 16), (int)records, 0x20000};
    u32 index = 63 - lane_id(), offset = 4, x, y;
    u64 both = index | (u64)offset << 32;
    asm volatile("buffer_load_dword %0, %2, %4, 0 idxen\n"
                 "buffer_load_dword %1, %3, %4, 0 idxen offen offset:4\n s_waitcnt vmcnt(0)"
                 : "=&v"(x), "=&v"(y)
                 : "v"(index), "v"(both), "s"(descriptor));
    out[lane_id()] = x;
    out[lane_id() + 64] = y;
}
// Four dwords from byte `at` of a buffer of so many records, by a scalar load.
KERNEL(64) scalar_records(const u32* in, u32* out, u32 stride, u32 records, u32 at) {
    u64 base = (u64)in;
    i32x4 descriptor = {(int)base, (int)((u32)(base >> 32) | stride << 16), (int)records, 0x20000};
    i32x4 found;
    asm volatile("s_buffer_load_dwordx4 %0, %1, %2\n s_waitcnt lgkmcnt(0)"
                 : "=&s"(found)
                 : "s"(descriptor), "s"(at));
    for (int i = 0; i < 4; ++i)
        out[lane_id() * 4 + i] = (u32)found[i];
}
KERNEL(64) descriptor(const u32* in, u32* out, u32 flags, u32 word) {
    u64 base = (u64)in;
    i32x4 descriptor = {(int)base, (int)((u32)(base >> 32) | (word == 1 ? flags : 0)), 4096,
                        (int)(0x20000 | (word == 3 ? flags : 0))};
    u32 x;
    asm volatile("buffer_load_dword %0, off, %1, 0\n s_waitcnt vmcnt(0)"
                 : "=v"(x)
                 : "s"(descriptor));
    out[lane_id()] = x;
}
