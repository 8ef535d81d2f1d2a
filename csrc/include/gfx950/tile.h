// Tiles of the scaled matrix instruction, and their way from memory into its operands. A tile is
// what two instructions take of one operand: 16 rows of 256 k.
//
// Loading a tile, 4 adjacent lanes have 64 adjacent bytes, as the address unit takes 4 lanes at a
// time if they are in one cache line. As an operand, adjacent lanes have adjacent rows. Each wave
// transposes its tiles in LDS.
//
// A wave adds the products of its tiles a step of K at a time, and leaves its sums in LDS, where
// they meet those of other waves.
#pragma once

#include "common/target.h"
#include "gfx950/memory.h"
#include "gfx950/mfma.h"

namespace mx {

#define MX_LDS_POINTER __attribute__((address_space(3)))

constexpr unsigned kBlock = 32;              // k of one scale
constexpr unsigned kTileK = 2 * kDepth;      // of one operand row
constexpr unsigned kPiece = 16;              // bytes of one load
constexpr int kRowPieces = kTileK / kPiece;  // of an operand row
constexpr int kPieces = kSide * kRowPieces;  // of a tile
constexpr int kLoads = kPieces / kLanes;     // of a lane for a tile
constexpr int kProductWords = kSide * kSide; // sums of a row tile with a column tile

struct Tile { // as loaded: of 4 lanes, rows 4 a to 4 a + 3, one by each load
    u32x4 payload[kLoads];
    unsigned scales; // of two blocks, in bytes 0 and 1
};

struct Operand {
    u32x8 rows[2];   // for two instructions
    unsigned scales; // byte i for instruction i
};

// The lane's part in transposing tiles in the wave's LDS. Piece p of operand row r is kept at place
// p ^ r of its row, so that any 8 lanes that are served together are in different banks.
struct Turn {
    MX_LDS_POINTER u32x4 *put[kLoads], *take[2][2];

    MX_MEMBER Turn(u32x4* lds, int lane) {
        const int quad = lane / 4 % 4, part = lane / kSide;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
            const int row = 4 * quad + j;
            put[j] = place(lds, row, part * 4 + lane % 4);
        }
        // Lane group g has half g % 2 of the instruction's blocks g / 2 and 2 + g / 2, its scale is
        // that of block g: which is to be block 2 g + i of the tile's row.
        const int g = lane / kSide;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                take[i][half] = place(lds, lane % kSide, 2 * (2 * (g / 2) + i) + g % 2 + 8 * half);
    }
    // The scales are taken as they are.
    MX_MEMBER Operand payload(const Tile& tile) const {
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            *put[j] = tile.payload[j];
        wave_in_order();
        Operand operand;
#pragma unroll
        for (int i = 0; i < 2; ++i)
            operand.rows[i] =
                __builtin_shufflevector(*take[i][0], *take[i][1], 0, 1, 2, 3, 4, 5, 6, 7);
        wave_in_order();
        operand.scales = tile.scales;
        return operand;
    }
    MX_MEMBER Operand whole(const Tile& tile, int lane) const {
        Operand operand = payload(tile);
        operand.scales = of_lane(lane % kSide * 4 + lane / kSide, tile.scales);
        return operand;
    }

    // Has its addresses kept in registers: the compiler would make them anew for each tile.
    MX_MEMBER void keep() {
#pragma unroll
        for (int j = 0; j < kLoads; ++j)
            asm volatile("" : "+v"(put[j]));
#pragma unroll
        for (int i = 0; i < 4; ++i)
            asm volatile("" : "+v"(take[i / 2][i % 2]));
    }

  private:
    MX_MEMBER static MX_LDS_POINTER u32x4* place(u32x4* lds, int row, int piece) {
        return (MX_LDS_POINTER u32x4*)(lds + row * kRowPieces + (piece ^ row));
    }
};

MX_DEVICE Operand transpose(u32x4* lds, const Tile& tile, int lane) {
    return Turn(lds, lane).whole(tile, lane);
}

// The instruction's treatment of NaN scales is not relied on: a row that has one is noted here, and
// gets a NaN payload at the end.
struct NanNotes {
    unsigned bits = 0;

    MX_MEMBER void take(unsigned scales) { // bit 7 of a byte stays set if the byte is 255
        bits |= ((scales & 0x7f7f7f7f) + 0x01010101) & scales;
    }
    MX_MEMBER u32x8 payload() const {
        constexpr unsigned nans = 0x7f7f7f7f;
        return bits & 0x80808080 ? u32x8{nans} : u32x8{};
    }
    MX_MEMBER bool in_wave() const { // of any lane, which all know
        return lanes_where(bits & 0x80808080) != 0;
    }
};

// A step's tiles as loaded; operand_of makes operands of tiles of x. Tiles are transposed in the
// wave's LDS.
template <int RowTiles, int ColTiles, class X, class OperandOf>
MX_DEVICE void multiply_step(u32x4* lds, const Tile (&w)[RowTiles], const X (&x)[ColTiles],
                             int lane, OperandOf operand_of, f32x4 (&sums)[RowTiles][ColTiles],
                             NanNotes (&w_nans)[RowTiles], NanNotes (&x_nans)[ColTiles]) {
    finish_before_next(); // transposing several steps at once would take more registers
    Operand a[RowTiles];
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) {
        a[r] = transpose(lds, w[r], lane);
        w_nans[r].take(a[r].scales);
    }
#pragma unroll
    for (int c = 0; c < ColTiles; ++c) {
        const Operand b = operand_of(lds, x[c], lane);
        x_nans[c].take(b.scales);
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) {
            f32x4& sum = sums[r][c];
            sum = multiply_scaled<0>(a[r].rows[0], a[r].scales, b.rows[0], b.scales, sum);
            sum = multiply_scaled<1>(a[r].rows[1], a[r].scales, b.rows[1], b.scales, sum);
        }
    }
}

// Puts rows 4 g to 4 g + 3 of a column of a product, with NaN where a scale was, at piece
// place(r, c, g, column).
template <int RowTiles, int ColTiles, class PlaceOf>
MX_DEVICE void put_sums(u32x4* lds, int lane, PlaceOf place, f32x4 (&sums)[RowTiles][ColTiles],
                        const NanNotes (&w_nans)[RowTiles], const NanNotes (&x_nans)[ColTiles]) {
    NanNotes any;
    for (const NanNotes& notes : w_nans)
        any.bits |= notes.bits;
    for (const NanNotes& notes : x_nans)
        any.bits |= notes.bits;
    if (any.in_wave()) {
#pragma unroll
        for (int r = 0; r < RowTiles; ++r)
#pragma unroll
            for (int c = 0; c < ColTiles; ++c)
                sums[r][c] = multiply_scaled<0>(w_nans[r].payload(), kUnitScale,
                                                x_nans[c].payload(), kUnitScale, sums[r][c]);
    }
#pragma unroll
    for (int r = 0; r < RowTiles; ++r)
#pragma unroll
        for (int c = 0; c < ColTiles; ++c)
            lds[place(r, c, lane / kSide, lane % kSide)] = __builtin_bit_cast(u32x4, sums[r][c]);
}

} // namespace mx
