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
constexpr int kMostColTiles = MX_COL_TILES;   // of x: 1, 2 or 3
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
// Weights are asked for ahead of ids. Held beside more tiles of ids, they would cost workgroups.
constexpr bool kAhead = kMostColTiles == 1;
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
MX_DEVICE void hold(T*& pointer) {
    auto global = (__attribute__((address_space(1))) T*)pointer;
    asm volatile("" : "+s"(global));
    pointer = (T*)global;
}

// What the sums are made of, loaded at once as a wave begins: each load that waits for its turn
// would be a scalar latency ahead of the first weights.
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

// What results are made of, loaded at once while the first tiles are under way: after the products
// each load would be a scalar latency ahead of the results.
struct Ending {
    const float* weights;
    const void* bias;
    void* out;
    unsigned char* out_scales;
    int weights_by_place, bias_kind;
    ActivationArgs activation;

    MX_MEMBER explicit Ending(ArgsInMemory& args)
        : weights(args.weights), bias(args.bias), out(args.out), out_scales(args.out_scales),
          weights_by_place(args.weights_by_place), bias_kind(args.bias_kind),
          activation{args.activation.alpha, args.activation.beta, args.activation.limit} {
        hold(weights), hold(bias), hold(out), hold(out_scales);
        asm volatile(""
                     : "+s"(weights_by_place), "+s"(bias_kind), "+s"(activation.alpha),
                       "+s"(activation.beta), "+s"(activation.limit));
    }
};

// First row of w of the workgroup's tile, of which tiles there are the fewest that cover N.
MX_DEVICE Offset first_feature() { return group_x() * (kActivated ? kRows / 2 : kRows); }

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

// The workgroup's rows of an expert's w, those of the tile in two parts where gate and up rows are
// halves; none where the expert is not here.
struct WRows {
    static constexpr int kParts = kActivated && !kInterleaved ? 2 : 1;
    static constexpr int kPartTiles = kRowTiles / kParts;
    Buffer payload, scales;
    unsigned K, to_part; // rows from one part to the other

    MX_MEMBER WRows(const Held& args, int expert)
        : WRows(args, (static_cast<Offset>(expert) * args.N + first_row()) * args.K,
                rows_of(args, expert)) {}

    // All tiles of a step.
    MX_MEMBER void load(Tile (&w)[kRowTiles], int lane, const Place& place) const {
        const unsigned blocks = K / kBlock;
        unsigned row_at = lane / 4 % 4 * 4 * K + place.payload, scales_at = lane / 4 * blocks;
        each<kRowTiles>([&](auto r) {
            constexpr int tile = r.value;
            if constexpr (tile > 0) {
                const unsigned rows =
                    tile % kPartTiles ? kSide : to_part - (kPartTiles - 1) * kSide;
                row_at += (rows - (kLoads - 1)) * K;
                scales_at += rows * blocks;
            }
            w[tile].scales = load_scales(scales, scales_at, place);
#pragma unroll
            for (int j = 0; j < kLoads; ++j) {
                row_at += j ? K : 0;
                asm("" : "+v"(row_at)); // else LLVM multiplies for each row, ahead of the first
                w[tile].payload[j] = payload.load_once(row_at);
            }
        });
    }

  private:
    static MX_MEMBER Offset first_row() {
        return kInterleaved ? 2 * first_feature() : first_feature();
    }
    // From the first one to the last, those between both parts included.
    static MX_MEMBER unsigned rows_of(const Held& args, int expert) {
        const Offset part = args.N / kParts, left = part - first_row();
        const unsigned last = left < kRows / kParts ? left : kRows / kParts;
        const bool is_here = static_cast<unsigned>(expert) < static_cast<unsigned>(args.experts);
        return is_here ? (kParts - 1) * static_cast<unsigned>(part) + last : 0;
    }
    // From a byte of w's payload on.
    MX_MEMBER WRows(const Held& args, Offset at, unsigned rows)
        : payload(args.wq + at, rows * args.K),
          scales(args.ws + at / kBlock, rows * static_cast<unsigned>(args.K / kBlock)), K(args.K),
          to_part(args.N / kParts) {}
};

// The row of x of routed row t, or -1, and the number of rows of x.
struct RowOfX {
    int row;
    unsigned rows;

    MX_MEMBER RowOfX(const Held& args, int t) : row(t), rows(args.valid_tokens) {
        if (args.a_div == 1)
            return;
        unsigned a_div = args.a_div; // else LLVM prepares for the divisions, needed or not
        asm volatile("" : "+s"(a_div));
        row = t < 0 ? -1 : static_cast<unsigned>(t) / a_div;
        // Divided by vector instructions, it would make descriptors that differ from lane to lane.
        rows = __builtin_amdgcn_readfirstlane((rows + a_div - 1) / a_div);
    }
};

// The rows of x of a chunk: those that a lane loads, or -1.
template <int ColTiles>
struct XRows {
    Buffer payload, scales; // not of a wide x
    const Held& args;
    int rows[ColTiles][kLoads], scale_rows[ColTiles];

    // own: the row of x of id `lane` of the chunk.
    MX_MEMBER XRows(const Held& args, const RowOfX& own, int lane)
        : payload(args.xq, kWide ? 0 : own.rows * static_cast<unsigned>(args.K)),
          scales(args.xs, kWide ? 0 : own.rows * static_cast<unsigned>(args.K / kBlock)),
          args(args) {
#pragma unroll
        for (int c = 0; c < ColTiles; ++c) {
            scale_rows[c] = of_lane(c * kSide + lane / 4, own.row);
#pragma unroll
            for (int j = 0; j < kLoads; ++j)
                rows[c][j] = of_lane(c * kSide + lane / 4 % 4 * 4 + j, own.row);
        }
    }

    MX_MEMBER void load(Tile (&x)[ColTiles], const Place& place) const {
#pragma unroll
        for (int c = 0; c < ColTiles; ++c)
            x[c] = load(c, place);
    }

  private:
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

// What no workgroup of the launch writes, the same for all lanes.
MX_DEVICE int load_scalar(const int* from) {
    return *(const __attribute__((address_space(4))) int*)from;
}

// Memory tells of a chunk the expert of its block, and the id of each lane.
struct LookUp {
    int expert, id;

    MX_MEMBER LookUp(const Held& args, int block, int first, int lane)
        : expert(load_scalar(args.expert_ids + block)) {
        const int in_block = first + lane < args.block_m ? first + lane : args.block_m - 1;
        id = args.sorted_ids[block * args.block_m + in_block];
    }
};

// A chunk of a block as every wave sees it; lane i has the chunk's id i.
struct Chunk {
    int expert; // outside 0 .. experts - 1 where it is not here
    int t;      // routed row, or -1
    int place;  // in sorted_ids

    MX_MEMBER Chunk(const Held& args, const LookUp& found, int block, int first, int lane)
        : expert(found.expert), place(block * args.block_m + first + lane) {
        // Waited for once, by all lanes: LLVM would wait anew, and for all that is asked for since.
        int id = found.id;
        asm volatile("" : "+v"(id));
        const int row = routed_row(id, args.valid_tokens, args.packed_top_k);
        t = lane < kCols && first + lane < args.block_m ? row : -1;
    }
    MX_MEMBER LaneMask valid() const { return lanes_where(t >= 0); }
};

// Blocks that are in use. What a division makes of block_m alone is to come where it is needed, not
// ahead of the first weights.
MX_DEVICE unsigned blocks_of(const Held& args, int padded) {
    unsigned block_m = args.block_m;
    asm volatile("" : "+s"(block_m));
    const unsigned ids = padded > 0 ? padded : 0, most = args.max_blocks;
    const unsigned in_use = (ids + block_m - 1) / block_m;
    return in_use < most ? in_use : most;
}

// Blocks that are in use, and chunks of all of them. They are made where this is, as LLVM would
// have a division after results wait for these.
struct Items {
    unsigned blocks, count;

    MX_MEMBER Items(const Held& args, int padded) : blocks(blocks_of(args, padded)) {
        count = blocks * ((args.block_m + kCols - 1) / kCols);
        asm volatile("" : "+s"(blocks), "+s"(count));
    }
};

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

// Results of features that follow each other.
struct alignas(4 * sizeof(Out)) Four {
    Out of[4];

    MX_MEMBER explicit Four(f32x4 values) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
            of[i] = static_cast<Out>(values[i]);
    }
};

// What was loaded is waited for, also by lanes without results: else LLVM has the next item wait
// for its first weights before it asks for x.
MX_DEVICE void await(float& loaded) { asm volatile("" : "+v"(loaded)); }

template <int ColTiles>
MX_DEVICE void store_features(const Ending& args, Offset N, const Chunk& chunk,
                              const u32x4 (&lds)[kWaves][kWavePieces]) {
    // Where a lane stores is made anew: held beside the products, it would cost a wave of a SIMD.
    int thread = thread_in_group();
    asm volatile("" : "+v"(thread));
    __builtin_assume(thread >= 0 && thread < kThreads);
    const int of_four = thread % (kRows / 4) * 4;
    const Offset n = first_feature() + of_four;
    const Offset bias_row = static_cast<Offset>(chunk.expert) * N;
    f32x4 added = {};
    if (args.bias_kind != kNone)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (n + i < N)
                added[i] = load_bias(args.bias, args.bias_kind, bias_row + n + i);
    const int weight_at = args.weights_by_place ? chunk.place : chunk.t;
    float own_weight = args.weights && chunk.t >= 0 ? args.weights[weight_at] : 1.0f;
    const bool at_once = N % 4 == 0 && reinterpret_cast<Offset>(args.out) % sizeof(Four) == 0;
    group_barrier();
    await(own_weight);
    for (int i = thread; i < ColTiles * kSide * kRows / 4; i += kThreads) {
        const int m = i / (kRows / 4);
        const int t = of_lane(m, chunk.t);
        const float weight = bits_to_float(of_lane(m, float_to_bits(own_weight)));
        const f32x4 values = (sum_of_waves<ColTiles>(lds, m, of_four) + added) * weight;
        if (t < 0 || n >= N)
            continue;
        Out* out = static_cast<Out*>(args.out) + static_cast<Offset>(t) * N + n;
        if (at_once)
            *reinterpret_cast<Four*>(out) = Four(values);
        else
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (n + j < N)
                    store(out + j, values[j]);
    }
}

template <int ColTiles>
MX_DEVICE void store_activated(const Ending& args, Offset N, const Chunk& chunk,
                               const u32x4 (&lds)[kWaves][kWavePieces]) {
    constexpr int lanes = kBlock / 4; // of a block
    const int quarter = thread_in_group() % lanes;
    const Offset features = N / 2, feature = first_feature() + quarter * 4;
    // Rows within the tile, and of them in w.
    const int gate_row = kInterleaved ? quarter * 8 : quarter * 4;
    const int up_row = kInterleaved ? gate_row + 4 : kRows / 2 + quarter * 4;
    const Offset bias_row = static_cast<Offset>(chunk.expert) * N;
    float added[8] = {};
    if (args.bias_kind != kNone)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const Offset row = kInterleaved ? 2 * feature + i : i / 4 * features + feature + i % 4;
            added[i] = load_bias(args.bias, args.bias_kind, bias_row + row);
        }
    group_barrier();
    for (float& value : added)
        await(value);
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

// The wave's first steps of w.
MX_DEVICE void ask(const WRows& rows, Tile (&w)[kUnroll][kRowTiles], int lane) {
#pragma unroll
    for (int i = 0; i < kUnroll; ++i)
        rows.load(w[i], lane, Place(lane, wave_in_group() * kTileK + i * kStride, rows.K));
}

// Tells how many items there are.
template <int ColTiles>
MX_DEVICE Items compute(Held args, int padded, const Chunk& chunk, const WRows& w_rows,
                        const Tile (&first_w)[kUnroll][kRowTiles],
                        u32x4 (&lds)[kWaves][kWavePieces]) {
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();
    const unsigned K = args.K;
    const XRows<ColTiles> x_rows(args, RowOfX(args, chunk.t), lane);

    f32x4 sums[kRowTiles][ColTiles] = {};
    NanNotes w_nans[kRowTiles], x_nans[ColTiles];
    const auto multiply = [&](const Tile(&w)[kUnroll][kRowTiles],
                              const Tile(&x)[kUnroll][ColTiles]) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            multiply_step(lds[wave], w[i], x[i], lane, transpose, sums, w_nans, x_nans);
    };
    unsigned k = wave * kTileK;
    int later = lane;
    Tile first_x[kUnroll][ColTiles];
    if constexpr (kAhead) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            x_rows.load(first_x[i], Place(lane, k + i * kStride, K));
        finish_before_next();
    }
    const Ending ending(loaded_anew());
    const Items items(args, padded);
    if constexpr (kAhead) {
        multiply(first_w, first_x);
        k += kUnroll * kStride;
        // What later steps alone need is not made, nor held, ahead of the first.
        asm volatile("" : "+v"(later));
        __builtin_assume(later >= 0 && later < kLanes);
    }
    for (; k < K; k += kUnroll * kStride) {
        Tile w[kUnroll][kRowTiles], x[kUnroll][ColTiles];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) { // a step past the end of K loads zeros
            const Place place(later, k + i * kStride, K);
            w_rows.load(w[i], later, place);
            x_rows.load(x[i], place);
        }
        multiply(w, x);
    }
    const auto place = [](int r, int c, int g, int column) {
        return (r * ColTiles + c) * kLanes + column * 4 + g;
    };
    put_sums(lds[wave], lane, place, sums, w_nans, x_nans);
    if constexpr (kActivated)
        store_activated<ColTiles>(ending, args.N, chunk, lds);
    else
        store_features<ColTiles>(ending, args.N, chunk, lds);
    return items;
}

// The arguments are Args, member by member.
MX_KERNEL(kThreads)
aiter_mx_moe_gemm_mfma(const unsigned char*, const unsigned char*, const unsigned char*,
                       const unsigned char*, const int*, const int*, const int*, const float*,
                       const void*, void*, unsigned char*, Offset, Offset, int, int, int, int, int,
                       int, int, int, float, float, float, int) {
    Held args(loaded_anew());
    MX_LDS u32x4 lds[kWaves][kWavePieces];
    const int lane = thread_in_group() % kLanes;

    // Looked up under the supposition that it is in use and a first chunk, as most are. The block's
    // expert is there before its ids, and weights are asked for at once.
    const unsigned own = group_y(), most_blocks = args.max_blocks;
    const int own_block = own < most_blocks ? own : 0;
    LookUp found(args, own_block, 0, lane);
    const int padded = load_scalar(args.post_padded);
    const bool is_used = own < most_blocks && own_block * args.block_m < padded;
    // Such a workgroup may have a later chunk.
    if (!is_used && own >= Items(args, padded).count)
        return;
    Tile w[kUnroll][kRowTiles];
    WRows w_rows(args, is_used ? found.expert : -1);
    if constexpr (kAhead)
        ask(w_rows, w, lane);
    finish_before_next();

    Chunk chunk(args, found, own_block, 0, lane);
    LaneMask valid = is_used ? chunk.valid() : 0;
    bool lds_in_use = false;
    unsigned step = is_used ? args.groups_y : 0; // to the next item
    for (unsigned item = own;;) {
        const auto computed = [&] {
            if (valid != 0 && static_cast<unsigned>(chunk.expert) < args.experts) {
                lds_in_use = true;
                if (kMostColTiles == 1 || valid >> kSide == 0)
                    return compute<1>(args, padded, chunk, w_rows, w, lds);
                constexpr int two = kMostColTiles < 2 ? kMostColTiles : 2;
                if (kMostColTiles == 2 || valid >> (2 * kSide) == 0)
                    return compute<two>(args, padded, chunk, w_rows, w, lds);
                return compute<kMostColTiles>(args, padded, chunk, w_rows, w, lds);
            }
            if (valid != 0)
                store_zeros(loaded_anew(), chunk);
            return Items(args, padded);
        };
        const Items items = computed();
        item += step;
        if (item >= items.count)
            return;
        args = Held(loaded_anew());
        step = args.groups_y;
        for (;; item += step) {
            if (item >= items.count)
                return;
            const int block = item % items.blocks, first = item / items.blocks * kCols;
            chunk = Chunk(args, LookUp(args, block, first, lane), block, first, lane);
            valid = chunk.valid();
            if (valid != 0)
                break;
        }
        w_rows = WRows(args, chunk.expert);
        if constexpr (kAhead)
            ask(w_rows, w, lane);
        if (lds_in_use)
            group_barrier();
    }
}
