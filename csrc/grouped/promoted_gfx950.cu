// Grouped GEMM on CDNA4 of fp8 operands whose scales are fp32, one for each 128 k:
//
//   y[m] = sum over k' of (xq[m, k'] * wq[g, :, k']^T) * xs[m, k'] * ws[g, n / 128, k']
//
// for each group g, each row m of it, and each step k' of 128 k: a matrix instruction's, whose own
// scales are 1. What it gives is added to sums in fp32 times the step's scales, by the vector
// unit. aiter_mx/kernels/promoted_gemm says what is passed.
//
// A workgroup, four waves, takes tiles of kTileM rows of x by 128 rows of w; a wave has a half of
// each. LDS holds three stages of a step's operands: one is multiplied, the next two are copied
// meanwhile, straight from memory. A stage has rows of 128 bytes, those of x, then those of w, and
// then the scales of x: were these loaded to registers, LLVM, which knows nothing of the copies,
// would wait for all of them.
// Piece p of 16 bytes of row r is kept in place p ^ (r / 2 % 8), so that the lanes that one read
// serves together are in different banks.
//
// w is operand A and x is B. Rows of w are in such an order in LDS that two fragments give a lane
// eight features side by side.
//
// Order. A wave waits for its own copies of a step, and at a barrier for the others'. After it all
// have read the stage of the step before, into which it then copies what is two steps on.

#include "common/target.h"
#include "gfx950/memory.h"
#include "gfx950/mfma.h"

using namespace mx;

constexpr int kTileM = MX_TILE_M, kTileN = 128, kStages = 3;
constexpr unsigned kSwath = 8; // rows of tiles that share rows of w before the next
constexpr int kWaves = 4, kThreads = kWaves * kLanes;
constexpr int kFragsX = kTileM / 2 / kSide, kFragsW = kTileN / 2 / kSide;
constexpr unsigned kPiece = 16, kRowPieces = kDepth / kPiece;
constexpr int kCopyRows = kLanes / kRowPieces; // of one copy
constexpr int kCopiesX = kTileM / kWaves / kCopyRows, kCopiesW = kTileN / kWaves / kCopyRows;
constexpr int kCopies = kCopiesX + kCopiesW + 1; // of a wave and step, and scales
constexpr int kScaleRows = kTileM / kWaves;      // of x, whose scales a wave copies
constexpr int kScalesAt = (kTileM + kTileN) * kDepth;
constexpr int kStage = kScalesAt + kWaves * kLanes * 4; // a dword for each lane, used or not
using Out = DType<MX_OUT>;

// A feature of w, of 32, at a row of LDS: the first of two fragments has features 0 to 3 of each
// eight, the second has 4 to 7.
MX_DEVICE constexpr int paired_row(int at) {
    return at / 32 * 32 + at % kSide / 4 * 8 + at % 32 / kSide * 4 + at % 4;
}

// The kernel's arguments. They are loaded anew wherever they are asked for: kept, they would take
// the scalar registers that the loop needs.
struct Args {
    const unsigned char* xq;
    const float* xs;
    const unsigned char* wq;
    const float* ws;
    Out* y;
    const void *starts, *ends;
    Offset M, N, K, G;
    int layout, index_bytes;
    Offset x_row, x_step, x_group, w_block, w_step, w_group;
    Offset room, workgroups; // room: rows from one masked group to the next
};
using ArgsPointer = const __attribute__((address_space(4))) Args*;
MX_DEVICE ArgsPointer arguments() {
    auto at = (ArgsPointer)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(at));
    return at;
}

// Where a group may have several ranges of rows: how many there are, and then the group of each.
using Numbers = const __attribute__((address_space(4))) int*; // which scalar loads read
MX_DEVICE Numbers runs() {
    const ArgsPointer a = arguments();
    const int layout = a->layout;
    return layout < 0 ? (Numbers) static_cast<const int*>(a->ends) - layout : nullptr;
}
MX_DEVICE unsigned ranges() {
    const Numbers of = runs();
    return of ? min(static_cast<unsigned>(*of), 0u - arguments()->layout) : arguments()->G;
}
MX_DEVICE unsigned group_of(unsigned range) {
    const Numbers of = runs();
    return of ? of[1 + range] : range;
}

struct Tile {
    unsigned first, rows; // of x
    unsigned in_room;     // of a masked group, from its first row
    unsigned group, feature;
};

MX_DEVICE unsigned scalar(unsigned x) { return __builtin_amdgcn_readfirstlane(x); }

// Deals tiles: a wave looks at 64 ranges at a time, a lane at each.
struct Deal {
    unsigned lane, columns;
    unsigned chunk = 0, before = 0; // first of the 64 ranges; tiles before them
    unsigned first_row, rows, through, in_chunk;

    MX_MEMBER explicit Deal(unsigned lane)
        : lane(lane), columns((arguments()->N + kTileN - 1) / kTileN) {
        look(0);
    }

    // Tile t, if there are so many. The t of successive calls must not decrease.
    MX_MEMBER bool find(unsigned t, Tile& tile) {
        while (t >= before + in_chunk) {
            if (chunk + kLanes >= ranges())
                return false;
            before += in_chunk;
            look(chunk + kLanes);
        }
        t -= before;
        const int owner = lanes_of(lanes_where(through <= t));
        if (owner > 0)
            t -= at_lane(through, owner - 1);
        const unsigned left = at_lane(rows, owner);
        const unsigned swath = t / (kSwath * columns), in_swath = t % (kSwath * columns);
        const unsigned height = min(kSwath, (left + kTileM - 1) / kTileM - swath * kSwath);
        const unsigned below = (swath * kSwath + in_swath % height) * kTileM;
        tile.first = scalar(at_lane(first_row, owner) + below);
        tile.rows = scalar(min(left - below, static_cast<unsigned>(kTileM)));
        tile.group = scalar(group_of(chunk + owner));
        const unsigned room = arguments()->room;
        tile.in_room = scalar(tile.first - room * tile.group);
        tile.feature = scalar(in_swath / height * kTileN);
        return true;
    }

  private:
    MX_MEMBER static unsigned at_lane(unsigned x, int from) {
        return __builtin_amdgcn_readlane(x, from);
    }
    MX_MEMBER static unsigned bound(const void* of, int index_bytes, unsigned g, unsigned most) {
        const long at =
            index_bytes == 8 ? static_cast<const long*>(of)[g] : static_cast<const int*>(of)[g];
        return at < 0 ? 0 : at < most ? at : most;
    }
    MX_MEMBER void look(unsigned first) {
        chunk = first;
        first_row = rows = 0;
        const unsigned g = first + lane;
        const ArgsPointer a = arguments();
        const void *starts = a->starts, *ends = a->ends;
        const int size = a->index_bytes;
        const bool is_masked = a->layout > 0;
        if (g < ranges()) {
            const unsigned most = is_masked ? a->room : a->M;
            if (starts)
                first_row = bound(starts, size, g, most);
            else if (g > 0 && !is_masked)
                first_row = bound(ends, size, g - 1, most);
            const unsigned end = bound(ends, size, g, most);
            rows = end > first_row ? end - first_row : 0;
            first_row += is_masked ? g * most : 0;
        }
        through = (rows + kTileM - 1) / kTileM * columns;
#pragma unroll
        for (unsigned distance = 1; distance < kLanes; distance *= 2) {
            const unsigned below = of_lane(lane - distance, through);
            through += lane >= distance ? below : 0;
        }
        in_chunk = at_lane(through, kLanes - 1);
    }
};

// Whether the product of two scales, neither of which is 0 or NaN, may lie outside of fp32.
MX_DEVICE bool is_far(float factor, float one, float other) {
    const float size = __builtin_fabsf(factor);
    return !(size >= 0x1p-100f && size <= 0x1p100f) && one * 0.0f == 0.0f && one != 0.0f &&
           other * 0.0f == 0.0f && other != 0.0f;
}

MX_KERNEL(kThreads) aiter_mx_promoted_gemm_mfma(const Args) {
    MX_LDS u32x4 memory[kStages * kStage / 16];
    const unsigned lds = static_cast<unsigned>(
        reinterpret_cast<unsigned long>((MX_LDS unsigned char*)(unsigned char*)memory));
    const unsigned lane = thread_in_group() % kLanes, wave = wave_in_group();
    const unsigned row_wave = wave / 2, column_wave = wave % 2;
    const unsigned k_bytes = arguments()->K, steps = (k_bytes + kDepth - 1) / kDepth;

    // What this lane copies: place `lane % 8` of row `lane / 8` of eight.
    const unsigned copy_row = lane / kRowPieces, place = lane % kRowPieces;
    unsigned x_from[2], w_from[2], piece_x[2], piece_w[2]; // of even and odd eights of rows
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const unsigned row_x = wave * (kTileM / kWaves) + odd * kCopyRows + copy_row;
        const unsigned row_w = wave * (kTileN / kWaves) + odd * kCopyRows + copy_row;
        piece_x[odd] = (place ^ row_x / 2 % 8) * kPiece;
        piece_w[odd] = (place ^ row_w / 2 % 8) * kPiece;
        x_from[odd] = row_x * k_bytes + piece_x[odd];
        w_from[odd] = paired_row(row_w) * k_bytes + piece_w[odd];
    }
    // Where this lane reads the two halves of its row of a fragment.
    const unsigned row = lane % kSide, g = lane / kSide;
    const unsigned low = (g ^ row / 2) * kPiece, high = ((g + 4) ^ row / 2) * kPiece;

    Deal deal(lane);
    Tile tile;
    for (unsigned turn = group_x(); deal.find(turn, tile); turn += arguments()->workgroups) {
        const ArgsPointer a = arguments();
        const Offset N = a->N, x_first = tile.first;
        const unsigned w_rows = min(static_cast<unsigned>(N) - tile.feature, kTileN + 0u);
        const Resource x = resource(a->xq + x_first * k_bytes, tile.rows * k_bytes);
        const Resource w =
            resource(a->wq + (tile.group * N + tile.feature) * k_bytes, w_rows * k_bytes);
        const unsigned char* const x_scales = reinterpret_cast<const unsigned char*>(
            a->xs + (a->layout > 0 ? tile.group * a->x_group : 0) +
            static_cast<Offset>(tile.in_room) * a->x_row);
        const unsigned scale_row = min(wave * kScaleRows + lane % kScaleRows, tile.rows - 1);
        const unsigned scale_from = scale_row * static_cast<unsigned>(a->x_row) * 4;
        // Constant memory, so that scalar loads read it.
        const auto w_scales =
            (const __attribute__((address_space(4))) float*)(a->ws + tile.group * a->w_group +
                                                             tile.feature / kTileN * a->w_block);
        const Offset x_step = a->x_step, w_step = a->w_step;
        const auto copy = [&](unsigned step) {
            const unsigned k = step * kDepth, to = lds + step % kStages * kStage;
            unsigned x_now[2], w_now[2];
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                x_now[odd] = k + piece_x[odd] < k_bytes ? x_from[odd] + k : kNowhere;
                w_now[odd] = k + piece_w[odd] < k_bytes ? w_from[odd] + k : kNowhere;
            }
            const unsigned to_x = scalar(to + wave * (kTileM / kWaves * kDepth));
            const unsigned to_w = scalar(to + kTileM * kDepth + wave * (kTileN / kWaves * kDepth));
            each<kCopiesX>([&](auto i) {
                constexpr int I = decltype(i)::value;
                copy_16_bytes(x, x_now[I % 2], I / 2 * 2 * kCopyRows * k_bytes, to_x,
                              I * kCopyRows * kDepth);
            });
            const Resource scales = resource(x_scales + step * x_step * 4, kNowhere - 1);
            const unsigned to_scales = scalar(to + kScalesAt + wave * kLanes * 4);
            copy_piece<4>(scales, step < steps ? scale_from : kNowhere, 0, to_scales, 0);
            each<kCopiesW>([&](auto i) {
                constexpr int I = decltype(i)::value;
                constexpr int rows = I / 2 * 2 * kCopyRows;
                copy_16_bytes(w, w_now[I % 2], paired_row(rows) * k_bytes, to_w,
                              I * kCopyRows * kDepth);
            });
        };
        f32x4 sums[kFragsX][kFragsW];
#pragma unroll
        for (int i = 0; i < kFragsX; ++i)
#pragma unroll
            for (int j = 0; j < kFragsW; ++j)
                sums[i][j] = f32x4{};

        reads_arrived(); // of the tile before
        copy(0);
        copy(1); // zeros where there is none, so that each step waits for as many
#pragma unroll 1
        for (unsigned step = 0; step < steps; ++step) {
            const float scale_w = w_scales[step * w_step];
            copies_arrived<kCopies>();
            copy(step + 2);
            const unsigned char* const stage =
                reinterpret_cast<const unsigned char*>(memory) + step % kStages * kStage;
            float scale[kFragsX], factor[kFragsX];
            bool far = false;
#pragma unroll
            for (int i = 0; i < kFragsX; ++i) {
                const unsigned own = (row_wave * kFragsX + i) * kSide + row;
                const unsigned at = own / kScaleRows * kLanes + own % kScaleRows;
                scale[i] = reinterpret_cast<const float*>(stage + kScalesAt)[at];
                factor[i] = scale[i] * scale_w;
                far |= is_far(factor[i], scale[i], scale_w);
            }
            const auto operand = [&](unsigned first) {
                const unsigned char* const at = stage + (first + row) * kDepth;
                const u32x4 l = *reinterpret_cast<const u32x4*>(at + low);
                const u32x4 h = *reinterpret_cast<const u32x4*>(at + high);
                return __builtin_shufflevector(l, h, 0, 1, 2, 3, 4, 5, 6, 7);
            };
            u32x8 of_features[kFragsW];
#pragma unroll
            for (int j = 0; j < kFragsW; ++j)
                of_features[j] = operand(kTileM + (column_wave * kFragsW + j) * kSide);
            f32x4 products[2][kFragsW]; // one is multiplied while the other is added
            const auto multiply = [&](int i) {
                const u32x8 of_rows = operand((row_wave * kFragsX + i) * kSide);
#pragma unroll
                for (int j = 0; j < kFragsW; ++j)
                    products[i % 2][j] = multiply_scaled<0>(of_features[j], kUnitScale, of_rows,
                                                            kUnitScale, f32x4{});
            };
            if (__builtin_expect(lanes_where(far) != 0, false)) {
                // A product of scales is not in fp32, but what it makes of a sum may be.
#pragma unroll
                for (int i = 0; i < kFragsX; ++i) {
                    multiply(i);
                    const double both = static_cast<double>(scale[i]) * scale_w;
#pragma unroll
                    for (int j = 0; j < kFragsW; ++j)
#pragma unroll
                        for (int v = 0; v < 4; ++v)
                            sums[i][j][v] += static_cast<float>(products[i % 2][j][v] * both);
                }
            } else {
                multiply(0);
#pragma unroll
                for (int i = 0; i < kFragsX; ++i) {
                    if (i + 1 < kFragsX)
                        multiply(i + 1);
                    const float f = factor[i];
#pragma unroll
                    for (int j = 0; j < kFragsW; ++j)
                        sums[i][j] = __builtin_elementwise_fma(products[i % 2][j],
                                                               f32x4{f, f, f, f}, sums[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < kFragsX; ++i) {
            const unsigned own = (row_wave * kFragsX + i) * kSide + row;
            const ArgsPointer a = arguments();
            const Offset N = a->N;
            Out* const to = a->y + static_cast<Offset>(tile.first + own) * N;
#pragma unroll
            for (int pair = 0; pair < kFragsW / 2; ++pair) {
                const unsigned column =
                    tile.feature + (column_wave * kFragsW + 2 * pair) * kSide + g * 8;
                if (own >= tile.rows || column >= N)
                    continue;
                using Eight = Out __attribute__((ext_vector_type(8)));
                Eight eight;
#pragma unroll
                for (int v = 0; v < 8; ++v)
                    eight[v] = static_cast<Out>(sums[i][2 * pair + v / 4][v % 4]);
                *reinterpret_cast<Eight*>(to + column) = eight;
            }
        }
    }
    copies_arrived<0>(); // LDS may be another workgroup's after this one
}
