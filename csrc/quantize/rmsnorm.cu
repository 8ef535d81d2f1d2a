// RMSNorm of rows, quantised to MX-FP8 on the way, after a residual was added; and beside it the
// RMSNorm of the rows of a second tensor, which is not quantised.
//
//   x, residual [M, N]    fp32, bf16 or fp16
//   weight [N]            of the same dtype, likewise all else that is no payload or scale
//   sum [M, N]            x + residual, rounded: what is normalised
//   payload [M, N]        e4m3 of sum * weight / sqrt(mean of squares of the row + epsilon), which
//                         is rounded to e4m3 alone
//   scales [M, N/32]      e8m0
//   other [M, N2], its weight and its norm [M, N2]
//
// A workgroup takes a row, which is in its registers from the loads to the stores. A thread has 16
// bytes of the row at a time; kLoads lanes side by side have a block of 32.

#include "common/quantize.h"

using namespace mx;

using In = DType<MX_IN>;
constexpr ScaleMode kMode = static_cast<ScaleMode>(MX_MODE);
constexpr int kWaves = MX_WAVES;                   // of a workgroup
constexpr bool kAdds = MX_RESIDUAL;                // a residual
constexpr bool kEarly = MX_EARLY_WEIGHTS;          // asked for with the row, not once it is there
constexpr unsigned long kMaxGridX = MX_MAX_GRID_X; // rows beyond it continue in the grid's y

constexpr int kThreads = kWaves * kLanes;
constexpr int kValues = 16 / sizeof(In);
constexpr int kLoads = 32 / kValues;

struct alignas(16) Piece {
    In values[kValues];
};
struct alignas(kValues) Payload {
    unsigned words[kValues / 4];
};

MX_DEVICE float to_f32(float x) { return x; }

MX_DEVICE float reciprocal_root(float x) {
#if defined(__AMDGCN__)
    const float y = __builtin_amdgcn_rsqf(x);
#else
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#endif
    const float better = y * (1.5f - 0.5f * x * y * y); // Newton's
    return x > 0 && x < bits_to_float(kInfinityBits) ? better : y;
}

// The sum over the workgroup's threads, the same in all of them.
MX_DEVICE float sum_of_group(float x) {
    if constexpr (kLanes == 64)
        x = fold<32>(x, x);
    x = fold<16>(x, x);
    x += across<8>(x);
    x += across<4>(x);
    x += across<2>(x);
    x += across<1>(x);
    MX_LDS float sums[kWaves];
    if (thread_in_group() % kLanes == 0)
        sums[thread_in_group() / kLanes] = x;
    group_barrier();
    float total = 0;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave)
        total += sums[wave];
    return total;
}

template <int Columns>
constexpr int kPieces = Columns / kValues;
template <int Columns>
constexpr int kSteps = (kPieces<Columns> + kThreads - 1) / kThreads;

// A row's values, after the residual's were added and stored where there is one; zeros past its
// end.
template <int Columns, bool Adds>
MX_DEVICE void load_row(const Piece* x, const Piece* residual, const Piece* weight, Piece* sum,
                        float (&values)[kSteps<Columns>][kValues],
                        Piece (&weights)[kSteps<Columns>]) {
    Piece pieces[kSteps<Columns>], added[kSteps<Columns>];
#pragma unroll
    for (int step = 0; step < kSteps<Columns>; ++step) {
        const int p = step * kThreads + thread_in_group();
        if (p < kPieces<Columns>) {
            pieces[step] = x[p];
            if (Adds)
                added[step] = residual[p];
            if (kEarly)
                weights[step] = weight[p];
        }
    }
#pragma unroll
    for (int step = 0; step < kSteps<Columns>; ++step) {
        const int p = step * kThreads + thread_in_group();
        const bool inside = p < kPieces<Columns>;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
            if (Adds)
                store(&pieces[step].values[i],
                      to_f32(pieces[step].values[i]) + to_f32(added[step].values[i]));
            values[step][i] = inside ? to_f32(pieces[step].values[i]) : 0.0f;
        }
        if (Adds && inside)
            sum[p] = pieces[step];
    }
}

// Multiplies a row by its weights over its root mean square.
template <int Columns>
MX_DEVICE void normalise(const Piece* weight, Piece (&weights)[kSteps<Columns>], float epsilon,
                         float (&values)[kSteps<Columns>][kValues]) {
    float squares = 0;
#pragma unroll
    for (int step = 0; step < kSteps<Columns>; ++step) {
        const int p = step * kThreads + thread_in_group();
        if (!kEarly && p < kPieces<Columns>)
            weights[step] = weight[p];
#pragma unroll
        for (int i = 0; i < kValues; ++i)
            squares = mx::fma(values[step][i], values[step][i], squares);
    }
    const float factor = reciprocal_root(sum_of_group(squares) * (1.0f / Columns) + epsilon);
#pragma unroll
    for (int step = 0; step < kSteps<Columns>; ++step)
        if (step * kThreads + thread_in_group() < kPieces<Columns>)
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                values[step][i] = values[step][i] * factor * to_f32(weights[step].values[i]);
}

MX_KERNEL(kThreads)
aiter_mx_rmsnorm_quantize_rows(const In* x, const In* residual, const In* weight, const In* other,
                               const In* other_weight, unsigned char* payload,
                               unsigned char* scales, In* sum, In* other_norm, long M,
                               float epsilon, float other_epsilon) {
    launch_dependents();
    wait_for_grid_ahead();
    const long row = group_y() * kMaxGridX + group_x();
    const auto pieces = [](const In* p) { return reinterpret_cast<const Piece*>(p); };
    const auto results = [](In* p) { return reinterpret_cast<Piece*>(p); };
    if (row < M) {
        constexpr int columns = MX_N;
        const long at = row * columns;
        float values[kSteps<columns>][kValues];
        Piece weights[kSteps<columns>];
        load_row<columns, kAdds>(pieces(x + at), pieces(residual + at), pieces(weight),
                                 results(sum + at), values, weights);
        normalise<columns>(pieces(weight), weights, epsilon, values);
#pragma unroll
        for (int step = 0; step < kSteps<columns>; ++step) {
            const int p = step * kThreads + thread_in_group();
            const unsigned amax = max_of_lanes<kLoads>(amax_bits(values[step]));
            const BlockScale scale = block_scale<E4M3, kMode>(amax);
            if (p >= kPieces<columns>)
                continue;
            Payload bytes;
#pragma unroll
            for (int i = 0; i < kValues; i += 4)
                bytes.words[i / 4] =
                    to_e4m3x4<kMode>(values[step][i], values[step][i + 1], values[step][i + 2],
                                     values[step][i + 3], scale);
            reinterpret_cast<Payload*>(payload + at)[p] = bytes;
            if (p % kLoads == 0)
                scales[at / 32 + p / kLoads] = static_cast<unsigned char>(scale.byte);
        }
    }
#if MX_N2
    else if (row < 2 * M) {
        constexpr int columns = MX_N2;
        const long at = (row - M) * columns;
        float values[kSteps<columns>][kValues];
        Piece weights[kSteps<columns>];
        load_row<columns, false>(pieces(other + at), nullptr, pieces(other_weight), nullptr, values,
                                 weights);
        normalise<columns>(pieces(other_weight), weights, other_epsilon, values);
#pragma unroll
        for (int step = 0; step < kSteps<columns>; ++step) {
            const int p = step * kThreads + thread_in_group();
            if (p >= kPieces<columns>)
                continue;
            Piece norm;
#pragma unroll
            for (int i = 0; i < kValues; ++i)
                store(&norm.values[i], values[step][i]);
            results(other_norm + at)[p] = norm;
        }
    }
#endif
}
