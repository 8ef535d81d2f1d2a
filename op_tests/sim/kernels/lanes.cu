// One cross-lane move an output row: out[row * 64 + lane].

#define DPP(row, control, row_mask, bank_mask, zero)                                               \
    out[row * 64 + l] =                                                                            \
        __builtin_amdgcn_update_dpp(-1 - l, in[l], control, row_mask, bank_mask, zero)

KERNEL(64) dpp(const int* in, int* out) {
    const int l = lane_id();
    DPP(0, 0x111, 0xf, 0xf, false); // row_shr:1
    DPP(1, 0x103, 0xf, 0xf, true);  // row_shl:3, zero where the row ends
    DPP(2, 0x125, 0xf, 0xf, false); // row_ror:5
    DPP(3, 0x1b, 0xf, 0xf, false);  // quad_perm:[3,2,1,0]
    DPP(4, 0x140, 0xf, 0xf, false); // row_mirror
    DPP(5, 0x141, 0xf, 0xf, false); // row_half_mirror
    DPP(6, 0x142, 0xa, 0xf, false); // row_bcast:15, rows 1 and 3
    DPP(7, 0x143, 0xc, 0xf, false); // row_bcast:31, rows 2 and 3
    DPP(8, 0x114, 0xf, 0x5, false); // row_shr:4, banks 0 and 2
    DPP(9, 0x152, 0xf, 0xf, false); // row_newbcast:2
}

KERNEL(64) permutes(const int* in, const int* index, int* out) {
    const int l = lane_id(), x = in[l];
    out[l] = __builtin_amdgcn_ds_bpermute(index[l] * 4, x);
    out[64 + l] = __builtin_amdgcn_ds_permute(index[l] * 4, x);
    out[128 + l] = __builtin_amdgcn_ds_swizzle(x, 0x8000 | 0x4e); // quads [2,3,0,1]
    out[192 + l] = __builtin_amdgcn_ds_swizzle(x, 0x11 << 10 | 0x3 << 5 | 0x0c);
    const auto wide = __builtin_amdgcn_permlane32_swap(x, index[l], false, false);
    const auto narrow = __builtin_amdgcn_permlane16_swap(x, index[l], false, false);
    out[256 + l] = wide[0], out[320 + l] = wide[1];
    out[384 + l] = narrow[0], out[448 + l] = narrow[1];
    out[512 + l] = __builtin_amdgcn_readlane(x, index[5] & 63);
    out[576 + l] = __builtin_amdgcn_readfirstlane(x);
    out[640 + l] = __builtin_amdgcn_mbcnt_hi(-1, __builtin_amdgcn_mbcnt_lo(-1, 7));
    int written = x;
    asm volatile("s_nop 1\nv_writelane_b32 %0, %1, 9"
                 : "+v"(written)
                 : "s"(__builtin_amdgcn_readfirstlane(index[3])));
    out[704 + l] = written;
    int first = x, second = index[l];
    if (l % 3)
        asm volatile("v_swap_b32 %0, %1" : "+v"(first), "+v"(second));
    out[832 + l] = first - 3 * second;
    out[896 + l] = __builtin_amdgcn_ds_swizzle(x, 0xc000 | 5 << 5 | 0x10);           // up by 5
    out[960 + l] = __builtin_amdgcn_ds_swizzle(x, 0xc000 | 1 << 10 | 3 << 5 | 0x08); // down by 3
    out[1024 + l] = __builtin_amdgcn_ds_swizzle(x, 0xe000);
    out[1088 + l] = __builtin_amdgcn_ds_swizzle(x, 0xe000 | 0x11);
    u64 below = __builtin_amdgcn_ballot_w64(x < 0);
    out[768 + l] = below >> l & 1;
}

// Lanes whose turn has not come hold no value that others may see.
KERNEL(64) inactive(const int* in, int* out) {
    const int l = lane_id(), x = in[l];
    int y = 5;
    if (l & 1)
        y = __builtin_amdgcn_ds_bpermute(((l + 1) & 63) * 4, x);
    out[l] = y;
}
