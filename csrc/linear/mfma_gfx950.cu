// Linear for few rows of x on CDNA4: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//                               or xq is bf16 or fp16, there is no xs, and x is quantised here
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A workgroup computes up to kRows consecutive outputs n for all m: as many as any other, or one
// more. Its waves take steps of K in turn and share nothing until their sums are added, in a fixed
// order. A wave asks for its next step while it multiplies one.
//
// Rows of x make blocks of kBlockRows, each with workgroups of its own, which read w too.
//
// With kSplits, so many workgroups have a part of K each of the same outputs. Each wave leaves sums
// of its share of these in memory; of waves with the same share, the last to do so adds them all,
// in the order of their parts.
//
// w is operand A of the scaled matrix instruction, x is B. A tile is what two instructions take of
// one operand: 16 rows of 256 k, in memory
//
//   kFold 1: 16 rows                          kFold 2: 8 rows, of 512 k
//
//   k ->     |0           255|                k ->     |0            255|256           511|
//   row 0    |operand row 0  |                row 0    |operand row 0   |operand row 8    |
//   ...      |               |                ...      |                |                 |
//   row 15   |operand row 15 |                row 7    |operand row 7   |operand row 15   |
//
// and likewise for 4. Folded, few rows of x fill the instruction, and few rows of w make a
// workgroup, so that small N occupies more compute units. Of a folded product only the blocks on
// its diagonal mean anything, where both operands have the same k; they are added at the end.

#include "common/target.h"
#include "fused.h"
#include "gfx950/bias.h"
#include "gfx950/memory.h"
#include "gfx950/tile.h"

using namespace mx;

constexpr int kRowTiles = MX_ROW_TILES;      // of w in a workgroup
constexpr int kColTiles = MX_COL_TILES;      // of x, of a block
constexpr int kFold = MX_FOLD;               // parts of K in a tile
constexpr int kWaves = MX_WAVES;             // of a workgroup
constexpr int kUnroll = MX_UNROLL;           // steps of a wave whose loads precede all use
constexpr int kSplits = MX_SPLITS;           // workgroups that share K
constexpr bool kEvenBlocks = MX_EVEN_BLOCKS; // K / 32 is even
constexpr bool kQuantises = !kIsQuantised<MX_X>;
using Out = DType<MX_OUT>;
using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB

constexpr int kTileRows = kSide / kFold;
constexpr unsigned kStep = kFold * kTileK;   // k of a tile
constexpr unsigned kStride = kWaves * kStep; // k of a step of all waves
constexpr int kRows = kRowTiles * kTileRows;
constexpr unsigned kBlockRows = kColTiles * kTileRows; // of x
constexpr int kThreads = kWaves * kLanes;
constexpr unsigned kMaxGridX = MX_MAX_GRID_X; // groups beyond it continue in the grid's y

constexpr int kSumPieces = kRowTiles * kColTiles * kProductWords * 4 / kPiece;
constexpr int kWavePieces = kPieces > kSumPieces ? kPieces : kSumPieces; // LDS of a wave
constexpr int kResultPieces = kRows / 4;                                 // of a row of x
constexpr int kRowPairs = kRows / 2;
constexpr int kMostPairs = kRowPairs * kColTiles * kTileRows; // of a workgroup's sums

// The part of a tile's first rows that a lane loads, of a payload and of two scales.
struct LanePart {
    unsigned row, k, scale_row, block;

    MX_MEMBER explicit LanePart(int lane) {
        const int quad = lane / 4 % 4, part = lane / kSide; // rows 4 quad.., a fourth of their k
        row = 4 * quad % kTileRows;
        k = 4 * quad / kTileRows * kTileK + part * 64 + lane % 4 * kPiece;
        scale_row = lane / 4 % kTileRows;
        block = lane / 4 / kTileRows * (kTileK / kBlock) + lane % 4 * 2;
        asm volatile("" : "+v"(row), "+v"(k), "+v"(scale_row), "+v"(block)); // computed here
    }
};

// A lane's loads of a tile's first rows, in a step of K.
struct Place {
    unsigned payload, scales[2]; // offsets, or kNowhere past the end of the workgroup's part of K

    // The lane's place in the step of K that begins at first.
    MX_MEMBER Place(const LanePart& part, unsigned first, unsigned end, unsigned K) {
        const unsigned k = first + part.k, at = part.row * K + k;
        payload = k < end ? at : kNowhere;
        const unsigned block = first / kBlock + part.block, in_rows = part.scale_row * (K / kBlock);
        for (int i = 0; i < 2; ++i)
            scales[i] = block + i < end / kBlock ? in_rows + block + i : kNowhere;
    }
};

// A tile as loaded. Its scales are made one word where they are used: a wave that did so earlier
// would wait for all that is under way.
struct LoadedTile {
    u32x4 payload[kLoads];
    unsigned scales[kEvenBlocks ? 1 : 2];

    MX_MEMBER Tile tile() const {
        Tile tile;
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            tile.payload[j] = payload[j];
        tile.scales = kEvenBlocks ? scales[0] : scales[0] | scales[kEvenBlocks ? 0 : 1] << 8;
        return tile;
    }
};

// Rows of x or w, from the first that the workgroup needs.
struct Rows {
    Buffer payload, scales;
    unsigned K;

    MX_MEMBER Rows(const unsigned char* q, const unsigned char* s, Offset first, unsigned rows,
                   unsigned K)
        : payload(q + first * K, rows * K), scales(s + first * (K / kBlock), rows * (K / kBlock)),
          K(K) {}

    // Load j of a tile: its rows differ by an offset that all lanes share.
    template <bool Once>
    MX_MEMBER void load_payload(LoadedTile& to, int tile, int j, const Place& place) const {
        const unsigned further = (tile * kTileRows + j) * K;
        to.payload[j] =
            Once ? payload.load_once(place.payload, further) : payload.load(place.payload, further);
    }
    MX_MEMBER void load_scales(LoadedTile& to, int tile, const Place& place) const {
        const unsigned further = tile * kTileRows * (K / kBlock);
        if constexpr (kEvenBlocks) {
            to.scales[0] = scales.load_two_bytes(place.scales[0], further);
        } else {
            to.scales[0] = scales.load_byte(place.scales[0], further);
            to.scales[1] = scales.load_byte(place.scales[1], further);
        }
    }
    // Load j, with the first of them the scales.
    template <bool Once>
    MX_MEMBER void load(LoadedTile& to, int tile, int j, const Place& place) const {
        load_payload<Once>(to, tile, j, place);
        if (j == 0)
            load_scales(to, tile, place);
    }
};

// A tile of x that is yet to be quantised: as a Tile, with half a block for each 16 bytes.
struct WideTile {
    HalfBlock<MX_X> halves[kLoads];

    // Its scales come out where operands have theirs: lane l has blocks 2 g and 2 g + 1, g = l /
    // 16, of operand row l % 16, which is 4 (l / 4 % 4) + l % 4. Before, four lanes have half a
    // block each of blocks 2 g, 2 g, 2 g + 1, 2 g + 1 of four rows.
    MX_MEMBER Tile quantise(int lane) const {
        Tile tile;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const QuantisedHalf half = quantised(halves[j]);
            tile.payload[j] = half.payload;
            const unsigned other = float_to_bits(across<2>(bits_to_float(half.scale)));
            const unsigned both = lane & 2 ? other | half.scale << 8 : half.scale | other << 8;
            tile.scales = j == 0 || lane % kLoads == j ? both : tile.scales;
            finish_before_next(); // rows side by side would take too many registers
        }
        return tile;
    }
};
static_assert(kLoads == 4);

// Rows of x before quantisation.
struct WideRows {
    Buffer values;
    unsigned K;

    MX_MEMBER WideRows(const unsigned char* x, unsigned rows, unsigned K)
        : values(x, 2 * rows * K), K(K) {}

    MX_MEMBER void load(WideTile& to, int tile, int j, const Place& place) const {
        const unsigned offset = place.payload == kNowhere ? kNowhere : 2 * place.payload;
        const unsigned further = 2 * (tile * kTileRows + j) * K;
        to.halves[j] = {values.load(offset, further), values.load(offset + 16, further)};
    }
};

// Rows of x, their tiles as loaded, and as operands.
template <bool Quantises>
struct Activations {
    using Loaded = LoadedTile;
    Rows rows;

    MX_MEMBER Activations(const unsigned char* q, const unsigned char* s, Offset first, unsigned M,
                          unsigned K)
        : rows(q, s, first, M, K) {}
    MX_MEMBER void load(LoadedTile& to, int tile, int j, const Place& place) const {
        rows.template load<false>(to, tile, j, place);
    }
    MX_MEMBER static Operand operand(const Turn& turn, const LoadedTile& loaded, int lane) {
        return turn.whole(loaded.tile(), lane);
    }
};
template <>
struct Activations<true> {
    using Loaded = WideTile;
    WideRows rows;

    MX_MEMBER Activations(const unsigned char* x, const unsigned char*, Offset first, unsigned M,
                          unsigned K)
        : rows(x + 2 * first * K, M, K) {}
    MX_MEMBER void load(WideTile& to, int tile, int j, const Place& place) const {
        rows.load(to, tile, j, place);
    }
    MX_MEMBER static Operand operand(const Turn& turn, const WideTile& loaded, int lane) {
        return turn.payload(loaded.quantise(lane));
    }
};
using X = Activations<kQuantises>;

// Tiles of w and of x take turns as long as there are both, so that some loads under way come from
// memory and some from the cache: those of w before tile t of a step. The first is of w.
constexpr int kTiles = kRowTiles + kColTiles;
constexpr int kPairs = kRowTiles < kColTiles ? kRowTiles : kColTiles;
constexpr int rows_before(int t) {
    return t < 2 * kPairs ? (t + 1) / 2 : kRowTiles > kPairs ? t - kColTiles : kRowTiles;
}
constexpr bool is_row(int t) { return rows_before(t) < rows_before(t + 1); }

// Adds the products of a step. Tiles are transposed in the wave's LDS; once a tile is there, what
// the next step needs in its registers is asked for.
template <class LoadNext>
MX_DEVICE void multiply_step(const Turn& turn, LoadedTile (&w)[kRowTiles],
                             X::Loaded (&x)[kColTiles], int lane,
                             f32x4 (&sums)[kRowTiles][kColTiles], NanNotes (&w_nans)[kRowTiles],
                             NanNotes (&x_nans)[kColTiles], LoadNext load_next) {
    Operand a[kRowTiles], b[kColTiles];
    const auto add = [&](int r, int c) {
        f32x4& sum = sums[r][c];
        sum = multiply_scaled<0>(a[r].rows[0], a[r].scales, b[c].rows[0], b[c].scales, sum);
        sum = multiply_scaled<1>(a[r].rows[1], a[r].scales, b[c].rows[1], b[c].scales, sum);
    };
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        finish_before_next(); // transposing several at once would take more registers
        const int rows = rows_before(t), cols = t - rows;
        if (is_row(t)) {
            a[rows] = turn.whole(w[rows].tile(), lane);
            w_nans[rows].take(a[rows].scales);
        } else {
            b[cols] = X::operand(turn, x[cols], lane);
            x_nans[cols].take(b[cols].scales);
        }
        load_next(t);
#pragma unroll
        for (int i = 0; i < (is_row(t) ? cols : rows); ++i)
            is_row(t) ? add(rows, i) : add(i, cols);
    }
}

// Where rows 4 g to 4 g + 3 of a column of a product are kept in LDS, in pieces of 16 bytes. Lanes
// that write together have adjacent columns, those that read have adjacent outputs: rows of w, then
// the next row of x. The exclusive or puts either in different banks.
MX_DEVICE int place_of_sums(int row_tile, int col_tile, int g, int column) {
    constexpr int of_tile = kTileRows / 4, of_group = kResultPieces;
    constexpr int spread = of_group > 8 ? 1 : of_group > 4 ? 2 : of_group > 2 ? 4 : 16 / of_group;
    const int piece = row_tile * of_tile + g % of_tile; // of all that one row of x has
    const int swizzled = column ^ (piece * spread ^ col_tile * kTileRows) % kSide;
    return (row_tile * kColTiles + col_tile) * kLanes + g * kSide + swizzled;
}

// Two outputs of adjacent rows of w, which a thread adds up and stores.
struct Outputs {
    // Their sums lie at the same place of each wave's LDS, one for each part of K that is side by
    // side in a tile.
    MX_LDS_POINTER const f32x2* of_first_wave[kFold];
    unsigned at, next; // bytes of the results, or kNowhere
    int row;
    bool are_own; // of the workgroup

    MX_MEMBER static Outputs number(int i, const u32x4* lds, unsigned N, int M, int rows) {
        Outputs outputs;
        const int m = i / kRowPairs;
        outputs.row = i % kRowPairs * 2;
        const unsigned at = (m * N + outputs.row) * sizeof(Out);
        outputs.are_own = m < M && outputs.row < rows;
        outputs.at = outputs.are_own ? at : kNowhere;
        outputs.next = outputs.are_own && outputs.row + 1 < rows ? at + sizeof(Out) : kNowhere;
        const int row = outputs.row % kRows, column = m % (kColTiles * kTileRows);
#pragma unroll
        for (int f = 0; f < kFold; ++f) {
            const int operand_row = f * kTileRows + row % kTileRows;
            const int piece = place_of_sums(row / kTileRows, column / kTileRows, operand_row / 4,
                                            f * kTileRows + column % kTileRows);
            outputs.of_first_wave[f] =
                (MX_LDS_POINTER const f32x2*)(lds + piece) + operand_row % 4 / 2;
        }
        return outputs;
    }
    MX_MEMBER f32x2 sums() const {
        f32x2 sums = {};
#pragma unroll
        for (int v = 0; v < kWaves; ++v)
#pragma unroll
            for (int f = 0; f < kFold; ++f)
                sums += of_first_wave[f][v * kWavePieces * 2];
        return sums;
    }
    MX_MEMBER void store(const Buffer& results, f32x2 values) const {
        results.store(at, static_cast<Out>(values.x));
        results.store(next, static_cast<Out>(values.y));
    }
    // Has the addresses computed here: the compiler would do it when all waits for them.
    MX_MEMBER void keep() {
        asm volatile("" : "+v"(at), "+v"(next));
#pragma unroll
        for (int f = 0; f < kFold; ++f)
            asm volatile("" : "+v"(of_first_wave[f]));
    }
};

// Where workgroups that share K meet by twos: one leaves its sums, the other adds them to its own.
struct Handover {
    unsigned char* slots; // of two sums each: zero when a launch begins, and when it ends
    unsigned tiles;       // of outputs, for a block of x
};

// What a slot holds of two sums, which is never zero.
MX_DEVICE unsigned long as_left(f32x2 sums) {
    const unsigned low =
        min(float_to_bits(sums.x), ~1u); // 2^32 - 1 is a NaN, and so is what is below
    return static_cast<unsigned long>(float_to_bits(sums.y)) << 32 | (low + 1);
}
MX_DEVICE f32x2 sums_left(unsigned long left) {
    return {bits_to_float(static_cast<unsigned>(left) - 1),
            bits_to_float(static_cast<unsigned>(left >> 32))};
}

// Adds the sums of the workgroups that share a tile, by twos: whichever of two comes later goes on.
// Either order gives the same bits. What is left to others is no longer the thread's own.
template <int Each>
MX_DEVICE void meet(const Handover& handover, unsigned part, unsigned tile, f32x2 (&sums)[Each],
                    Outputs (&own)[Each]) {
    constexpr unsigned bytes = (kSplits - 1) * kMostPairs * sizeof(unsigned long);
    const Buffer slots(handover.slots + static_cast<Offset>(tile) * bytes, bytes);
    unsigned first = 0; // slot of the level
#pragma unroll
    for (unsigned nodes = kSplits; nodes > 1; nodes = (nodes + 1) / 2) {
        if ((part ^ 1) < nodes) {
            unsigned long left[Each];
            unsigned at[Each];
#pragma unroll
            for (int e = 0; e < Each; ++e) {
                const unsigned slot = first + part / 2 * kMostPairs + e * kThreads;
                at[e] =
                    own[e].are_own ? (slot + thread_in_group()) * sizeof(unsigned long) : kNowhere;
                left[e] = slots.exchange_for_all(at[e], as_left(sums[e]));
            }
#pragma unroll
            for (int e = 0; e < Each; ++e) {
                const bool goes_on = static_cast<unsigned>(left[e]) != 0;
                slots.clear_for_all(goes_on ? at[e] : kNowhere);
                own[e].are_own = own[e].are_own && goes_on;
                own[e].at = goes_on ? own[e].at : kNowhere;
                own[e].next = goes_on ? own[e].next : kNowhere;
                sums[e] += sums_left(left[e]);
            }
        }
        first += nodes / 2 * kMostPairs;
        part /= 2;
    }
}

struct Arguments {
    unsigned M, N, K, rows_each, longer;
    const unsigned char *xq, *xs, *wq, *ws;
    const void* bias;
    Out* y;
    int bias_kind;
};

// Has the arguments that registers do not hold when a wave begins loaded at once, behind the first
// weights: left alone, each is loaded where it is first used, and the latencies add up.
MX_DEVICE void ask_for_the_rest(const Arguments& a, const Handover& handover) {
    asm volatile("" ::"s"(a.bias), "s"(a.y), "s"(a.bias_kind));
    if constexpr (kSplits > 1)
        asm volatile("" ::"s"(handover.slots));
}

// The pointer, of which the compiler computes nothing before this.
MX_DEVICE const unsigned char* from_here(const unsigned char* pointer) {
    asm volatile("" : "+s"(pointer));
    return pointer;
}

MX_DEVICE void multiply(const Arguments& a, Handover handover) {
    const unsigned group = group_y() * kMaxGridX + group_x();
    const int lane = thread_in_group() % kLanes, wave = wave_in_group();
    const LanePart lane_part(lane);
    const unsigned tile = group / kSplits, part = group % kSplits;
    const unsigned first_row = tile * a.rows_each + min(tile, a.longer);
    if (first_row >= a.N)
        return;
    const unsigned rows = a.rows_each + (tile < a.longer);
    const unsigned K = a.K, k_each = (K + kSplits * kStep - 1) / (kSplits * kStep) * kStep;
    const unsigned begin = part * k_each, end = min(begin + k_each, K);
    const unsigned first_m = group_z() * kBlockRows;
    const unsigned own_m = min(a.M - first_m, kBlockRows);

    const Rows w_rows(a.wq, a.ws, first_row, rows, K);
    MX_LDS u32x4 lds[kWaves][kWavePieces];

    LoadedTile w[kUnroll][kRowTiles];
    X::Loaded x[kUnroll][kColTiles];
    unsigned first = begin + wave * kStep;
    const Place begun(lane_part, first, end, K);
    w_rows.load_payload<true>(w[0][0], 0, 0, begun);
    finish_before_next(); // memory is asked for weights before the rest has addresses
    w_rows.load_scales(w[0][0], 0, begun);
    const X x_rows(from_here(a.xq), from_here(a.xs), first_m, own_m, K);
    const auto load = [&](int i, int t, int j, const Place& place) { // of a wave's step i, tile t
        const int rows = rows_before(t), cols = t - rows;
        is_row(t) ? w_rows.load<true>(w[i][rows], rows, j, place)
                  : x_rows.load(x[i][cols], cols, j, place);
    };
    const auto load_tile = [&](int i, int t, const Place& place) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            load(i, t, j, place);
    };
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) { // a step past the end of K loads zeros
        const Place place(lane_part, first + i * kStride, end, K);
#pragma unroll
        for (int pair = 0; pair < kTiles; pair += 2)
#pragma unroll
            for (int j = 0; j < kLoads; ++j)
#pragma unroll
                for (int t = pair; t < min(pair + 2, kTiles); ++t)
                    if (i > 0 || t > 0 || j > 0) {
                        finish_before_next(); // what is used first arrives first
                        load(i, t, j, place);
                    }
    }
    finish_before_next();
    ask_for_the_rest(a, handover);
    const BiasLoad own_bias(a.bias, a.bias_kind, first_row, rows, thread_in_group());
    f32x4 sums[kRowTiles][kColTiles] = {};
    NanNotes w_nans[kRowTiles], x_nans[kColTiles];
    Turn turn(lds[wave], lane);
    turn.keep();

    constexpr int kEach = (kMostPairs + kThreads - 1) / kThreads; // of a thread
    Offset first_result = static_cast<Offset>(first_m) * a.N + first_row;
    asm volatile("" : "+s"(first_result)); // one number, and computed here
    const Buffer results(reinterpret_cast<unsigned char*>(a.y + first_result),
                         own_m * a.N * sizeof(Out));
    Outputs own[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        own[e] = Outputs::number(e * kThreads + thread_in_group(), lds[0], a.N, own_m, rows);
        if constexpr (kEach == 1)
            own[e].keep();
    }
    const auto multiply_round = [&](auto load_next) {
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const Place next(lane_part, first + (kUnroll + i) * kStride, end, K);
            multiply_step(turn, w[i], x[i], lane, sums, w_nans, x_nans,
                          [&](int t) { load_next(i, t, next); });
        }
    };
    for (; first + kUnroll * kStride < end; first += kUnroll * kStride)
        multiply_round(load_tile);
    multiply_round([](int, int, const Place&) {});

    put_sums(lds[wave], lane, place_of_sums, sums, w_nans, x_nans);
    MX_LDS f32x4 added[kResultPieces];
    if (thread_in_group() < kRows)
        reinterpret_cast<float*>(added)[thread_in_group()] = own_bias.to_f32();
    group_barrier();
    f32x2 sums_of[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e)
        sums_of[e] = own[e].sums();
    if constexpr (kSplits > 1)
        meet(handover, part, group_z() * handover.tiles + tile, sums_of, own);
#pragma unroll
    for (int e = 0; e < kEach; ++e)
        own[e].store(results, sums_of[e] + reinterpret_cast<const f32x2*>(added)[own[e].row / 2]);
}

// As many arguments as there is room for come in registers: those up to ws.
#if MX_SPLITS == 1
MX_KERNEL(kThreads)
aiter_mx_linear_mfma(unsigned M, unsigned N, unsigned K, unsigned rows_each, unsigned longer,
                     unsigned, const unsigned char* xq, const unsigned char* xs,
                     const unsigned char* wq, const unsigned char* ws, const void* bias, Out* y,
                     int bias_kind) {
    multiply({M, N, K, rows_each, longer, xq, xs, wq, ws, bias, y, bias_kind}, {});
}
#else
MX_KERNEL(kThreads)
aiter_mx_linear_mfma_split(unsigned M, unsigned N, unsigned K, unsigned rows_each, unsigned longer,
                           unsigned tiles, const unsigned char* xq, const unsigned char* xs,
                           const unsigned char* wq, const unsigned char* ws, const void* bias,
                           Out* y, unsigned char* slots, int bias_kind) {
    multiply({M, N, K, rows_each, longer, xq, xs, wq, ws, bias, y, bias_kind}, {slots, tiles});
}
#endif
