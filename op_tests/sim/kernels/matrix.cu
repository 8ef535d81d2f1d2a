// One matrix instruction a kernel, operands straight from memory in the layout of the ISA.
// Rows of A [M][K] and of B [N][K]; D [M][N].

template <int M>
DEVICE void store_tile(float* d, const float* x, int l) {
    constexpr int count = M * M / 64;
    for (int r = 0; r < count; ++r) {
        const int row = M == 16 ? 4 * (l / 16) + r : 8 * (r / 4) + 4 * (l / 32) + r % 4;
        d[row * M + l % M] = x[r];
    }
}

// fp8: 16 consecutive k, then the 16 that stand half of K further.
template <int M>
DEVICE i32x8 load_fp8(const u8* rows, int l) {
    constexpr int K = M == 16 ? 128 : 64;
    const u8* row = rows + l % M * K + 16 * (l / M);
    const u32x4 low = *(const u32x4*)row, high = *(const u32x4*)(row + K / 2);
    return i32x8{(int)low[0],  (int)low[1],  (int)low[2],  (int)low[3],
                 (int)high[0], (int)high[1], (int)high[2], (int)high[3]};
}

// Scales arrive as words whose bytes 0..3 are for selectors 0..3: only one byte is the right one.
KERNEL(64)
scaled16(const u8* a, const u32* sa, const u8* b, const u32* sb, const float* c, float* d) {
    const int l = lane_id(), at = l % 16 * 4 + l / 16;
    const i32x8 x = load_fp8<16>(a, l), y = load_fp8<16>(b, l);
    f32x4 sum;
    for (int r = 0; r < 4; ++r)
        sum[r] = c[(4 * (l / 16) + r) * 16 + l % 16];
    f32x4 out[4] = {
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, sum, 0, 0, 0, sa[at], 0, sb[at]),
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, sum, 0, 0, 1, sa[at], 2, sb[at]),
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, sum, 0, 0, 2, sa[at], 3, sb[at]),
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, sum, 0, 0, 3, sa[at], 1, sb[at])};
    for (int i = 0; i < 4; ++i)
        store_tile<16>(d + 256 * i, (const float*)&out[i], l);
}

KERNEL(64) scaled32(const u8* a, const u32* sa, const u8* b, const u32* sb, float* d) {
    const int l = lane_id(), at = l % 32 * 2 + l / 32;
    const f32x16 out = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(
        load_fp8<32>(a, l), load_fp8<32>(b, l), f32x16{}, 0, 0, 2, sa[at], 1, sb[at]);
    store_tile<32>(d, (const float*)&out, l);
}

// fp4: 32 consecutive k a lane.
KERNEL(64) scaled_fp4(const u8* a, const u32* sa, const u8* b, const u32* sb, float* d) {
    const int l = lane_id(), at = l % 16 * 4 + l / 16;
    const u32x4 x = *(const u32x4*)(a + l % 16 * 64 + 16 * (l / 16));
    const u32x4 y = *(const u32x4*)(b + l % 16 * 64 + 16 * (l / 16));
    const i32x8 p = {(int)x[0], (int)x[1], (int)x[2], (int)x[3]};
    const i32x8 q = {(int)y[0], (int)y[1], (int)y[2], (int)y[3]};
    const f32x4 out =
        __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(p, q, f32x4{}, 4, 4, 0, sa[at], 0, sb[at]);
    store_tile<16>(d, (const float*)&out, l);
}

typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));

KERNEL(64)
plain(const _Float16* ah, const _Float16* bh, const __bf16* ab, const __bf16* bb, const u8* a8,
      const u8* b8, float* d) {
    const int l = lane_id();
    const f32x4 half = __builtin_amdgcn_mfma_f32_16x16x32_f16(
        *(const f16x8*)(ah + l % 16 * 32 + 8 * (l / 16)),
        *(const f16x8*)(bh + l % 16 * 32 + 8 * (l / 16)), f32x4{}, 0, 0, 0);
    const f32x16 brain = __builtin_amdgcn_mfma_f32_32x32x16_bf16(
        *(const bf16x8*)(ab + l % 32 * 16 + 8 * (l / 32)),
        *(const bf16x8*)(bb + l % 32 * 16 + 8 * (l / 32)), f32x16{}, 0, 0, 0);
    const f32x4 bytes = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(
        *(const long*)(a8 + l % 16 * 32 + 8 * (l / 16)),
        *(const long*)(b8 + l % 16 * 32 + 8 * (l / 16)), f32x4{}, 0, 0, 0);
    store_tile<16>(d, (const float*)&half, l);
    store_tile<32>(d + 256, (const float*)&brain, l);
    store_tile<16>(d + 1280, (const float*)&bytes, l);
}

// A tiled MX-FP8 GEMM: four waves, a 64 x 64 tile, K in steps of 128 through LDS, loads of bounded
// buffers, 16x16x128 instructions. A [M][K], B [N][K], scales [rows][K / 32].
KERNEL(256)
gemm(const u8* a, const u8* as, const u8* b, const u8* bs, float* d, int M, int N, int K) {
    SHARED u8 tile[2][64 * 128];
    const int t = lane_id(), wave = t / 64, l = t % 64;
    const int m0 = group_id() * 64, n0 = __builtin_amdgcn_workgroup_id_y() * 64;
    const auto from_a = __builtin_amdgcn_make_buffer_rsrc((void*)a, 0, M * K, 0x27000);
    const auto from_b = __builtin_amdgcn_make_buffer_rsrc((void*)b, 0, N * K, 0x27000);
    f32x4 sum[4] = {};
    for (int k = 0; k < K; k += 128) {
        barrier();
        for (int i = 0; i < 2; ++i) {
            const int at = (t + 256 * i) * 16, row = at / 128, column = at % 128;
            *(u32x4*)(tile[0] + at) =
                __builtin_amdgcn_raw_buffer_load_b128(from_a, (m0 + row) * K + k + column, 0, 0);
            *(u32x4*)(tile[1] + at) =
                __builtin_amdgcn_raw_buffer_load_b128(from_b, (n0 + row) * K + k + column, 0, 0);
        }
        barrier();
        const int m = m0 + wave * 16 + l % 16;
        const i32x8 x = load_fp8<16>(tile[0] + wave * 16 * 128, l);
        const int scale_x = m < M ? as[m * (K / 32) + k / 32 + l / 16] : 127;
        for (int j = 0; j < 4; ++j) {
            const int n = n0 + j * 16 + l % 16;
            const int scale_y = n < N ? bs[n * (K / 32) + k / 32 + l / 16] : 127;
            sum[j] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
                x, load_fp8<16>(tile[1] + j * 16 * 128, l), sum[j], 0, 0, 0, scale_x, 0, scale_y);
        }
    }
    for (int j = 0; j < 4; ++j)
        for (int r = 0; r < 4; ++r) {
            const int m = m0 + wave * 16 + 4 * (l / 16) + r, n = n0 + j * 16 + l % 16;
            if (m < M && n < N)
                d[(long)m * N + n] = sum[j][r];
        }
}
