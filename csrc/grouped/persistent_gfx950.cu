// Grouped GEMM on CDNA4: y[m] = dequantised(x[m]) * dequantised(w[g])^T + bias[g] for each row m of
// each group g. aiter_mx/kernels/grouped_gemm/problem.py says what a group is.
//
//   xq [M, K], wq [G, N, K]          e4m3 payload
//   xs [M, K/32], ws [G, N, K/32]    e8m0 scale of each 32 consecutive k
//   y  [M, N]                        fp32, bf16 or fp16
//   bias [G, N]                      any of these, or none
//
// Each workgroup, four waves, takes tiles of kTileM rows by kTileN features in turn. Over all its
// tiles it takes steps of 128 k in one unbroken stream: what it copies to LDS is two steps ahead of
// what it multiplies, across the ends of tiles too.
//
// A stage of LDS holds a step of both operands. The part of one wave, by which it is filled:
//
//   bytes ->   |0       15|16      31| ...             |127
//   row 0      | piece 0  | piece 1  | ... | piece 7   |     16 bytes of k each
//   row 1      |          |          |     |           |     Piece p of row r is kept in place
//   ...        |                                       |     p ^ (r / 2 % 8), so that the lanes
//   kRowsX - 1 |          x                            |     that one read serves together are
//   row 0      |          w                            |     in different banks.
//   kRowsW - 1 |                                       |
//
// After the four parts, the scales, a row after the other: kScalePieces dwords of kScaleBytes each.
//
// Or, shuffled, in blocks of 16 rows as they are in memory.
//
// w is operand A of the matrix instruction and x is B, so that a lane holds consecutive features:
// eight, as rows of w are in such an order in LDS that two fragments have four each (paired_row).
// A wave's sums are kFragsX by kFragsW products of 16 by 16. A step multiplies them by quarters;
// while it multiplies one, it reads operands for the next, one half of x's or w's fragments:
//
//   quarter         1             2              3                       4
//   multiply        x lo, w lo    x lo, w hi     x hi, w hi              x hi, w lo
//   read            w hi          x hi           x lo of the next step   w lo of the next step
//   copy to LDS                   w              w, then x               x
//
// What is copied is two steps on and goes into this step's stage.
//
// Each half has its registers, but that w lo of the next step comes into those of w hi: the roles
// of the two change with each step.
//
// Order. Copies to LDS count in vmcnt, reads of LDS in lgkmcnt; the compiler places the waits for
// reads, and knows nothing of the copies, which are assembly.
// - Early in quarter 2 a wave waits for its reads of this step's w, and at a barrier for the
//   others'. After it, w may be overwritten.
// - Half way through quarter 3 a wave waits for its copies but those that it has issued in this
//   step, and for its reads of x, and at a barrier for the others'. After it, x may be overwritten,
//   and the stage that is read from here on is complete.
// - The unit that takes the copies' addresses is busy for most of a step, so that copies in a burst
//   would hold up the products behind them, and be late: hence two barriers and not one.
// - The results' way through LDS has memory of each wave's own and needs no barrier.

#include "common/scale.h"
#include "gfx950/buffer.h"
#include "stage_gfx950.h"
#include "sums_gfx950.h"

using namespace mx;

// The instruction's treatment of NaN scales is not relied on: the largest scale of each row is
// kept, and a row that met a NaN gets a NaN payload at the end.
template <int Count>
struct Largest {
    unsigned scale[2][Count] = {};

    MX_MEMBER void take(int half, int i, unsigned x) { scale[half][i] = max(scale[half][i], x); }
    MX_MEMBER bool any_nan() const {
        unsigned most = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < Count; ++i)
                most = max(most, scale[half][i]);
        return __builtin_amdgcn_ballot_w64(most == kNanScale) != 0;
    }
    MX_MEMBER u32x8 payload(int i) const {
        constexpr unsigned nans = 0x7f7f7f7f;
        return scale[i / Count][i % Count] == kNanScale ? u32x8{nans} : u32x8{};
    }
};

// Of two waves a SIMD each has half of the registers, and plain sums fit.
using Sums = SumsOf<(kFragsX * kFragsW >= 32), kFragsX * kFragsW>::type; // fragment x * kFragsW + w

// What a wave does in the steps of its tiles.
class Stream {
  public:
    Sums sums;

    MX_MEMBER Stream(const Copier& copier, int wave, int lane)
        : copier(copier), place_x(wave / kWavesN * (kTileM / kWavesM), lane),
          place_w(wave % kWavesN * (kTileN / kWavesN), lane) {}

    // Copies the first two steps of the first tile, and reads the first operands.
    MX_MEMBER void begin(const Tile& first) {
        copier.start(first, true);
        for (int step = 0; step < 2; ++step) {
            copier.aim();
            each<kAllCopiesX>([&](auto i) { copier.copy_x<i.value>(step * kStage); });
            each<kAllCopiesW>([&](auto i) { copier.copy_w<i.value>(step * kStage); });
            copier.advance();
        }
        if constexpr (kShuffledX)
            place_x.start(skew = copier.skew);
        copies_arrived<kAllCopiesX + kAllCopiesW>();
        each<kReadsX>([&](auto i) { place_x.read_half<i.value>(x_low, false, stage); });
        each<kReadsW>([&](auto i) { place_w.read_half<i.value>(w_first, false, stage); });
        x_low.widen();
        w_first.widen();
    }
    template <bool IsFirst>
    MX_MEMBER void even_step(unsigned steps, const Tile& next, bool is_last) {
        step<IsFirst>(w_first, w_second, steps, next, is_last);
    }
    MX_MEMBER void odd_step(unsigned steps, const Tile& next, bool is_last) {
        step<false>(w_second, w_first, steps, next, is_last);
    }
    // To be called where a tile ends with an even step.
    MX_MEMBER void swap() { w_first = w_second; }

    // Rows that met a NaN scale get NaN, and the next tile's notes begin.
    MX_MEMBER void settle_nans() {
        if (most_x.any_nan() || most_w.any_nan())
#pragma unroll
            for (int x = 0; x < kFragsX; ++x)
#pragma unroll
                for (int w = 0; w < kFragsW; ++w)
                    sums.add_fresh(x * kFragsW + w, most_w.payload(w), kUnitScale,
                                   most_x.payload(x), kUnitScale);
        most_x = {};
        most_w = {};
    }

  private:
    static constexpr int kReadsX = PlaceX::kReads * kHalfX, kReadsW = PlaceW::kReads * kHalfW;
    static constexpr int kProducts = kHalfX * kHalfW, kEarly = kProducts / 2;
    // Of w in quarter 2, of x in quarter 3: the other one has half the time, and may have none.
    static constexpr int kLateW = kEarly ? kAllCopiesW / 3 : 0, kEarlyW = kAllCopiesW - kLateW;
    static constexpr int kEarlyX = kAllCopiesX / 3;

    // A step of the tile before `next`, of so many; without a next one, zeros are copied. The first
    // begins the sums.
    template <bool IsFirst>
    MX_MEMBER void step(Half<kHalfW>& low, Half<kHalfW>& high, unsigned steps, const Tile& next,
                        bool is_last) {
        const unsigned other = kStage - stage;
        if (copier.is_done(steps))
            copier.start(next, !is_last);
        copier.aim();
        note(most_x, 0, x_low);
        note(most_w, 0, low);
        const auto nothing = [](auto) {};
        quarter<IsFirst, 0, kReadsW, 0>(x_low, 0, low, 0, nothing, [&](auto i) {
            place_w.read_half<i.value>(high, true, stage);
        });
        note(most_w, 1, high);
        quarter<IsFirst, 0, 1 + kReadsX + kEarlyW, kProducts / 8>(
            x_low, 0, high, 1, nothing, [&](auto i) {
                if constexpr (i.value == 0)
                    reads_arrived();
                else if constexpr (i.value <= kReadsX)
                    place_x.read_half<i.value - 1>(x_high, true, stage);
                else
                    copier.copy_w<i.value - 1 - kReadsX>(stage);
            });
        note(most_x, 1, x_high);
        if constexpr (kShuffledX) { // a branch would let LLVM take bytes to its other side
            skew = copier.has_begun() ? copier.skew : skew;
            place_x.start(skew);
        }
        quarter<IsFirst, kLateW, 1 + kReadsX + kEarlyX, kEarly>(
            x_high, 1, high, 1, [&](auto i) { copier.copy_w<kEarlyW + i.value>(stage); },
            [&](auto i) {
                if constexpr (i.value == 0)
                    copies_arrived<kAllCopiesW>();
                else if constexpr (i.value <= kReadsX)
                    place_x.read_half<i.value - 1>(x_low, false, other);
                else
                    copier.copy_x<i.value - 1 - kReadsX>(stage);
            });
        quarter<IsFirst, 0, kReadsW + kAllCopiesX - kEarlyX, 0>(
            x_high, 1, low, 0, nothing, [&](auto i) {
                if constexpr (i.value < kReadsW)
                    place_w.read_half<i.value>(high, false, other);
                else
                    copier.copy_x<i.value - kReadsW + kEarlyX>(stage);
            });
        x_low.widen();
        high.widen();
        copier.advance();
        stage = other;
    }

    // A quarter of a step's products. early(i), for each i below Early, is spread over those before
    // number From, and work(i), for each i below Work, over the others.
    template <bool IsFirst, int Early, int Work, int From, class DoEarly, class Do>
    MX_MEMBER void quarter(const Half<kHalfX>& x, int x_half, const Half<kHalfW>& w, int w_half,
                           DoEarly early, Do work) {
        constexpr int slots = kProducts - From;
        sums.reserve();
        each<kProducts>([&](auto i) {
            constexpr int fx = i.value / kHalfW, fw = i.value % kHalfW;
            sums.template add<IsFirst>((x_half * kHalfX + fx) * kFragsW + w_half * kHalfW + fw,
                                       w.rows[fw], w.scales[fw], x.rows[fx], x.scales[fx]);
            if constexpr (i.value < From) {
                constexpr int first = i.value * Early / From, end = (i.value + 1) * Early / From;
                each<end - first>([&](auto j) { early(Constant<first + j.value>{}); });
            } else {
                constexpr int first = (i.value - From) * Work / slots;
                constexpr int end = (i.value - From + 1) * Work / slots;
                each<end - first>([&](auto j) { work(Constant<first + j.value>{}); });
            }
            finish_before_next();
        });
    }

    template <int Count>
    MX_MEMBER static void note(Largest<Count>& most, int half, const Half<Count>& taken) {
#pragma unroll
        for (int i = 0; i < Count; ++i)
            most.take(half, i, taken.scales[i]);
    }

    Copier copier;
    PlaceX place_x;
    PlaceW place_w;
    Half<kHalfX> x_low, x_high;
    Half<kHalfW> w_first, w_second;
    Largest<kHalfX> most_x;
    Largest<kHalfW> most_w;
    unsigned stage = 0, skew = 0;
};

// The bias of the features that a lane holds: four of each fragment.
template <int Kind>
struct Bias {
    f32x4 of[kFragsW];

    MX_MEMBER Bias(const Tile& tile, unsigned N, unsigned feature) {
        constexpr unsigned size = sizeof(DType<Kind>);
        const Offset first = static_cast<Offset>(tile.group) * N + tile.feature;
        const Buffer values(static_cast<const unsigned char*>(arguments()->bias) + first * size,
                            (N - tile.feature) * size);
#pragma unroll
        for (int w = 0; w < kFragsW; ++w) {
            const u32x4 words = values.load((feature + paired_row(w * kSide)) * size);
            if constexpr (Kind == kF32) {
                of[w] = __builtin_bit_cast(f32x4, words);
            } else { // in the first two
                using Four = DType<Kind> __attribute__((ext_vector_type(4)));
                of[w] = __builtin_convertvector(__builtin_bit_cast(Four, words.xy), f32x4);
            }
        }
    }
    MX_MEMBER f32x4 added_to(f32x4 sum, int w) const { return sum + of[w]; }
};
template <>
struct Bias<kNone> {
    MX_MEMBER Bias(const Tile&, unsigned, unsigned) {}
    MX_MEMBER static f32x4 added_to(f32x4 sum, int) { return sum; }
};

// Where LDS has piece p of row r of results on their way: eight lanes that write adjacent rows, and
// those that read a row, are in different banks.
MX_DEVICE unsigned place_of(unsigned r, unsigned p) {
    constexpr unsigned banks = 128; // bytes
    constexpr unsigned together = kPassRow < banks ? banks / kPassRow : 1;
    return r * kPassRow + (p ^ r / together) % (kPassRow / kPiece) * kPiece;
}

// Rounds a wave's sums and stores them, 16 bytes a lane: rows come to lie in lines of memory by way
// of LDS, 16 rows at a time.
MX_DEVICE void store_tile(const Sums& sums, const Tile& tile, unsigned N, unsigned wave,
                          unsigned lane) {
    constexpr unsigned row_pieces = kPassRow / kPiece, rows = kLanes / row_pieces; // of a store
    constexpr int frags = kPassFeatures / kSide;
    constexpr int count = kPiece / sizeof(Out), piece_frags = count / 4; // of a piece
    using Values = Out __attribute__((ext_vector_type(count)));
    // What follows from the lane is worked out for each tile, not kept in registers meanwhile.
    asm volatile("" : "+v"(lane));
    const unsigned first_feature = wave % kWavesN * kFeatures;
    const unsigned written = lane % kSide, eight = lane / kSide, read = lane / row_pieces;
    const Bias<MX_BIAS> bias(tile, N, first_feature + eight * 8);
    unsigned char* own = lds() + kPassesAt + wave * kPass;
    const unsigned left = N - tile.feature, row_bytes = N * sizeof(Out);
    Out* y = static_cast<Out*>(arguments()->y);
    const Buffer out(
        reinterpret_cast<unsigned char*>(y + static_cast<Offset>(tile.first) * N + tile.feature),
        tile.rows * row_bytes - tile.feature * sizeof(Out));
    const unsigned piece = lane % row_pieces;
    const unsigned m = wave / kWavesN * (kTileM / kWavesM) + read;
    constexpr int stores = kSide / rows;
    u32x4 arrived[stores]; // of the 16 rows before, read while the next ones are rounded
    unsigned at;
    const auto store = [&] {
#pragma unroll
        for (int i = 0; i < stores; ++i) {
            out.store(at, arrived[i]);
            at += rows * row_bytes;
            asm volatile("" : "+v"(at)); // else each would be kept in a register
        }
    };
#pragma unroll
    for (int pass = 0; pass < kFragsW / frags; ++pass) {
#pragma unroll
        for (int x = 0; x < kFragsX; ++x) {
#pragma unroll
            for (int i = 0; i < frags; i += piece_frags) {
                const int w = pass * frags + i;
                f32x4 sum;
                Values values;
#pragma unroll
                for (int j = 0; j < count; ++j) {
                    if (j % 4 == 0)
                        sum = bias.added_to(sums.read(x * kFragsW + w + j / 4), w + j / 4);
                    values[j] = static_cast<Out>(sum[j % 4]);
                }
                const unsigned p = (eight * 8 + paired_row(i * kSide)) / count;
                *reinterpret_cast<Values*>(own + place_of(written, p)) = values;
            }
            finish_before_next();
            if (pass > 0 || x > 0)
                store();
            if (x == 0) {
                const unsigned n = first_feature + pass * kPassFeatures + piece * count;
                at = n < left ? m * row_bytes + n * sizeof(Out) : kNowhere;
            }
            wave_in_order();
#pragma unroll
            for (int i = 0; i < stores; ++i)
                arrived[i] =
                    *reinterpret_cast<const u32x4*>(own + place_of(i * rows + read, piece));
            wave_in_order();
        }
    }
    store();
}

// The arguments are those of GroupedArguments, which says how they are read.
MX_KERNEL(kThreads)
aiter_mx_grouped_gemm_persistent(const unsigned char*, const unsigned char*, const unsigned char*,
                                 const unsigned char*, const void*, Out*, const void*, const void*,
                                 Offset, Offset, Offset, Offset, int, int, int, unsigned,
                                 unsigned) {
    const unsigned N = arguments()->N, K = arguments()->K;
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();
    // At least two, so that copies are never more than a tile ahead.
    const unsigned steps = max((K + kDepth - 1) / kDepth, 2);

    // Workgroups go to the dies in turn: those of one die get tiles that follow each other.
    const unsigned workgroups = arguments()->workgroups, group = group_x();
    unsigned t = workgroups % kXcds ? group : group % kXcds * (workgroups / kXcds) + group / kXcds;
    Deal<kTileM, kTileN, kSwath> deal(N, lane);
    Tile now;
    if (!deal.find(t, now))
        return;

    Stream stream(Copier(N, K, wave, lane), wave, lane);
    stream.begin(now);
    for (;;) {
        Tile next = now;
        t += arguments()->workgroups;
        const bool is_last = !deal.find(t, next);
        stream.even_step<true>(steps, next, is_last);
        unsigned step = 1;
        for (; step + 2 <= steps; step += 2) {
            stream.odd_step(steps, next, is_last);
            stream.even_step<false>(steps, next, is_last);
        }
        if (step < steps)
            stream.odd_step(steps, next, is_last);
        else
            stream.swap();
        stream.settle_nans();
        stream.sums.settle();
        store_tile(stream.sums, now, N, wave, lane);
        if (is_last)
            return;
        now = next;
    }
}
