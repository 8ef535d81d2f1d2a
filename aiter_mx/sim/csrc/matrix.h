// MFMA. Products are exact and summed in double, the sum is rounded to f32 once: the order of
// accumulation inside one hardware MFMA is not published.
#pragma once
#include "machine.h"
#include "numbers.h"

static const u8 operand_bits[] = {32, 16, 16, 8, 8, 6, 6, 4, 8};

INLINE double element_of(const u32* row, Operand kind, u32 lane, u32 index) {
    u32 bits = operand_bits[kind], at = index * bits, word = at >> 5, shift = at & 31;
    u64 both = row[lane + 64 * word];
    if (shift + bits > 32)
        both |= (u64)row[lane + 64 * (word + 1)] << 32;
    u32 x = (u32)(both >> shift) & (bits == 32 ? ~0u : (1u << bits) - 1);
    switch (kind) {
    case OF_F32:
        return f32(x);
    case OF_F16:
        return f16_to_f32((u16)x);
    case OF_BF16:
        return f32(x << 16);
    case OF_I8:
        return (i8)x;
    default:
        return decoded[kind - OF_E4M3][x];
    }
}

// C or D, element (row, column) of an M x M tile: register and lane.
INLINE u32 tile_at(u32 M, u32 row, u32 column, u32 block) {
    if (M == 4)
        return 64 * row + 4 * block + column;
    if (M == 16)
        return 64 * (4 * block + row % 4) + 16 * (row / 4) + column;
    return 64 * (16 * block + 4 * (row / 8) + row % 4) + 32 * (row / 4 % 2) + column;
}
#define C_AT(i)                                                                                    \
    (c ? (is_int ? (double)(i32)c[i] : (double)f32(c[i]))                                          \
       : (is_int ? (double)(i32)c_bits : (double)f32(c_bits)))

// As wide as the CPU's registers: compilers make poor code of wider ones.
#if defined(__AVX512F__)
typedef double Doubles __attribute__((vector_size(64)));
#else
typedef double Doubles __attribute__((vector_size(32)));
#endif
enum { WIDTH = sizeof(Doubles) / sizeof(double) };

// The launch's order of sums: exact in double and rounded once, or rounded to f32 at each step.
enum { SUM_EXACT, SUM_FORWARD, SUM_BACKWARD, SUM_TREE };
static float sum_in_order(float* products, u32 count, float c, int order) {
    if (order == SUM_TREE) {
        for (u32 step = 1; step < count; step *= 2)
            for (u32 i = 0; i + step < count; i += 2 * step)
                products[i] += products[i + step];
        return c + products[0];
    }
    for (u32 i = 0; i < count; i++)
        c += products[order == SUM_FORWARD ? i : count - 1 - i];
    return c;
}

// An operand's elements by k, those of one k side by side: lane g*M + i has k = g*each + j.
INLINE void decode_plain(const u32* from, Operand kind, u32 M, u32 groups, u32 each,
                         double out[64][32]) {
    for (u32 g = 0; g < groups; g++)
        for (u32 j = 0; j < each; j++) {
            double* row = out[g * each + j];
            const u32 *half = from + g * M + 64 * (j / 2), *quarter = from + g * M + 64 * (j / 4);
            u32 shift = 16 * (j & 1), byte = 8 * (j & 3);
            switch (kind) {
            case OF_BF16:
                for (u32 i = 0; i < M; i++)
                    row[i] = f32(half[i] >> shift << 16);
                break;
            case OF_F16:
                for (u32 i = 0; i < M; i++)
                    row[i] = f16_to_f32((u16)(half[i] >> shift));
                break;
            case OF_I8:
                for (u32 i = 0; i < M; i++)
                    row[i] = (i8)(quarter[i] >> byte);
                break;
            case OF_E4M3:
            case OF_E5M2:
                for (u32 i = 0; i < M; i++)
                    row[i] = decoded[kind - OF_E4M3][quarter[i] >> byte & 255];
                break;
            default:
                for (u32 i = 0; i < M; i++)
                    row[i] = element_of(from, kind, g * M + i, j);
            }
        }
}
// One block: D = C + A B, a tile of rows and columns at a time, whose sums stay in registers.
INLINE void multiply(u32* out, double A[64][32], double B[64][32], const u32* c, u32 c_bits, u32 M,
                     u32 K, int is_int) {
#pragma STDC FP_CONTRACT ON // products are exact: fused with their sums they come to the same
    enum { ROWS = WIDTH == 8 ? 4 : 2, COLUMNS = 4 };
    const u32 columns = M / WIDTH < COLUMNS ? M / WIDTH : COLUMNS;
    for (u32 i = 0; i < M; i += ROWS)
        for (u32 j = 0; j < M; j += columns * WIDTH) {
            Doubles sum[ROWS][COLUMNS] = {0};
            for (u32 k = 0; k < K; k++)
                UNROLL for (u32 q = 0; q < columns; q++) {
                    const Doubles column = *(const Doubles*)&B[k][j + WIDTH * q];
                    UNROLL for (u32 r = 0; r < ROWS; r++) sum[r][q] += A[k][i + r] * column;
                }
            UNROLL for (u32 r = 0; r < ROWS; r++) for (u32 n = 0; n < columns * WIDTH; n++) {
                u32 at = tile_at(M, i + r, j + n, 0);
                double total = sum[r][n / WIDTH][n % WIDTH] + C_AT(at);
                out[at] = is_int ? (u32)(i64)total : bits32((float)total);
            }
        }
}
// Several blocks, where lane l/M is the block, and sums that are rounded at each step.
NOINLINE void multiply_slowly(u32* out, const u32* a, Operand ka, const u32* b, Operand kb,
                              const u32* c, u32 c_bits, u32 M, u32 K, u32 blocks) {
    u32 groups = 64 / M / blocks, each = K / groups, is_int = ka == OF_I8;
    for (u32 block = 0; block < blocks; block++)
        for (u32 i = 0; i < M; i++)
            for (u32 j = 0; j < M; j++) {
                u32 at = tile_at(M, i, j, block);
                float products[64];
                double sum = 0;
                for (u32 k = 0; k < K; k++) {
                    u32 lane = (blocks > 1 ? block : k / each) * M;
                    double product = element_of(a, ka, lane + i, k % each) *
                                     element_of(b, kb, lane + j, k % each);
                    products[k] = (float)product;
                    sum += product;
                }
                double total = sum + C_AT(at);
                if (sum_order && !is_int)
                    total = sum_in_order(products, K, (float)C_AT(at), sum_order);
                out[at] = is_int ? (u32)(i64)total : bits32((float)total);
            }
}
#define MULTIPLY(kind, M_)                                                                         \
    case kind:                                                                                     \
        decode_plain(a, kind, M_, groups, K / groups, A);                                          \
        decode_plain(b, kb, M_, groups, K / groups, B);                                            \
        multiply(out, A, B, c, c_bits, M_, K, kind == OF_I8);                                      \
        break;
#define MULTIPLY_ANY(M_)                                                                           \
    switch (ka) {                                                                                  \
        MULTIPLY(OF_F32, M_)                                                                       \
        MULTIPLY(OF_F16, M_)                                                                       \
        MULTIPLY(OF_BF16, M_)                                                                      \
        MULTIPLY(OF_I8, M_)                                                                        \
        MULTIPLY(OF_E4M3, M_)                                                                      \
        MULTIPLY(OF_E5M2, M_)                                                                      \
    default:                                                                                       \
        __builtin_trap();                                                                          \
    }
// Unscaled: lane l holds row l%M; the K elements of a row are spread in order over the lanes of
// that row. `c` NULL: the constant `c_bits`.
API void mfma(Wave* w, u32* d, const u32* a, Operand ka, const u32* b, Operand kb, const u32* c,
              u32 c_bits, u32 M, u32 K, u32 blocks) {
    u32 out[32 * 64], groups = 64 / M / blocks;
    double A[64][32] ALIGNED, B[64][32] ALIGNED;
    if (blocks > 1 || M == 4 || UNLIKELY(sum_order))
        multiply_slowly(out, a, ka, b, kb, c, c_bits, M, K, blocks);
    else if (M == 16)
        MULTIPLY_ANY(16)
    else
        MULTIPLY_ANY(32)
    memcpy(d, out, 4 * M * M * blocks);
    (void)w;
}

// Where element j of a lane's operand stands in K. fp8 halves: 16 consecutive, then 16 from the
// middle; narrower formats: 32 consecutive.
INLINE u32 scaled_k(u32 bits, u32 groups, u32 g, u32 j) {
    return bits == 8 ? (j / 16) * 16 * groups + 16 * g + j % 16 : 32 * g + j;
}
// An operand's elements by k, those of one k side by side.
INLINE void decode_operand(const u32* from, Operand kind, u32 M, double out[4][32][32]) {
    const u32 groups = 64 / M, bits = operand_bits[kind];
    for (u32 g = 0; g < groups; g++)
        for (u32 j = 0; j < 32; j++) {
            u32 k = scaled_k(bits, groups, g, j);
            double* row = out[k / 32][k % 32];
            if (bits == 8) {
                const double* table = decoded[kind - OF_E4M3];
                const u32* words = from + g * M + 64 * (j / 4);
                for (u32 i = 0; i < M; i++)
                    row[i] = table[words[i] >> (8 * (j % 4)) & 255];
            } else {
                for (u32 i = 0; i < M; i++)
                    row[i] = element_of(from, kind, g * M + i, j);
            }
        }
}
// Scaled: D = C + sum over blocks of 32 of 2^(ea+eb-254) * dot. Scale rows NULL: all ones. The
// scale of block 32g.. of a row is in the lane g*M + row, at byte `sa` or `sb` of its word.
INLINE void mfma_scaled_of(u32* d, const u32* a, Operand ka, const u32* b, Operand kb, const u32* c,
                           u32 c_bits, u32 M, const u32* scale_a, u32 sa, const u32* scale_b,
                           u32 sb) {
#pragma STDC FP_CONTRACT ON // products are exact: fused with their sums they come to the same
    const u32 groups = 64 / M, is_int = 0;
    double A[4][32][32] ALIGNED, B[4][32][32] ALIGNED, for_a[4][32] ALIGNED, for_b[4][32] ALIGNED;
    u32 out[16 * 64];
    decode_operand(a, ka, M, A);
    decode_operand(b, kb, M, B);
    for (u32 g = 0; g < groups; g++)
        for (u32 row = 0; row < M; row++) {
            for_a[g][row] = scale_a ? scale_of_e8m0(scale_a[g * M + row] >> (8 * sa) & 255) : 1;
            for_b[g][row] = scale_b ? scale_of_e8m0(scale_b[g * M + row] >> (8 * sb) & 255) : 1;
        }
    if (UNLIKELY(sum_order)) {
        for (u32 i = 0; i < M; i++)
            for (u32 j = 0; j < M; j++) {
                u32 at = tile_at(M, i, j, 0);
                float products[128];
                for (u32 k = 0; k < 32 * groups; k++)
                    products[k] = (float)(A[k / 32][k % 32][i] * B[k / 32][k % 32][j] *
                                          for_a[k / 32][i] * for_b[k / 32][j]);
                out[at] = bits32(sum_in_order(products, 32 * groups, (float)C_AT(at), sum_order));
            }
        memcpy(d, out, 4 * M * M);
        return;
    }
    // A tile of rows and columns at a time, whose sums stay in registers.
    enum { ROWS = WIDTH == 8 ? 4 : 2, COLUMNS = 4 };
    const u32 columns = M / WIDTH < COLUMNS ? M / WIDTH : COLUMNS;
    for (u32 i = 0; i < M; i += ROWS)
        for (u32 j = 0; j < M; j += columns * WIDTH) {
            Doubles total[ROWS][COLUMNS] = {0};
            for (u32 g = 0; g < groups; g++) {
                Doubles sum[ROWS][COLUMNS] = {0};
                for (u32 k = 0; k < 32; k++)
                    UNROLL for (u32 q = 0; q < columns; q++) {
                        const Doubles column = *(const Doubles*)&B[g][k][j + WIDTH * q];
                        UNROLL for (u32 r = 0; r < ROWS; r++) sum[r][q] += A[g][k][i + r] * column;
                    }
                UNROLL for (u32 r = 0; r < ROWS; r++) UNROLL for (u32 q = 0; q < columns; q++)
                    total[r][q] +=
                    sum[r][q] * for_a[g][i + r] * *(const Doubles*)&for_b[g][j + WIDTH * q];
            }
            UNROLL for (u32 r = 0; r < ROWS; r++) for (u32 n = 0; n < columns * WIDTH; n++) {
                u32 at = tile_at(M, i + r, j + n, 0);
                out[at] = bits32((float)(total[r][n / WIDTH][n % WIDTH] + C_AT(at)));
            }
        }
    memcpy(d, out, 4 * M * M);
}
API void mfma_scaled_16(u32* d, const u32* a, Operand ka, const u32* b, Operand kb, const u32* c,
                        u32 c_bits, const u32* scale_a, u32 sa, const u32* scale_b, u32 sb) {
    mfma_scaled_of(d, a, ka, b, kb, c, c_bits, 16, scale_a, sa, scale_b, sb);
}
API void mfma_scaled_32(u32* d, const u32* a, Operand ka, const u32* b, Operand kb, const u32* c,
                        u32 c_bits, const u32* scale_a, u32 sa, const u32* scale_b, u32 sb) {
    mfma_scaled_of(d, a, ka, b, kb, c, c_bits, 32, scale_a, sa, scale_b, sb);
}
