// Grouped GEMM over routed tokens on CDNA4: aiter_mx/kernels/moe_gemm/problem.py defines what it
// computes and its arguments.
//
// A workgroup computes kRows rows of one expert's w for a chunk of a block of ids, up to kCols of
// them; the grid's x are the tiles of w, its y walks the chunks, all first chunks before all second
// ones. Its waves take steps of K in turn and share nothing until their sums are added, in a fixed
// order. w is operand A of the scaled matrix instruction, the rows of x that the ids name are B:
//
//   k ->                    |0   255|256  511| ...              of each wave in turn
//   w[expert], 16 rows      |  A    |   A    |     kRowTiles of them
//   x[t // a_div], 16 ids   |  B    |   B    |     kColTiles of them, or as few as hold valid ids
//
// With an activation kRows is 64, half of them gate and half up rows, so that a workgroup has whole
// blocks of 32 activated features, which it quantises before they leave it.

#include "common/epilogue.h"
#include "common/quantize.h"
#include "common/target.h"
#include "gfx950/memory.h"
#include "gfx950/tile.h"
#include "moe.h"

using namespace mx;

constexpr int kRowTiles = MX_ROW_TILES;       // of w in a workgroup
constexpr int kMostColTiles = MX_COL_TILES;   // of x: 1, 2 or 4
constexpr int kWaves = MX_WAVES;              // of a workgroup
constexpr int kUnroll = MX_UNROLL;            // steps of a wave whose loads precede all use
constexpr bool kEvenBlocks = MX_EVEN_BLOCKS;  // K / 32 is even
constexpr bool kWide = MX_WIDE;               // x has 2^31 bytes or more
constexpr int kActivation = MX_ACTIVATION;    // between gate and up rows, or none
constexpr bool kInterleaved = MX_INTERLEAVED; // gate and up rows alternate; else halves of w
constexpr bool kActivated = kActivation != kNoActivation;
using Out = DType<kActivated ? kF32 : MX_OUT>;
using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB

constexpr unsigned kStride = kWaves * kTileK; // k of a step of all waves
constexpr int kRows = kRowTiles * kSide;
constexpr int kCols = kMostColTiles * kSide;
constexpr int kThreads = kWaves * kLanes;
constexpr int kSumPieces = kRowTiles * kMostColTiles * kProductWords * 4 / kPiece;
constexpr int kWavePieces = kPieces > kSumPieces ? kPieces : kSumPieces; // LDS of a wave

static_assert(kCols <= kLanes, "a lane looks up one id");
static_assert(!kActivated || kRowTiles == 4, "gate and up of a block of 32 features");

struct Args {
    const unsigned char *xq, *xs, *wq, *ws;
    const int *sorted_ids, *expert_ids, *post_padded;
    const float* weights;
    const void* bias;
    void* out;
    unsigned char* out_scales;
    Offset N, K;
    int experts, valid_tokens, a_div, packed_top_k, weights_by_place, max_blocks, block_m,
        bias_kind;
    ActivationArgs activation;
    int groups_y; // of the grid
};

using ArgsInMemory = const __attribute__((address_space(4))) Args;

// The compiler takes a pointer from inline assembly for one to any memory unless it is told.
template <class T>
MX_DEVICE void hold(const T*& pointer) {
    auto global = (const __attribute__((address_space(1))) T*)pointer;
    asm volatile("" : "+s"(global));
    pointer = (const T*)global;
}

// What the sums are made of, loaded at once as a wave begins: each load that waits for its turn
// would be a scalar latency ahead of the first weights. Beside the products of four tiles of ids
// there is no room to hold them.
struct Held {
    const unsigned char *xq, *xs, *wq, *ws;
    const int *sorted_ids, *expert_ids, *post_padded;
    Offset N, K;
    int experts, valid_tokens, a_div, packed_top_k, max_blocks, block_m, groups_y;

    MX_MEMBER explicit Held(ArgsInMemory& args)
        : xq(args.xq), xs(args.xs), wq(args.wq), ws(args.ws), sorted_ids(args.sorted_ids),
          expert_ids(args.expert_ids), post_padded(args.post_padded), N(args.N), K(args.K),
          experts(args.experts), valid_tokens(args.valid_tokens), a_div(args.a_div),
          packed_top_k(args.packed_top_k), max_blocks(args.max_blocks), block_m(args.block_m),
          groups_y(args.groups_y) {
        hold(xq), hold(xs), hold(wq), hold(ws);
        hold(sorted_ids), hold(expert_ids), hold(post_padded);
        asm volatile(""
                     : "+s"(N), "+s"(K), "+s"(experts), "+s"(valid_tokens), "+s"(a_div),
                       "+s"(packed_top_k), "+s"(max_blocks), "+s"(block_m), "+s"(groups_y));
    }
};

// All arguments, to be loaded where they are used from here on: held from the start of the kernel
// to its end, they would not all fit into scalar registers.
MX_DEVICE ArgsInMemory& loaded_anew() {
    auto from = __builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(from));
    return *(ArgsInMemory*)from;
}

// A lane's loads of a tile's rows in a step of K, past the start of each row.
struct Place {
    unsigned payload, scales[2]; // offsets, or kNowhere past the end of K

    MX_MEMBER Place(int lane, unsigned first, unsigned K) {
        const unsigned k = first + lane / kSide * 64 + lane % 4 * kPiece;
        payload = k < K ? k : kNowhere;
        const unsigned block = first / kBlock + lane % 4 * 2;
        for (int i = 0; i < 2; ++i)
            scales[i] = block + i < K / kBlock ? block + i : kNowhere;
    }
};

// The scales of two blocks of a row, in bytes 0 and 1.
MX_DEVICE unsigned load_scales(const Buffer& scales, unsigned row_offset, const Place& place) {
    if (kEvenBlocks)
        return scales.load_two_bytes(row_offset + place.scales[0]);
    return scales.load_byte(row_offset + place.scales[0]) |
           scales.load_byte(row_offset + place.scales[1]) << 8;
}

// Consecutive rows of an expert's w.
struct WRows {
    Buffer payload, scales;
    unsigned K;

    MX_MEMBER WRows(const Held& args, Offset first, unsigned rows)
        : payload(args.wq + first * args.K, rows * args.K),
          scales(args.ws + first * (args.K / kBlock), rows * (args.K / kBlock)), K(args.K) {}

    // first_row: of the part that the tile is in.
    MX_MEMBER Tile load(int tile, unsigned first_row, int lane, const Place& place) const {
        Tile loaded;
        const unsigned first = first_row + tile * kSide, blocks = K / kBlock;
        loaded.scales = load_scales(scales, (first + lane / 4) * blocks, place);
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const unsigned row = first + lane / 4 % 4 * 4 + j;
            loaded.payload[j] = payload.load_once(row * K + place.payload);
        }
        return loaded;
    }
};

// The rows of x of a chunk: those that a lane loads, or -1.
template <int ColTiles>
struct XRows {
    Buffer payload, scales; // not of a wide x
    const Held& args;
    int rows[ColTiles][kLoads], scale_rows[ColTiles];

    // own: the row of x of id `lane` of the chunk.
    MX_MEMBER XRows(const Held& args, int own, int lane)
        : payload(args.xq, kWide ? 0 : rows_of_x(args) * static_cast<unsigned>(args.K)),
          scales(args.xs, kWide ? 0 : rows_of_x(args) * static_cast<unsigned>(args.K / kBlock)),
          args(args) {
#pragma unroll
        for (int c = 0; c < ColTiles; ++c) {
            scale_rows[c] = of_lane(c * kSide + lane / 4, own);
#pragma unroll
            for (int j = 0; j < kLoads; ++j)
                rows[c][j] = of_lane(c * kSide + lane / 4 % 4 * 4 + j, own);
        }
    }

    // Divided by vector instructions, it would make descriptors that differ from lane to lane.
    static MX_MEMBER unsigned rows_of_x(const Held& args) {
        return __builtin_amdgcn_readfirstlane((args.valid_tokens + args.a_div - 1u) / args.a_div);
    }

    MX_MEMBER Tile load(int tile, const Place& place) const {
        Tile loaded;
        if constexpr (kWide) {
            const Offset scale_row = static_cast<Offset>(scale_rows[tile]) * (args.K / kBlock);
            const auto scale = [&](unsigned at) {
                const bool is_there = scale_rows[tile] >= 0 && at != kNowhere;
                return is_there ? load_byte(args.xs + scale_row + at) : 0u;
            };
            loaded.scales = scale(place.scales[0]) | scale(place.scales[1]) << 8;
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                const Offset row = static_cast<Offset>(rows[tile][j]) * args.K;
                loaded.payload[j] = u32x4{};
                if (rows[tile][j] >= 0 && place.payload != kNowhere)
                    loaded.payload[j] = mx::load(args.xq + row + place.payload);
            }
        } else {
            // An absent row past the end of K wraps to offset 0, which does no harm.
            const unsigned K = args.K, blocks = K / kBlock;
            const int scale_row = scale_rows[tile];
            loaded.scales =
                load_scales(scales, scale_row < 0 ? kNowhere : scale_row * blocks, place);
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                const int row = rows[tile][j];
                loaded.payload[j] = payload.load((row < 0 ? kNowhere : row * K) + place.payload);
            }
        }
        return loaded;
    }
};

// A chunk of a block as every wave sees it; lane i has the chunk's id i.
struct Chunk {
    int expert; // outside 0 .. experts - 1 where it is not here
    int t;      // routed row, or -1
    int place;  // in sorted_ids
};

// Memory tells of a chunk the expert of its block, and the id of each lane.
struct LookUp {
    int expert, id;

    MX_MEMBER LookUp(const Held& args, int block, int first, int lane)
        : expert(args.expert_ids[block]) {
        const int in_block = first + lane < args.block_m ? first + lane : args.block_m - 1;
        id = args.sorted_ids[block * args.block_m + in_block];
    }
    // With another load that all lanes share. Left alone, each is loaded where it is first used.
    MX_MEMBER void wait_with(int& other) {
        asm volatile("" : "+v"(expert), "+v"(id), "+v"(other));
        expert = __builtin_amdgcn_readfirstlane(expert);
        other = __builtin_amdgcn_readfirstlane(other);
    }
};

// First row of w of the workgroup's tile, of which tiles there are the fewest that cover N.
MX_DEVICE Offset first_feature() { return group_x() * (kActivated ? kRows / 2 : kRows); }

// Sum over waves of rows `row` to `row + 3` of w for id m; they are side by side in LDS.
template <int ColTiles>
MX_DEVICE f32x4 sum_of_waves(const u32x4 (&lds)[kWaves][kWavePieces], int m, int row) {
    const int product = row / kSide * ColTiles + m / kSide;
    const int piece = (product * kProductWords + m % kSide * kSide + row % kSide) / 4;
    f32x4 sum = {};
#pragma unroll
    for (int v = 0; v < kWaves; ++v)
        sum += __builtin_bit_cast(f32x4, lds[v][piece]);
    return sum;
}

template <int ColTiles>
MX_DEVICE void store_features(ArgsInMemory& args, const Chunk& chunk,
                              const u32x4 (&lds)[kWaves][kWavePieces]) {
    const int of_four = thread_in_group() % (kRows / 4) * 4;
    const Offset n = first_feature() + of_four;
    const Offset bias_row = static_cast<Offset>(chunk.expert) * args.N;
    float added[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        added[i] = args.bias_kind != kNone && n + i < args.N
                       ? load_bias(args.bias, args.bias_kind, bias_row + n + i)
                       : 0.0f;
    const int weight_at = args.weights_by_place ? chunk.place : chunk.t;
    const float own_weight = args.weights && chunk.t >= 0 ? args.weights[weight_at] : 1.0f;
    group_barrier();
    for (int i = thread_in_group(); i < ColTiles * kSide * kRows / 4; i += kThreads) {
        const int m = i / (kRows / 4);
        const int t = of_lane(m, chunk.t);
        const float weight = bits_to_float(of_lane(m, float_to_bits(own_weight)));
        const f32x4 sum = sum_of_waves<ColTiles>(lds, m, of_four);
        Out* out = static_cast<Out*>(args.out) + static_cast<Offset>(t) * args.N + n;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (t >= 0 && n + j < args.N)
                store(out + j, args.weights ? (sum[j] + added[j]) * weight : sum[j] + added[j]);
    }
}

template <int ColTiles>
MX_DEVICE void store_activated(ArgsInMemory& args, const Chunk& chunk,
                               const u32x4 (&lds)[kWaves][kWavePieces]) {
    constexpr int lanes = kBlock / 4; // of a block
    const int quarter = thread_in_group() % lanes;
    const Offset features = args.N / 2, feature = first_feature() + quarter * 4;
    // Rows within the tile, and of them in w.
    const int gate_row = kInterleaved ? quarter * 8 : quarter * 4;
    const int up_row = kInterleaved ? gate_row + 4 : kRows / 2 + quarter * 4;
    const Offset bias_row = static_cast<Offset>(chunk.expert) * args.N;
    float added[8] = {};
    if (args.bias_kind != kNone)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Offset row = kInterleaved ? 2 * feature + i : i / 4 * features + feature + i % 4;
            added[i] = load_bias(args.bias, args.bias_kind, bias_row + row);
        }
    group_barrier();
    for (int i = thread_in_group(); i < ColTiles * kSide * lanes; i += kThreads) {
        const int m = i / lanes;
        const int t = of_lane(m, chunk.t);
        const f32x4 low = sum_of_waves<ColTiles>(lds, m, gate_row);
        const f32x4 high = sum_of_waves<ColTiles>(lds, m, up_row);
        float values[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int gate = kInterleaved ? 2 * j : j, up = kInterleaved ? 2 * j + 1 : 4 + j;
            const auto sum = [&](int at) { return (at < 4 ? low[at] : high[at - 4]) + added[at]; };
            values[j] = activate<kActivation>(sum(gate), sum(up), args.activation);
        }
        const BlockScale scale =
            block_scale<E4M3, kRoundUp>(max_of_lanes<lanes>(amax_bits(values)));
        const unsigned word =
            to_e4m3x4<kRoundUp>(values[0], values[1], values[2], values[3], scale);
        if (t < 0)
            continue;
        unsigned char* out = static_cast<unsigned char*>(args.out);
        *reinterpret_cast<unsigned*>(out + static_cast<Offset>(t) * features + feature) = word;
        if (quarter == 0)
            args.out_scales[(static_cast<Offset>(t) * features + feature) / kBlock] = scale.byte;
    }
}

// Rows whose expert is not here.
MX_DEVICE void store_zeros(ArgsInMemory& args, const Chunk& chunk) {
    const Offset features = kActivated ? args.N / 2 : args.N;
    constexpr int width = kActivated ? kRows / 2 : kRows;
    for (int i = thread_in_group(); i < kCols * width; i += kThreads) {
        const int t = of_lane(i / width, chunk.t);
        const Offset n = first_feature() + i % width;
        if (t < 0 || n >= features)
            continue;
        const Offset at = static_cast<Offset>(t) * features + n;
        if constexpr (kActivated) {
            static_cast<unsigned char*>(args.out)[at] = 0;
            if (n % kBlock == 0)
                args.out_scales[at / kBlock] = 0;
        } else {
            store(static_cast<Out*>(args.out) + at, 0.0f);
        }
    }
}

template <int ColTiles>
MX_DEVICE void compute(const Held& args, const Chunk& chunk, u32x4 (&lds)[kWaves][kWavePieces]) {
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();
    const unsigned K = args.K;
    const Offset first = first_feature(), expert_row = static_cast<Offset>(chunk.expert) * args.N;
    // Of halves, the second part are the up rows; else both parts are one.
    constexpr int parts = kActivated && !kInterleaved ? 2 : 1;
    const Offset part_size = args.N / parts, first_row = kInterleaved ? 2 * first : first;
    const Offset left = part_size - first_row;
    const unsigned rows = left < kRows / parts ? left : kRows / parts;
    constexpr int part_tiles = kRowTiles / parts;
    const unsigned to_part = (parts - 1) * part_size; // rows
    const WRows w_rows(args, expert_row + first_row, to_part + rows);
    const int x_row = chunk.t < 0 ? -1 : static_cast<unsigned>(chunk.t) / args.a_div;
    const XRows<ColTiles> x_rows(args, x_row, lane);

    f32x4 sums[kRowTiles][ColTiles] = {};
    NanNotes w_nans[kRowTiles], x_nans[ColTiles];
    for (unsigned k = wave * kTileK; k < K; k += kUnroll * kStride) {
        Tile w[kUnroll][kRowTiles], x[kUnroll][ColTiles];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) { // a step past the end of K loads zeros
            const Place place(lane, k + i * kStride, K);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                w[i][r] = w_rows.load(r % part_tiles, r / part_tiles * to_part, lane, place);
#pragma unroll
            for (int c = 0; c < ColTiles; ++c)
                x[i][c] = x_rows.load(c, place);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            multiply_step(lds[wave], w[i], x[i], lane, transpose, sums, w_nans, x_nans);
    }
    const auto place = [](int r, int c, int g, int column) {
        return (r * ColTiles + c) * kLanes + column * 4 + g;
    };
    put_sums(lds[wave], lane, place, sums, w_nans, x_nans);
    if constexpr (kActivated)
        store_activated<ColTiles>(loaded_anew(), chunk, lds);
    else
        store_features<ColTiles>(loaded_anew(), chunk, lds);
}

// The arguments are Args, member by member.
MX_KERNEL(kThreads)
aiter_mx_moe_gemm_mfma(const unsigned char*, const unsigned char*, const unsigned char*,
                       const unsigned char*, const int*, const int*, const int*, const float*,
                       const void*, void*, unsigned char*, Offset, Offset, int, int, int, int, int,
                       int, int, int, float, float, float, int) {
    const Held args(loaded_anew());
    MX_LDS u32x4 lds[kWaves][kWavePieces];
    const int lane = thread_in_group() % kLanes;
    const int chunks = (args.block_m + kCols - 1) / kCols; // of a block

    // Looked up under the supposition that it is in use and a first chunk, as most are.
    const long first_item = group_y();
    int block = first_item < args.max_blocks ? first_item : 0, first = 0;
    LookUp found(args, block, first, lane);
    int padded = *args.post_padded;
    found.wait_with(padded);
    const int in_use = (padded + args.block_m - 1) / args.block_m;
    const int blocks = in_use < args.max_blocks ? in_use : args.max_blocks;

    bool lds_in_use = false;
    for (long item = first_item; item < static_cast<long>(blocks) * chunks; item += args.groups_y) {
        if (item != first_item || item >= blocks) {
            block = item % blocks;
            first = item / blocks * kCols;
            found = LookUp(args, block, first, lane);
            found.wait_with(padded);
        }
        Chunk chunk;
        chunk.expert = found.expert;
        chunk.place = block * args.block_m + first + lane;
        chunk.t = -1;
        if (lane < kCols && first + lane < args.block_m)
            chunk.t = routed_row(found.id, args.valid_tokens, args.packed_top_k);
        const LaneMask valid = lanes_where(chunk.t >= 0);
        if (valid == 0)
            continue;
        if (lds_in_use)
            group_barrier();
        lds_in_use = true;
        const Held sums_of = kMostColTiles < 4 ? args : Held(loaded_anew());
        if (chunk.expert < 0 || chunk.expert >= args.experts)
            store_zeros(loaded_anew(), chunk);
        else if (kMostColTiles == 1 || valid >> kSide == 0)
            compute<1>(sums_of, chunk, lds);
        else if (kMostColTiles == 2 || valid >> (2 * kSide) == 0)
            compute < kMostColTiles<2 ? kMostColTiles : 2>(sums_of, chunk, lds);
        else
            compute<kMostColTiles>(sums_of, chunk, lds);
    }
}
