// Decode linear for up to 64 rows of x on CDNA4: y = dequantised(x) * dequantised(w)^T + bias.
//
//   xq [M, K], wq [N, K]        e4m3 payload
//   xs [M, K/32], ws [N, K/32]  e8m0 scale of each 32 consecutive k
//                               or xq is bf16 or fp16, there is no xs, and x is quantised here
//   y  [M, N]                   fp32, bf16 or fp16
//   bias [N]                    any of these, or none
//
// A workgroup computes up to kRows consecutive outputs n for all m: as many as any other, or one
// more. Its waves take steps of K in turn and share nothing until their sums are added, in a fixed
// order.
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
#include "gfx950/memory.h"
#include "gfx950/tile.h"

using namespace mx;

constexpr int kRowTiles = MX_ROW_TILES;      // of w in a workgroup
constexpr int kColTiles = MX_COL_TILES;      // of x
constexpr int kFold = MX_FOLD;               // parts of K in a tile
constexpr int kWaves = MX_WAVES;             // of a workgroup
constexpr int kUnroll = MX_UNROLL;           // steps of a wave whose loads precede all use
constexpr bool kEvenBlocks = MX_EVEN_BLOCKS; // K / 32 is even
constexpr bool kQuantises = !kIsQuantised<MX_X>;
using Out = DType<MX_OUT>;
using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB

constexpr int kTileRows = kSide / kFold;
constexpr unsigned kStep = kFold * kTileK;   // k of a tile
constexpr unsigned kStride = kWaves * kStep; // k of a step of all waves
constexpr int kRows = kRowTiles * kTileRows;
constexpr int kThreads = kWaves * kLanes;
constexpr Offset kMaxGridX = MX_MAX_GRID_X; // groups beyond it continue in the grid's y

constexpr int kSumPieces = kRowTiles * kColTiles * kProductWords * 4 / kPiece;
constexpr int kWavePieces = kPieces > kSumPieces ? kPieces : kSumPieces; // LDS of a wave

// A lane's loads of a tile's first rows, in a step of K.
struct Place {
    unsigned payload, scales[2]; // offsets, or kNowhere past the end of K

    // The lane's place in the step of K that begins at first.
    MX_MEMBER Place(int lane, unsigned first, unsigned K) {
        const int quad = lane / 4 % 4, part = lane / kSide; // rows 4 quad.., a fourth of their k
        const unsigned k = first + 4 * quad / kTileRows * kTileK + part * 64 + lane % 4 * kPiece;
        payload = k < K ? 4 * quad % kTileRows * K + k : kNowhere;

        const int row = lane / 4;
        const unsigned blocks = K / kBlock;
        const unsigned block = (first + row / kTileRows * kTileK) / kBlock + lane % 4 * 2;
        for (int i = 0; i < 2; ++i)
            scales[i] = block + i < blocks ? row % kTileRows * blocks + block + i : kNowhere;
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

    template <bool Once>
    MX_MEMBER Tile load(int tile, const Place& place) const {
        Tile loaded;
        const unsigned first = tile * kTileRows * (K / kBlock);
        loaded.scales = kEvenBlocks ? scales.load_two_bytes(place.scales[0] + first)
                                    : scales.load_byte(place.scales[0] + first) |
                                          scales.load_byte(place.scales[1] + first) << 8;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const unsigned offset = place.payload + (tile * kTileRows + j) * K;
            loaded.payload[j] = Once ? payload.load_once(offset) : payload.load(offset);
        }
        return loaded;
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

    MX_MEMBER WideTile load(int tile, const Place& place) const {
        WideTile loaded;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const unsigned first = place.payload == kNowhere ? kNowhere : 2 * place.payload;
            const unsigned offset = first + 2 * (tile * kTileRows + j) * K;
            loaded.halves[j] = {values.load(offset), values.load(offset + 16)};
        }
        return loaded;
    }
};

// Rows of x, their tiles as loaded, and as operands.
template <bool Quantises>
struct Activations {
    using Loaded = Tile;
    Rows rows;

    MX_MEMBER Activations(const unsigned char* q, const unsigned char* s, unsigned M, unsigned K)
        : rows(q, s, 0, M, K) {}
    MX_MEMBER Tile load(int tile, const Place& place) const {
        return rows.template load<false>(tile, place);
    }
    MX_MEMBER static Operand operand(u32x4* lds, const Tile& loaded, int lane) {
        return transpose(lds, loaded, lane);
    }
};
template <>
struct Activations<true> {
    using Loaded = WideTile;
    WideRows rows;

    MX_MEMBER Activations(const unsigned char* x, const unsigned char*, unsigned M, unsigned K)
        : rows(x, M, K) {}
    MX_MEMBER WideTile load(int tile, const Place& place) const { return rows.load(tile, place); }
    MX_MEMBER static Operand operand(u32x4* lds, const WideTile& loaded, int lane) {
        return transpose_payload(lds, loaded.quantise(lane), lane);
    }
};
using X = Activations<kQuantises>;

// Where rows 4 g to 4 g + 3 of a column of a product are kept in LDS, in pieces of 16 bytes. Lanes
// that write together have adjacent columns, those that read have adjacent outputs: adjacent rows
// of w, then the next row of x. The exclusive or puts either in different banks.
MX_DEVICE int place_of_sums(int row_tile, int col_tile, int g, int column) {
    constexpr int of_tile = kTileRows / 4, of_group = kRowTiles * of_tile;
    constexpr int spread = of_group > 8 ? 1 : of_group > 4 ? 2 : of_group > 2 ? 4 : 16 / of_group;
    const int piece = row_tile * of_tile + g % of_tile; // of all that one row of x has
    const int swizzled = column ^ (piece * spread ^ col_tile * kTileRows) % kSide;
    return (row_tile * kColTiles + col_tile) * kLanes + g * kSide + swizzled;
}

// Has the scalar arguments loaded at once: left alone, each is loaded where it is first used, and
// the latencies add up.
MX_DEVICE void wait_for_arguments(Offset M, Offset N, Offset K, int bias_kind, unsigned rows_each,
                                  Offset longer) {
    asm volatile("" ::"s"(M), "s"(N), "s"(K), "s"(bias_kind), "s"(rows_each), "s"(longer));
}

MX_KERNEL(kThreads)
aiter_mx_linear_mfma(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                     const unsigned char* ws, const void* bias, Out* y, Offset M, Offset N,
                     Offset k_size, int bias_kind, unsigned rows_each, Offset longer) {
    const Offset group = group_y() * kMaxGridX + group_x();
    wait_for_arguments(M, N, k_size, bias_kind, rows_each, longer);
    const bool is_longer = group < longer;
    const Offset first_row = group * rows_each + (is_longer ? group : longer);
    if (first_row >= N)
        return;
    const unsigned rows = rows_each + is_longer;
    const unsigned K = k_size;
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();

    const BiasLoad own_bias(bias, bias_kind, first_row, rows, thread_in_group());
    const X x_rows(xq, xs, M, K);
    const Rows w_rows(wq, ws, first_row, rows, K);
    MX_LDS float added[kRows];
    MX_LDS u32x4 lds[kWaves][kWavePieces];

    f32x4 sums[kRowTiles][kColTiles] = {};
    NanNotes w_nans[kRowTiles], x_nans[kColTiles];
    for (unsigned first = wave * kStep; first < K; first += kUnroll * kStride) {
        Tile w[kUnroll][kRowTiles];
        X::Loaded x[kUnroll][kColTiles];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) { // a step past the end of K loads zeros
            const Place place(lane, first + i * kStride, K);
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
                w[i][r] = w_rows.load<true>(r, place);
#pragma unroll
            for (int c = 0; c < kColTiles; ++c)
                x[i][c] = x_rows.load(c, place);
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            multiply_step(lds[wave], w[i], x[i], lane, X::operand, sums, w_nans, x_nans);
    }

    put_sums(lds[wave], lane, place_of_sums, sums, w_nans, x_nans);
    if (thread_in_group() < kRows)
        added[thread_in_group()] = own_bias.to_f32();
    group_barrier();
    for (int i = thread_in_group(); i < static_cast<int>(M) * kRows; i += kThreads) {
        const int m = i / kRows, row = i % kRows;
        if (row >= static_cast<int>(rows))
            continue;
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kWaves; ++v)
#pragma unroll
            for (int f = 0; f < kFold; ++f) {
                const int operand_row = f * kTileRows + row % kTileRows;
                const int place = place_of_sums(row / kTileRows, m / kTileRows, operand_row / 4,
                                                f * kTileRows + m % kTileRows);
                sum += reinterpret_cast<const float*>(lds[v] + place)[operand_row % 4];
            }
        store(y + m * N + first_row + row, sum + added[row]);
    }
}
