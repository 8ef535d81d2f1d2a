// Sums of tiles of w with tiles of x, of a wave: a step of K after the other, then to LDS, where
// they meet those of other waves.
#pragma once

#include "gfx950/tile.h"

namespace mx {

// A step's tiles as loaded; operand_of makes operands of tiles of x. Tiles are turned in the
// wave's LDS.
template <int RowTiles, int ColTiles, class X, class OperandOf>
MX_DEVICE void multiply_step(u32x4* lds, const Tile (&w)[RowTiles], const X (&x)[ColTiles],
                             int lane, OperandOf operand_of, f32x4 (&sums)[RowTiles][ColTiles],
                             NanNotes (&w_nans)[RowTiles], NanNotes (&x_nans)[ColTiles]) {
    finish_before_next(); // turning several steps at once would take more registers
    Operand a[RowTiles];
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) {
        a[r] = turn(lds, w[r], lane);
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
MX_DEVICE void put_sums(u32x4* lds, int lane, PlaceOf place,
                        const f32x4 (&sums)[RowTiles][ColTiles], const NanNotes (&w_nans)[RowTiles],
                        const NanNotes (&x_nans)[ColTiles]) {
#pragma unroll
    for (int r = 0; r < RowTiles; ++r)
#pragma unroll
        for (int c = 0; c < ColTiles; ++c) {
            const f32x4 sum = multiply_scaled<0>(w_nans[r].payload(), kUnitScale,
                                                 x_nans[c].payload(), kUnitScale, sums[r][c]);
            lds[place(r, c, lane / kSide, lane % kSide)] = __builtin_bit_cast(u32x4, sum);
        }
}

} // namespace mx
