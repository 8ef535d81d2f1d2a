// Brings the scales that staged_sm90.cu left in the workspace, tile after tile, to their
// row-major matrices.
//
// A lane takes 4 bytes of kLines lines. They come from one tile (for rows of fp32: two), where the
// lines follow each other:
//
//     tile 0  tile 1  ...            line 0  |lane 0|lane 1|...
//     line 0  line 0                 line 1  |lane 0|lane 1|...
//     line 1  line 1
//
// so that neighbours store neighbouring words. Lines of less than 32 words take as many lanes as
// the next power of two; longer ones a multiple of 32. Where lines are no multiple of 4 bytes, a
// lane stores its bytes one by one.

#include "groups.h"
#include "tile_sm90.h"

using namespace mx;

constexpr int kLines = MX_LINES;

// One of the two matrices of scales, of each matrix of x: strips of tiles behind each other.
struct Matrix {
    const unsigned char* staged;
    unsigned char* to;
    unsigned lines, pitch; // bytes of a line
    unsigned strips, tiles, tile_lines, tile_bytes;
    unsigned lanes;         // of a line
    const TileRows* places; // of the lines of each strip; null where strips follow each other

    MX_MEMBER unsigned lanes_of_strip() const { return tile_lines / kLines * lanes; }
};

// 4 bytes of kLines lines, from Tiles tiles side by side.
template <int Tiles>
MX_DEVICE void load_words(const unsigned char* from, unsigned tile_bytes,
                          unsigned (&words)[kLines]) {
    Words<kLines / Tiles> parts[Tiles];
#pragma unroll
    for (int i = 0; i < Tiles; ++i)
        parts[i] = *reinterpret_cast<const Words<kLines / Tiles>*>(from + i * tile_bytes);
#pragma unroll
    for (int i = 0; i < kLines; ++i)
        if constexpr (Tiles == 1)
            words[i] = parts[0].word[i];
        else if (i % 2 == 0)
            words[i] = low_halves(parts[0].word[i / 2], parts[1].word[i / 2]);
        else
            words[i] = high_halves(parts[0].word[i / 2], parts[1].word[i / 2]);
}

// The work of lane number `lane` of those for the matrix.
template <int Tiles>
MX_DEVICE void bring(const Matrix& all, unsigned lane) {
    const unsigned strip_of_all = lane / all.lanes_of_strip();
    const unsigned in_strip = lane - strip_of_all * all.lanes_of_strip();
    const unsigned group = in_strip / all.lanes, word = in_strip - group * all.lanes;
    const unsigned line = group * kLines; // of the strip
    const unsigned matrix = strip_of_all / all.strips;
    Offset matrix_line = (strip_of_all - matrix * all.strips) * all.tile_lines + line;
    if ((all.places == nullptr && matrix_line >= all.lines) || word * 4 >= all.pitch)
        return;
    const unsigned char* from =
        all.staged +
        (static_cast<Offset>(strip_of_all) * all.tiles + word * Tiles) * all.tile_bytes +
        line * (4 / Tiles);
    wait_for_grid_ahead();
    unsigned there = kLines;
    if (all.places != nullptr) {
        const TileRows place = all.places[strip_of_all];
        matrix_line = place.first + line;
        there = bytes_left(place.count, line, kLines);
    }
    unsigned char* to =
        all.to + (static_cast<Offset>(matrix) * all.lines + matrix_line) * all.pitch + word * 4;

    unsigned words[kLines];
    load_words<Tiles>(from, all.tile_bytes, words);
    const bool in_words = all.pitch % 4 == 0;
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
        if (kRowsAsRead && i >= static_cast<int>(there))
            return;
        if (in_words)
            *reinterpret_cast<unsigned*>(to) = words[i];
#pragma unroll
        for (int byte = 0; byte < 4; ++byte)
            if (!in_words && word * 4 + byte < all.pitch)
                to[byte] = words[i] >> 8 * byte;
        to += all.pitch;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    aiter_mx_quantize_scales(const unsigned char*, const void*, unsigned char*,
                             unsigned char* row_scales, unsigned char*,
                             unsigned char* column_scales, void*, const unsigned char* staged,
                             unsigned M, unsigned N, unsigned matrices, unsigned tiles_down,
                             unsigned tiles_across, unsigned lanes_of_row,
                             unsigned lanes_of_column) {
    launch_dependents();
    const Offset tiles = static_cast<Offset>(matrices) * tiles_down * tiles_across;
    const void* behind = staged + tiles * (kRowScales + kColumnScales);
    const Matrix of_rows{staged,
                         row_scales,
                         M,
                         N / kBlock,
                         tiles_down,
                         tiles_across,
                         kTileRows,
                         kRowScales,
                         lanes_of_row,
                         kRowsAsRead ? static_cast<const TileRows*>(behind) : nullptr};
    const unsigned lane = group_x() * kThreads + thread_in_group();
    const unsigned row_lanes = matrices * tiles_down * of_rows.lanes_of_strip();
    if (lane < row_lanes) {
        bring<4 / kScaleColumns>(of_rows, lane);
        return;
    }
    const Matrix of_columns{staged + tiles * kRowScales,
                            column_scales,
                            N,
                            M / kBlock,
                            tiles_across,
                            tiles_down,
                            kTileColumns,
                            kColumnScales,
                            lanes_of_column,
                            nullptr};
    if (lane - row_lanes < matrices * tiles_across * of_columns.lanes_of_strip())
        bring<1>(of_columns, lane - row_lanes);
}
