// The decode linear of gemv.h on Hopper: loads of all steps under way are issued, then used.

#include "common/epilogue.h"
#include "gemv.h"

using namespace mx;

constexpr bool kOverlaps = MX_OVERLAPS; // may begin before the grid ahead of it ends

// Adds the waves' sums and stores them.
MX_DEVICE void store_sums(float (&sums)[kValues], Offset first_row, const void* bias, int bias_kind,
                          Out* y, Offset N) {
    const int lane = thread_in_group() % kLanes, wave = wave_in_group();
    MX_LDS float partial[kWaves][kValues];
    sum_lanes(sums, partial[wave], lane);
    group_barrier();
    for (int i = thread_in_group(); i < kValues; i += kThreads) {
        const int m = i / kRows;
        const Offset n = first_row + i % kRows;
        if (n < N) {
            float sum = 0.0f;
#pragma unroll
            for (int v = 0; v < kWaves; ++v)
                sum += partial[v][i];
            store(y + m * N + n, sum + load_bias(bias, bias_kind, n));
        }
    }
}

struct Operands {
    const unsigned char *xq, *xs, *wq, *ws;
    Offset rows[kRows]; // of w
    Offset K;
    int lane;

    // first: of the step's k, a multiple of kBlock that all lanes of the wave share.
    MX_MEMBER Piece x(int m, Offset first) const {
        return {load(xq + m * K + first + lane * kPiece),
                load_byte(xs + (m * K + first) / kBlock + lane * kPiece / kBlock)};
    }
    MX_MEMBER HalfBlock<MX_X> unquantised_x(int m, Offset first) const {
        const unsigned char* from = xq + 2 * (m * K + first + lane * kPiece);
        return {load(from), load(from + 16)};
    }
    MX_MEMBER Piece w(int r, Offset first) const {
        return {load_once_in_lines(wq + rows[r] * K + first + lane * kPiece),
                load_byte(ws + (rows[r] * K + first) / kBlock + lane * kPiece / kBlock)};
    }
};

MX_KERNEL(kThreads)
aiter_mx_linear_gemv(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                     const unsigned char* ws, const void* bias, Out* y, Offset N, Offset K,
                     int bias_kind) {
    const Offset first_row = (group_y() * kMaxGridX + group_x()) * kRows;
    if (first_row >= N)
        return;
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();

    Operands operands{xq, xs, wq, ws, {}, K, lane};
#pragma unroll
    for (int r = 0; r < kRows; ++r) // rows past the last are computed from it and not stored
        operands.rows[r] = first_row + r < N ? first_row + r : N - 1;

    float sums[kValues] = {};
    // All lanes take part in quantising, also those whose k are past the end.
    const int lane_k = kQuantises ? 0 : lane * kPiece;
    for (Offset first = wave * kStep; first + lane_k < K; first += kUnroll * kStride) {
        Piece x[kUnroll][kM] = {}, w[kUnroll][kRows] = {}; // zeros add nothing
        HalfBlock<MX_X> unquantised[kUnroll][kQuantises ? kM : 1] = {};
        const auto load_w = [&](int i) {
#pragma unroll
            for (int r = 0; r < kRows; ++r)
                w[i][r] = operands.w(r, first + i * kStride);
        };
        const auto load_x = [&](int i) {
#pragma unroll
            for (int m = 0; m < kM; ++m)
                if constexpr (kQuantises)
                    unquantised[i][m] = operands.unquantised_x(m, first + i * kStride);
                else
                    x[i][m] = operands.x(m, first + i * kStride);
        };
        const auto exists = [&](int i) {
            return (i == 0 && !kQuantises) || first + i * kStride + lane * kPiece < K;
        };
        if constexpr (kOverlaps) {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (exists(i))
                    load_w(i);
            if (first == wave * kStep) { // what is stored later comes after this as well
                launch_dependents();
                wait_for_grid_ahead();
            }
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (exists(i))
                    load_x(i);
        } else {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
                if (exists(i)) {
                    load_w(i);
                    load_x(i);
                }
        }
        if constexpr (kQuantises) {
#pragma unroll
            for (int i = 0; i < kUnroll; ++i)
#pragma unroll
                for (int m = 0; m < kM; ++m) {
                    const QuantisedHalf half = quantised(unquantised[i][m]);
                    x[i][m] = {half.payload, half.scale};
                }
        }
#pragma unroll
        for (int i = 0; i < kUnroll; ++i)
            accumulate_step(sums, w[i], x[i], [](int) {}, [](int) {});
    }
    store_sums(sums, first_row, bias, bias_kind, y, N);
}
