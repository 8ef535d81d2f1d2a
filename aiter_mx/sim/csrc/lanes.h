// EXEC, and data moving between lanes: DPP, SDWA selection, permutes.
#pragma once
#include "machine.h"

// Sixteen lanes at a time; the compilers' own vector types spare an intrinsics header.
typedef u32 Lanes16 __attribute__((vector_size(64)));
static const Lanes16 lane_bits = {1 << 0,  1 << 1,  1 << 2,  1 << 3, 1 << 4,  1 << 5,
                                  1 << 6,  1 << 7,  1 << 8,  1 << 9, 1 << 10, 1 << 11,
                                  1 << 12, 1 << 13, 1 << 14, 1 << 15};
void expand_mask(u64 bits, u32* out) {
    for (int i = 0; i < 4; i++) {
        Lanes16 x = (u32)(bits >> (16 * i) & 0xffff) - (Lanes16){0};
        x = (Lanes16)((x & lane_bits) != 0);
        memcpy(out + 16 * i, &x, sizeof x);
    }
}
void set_exec(Wave* w, u64 bits) {
    w->exec = bits;
    expand_mask(bits, w->mask);
}
// Source lane of lane l, or -1 where the row or the wave ends.
static int dpp_source(DppControl control, int argument, int l) {
    int row = l & ~15, at = l & 15;
    switch (control) {
    case QUAD_PERM:
        return (l & ~3) + (argument >> (2 * (l & 3)) & 3);
    case ROW_SHL:
        return at + argument < 16 ? l + argument : -1;
    case ROW_SHR:
        return at >= argument ? l - argument : -1;
    case ROW_ROR:
        return row + ((at + 16 - argument) & 15);
    case WAVE_SHL:
        return l < 63 ? l + 1 : -1;
    case WAVE_ROL:
        return (l + 1) & 63;
    case WAVE_SHR:
        return l - 1;
    case WAVE_ROR:
        return (l + 63) & 63;
    case ROW_MIRROR:
        return row + 15 - at;
    case ROW_HALF_MIRROR:
        return (l & ~7) + 7 - (l & 7);
    case ROW_BCAST15:
        return row ? row - 1 : -1;
    case ROW_BCAST31:
        return l >= 32 ? 31 : -1;
    case ROW_NEWBCAST:
        return row + argument;
    }
    return -1;
}
// Puts the permuted source in `out` and the lanes that are written in `mask`; returns those lanes.
// A lane without a valid source reads 0 when `bound_zero`, and is not written otherwise.
API u64 dpp(Wave* w, u32* out, const u32* in, u32* mask, DppControl control, int argument,
            u32 row_mask, u32 bank_mask, int bound_zero, u64* read) {
    u64 written = 0, sources = 0;
    for (int l = 0; l < 64; l++) {
        int from = dpp_source(control, argument, l);
        int valid = from >= 0 && (w->exec >> from & 1);
        int enabled = (row_mask >> (l >> 4) & 1) && (bank_mask >> (l >> 2 & 3) & 1);
        out[l] = valid ? in[from] : 0;
        if (enabled && (valid || bound_zero) && (w->exec >> l & 1)) {
            written |= 1ull << l;
            if (valid)
                sources |= 1ull << from;
        }
    }
    expand_mask(written, mask);
    *read = sources;
    return written;
}

API void select_piece(u32* out, const u32* in, Piece piece, int sign_extend) {
    u32 width = piece <= BYTE_3 ? 8 : piece == DWORD ? 32 : 16;
    u32 shift = piece <= BYTE_3 ? 8 * piece : piece == WORD_1 ? 16 : 0;
    u32 mask = width == 32 ? ~0u : (1u << width) - 1;
    if (sign_extend) {
        LANES out[l] = (u32)((i32)(in[l] << (32 - width - shift)) >> (32 - width));
    } else {
        LANES out[l] = in[l] >> shift & mask;
    }
}
// The other bits: 0 zero, 1 sign of the piece, 2 kept.
API void insert_piece(u32* d, const u32* in, const u32* lanes, Piece piece, int rest) {
    u32 width = piece <= BYTE_3 ? 8 : piece == DWORD ? 32 : 16;
    u32 shift = piece <= BYTE_3 ? 8 * piece : piece == WORD_1 ? 16 : 0;
    u32 mask = (width == 32 ? ~0u : (1u << width) - 1) << shift;
    LANES {
        u32 x = in[l] << shift & mask, kept = rest == 2 ? d[l] & ~mask : 0;
        if (rest == 1)
            x = (u32)((i32)(in[l] << (32 - width)) >> (32 - width)) << shift;
        d[l] = ((x | kept) & lanes[l]) | (d[l] & ~lanes[l]);
    }
}

API void fill(u32* out, u32 x) { LANES out[l] = x; }
API u32 read_first_lane(const Wave* w, const u32* in) {
    return in[w->exec ? __builtin_ctzll(w->exec) : 0];
}
API void swap_rows(Wave* w, u32* d, u32* s, u32 width) {
    for (u32 l = 0; l < 64; l++)
        if (l & width) { // odd rows of the destination change place with even rows of the source
            u32 x = d[l];
            d[l] = s[l - width];
            s[l - width] = x;
        }
    (void)w;
}
API void swap_lanes(Wave* w, u32* a, u32* b) {
    LANES {
        u32 change = (a[l] ^ b[l]) & w->mask[l];
        a[l] ^= change;
        b[l] ^= change;
    }
}
API void bpermute(Wave* w, u32* d, const u32* index, const u32* in, u32 offset) {
    u32 out[64];
    for (int l = 0; l < 64; l++) {
        u32 from = (index[l] + offset) >> 2 & 63;
        out[l] = w->exec >> from & 1 ? in[from] : 0;
    }
    LANES d[l] = (out[l] & w->mask[l]) | (d[l] & ~w->mask[l]);
}
API void permute(Wave* w, u32* d, const u32* index, const u32* in, u32 offset) {
    u32 out[64] = {0};
    EACH_ACTIVE(w) out[(index[ACTIVE_LANE] + offset) >> 2 & 63] = in[ACTIVE_LANE];
    LANES d[l] = (out[l] & w->mask[l]) | (d[l] & ~w->mask[l]);
}
// The lane that lane l reads, by the pattern in the offset field, within its 32 lanes or its quad.
static u32 swizzle_source(u32 pattern, u32 l) {
    u32 at = l & 31, kept = pattern & 31, from;
    if (pattern >= 0xe000) { // bits of the number turned round, as Fourier transforms have them
        from = reverse_bits(at) >> 27 >> __builtin_popcount(kept) | (at & kept);
    } else if (pattern >= 0xc000) { // rotated, by bits 9-5 and the direction in bit 10
        u32 by = pattern >> 5 & 31;
        from = (at & kept) | ((pattern >> 10 & 1 ? at - by : at + by) & ~kept & 31);
    } else if (pattern & 0x8000) {
        return (l & ~3u) + (pattern >> (2 * (l & 3)) & 3);
    } else { // and, or, exclusive or
        from = ((at & kept) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31);
    }
    return (l & 32) + from;
}
API void swizzle(Wave* w, u32* d, const u32* in, u32 pattern) {
    u32 out[64];
    for (u32 l = 0; l < 64; l++) {
        u32 from = swizzle_source(pattern, l);
        out[l] = w->exec >> from & 1 ? in[from] : 0;
    }
    LANES d[l] = (out[l] & w->mask[l]) | (d[l] & ~w->mask[l]);
}
// LDS transposing reads: lanes work in sets of 16, each lane having fetched 8 bytes.
API void transpose_read(Wave* w, u32* d, u32 bits) {
    u32 in[128];
    memcpy(in, d, sizeof in);
    u32 count = 64 / bits, mask = (u32)((1ull << bits) - 1);
    for (u32 l = 0; l < 64; l++) {
        u32 row = l & ~15u, i = l & 15;
        u64 x = 0;
        for (u32 r = 0; r < count; r++) {
            u32 from = row + (16 / count) * r + i / count, bit = bits * (i % count);
            x |= (u64)(in[from + 64 * (bit >> 5)] >> (bit & 31) & mask) << (bits * r);
        }
        d[l] = (u32)x, d[l + 64] = (u32)(x >> 32);
    }
    (void)w;
}

// Lane ids of a wave's start, packed into v0 as 10 bits for each of so many axes.
API void set_lane_ids(Wave* w, u32 axes) {
    const u32* b = w->group->launch->block;
    for (u32 l = 0; l < 64; l++) {
        u32 n = 64 * w->id + l, id[3] = {n % b[0], n / b[0] % b[1], n / b[0] / b[1]};
        ROW(0)[l] = 0;
        for (u32 i = 0; i < axes; i++)
            ROW(0)[l] |= id[i] << (10 * i);
    }
}
