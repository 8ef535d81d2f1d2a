// The decode linear of gemv.h on CDNA4. All loads go through buffer descriptors, which give zeros
// beyond the operands: no lane is masked, and the compiler waits for each step by itself.
//
// Scales are loaded as dwords, of several rows and steps at once:
//
//   lane      |  0 ..  7 |  8 .. 15 | 16 .. 23 | ...
//   of row    |     0    |     0    |     1    |        with two steps under way
//   of step   |     0    |     1    |     0    |
//   blocks    | 0 .. 31  | 0 .. 31  | 0 .. 31  |        of the step, four a lane
//
// and handed out to the lanes that have the blocks' payload. Rows of w and x are reloaded as soon
// as they are in use as fp32, so that the next steps' are under way while these are multiplied.

#include "gemv.h"
#include "gfx950/bias.h"
#include "gfx950/memory.h"

using namespace mx;

// How rows of scales lie in dwords: each row in whole ones, not so, or not even one a row.
enum ScaleDwords { kFew = 0, kShifted = 1, kWhole = 2 };
constexpr int kScaleDwords = MX_SCALE_DWORDS;

constexpr unsigned kRound = kUnroll * kStride;     // k of the steps under way, of all waves
constexpr int kStepDwords = kStep / kBlock / 4;    // of a row's scales in a step
constexpr int kPairsOfLoad = kLanes / kStepDwords; // rows and steps that one load covers

// Whether registers have room for a round that is under way while the one before is multiplied. It
// takes those of payload that is in use as fp32 by then.
constexpr bool kReloads = !kQuantises && kValues <= 16 && kUnroll * (kRows + kM) <= 10;

// The scales of Rows rows in the steps under way.
template <int Rows>
class Scales {
  public:
    MX_MEMBER Scales(const unsigned char* scales, unsigned rows, unsigned blocks, int lane)
        : from(scales, rows * blocks), blocks(blocks), lane(lane) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const unsigned pair = i * kPairsOfLoad + lane / kStepDwords;
            in_row[i] = pair % kUnroll * (kStride / kBlock) + lane % kStepDwords * 4;
            row[i] = pair / kUnroll * blocks; // beyond the descriptor's length past the last row
        }
    }
    // k: of the round's first step, the same in all lanes.
    MX_MEMBER void load(unsigned k) {
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const unsigned block = k / kBlock + in_row[i];
            const unsigned at = block < blocks ? row[i] + block : kNowhere;
            if constexpr (kScaleDwords == kWhole) {
                words[i] = from.load_dword(at);
            } else if constexpr (kScaleDwords == kShifted) {
                const unsigned over = block - min(block, blocks - 4);
                words[i] = from.load_dword(at - over);
                shifts[i] = 8 * over;
            } else {
                words[i] = from.load_byte(at);
#pragma unroll
                for (int b = 1; b < 3; ++b)
                    words[i] |= from.load_byte(block + b < blocks ? at + b : kNowhere) << 8 * b;
            }
        }
    }
    // The wave waits for the words.
    MX_MEMBER unsigned scale(int row, int step) const {
        const int pair = row * kUnroll + step, i = pair / kPairsOfLoad;
        const unsigned word = kScaleDwords == kShifted ? words[i] >> shifts[i] : words[i];
        const int holder = lane / kStepDwords + pair % kPairsOfLoad * kStepDwords;
        return __builtin_amdgcn_ubfe(of_lane(holder, word), lane / 2 % 4 * 8, 8);
    }

  private:
    static constexpr int kLoads = (Rows * kUnroll + kPairsOfLoad - 1) / kPairsOfLoad;
    Buffer from;
    unsigned blocks;
    int lane;
    unsigned in_row[kLoads], row[kLoads], words[kLoads], shifts[kLoads];
};

MX_KERNEL(kThreads)
aiter_mx_linear_gemv(const unsigned char* xq, const unsigned char* xs, const unsigned char* wq,
                     const unsigned char* ws, const void* bias, Out* y, Offset N, Offset wide_k,
                     int bias_kind) {
    asm volatile("" ::"s"(bias_kind)); // loaded with the rest, not where it is first used
    const unsigned group = group_y() * kMaxGridX + group_x(), first_row = group * kRows;
    const unsigned K = wide_k, blocks = K / kBlock;
    // Groups past the last row have none. As a vector operation it would make descriptors that
    // differ from lane to lane.
    const int left = static_cast<int>(N) - static_cast<int>(first_row);
    const unsigned rows =
        __builtin_amdgcn_readfirstlane(min(static_cast<unsigned>(left > 0 ? left : 0), kRows));
    constexpr unsigned x_bytes = kQuantises ? 2 : 1; // of an element
    const int lane = thread_in_group() % kLanes;
    const auto of_group = [&](unsigned row_bytes) {
        return static_cast<Offset>(group) * (kRows * row_bytes);
    };
    const Buffer w_rows(wq + of_group(K), rows * K), x_rows(xq, kM * K * x_bytes);
    Piece w[kUnroll][kRows], x[kUnroll][kM];
    HalfBlock<MX_X> unquantised[kUnroll][kQuantises ? kM : 1];
    float sums[kValues] = {};
    unsigned first = wave_in_group() * kStep; // k of the wave's first step under way

    // An offset past K stays beyond the operands when it is doubled.
    const auto place = [&](int i, unsigned k) {
        const unsigned own = k + i * kStride + lane * kPiece;
        return own < K ? own : kNowhere / x_bytes;
    };
    const auto load_w = [&](int i, int r, unsigned at) {
        w[i][r].payload = w_rows.load_once(at, r * K);
    };
    const auto load_x = [&](int i, int m, unsigned at) {
        if constexpr (kQuantises)
            unquantised[i][m] = {x_rows.load(at * x_bytes, 2 * m * K),
                                 x_rows.load(at * x_bytes + 16, 2 * m * K)};
        else
            x[i][m].payload = x_rows.load(at, m * K);
    };
    const auto load_step = [&](int i, unsigned k) {
        const unsigned at = place(i, k);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
            load_w(i, r, at);
#pragma unroll
        for (int m = 0; m < kM; ++m)
            load_x(i, m, at);
        finish_before_next();
    };
    load_step(0, first); // memory is asked for weights before scales have addresses
    Scales<kRows> w_scales(ws + of_group(blocks), rows, blocks, lane);
    Scales<kM> x_scales(xs, kQuantises ? 0 : kM, blocks, lane);
    const auto load_scales = [&](unsigned k) {
        w_scales.load(k);
        if constexpr (!kQuantises)
            x_scales.load(k);
    };
    const auto load_rest = [&](unsigned k) {
        load_scales(k);
        finish_before_next();
#pragma unroll
        for (int i = 1; i < kUnroll; ++i)
            load_step(i, k);
    };
    load_rest(first);

    // What a thread stores at the end: asked for, and its place computed, while memory is waited
    // for.
    constexpr int kEach = (kValues + kThreads - 1) / kThreads;
    const Buffer results(reinterpret_cast<unsigned char*>(y + first_row),
                         ((kM - 1) * static_cast<unsigned>(N) + rows) * sizeof(Out));
    const auto number_of = [](int e) { return e * kThreads + thread_in_group(); };
    BiasLoad biases[kEach];
    unsigned places[kEach];
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const unsigned m = number_of(e) / kRows, row = number_of(e) % kRows;
        biases[e] = BiasLoad(bias, bias_kind, first_row, rows, row);
        const bool is_own = number_of(e) < kValues && row < rows;
        places[e] = is_own ? (m * static_cast<unsigned>(N) + row) * sizeof(Out) : kNowhere;
        asm volatile("" : "+v"(places[e]));
    }

    const auto multiply = [&](auto reloads) {
        constexpr bool reloads_now = decltype(reloads)::value;
        const Scales<kRows> ws_now = w_scales;
        const Scales<kM> xs_now = x_scales;
        if constexpr (reloads_now)
            load_scales(first + kRound);
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const unsigned at = reloads_now ? place(i, first + kRound) : 0;
            for (int r = 0; r < kRows; ++r)
                w[i][r].scale = ws_now.scale(r, i);
            for (int m = 0; m < kM; ++m)
                if constexpr (kQuantises) {
                    const QuantisedHalf half = quantised(unquantised[i][m]);
                    x[i][m] = {half.payload, half.scale};
                } else {
                    x[i][m].scale = xs_now.scale(m, i);
                }
            const auto taken_w = [&](int r) {
                if constexpr (reloads_now)
                    load_w(i, r, at);
            };
            const auto taken_x = [&](int m) {
                if constexpr (reloads_now)
                    load_x(i, m, at);
            };
            accumulate_step(sums, w[i], x[i], taken_w, taken_x);
            finish_before_next();
        }
    };
    for (; first + kRound < K; first += kRound) {
        multiply(Constant<kReloads>{});
        if constexpr (!kReloads) {
            load_step(0, first + kRound);
            load_rest(first + kRound);
        }
    }
    multiply(Constant<0>{});
    MX_LDS float partial[kWaves][kValues];
    sum_lanes(sums, partial[wave_in_group()], lane);
    group_barrier();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < kWaves; ++v)
            sum += partial[v][min(number_of(e), kValues - 1)];
        results.store(places[e], static_cast<Out>(sum + biases[e].to_f32()));
    }
}
