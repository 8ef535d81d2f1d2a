// Expert layers of few tokens: each slot of a token is a GEMV of its own, without a list of routed
// rows. aiter_mx/kernels/moe_up.py and moe_down.py define the two halves.
//
// A wave multiplies a row of w by x in the matrix unit, 16 bytes a lane as they are loaded: it is
// given the row's pieces as 16 rows of an operand, and those of x as 16 of the other. Of what it
// sums up only the diagonal is of use, where a piece of w meets that of x from the same k. A step
// is 1024 k, in the first half of each lane's 32 bytes, or 2048 in both.
//
//   lane group g, lane i of it   first half: of block 16 (g / 2) + i, second: of 32 + 16 (g / 2) +
//   i,
//                                each the block's half g % 2
//   scale of lane l              that of block l
//   sums of lane group g         rows 4 g to 4 g + 3, of which row i is the diagonal's in lane i
#pragma once

#include "common/epilogue.h"
#include "common/packed.h"
#include "gfx950/tile.h"

namespace mx {

#if MX_WIDE_IDS
using Id = long long;
#else
using Id = int;
#endif

constexpr bool kHasMap = MX_HAS_MAP;

struct Routing {
    const Id* topk_ids;
    const int *expert_map, *num_tokens;
    int top_k, experts, shared, here; // experts: on all ranks; here: with the shared ones

    MX_MEMBER Id id(unsigned token, int slot) const { return topk_ids[token * top_k + slot]; }
    // Tokens that count, the first ones. Memory is asked without a branch, together with ids.
    MX_MEMBER int tokens() const {
        return *(num_tokens ? num_tokens : reinterpret_cast<const int*>(topk_ids));
    }
    MX_MEMBER bool is_past(int token, int tokens) const {
        return (num_tokens != nullptr) & (token >= tokens);
    }
    // The number here of an expert, or -1, as for all of a token that is past.
    MX_MEMBER int number(Id id, bool is_past) const {
        const unsigned low = id, known = is_past ? 0 : kHasMap ? experts : min(experts, here);
        const bool is_known = (sizeof(Id) == sizeof(low) || id == low) & (low < known);
        if constexpr (!kHasMap)
            return is_known ? low : -1;
        const int number = expert_map[is_known ? low : 0];
        return (is_known & (number < here)) ? number : -1;
    }
    MX_MEMBER int shared_expert(int slot, bool is_past) const {
        return is_past ? -1 : here - shared + slot - top_k;
    }
};

// What depends on any of the three waits for all, whose loads are then under way at once: LLVM
// would put each near its use.
template <class A, class B, class C>
MX_DEVICE void arrive_together(A& a, B& b, C& c) {
    asm("" : "+s"(a), "+s"(b), "+s"(c));
}

constexpr int kRows = MX_ROWS;   // rows of w of a workgroup
constexpr int kWaves = MX_WAVES; // of a workgroup, which split k
constexpr int kHalves = MX_HALVES;
constexpr bool kDwords = MX_SCALE_DWORDS; // K / 32 is a multiple of 4
constexpr int kThreads = kLanes * kWaves;
constexpr unsigned kStep = 1024 * kHalves; // k of a wave at a time
constexpr int kGroups = kLanes / kSide;    // of lanes
constexpr int kWords = (kRows + 3) / 4;    // a byte for each row
using Out = DType<MX_OUT>;
using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB

// What depends on the lane alone, worked out while arguments are under way.
struct Lane {
    unsigned pieces[kHalves]; // the first k of its pieces in a step
    unsigned block;           // in a step, the first of its scales' in w
    unsigned by_one, by_two;  // which bytes turned() keeps, and which come from the other lane
    unsigned put_at, take_at; // its part of a product in Sums, and what it adds up, in bytes
    unsigned is_off_diagonal;

    MX_MEMBER explicit Lane(int lane)
        : block(kDwords ? lane / 4 * 4 : lane), by_one(lane & 1 ? 0x03070105 : 0x06020400),
          by_two(lane & 2 ? 0x03020706 : 0x05040100), put_at(lane % kSide * 16),
          take_at(lane / kSide * kSide * 16 + put_at + lane % 4 * 4),
          is_off_diagonal(lane / 4 % 4 - lane / kSide) {
        const int group = lane / kSide;
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            pieces[half] =
                1024 * half + 512 * (group / 2) + lane % kSide * kBlock + group % 2 * kPiece;
            asm("" : "+v"(pieces[half]));
        }
        asm(""
            : "+v"(block), "+v"(by_one), "+v"(by_two), "+v"(put_at), "+v"(take_at),
              "+v"(is_off_diagonal));
    }
    // Bytes of words, each that of this lane's block of four rows, from words of four blocks of a
    // row. Lane j of four has row j.
    MX_MEMBER unsigned turned(unsigned word) const {
        word = __builtin_amdgcn_perm(of_other<1>(word), word, by_one);
        return __builtin_amdgcn_perm(of_other<2>(word), word, by_two);
    }

  private:
    template <int Distance>
    MX_MEMBER static unsigned of_other(unsigned word) {
        return float_to_bits(across<Distance>(bits_to_float(word)));
    }
};

// A step's operand: payload, and in each byte of a word this lane's scale.
struct Factor {
    u32x8 payload;
    unsigned scales;
};
MX_DEVICE Factor factor_of(const u32x4 (&halves)[kHalves], unsigned scale) {
    const u32x4 high = kHalves == 2 ? halves[kHalves - 1] : u32x4{};
    return {__builtin_shufflevector(halves[0], high, 0, 1, 2, 3, 4, 5, 6, 7),
            __builtin_amdgcn_perm(scale, scale, 0)};
}

// A step of x on its way to an operand through a wave's LDS: lines of it are loaded whole, so that
// lanes that follow each other have 16 bytes of one block.
template <int Code>
struct Values {
    static constexpr unsigned kBytes = Code == kF32 ? 4 : 2; // of a value
    static constexpr int kLoads = kStep * kBytes / kPiece / kLanes;
    static constexpr int kCount = kPiece / kBytes;  // values of a load
    static constexpr int kOwners = kBlock / kCount; // lanes of a block
    u32x4 pieces[kLoads];

    struct alignas(16) Room {
        unsigned char payload[kStep], scales[kStep / kBlock];
    };

    // k: the step's first.
    MX_MEMBER void load(const Buffer& from, unsigned k, int lane) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            pieces[i] = from.load(i * kLanes * kPiece + lane * kPiece, k * kBytes);
    }
    // All lanes of the wave take part; those with nothing have zeros.
    MX_MEMBER Factor quantised(Room& room, int lane, const Lane& own) const {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int first = (i * kLanes + lane) * kCount;
            BlockScale scale;
            if constexpr (Code == kF32) {
                float v[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    v[j] = bits_to_float(pieces[i][j]);
                scale = block_scale<E4M3, kRoundUp>(max_of_lanes<kOwners>(amax_bits(v)));
                *reinterpret_cast<unsigned*>(room.payload + first) =
                    to_e4m3x4<kRoundUp>(v[0], v[1], v[2], v[3], scale);
            } else {
                using In = DType<Code == kNone ? kBF16 : Code>;
                const unsigned packed =
                    packed_max_of_lanes<In, kOwners>(packed_amax_of_piece<In>(pieces[i]));
                scale = block_scale<E4M3, kRoundUp>(largest_magnitude<In>(packed));
                *reinterpret_cast<Words<2>*>(room.payload + first) =
                    piece_to_payload<E4M3, kRoundUp, In>(pieces[i], scale);
            }
            room.scales[first / kBlock] = scale.byte; // the same of all owners
        }
        wave_in_order();
        u32x4 halves[kHalves];
#pragma unroll
        for (int half = 0; half < kHalves; ++half)
            halves[half] = *reinterpret_cast<const u32x4*>(room.payload + own.pieces[half]);
        const Factor factor = factor_of(halves, room.scales[lane % (kStep / kBlock)]);
        wave_in_order();
        return factor;
    }
};

// Where a lane's part of a step of w is: of its pieces in a row, and of its scales in the row of
// lane % 4, or from the expert's first row on where those are bytes. Or kNowhere.
struct Places {
    unsigned pieces[kHalves], scales;

    MX_MEMBER Places(unsigned k, unsigned K, unsigned row, const Lane& lane) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
            const unsigned own = k + lane.pieces[half];
            pieces[half] = own < K ? own : kNowhere;
            asm("" : "+v"(pieces[half])); // while ids are under way, not when they are there
        }
        const unsigned block = k / kBlock + lane.block, blocks = K / kBlock;
        scales = block < blocks ? (kDwords ? row * blocks : 0) + block : kNowhere;
        asm("" : "+v"(scales));
    }
};

// A step of the workgroup's rows of w.
struct Rows {
    u32x4 payload[kRows][kHalves];
    unsigned words[kDwords ? kWords : kRows];

    // row(r): the number of row r; rows of a word follow those of the word before by `next`.
    template <class RowOf>
    MX_MEMBER void load(const Buffer& rows, const Buffer& scales, const Places& at, unsigned K,
                        RowOf row, unsigned next) {
        const unsigned blocks = K / kBlock;
        if constexpr (kDwords)
#pragma unroll
            for (int i = 0; i < kWords; ++i)
                words[i] = scales.load_dword(at.scales + i * next * blocks);
        else
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                words[r] = scales.load_byte(at.scales, row(r) * blocks);
        finish_before_next(); // loads come in their order
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
            for (int half = 0; half < kHalves; ++half)
                payload[r][half] = rows.load_once(at.pieces[half], row(r) * K);
        finish_before_next();
    }
    MX_MEMBER void add_products(f32x4 (&sums)[kRows], const Factor& x, NanNotes (&nans)[kWords],
                                const Lane& lane) const {
        unsigned scales[kWords];
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            if constexpr (kDwords) {
                scales[i] = lane.turned(words[i]);
            } else {
                scales[i] = 0;
#pragma unroll
                for (int r = 4 * i; r < 4 * i + 4 && r < kRows; ++r)
                    scales[i] |= words[r] << r % 4 * 8;
            }
            nans[i].take(scales[i]);
        }
        each<kRows>([&](auto r) {
            constexpr int row = r.value;
            sums[row] = multiply_scaled<row % 4>(factor_of(payload[row], 0).payload,
                                                 scales[row / 4], x.payload, x.scales, sums[row]);
        });
    }
};

// Sums of the waves' rows on their way through LDS: of each what the lanes of the diagonal hold.
struct Sums {
    f32x4 of[kWaves][kRows][kSide];

    MX_MEMBER void put(const f32x4 (&sums)[kRows], int wave, const Lane& lane) {
        if (lane.is_off_diagonal == 0)
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                *reinterpret_cast<f32x4*>(bytes() + lane.put_at + (wave * kRows + r) * kRowBytes) =
                    sums[r];
    }
    // Those of four rows, one in all lanes of a group; all lanes of a wave take part.
    MX_MEMBER float take(int first, const Lane& lane) {
        unsigned at = lane.take_at + first * kRowBytes;
        if (kRows % kGroups != 0) // the last groups may have no row
            at = min(at, kRows * kRowBytes - sizeof(float));
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kWaves; ++v)
            sum += *reinterpret_cast<const float*>(bytes() + at + v * kRows * kRowBytes);
        sum += across<8>(sum);
        sum += across<4>(sum);
        sum += across<2>(sum);
        return sum + across<1>(sum);
    }

  private:
    static constexpr int kRowBytes = kSide * sizeof(f32x4);
    MX_MEMBER char* bytes() { return reinterpret_cast<char*>(of); }
};
// work(row) for the first of four rows at a time, which this wave's lane groups take.
template <class Do>
MX_DEVICE void each_four_rows(int wave, Do work) {
#pragma unroll
    for (int first = 0; first < kWords; first += kWaves)
        if (first + wave < kWords)
            work((first + wave) * kGroups);
}

MX_DEVICE bool are_any(const NanNotes (&nans)[kWords]) {
    NanNotes any;
    for (const NanNotes& notes : nans)
        any.bits |= notes.bits;
    return any.in_wave();
}
// Any NaN among a row's scales makes its sum NaN.
MX_DEVICE void add_nans(f32x4 (&sums)[kRows], const NanNotes (&nans)[kWords]) {
    each<kRows>([&](auto r) {
        if (lanes_where(nans[r.value / 4].bits >> (r.value % 4 * 8 + 7) & 1))
            sums[r.value] = f32x4{} + bits_to_float(kNanBits);
    });
}

} // namespace mx
