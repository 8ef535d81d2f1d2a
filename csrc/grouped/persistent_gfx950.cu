// Grouped GEMM on CDNA4: y[m] = dequantised(x[m]) * dequantised(w[g])^T + bias[g] for each row m of
// each group g. aiter_mx/kernels/grouped_gemm/problem.py says what a group is.
//
//   xq [M, K], wq [G, N, K]          e4m3 payload; with MX_X_E5M2 xq is e5m2, a gradient
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
// Shuffled scales follow the four parts, in blocks of 16 rows as they lie in memory. Row-major ones
// of several steps are copied at once, 16 bytes of a row by a lane: the unit that takes the copies'
// addresses has as much to do with a byte of a row as with 16. These runs lie behind the stages, in
// two halves of their own, rows of w in their order in a stage. A run begins at the dword that its
// first scale lies in, and has four steps, or three where rows are no whole dwords and up to three
// bytes may come before. What follows a row's scales may be NaN: lanes beyond them take the row's
// last one, for zeros. Where the scales of x are no whole dwords in all, the last of them cannot be
// copied so, and each step's are copied with it, kScalePieces pieces of kScaleBytes.
//
// w is operand A of the matrix instruction and x is B, so that a lane holds consecutive features:
// eight, as rows of w are in such an order in LDS that two fragments have four each (paired_row).
// A wave's sums are kFragsX by kFragsW products of 16 by 16. A step multiplies them by quarters;
// while it multiplies one, it reads operands for the next, one half of x's or w's fragments:
//
//   quarter         1             2              3                       4
//   multiply        x lo, w lo    x lo, w hi     x hi, w hi              x hi, w lo
//   read            w hi          x hi           x lo of the next step   w lo of the next step
//   copy to LDS     x lo, w lo    x lo, w lo     scales, w hi            w hi, x hi
//
// The copies are those of two steps on, and go into this step's stage. Waves copy of each half.
//
// Each half has its registers, but that w lo of the next step comes into those of w hi: the roles
// of the two change with each step.
//
// Order. Copies to LDS count in vmcnt, reads of LDS in lgkmcnt; the compiler places the waits for
// reads, and knows nothing of the copies, which are assembly.
// - Early in quarter 1 a wave waits for its reads of both lower halves, for its copies of the step
//   before the last, and at a barrier for the others'. After it the lower halves may be
//   overwritten, and the upper ones are there to be read.
// - Early in quarter 3 it waits for its reads of the upper halves, for the last step's copies of
//   lower halves and scales, and again at a barrier. After it the upper halves and the scales may
//   be overwritten, and the next step's lower halves may be read.
// - So copies are under way for a step at least. The unit that takes their addresses is busy for
//   most of a step, and copies in a burst would hold up the products behind them: they are spread
//   over all of it.
// - The results' way through LDS has memory of each wave's own and needs no barrier.
//
// With MX_WGRAD it computes the gradient of w instead (aiter_mx/kernels/grouped_wgrad/problem.py):
// for each group y[g] [M, N] is x [M, K] times w [N, K]^T, both of all groups, where the k of group
// g are its rows alone. Tiles of groups then have different numbers of steps, and each wave clears,
// of what it has copied, the last 16 k of a group and its last scales from the group's end on.
//
// With MX_ONE_GROUP it computes a linear: nothing of groups is looked up. With MX_SHARED, of two
// workgroups each takes half of the steps of one tile and no other, and one adds both sums.

#include "common/scale.h"
#include "common/target.h"
#include "gfx950/memory.h"
#include "gfx950/mfma.h"

using namespace mx;

// Deals the tiles of a grouped product to workgroups: tile t of all groups' tiles, for any t. A
// gradient of w has tiles of the groups that have any k.
//
// A wave looks at 64 groups at a time, a lane at each, and finds the one that tile t falls into by
// their running number of tiles. A group's tiles are ordered in swaths of `Swath` rows of tiles,
// and in a swath column after column, so that tiles that follow each other share rows of x or of w.

#ifndef MX_WGRAD
#define MX_WGRAD 0
#endif
#ifndef MX_X_E5M2
#define MX_X_E5M2 0
#endif
#ifndef MX_ACCUMULATE
#define MX_ACCUMULATE 0
#endif
constexpr bool kWgrad = MX_WGRAD;
constexpr unsigned kStart = 128; // with MX_WGRAD groups begin at multiples of so many k
#ifndef MX_PIECES
#define MX_PIECES 1
#endif
constexpr unsigned kPieces = MX_PIECES; // of a group's k, each of which is a group
#ifndef MX_UNPAD
#define MX_UNPAD 0
#endif
constexpr bool kUnpad = MX_UNPAD; // groups have other rows of y: those from ends[g] to ends[g + 1]
#ifndef MX_ONE_GROUP
#define MX_ONE_GROUP 0
#endif
#ifndef MX_SHARED
#define MX_SHARED 0
#endif
constexpr bool kShared = MX_SHARED; // two workgroups share the K of a tile
static_assert(!kShared || MX_ONE_GROUP);
constexpr bool kDepths = kWgrad || kShared; // a tile has its first k and how many

// The arguments of a grouped kernel, as problem.py lists them.
struct GroupedArguments {
    const unsigned char *xq, *xs, *wq, *ws;
    const void* bias; // with MX_WGRAD what is subtracted from ends, or null
    void* y;
    const void *starts, *ends;
#if MX_SHARED
    unsigned char *sums, *counts; // of all tiles' meetings
#endif
    Offset M, N, K, count;
    int layout, index_bytes, bias_kind; // layout: problem.py says what it is
    unsigned rows_each;                 // of a masked group
    unsigned workgroups;
    unsigned tile_rows; // that a tile takes of a group, at most kTileM
};
using ArgumentsPointer = const __attribute__((address_space(4))) GroupedArguments*;

// They are loaded anew wherever they are asked for: kept, they would take the scalar registers that
// the loop needs.
MX_DEVICE ArgumentsPointer arguments() {
    auto at = (ArgumentsPointer)__builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(at));
    return at;
}
struct Anew {
    MX_MEMBER ArgumentsPointer operator()() const { return arguments(); }
};

// Ahead of the loop all are loaded at once: the first weights would wait for one after the other.
class AtOnce {
  public:
    MX_MEMBER AtOnce() : args(arguments()) {
        asm volatile("" ::"s"(args->xq), "s"(args->xs), "s"(args->wq), "s"(args->ws),
                     "s"(args->starts), "s"(args->ends), "s"(args->M), "s"(args->N), "s"(args->K),
                     "s"(args->count), "s"(args->layout), "s"(args->index_bytes),
                     "s"(args->rows_each), "s"(args->workgroups), "s"(args->tile_rows));
    }
    MX_MEMBER ArgumentsPointer operator()() const { return args; }

  private:
    ArgumentsPointer args;
};

// Where groups begin or end: numbers of 4 or 8 bytes, zeros where there are none. Those of several
// places are asked for before the first is used.
class Bounds {
  public:
    struct Loaded {
        unsigned low, high;
        // Cut to 0 .. most.
        MX_MEMBER unsigned up_to(unsigned most) const {
            const unsigned whole = high == 0 && low < most ? low : most;
            return static_cast<int>(high) < 0 ? 0 : whole;
        }
        MX_MEMBER long whole() const {
            return static_cast<long>(static_cast<Offset>(high) << 32 | low);
        }
    };
    MX_MEMBER Bounds(const void* of, int index_bytes)
        : all(static_cast<const unsigned char*>(of), of ? kNowhere - 1 : 0), size(index_bytes) {}

    MX_MEMBER Loaded load(unsigned g, bool is_there) const {
        const unsigned at = is_there ? g * size : kNowhere;
        const unsigned low = all.load_dword(at);
        const unsigned high = all.load_dword(size == 8 ? at + 4 : kNowhere);
        return {low, size == 8 ? high : static_cast<unsigned>(static_cast<int>(low) >> 31)};
    }

  private:
    Buffer all;
    unsigned size;
};

// Where a group may have several ranges of rows: how many there are, and then the group of each.
using Numbers = const __attribute__((address_space(4))) int*; // which scalar loads read
MX_DEVICE Numbers runs(ArgumentsPointer args) {
    const int layout = args->layout;
    return layout < 0 ? (Numbers) static_cast<const int*>(args->ends) - layout : nullptr;
}
MX_DEVICE unsigned most_ranges(ArgumentsPointer args) {
    const bool has_runs = !kWgrad && !kUnpad && args->layout < 0;
    return has_runs ? 0u - args->layout : args->count;
}
MX_DEVICE unsigned ranges(ArgumentsPointer args) {
    const Numbers of = kWgrad || kUnpad ? nullptr : runs(args);
    return of ? min(static_cast<unsigned>(*of), most_ranges(args)) : args->count;
}
MX_DEVICE unsigned group_of(ArgumentsPointer args, unsigned range) {
    const Numbers of = kWgrad || kUnpad ? nullptr : runs(args);
    return of ? of[1 + range] : range;
}

// The first row of group g, or of a range, and how many it has, if it is there. With MX_UNPAD y has
// other rows of it.
MX_DEVICE void rows_of(ArgumentsPointer args, unsigned g, bool is_there, unsigned& first,
                       unsigned& rows, unsigned& first_of_y) {
    const Bounds starts(args->starts ? args->starts : args->ends, args->index_bytes);
    const Bounds ends(args->ends, args->index_bytes);
    if constexpr (kUnpad) {
        const unsigned most = args->layout - 2, M = args->M;
        const Bounds::Loaded of_x = starts.load(g, is_there);
        const Bounds::Loaded of_y = ends.load(g, is_there), end = ends.load(g + 1, is_there);
        first = of_x.up_to(M);
        first_of_y = of_y.up_to(most);
        const unsigned end_of_y = end.up_to(most);
        rows = min(end_of_y > first_of_y ? end_of_y - first_of_y : 0, M - first);
        return;
    }
    const bool is_masked = args->layout > 0, has_starts = args->starts != nullptr;
    const unsigned each = args->rows_each, most = is_masked ? each : args->M;
    // Else a group begins where the one before it ends.
    const bool begins = is_there && (has_starts || g > 0 && !is_masked);
    const Bounds::Loaded begin = starts.load(has_starts ? g : g - 1, begins);
    const Bounds::Loaded end = ends.load(g, is_there);
    first = begin.up_to(most);
    const unsigned last = args->ends ? end.up_to(most) : most;
    rows = is_there && last > first ? last - first : 0;
    first += is_masked ? g * each : 0;
}

// The first k of group g and how many it has, of a gradient of w.
MX_DEVICE void depth_of(ArgumentsPointer args, unsigned piece, bool is_there, unsigned& first,
                        unsigned& count) {
    const unsigned g = piece / kPieces, most = args->K;
    const int size = args->index_bytes;
    const Bounds::Loaded begin = Bounds(args->starts, size).load(g, is_there);
    const Bounds::Loaded end = Bounds(args->ends, size).load(g, is_there);
    const Bounds::Loaded subtracted = Bounds(args->bias, size).load(g, is_there);
    first = begin.up_to(most) / kStart * kStart;
    const long found = end.whole() - subtracted.whole();
    const unsigned left = most - first;
    count = found < 0 ? 0 : found < left ? found : left;
    if constexpr (kPieces > 1) {
        const unsigned room = (count + kPieces * kStart - 1) / (kPieces * kStart) * kStart;
        const unsigned passed = min(piece % kPieces * room, count);
        first += passed < count ? passed : 0;
        count = min(count - passed, room);
    }
}

struct Tile {
    unsigned first, rows; // of x
    unsigned group;       // whose weights and bias
    unsigned feature;     // first of the tile
    unsigned begin, end;  // where kDepths: its first k, and how many
    unsigned is_half;     // it has no more than kTileN / 2 features
};

// Who keeps what in which lanes: tiles, the workgroup's turn, Deal and Zeros.
constexpr int kNow = 0, kNext = 8, kIsLast = 16, kTurn = 17, kChunk = 18, kBefore = 19, kWhole = 20;
constexpr int kZerosChunk = 21, kZerosGroups = 22, kZerosAt = 24, kZerosLeft = 26;

// Numbers that are the same in all lanes and seldom needed, a lane each of one register: scalar
// registers have no room for them beside the loop.
class Shelf {
  public:
    template <int At>
    MX_MEMBER void put(unsigned x) {
        // A vector instruction may have written x: two wait states (ISA manual, section 4.5).
        asm("s_nop 1\n\tv_writelane_b32 %0, %1, %2" : "+v"(lanes) : "s"(scalar(x)), "i"(At));
    }
    template <int At>
    MX_MEMBER unsigned get() {
        asm volatile("" : "+v"(lanes)); // else what is read would be kept
        return __builtin_amdgcn_readlane(lanes, At);
    }
    template <int At>
    MX_MEMBER void put_long(Offset x) {
        put<At>(x);
        put<At + 1>(x >> 32);
    }
    template <int At>
    MX_MEMBER Offset get_long() {
        return get<At>() | static_cast<Offset>(get<At + 1>()) << 32;
    }
    // Two wait states serve all that follow.
    MX_MEMBER void put_next(const Tile& tile) {
        asm("s_nop 1\n\tv_writelane_b32 %0, %1, %6\n\tv_writelane_b32 %0, %2, %6+1\n\t"
            "v_writelane_b32 %0, %3, %6+2\n\tv_writelane_b32 %0, %4, %6+3\n\t"
            "v_writelane_b32 %0, %5, %6+4"
            : "+v"(lanes)
            : "s"(scalar(tile.first)), "s"(scalar(tile.rows)), "s"(scalar(tile.group)),
              "s"(scalar(tile.feature)), "s"(scalar(tile.is_half)), "i"(kNext));
        if constexpr (kDepths) {
            put<kNext + 5>(tile.begin);
            put<kNext + 6>(tile.end);
        }
    }
    // The next tile is the present one.
    MX_MEMBER void turn() {
        constexpr int row_left = 0x100; // DPP: lanes of the first 16 take those so many on
        lanes = __builtin_amdgcn_update_dpp(lanes, lanes, row_left + kNext - kNow, 1, 0xf, false);
    }
    template <int At>
    MX_MEMBER Tile tile() {
        Tile tile{get<At>(), get<At + 1>(), get<At + 2>(), get<At + 3>(), 0, 0, get<At + 4>()};
        if constexpr (kDepths) {
            tile.begin = get<At + 5>();
            tile.end = get<At + 6>();
        }
        return tile;
    }

  private:
    MX_MEMBER static unsigned scalar(unsigned x) { return __builtin_amdgcn_readfirstlane(x); }
    unsigned lanes = 0;
};
// x summed over this lane and all below it.
MX_DEVICE unsigned sum_through(unsigned x) {
    // DPP: rows of 16 lanes shifted right by 1, 2, 4 and 8, then lane 15 of rows 0 and 2 to the
    // rows after them, then lane 31 to the upper half.
    x += __builtin_amdgcn_update_dpp(0, x, 0x111, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x112, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x114, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x118, 0xf, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x142, 0xa, 0xf, false);
    x += __builtin_amdgcn_update_dpp(0, x, 0x143, 0xc, 0xf, false);
    return x;
}

template <int TileN, unsigned Swath, bool Halves>
class Deal {
  public:
    template <class Arguments>
    MX_MEMBER Deal(Arguments args, Shelf& shelf, int lane) : lane(lane) {
        shelf.put<kBefore>(0);
        look(args, shelf, 0);
        // Tiles that are too few for another round are dealt by halves, if these are not too many.
        const unsigned all = in_chunk(), workgroups = args()->workgroups;
        const unsigned left = all % workgroups;
        const bool has_halves = Halves && ranges(args()) <= kLanes && 2 * left <= workgroups;
        shelf.put<kWhole>(has_halves ? all - left : ~0u);
    }

    // Tile t, if there are so many. The t of successive calls must not decrease.
    template <class Arguments>
    MX_MEMBER bool find(Arguments args, Shelf& shelf, unsigned t, Tile& tile) {
        const unsigned whole = shelf.get<kWhole>(), N = args()->N;
        const unsigned columns = (N + TileN - 1) / TileN;
        const unsigned is_half = t >= whole, half = is_half & t - whole;
        t = is_half ? whole + (t - whole) / 2 : t;
        unsigned chunk = shelf.get<kChunk>(), before = shelf.get<kBefore>();
        while (t >= before + in_chunk()) {
            if (chunk + kLanes >= ranges(args()))
                return false;
            before += in_chunk();
            shelf.put<kBefore>(before);
            look(args, shelf, chunk += kLanes);
        }
        t -= before;
        const int owner = __builtin_popcountll(__builtin_amdgcn_ballot_w64(through <= t));
        if (owner > 0)
            t -= at_lane(through, owner - 1);
        const unsigned left = kWgrad ? args()->M : at_lane(rows, owner);
        const unsigned swath = t / (Swath * columns);
        const unsigned in_swath = t % (Swath * columns);
        const unsigned each = args()->tile_rows;
        const unsigned height = min(Swath, (left + each - 1) / each - swath * Swath);
        const unsigned below = (swath * Swath + in_swath % height) * each;
        tile.rows = scalar(min(left - below, each));
        tile.group = scalar(group_of(args(), chunk + owner));
        tile.feature = scalar(in_swath / height * TileN + half * (TileN / 2));
        if constexpr (kWgrad) {
            tile.first = scalar(below);
            tile.begin = scalar(at_lane(first_row, owner));
            tile.end = scalar(at_lane(rows, owner));
        } else {
            tile.first = scalar(at_lane(first_row, owner) + below);
        }
        if constexpr (Halves)
            tile.is_half = scalar(is_half | (tile.feature + TileN / 2 >= N));
        return tile.feature < N;
    }

  private:
    template <class Arguments>
    MX_MEMBER void look(Arguments args, Shelf& shelf, unsigned first) {
        shelf.put<kChunk>(first);
        const unsigned range = first + lane;
        const bool may_be = range < most_ranges(args());
        [[maybe_unused]] unsigned first_of_y;
        if constexpr (kWgrad)
            depth_of(args(), range, may_be, first_row, rows);
        else
            rows_of(args(), range, may_be, first_row, rows, first_of_y);
        const unsigned each = args()->tile_rows;
        unsigned down = ((kWgrad && rows > 0 ? args()->M : rows) + each - 1) / each;
        down = range < ranges(args()) ? down : 0;
        through = sum_through(down * ((args()->N + TileN - 1) / TileN));
    }
    MX_MEMBER unsigned in_chunk() const { return at_lane(through, kLanes - 1); }
    MX_MEMBER static unsigned scalar(unsigned x) { return __builtin_amdgcn_readfirstlane(x); }
    MX_MEMBER static unsigned at_lane(unsigned x, int from) {
        return __builtin_amdgcn_readlane(x, from);
    }

    unsigned lane;
    unsigned first_row, rows; // of the lane's group, or its first k and how many
    unsigned through;         // tiles of the 64 groups up to the lane's
};

// The same for one group of all rows, of which nothing is to be looked up.
template <int TileN, unsigned Swath, bool Halves>
class DealOne {
  public:
    template <class Arguments>
    MX_MEMBER DealOne(Arguments args, Shelf& shelf, int) {
        if constexpr (Halves) {
            const unsigned all = tiles_down(args) * columns(args), workgroups = args()->workgroups;
            const unsigned left = all % workgroups;
            shelf.put<kWhole>(2 * left <= workgroups ? all - left : ~0u);
        }
    }

    template <class Arguments>
    MX_MEMBER static bool find(Arguments args, Shelf& shelf, unsigned t, Tile& tile) {
        const unsigned N = args()->N, each = args()->tile_rows, down = tiles_down(args);
        const unsigned of_swath = Swath * columns(args);
        unsigned is_half = 0, half = 0;
        if constexpr (Halves) {
            const unsigned whole = shelf.get<kWhole>();
            is_half = t >= whole;
            half = is_half & t - whole;
            t = is_half ? whole + (t - whole) / 2 : t;
        }
        if (t >= down * columns(args))
            return false;
        const unsigned above = t / of_swath * Swath, in_swath = t % of_swath;
        const unsigned height = min(Swath, down - above);
        tile.first = scalar((above + in_swath % height) * each);
        tile.rows = scalar(min(static_cast<unsigned>(args()->M) - tile.first, each));
        tile.group = 0;
        tile.feature = scalar(in_swath / height * TileN + half * (TileN / 2));
        if constexpr (Halves)
            tile.is_half = scalar(is_half | (tile.feature + TileN / 2 >= N));
        return tile.feature < N;
    }

  private:
    template <class Arguments>
    MX_MEMBER static unsigned tiles_down(Arguments args) {
        const unsigned each = args()->tile_rows, M = args()->M;
        return (M + each - 1) / each;
    }
    template <class Arguments>
    MX_MEMBER static unsigned columns(Arguments args) {
        return (static_cast<unsigned>(args()->N) + TileN - 1) / TileN;
    }
    MX_MEMBER static unsigned scalar(unsigned x) { return __builtin_amdgcn_readfirstlane(x); }
};

// LDS holds two stages of copied operands, and results on their way.

constexpr int kTileM = MX_TILE_M;           // rows of x in a tile: 32, 64, 128, 160 or 256
constexpr int kTileN = MX_TILE_N;           // rows of w
constexpr int kScaleBytes = MX_SCALE_BYTES; // of one copy: what K / 32 is a multiple of, at most 4
constexpr unsigned kRunSteps = kScaleBytes == 4 ? 4 : 3; // of row-major scales
constexpr bool kShuffledX = MX_X_SCALES == k16x4, kShuffledW = MX_W_SCALES == k16x4; // or row-major
constexpr bool kWholeSteps = MX_WHOLE_STEPS; // K is a multiple of 128, and more
// Whether row-major scales of several steps are copied at once.
constexpr bool kRunsX = !kShuffledX && MX_X_RUNS && !kWgrad, kRunsW = !kShuffledW && !kWgrad;
constexpr unsigned kSwath = MX_SWATH; // rows of tiles that a group's tiles are ordered by
constexpr unsigned kXcds = MX_XCDS;   // dies that workgroups go to in turn; 1 to ignore them
using Out = DType<MX_OUT>;

constexpr int kWaves = 4;
constexpr int kWavesM = kTileM > 32 ? 2 : 1, kWavesN = kWaves / kWavesM;
constexpr int kThreads = kWaves * kLanes;
constexpr unsigned kBlock = 32; // k of one scale
constexpr unsigned kPiece = 16; // bytes of one copy or read of payload
constexpr unsigned kRowPieces = kDepth / kPiece;
constexpr int kWaveRowsX = kTileM / kWavesM; // of a wave
constexpr int kFragsX = kWaveRowsX / kSide, kFragsW = kTileN / kWavesN / kSide;
constexpr int kHalfX = (kFragsX + 1) / 2, kHalfW = kFragsW / 2;
constexpr int kUpperX = kFragsX - kHalfX; // of the upper half: of 160 rows one less

// LDS has room for two whole halves.
constexpr int kRoomX = 2 * kHalfX * kSide;

// A wave copies these.
constexpr int kRowsX = kRoomX * kWavesM / kWaves, kRowsW = kTileN / kWaves;
constexpr int kScaleRowsX = kTileM / kWaves;
constexpr int kCopyRows = kLanes / kRowPieces;
constexpr int kCopiesX = kRowsX / kCopyRows, kCopiesW = kRowsW / kCopyRows;
constexpr int kScalePieces = kDepth / kBlock / kScaleBytes; // of one row, each a dword of LDS
constexpr int kScaleCopyRows = kLanes / kScalePieces;
// Rows with as many more, whose scales are never read, as let each wave make as many copies.
constexpr int whole_copies(int rows) {
    constexpr int at_once = kWaves * kScaleCopyRows;
    return (rows + at_once - 1) / at_once * at_once;
}
// Shuffled, those of 16 rows and a step are a block of four pieces. Waves copy as many whole blocks
// each. A tile of x may begin within a block, and then is in one more.
constexpr unsigned kScaleBlock = kSide * kDepth / kBlock;
constexpr int kBlockPieces = kScaleBlock / kPiece;
constexpr int of_all_waves(int blocks) { return (blocks + kWaves - 1) / kWaves * kWaves; }
constexpr int kBlocksX = of_all_waves(kTileM / kSide + 1), kBlocksW = of_all_waves(kTileN / kSide);

// LDS has so many bytes of an operand's scales, and so many copies of a wave bring them.
constexpr int kScaleRow = 4 * kScalePieces;
constexpr int scales_size(bool is_shuffled, bool in_runs, int rows, int blocks) {
    return is_shuffled ? blocks * kScaleBlock : in_runs ? 0 : whole_copies(rows) * kScaleRow;
}
constexpr int scale_copies(bool is_shuffled, bool in_runs, int rows) {
    return is_shuffled ? 1 : in_runs ? 0 : whole_copies(rows) / kScaleCopyRows / kWaves;
}
constexpr int kScalesSizeX = scales_size(kShuffledX, kRunsX, kTileM, kBlocksX);
constexpr int kScalesSizeW = scales_size(kShuffledW, kRunsW, kTileN, kBlocksW);
// Few steps have any of runs.
constexpr int kRunCopies = kRunsX + kRunsW;

// Of a step, a wave copies rows of the lower halves of all waves' fragments, then scales, and then
// rows of the upper halves. Of 32 rows of x there are too few for that: they come with the scales.
constexpr bool kSplitsX = kTileM > 32;
constexpr int kHalfRowsX = kHalfX * kSide, kHalfRowsW = kHalfW * kSide;
constexpr int kHalfCopiesX = kSplitsX ? kCopiesX / 2 : 0, kHalfCopiesW = kCopiesW / 2;
constexpr int kHalfCopies = kHalfCopiesX + kHalfCopiesW;
constexpr int kWholeX = kSplitsX ? 0 : kCopiesX;
constexpr int kScaleCopiesX = scale_copies(kShuffledX, kRunsX, kTileM);
constexpr int kScaleCopiesW = scale_copies(kShuffledW, kRunsW, kTileN);
constexpr int kMiddleCopies = kWholeX + kScaleCopiesX + kScaleCopiesW; // and those of runs
constexpr int kUpperCopies = kMiddleCopies + kRunCopies + kHalfCopies; // that follow the lower half
// Of a wave's share of the lower halves, the first row.
constexpr int kShareX = kHalfCopiesX * kCopyRows, kShareW = kHalfCopiesW * kCopyRows;
MX_DEVICE constexpr int first_low(int at, int half_rows) {
    return at / half_rows * 2 * half_rows + at % half_rows;
}
MX_DEVICE int first_x(int wave) {
    return kSplitsX ? first_low(wave * kShareX, kHalfRowsX) : wave * kRowsX;
}
MX_DEVICE int first_w(int wave) { return first_low(wave * kShareW, kHalfRowsW); }

// LDS, in bytes.
constexpr int kPart = (kRowsX + kRowsW) * kDepth;
MX_DEVICE constexpr int place_of_x(int row) { return row / kRowsX * kPart + row % kRowsX * kDepth; }
MX_DEVICE constexpr int place_of_w(int row) {
    return row / kRowsW * kPart + (kRowsX + row % kRowsW) * kDepth;
}
constexpr int kScalesAtX = kWaves * kPart, kScalesAtW = kScalesAtX + kScalesSizeX;
constexpr int kStage = kScalesAtW + kScalesSizeW;
constexpr int kFeatures = kTileN / kWavesN; // of a wave
// Of so many features of a wave, those of a row that are on their way at a time.
constexpr int pass_features(int features) {
    return features * sizeof(Out) > 256 ? 256 / sizeof(Out) : features;
}
constexpr int kPass = kSide * pass_features(kFeatures) * sizeof(Out);
constexpr int kPassesAt = 2 * kStage;
constexpr int kRunsAt = kPassesAt + kWaves * kPass; // of x, then of w
constexpr unsigned kRun = kPiece;                   // bytes of a row
constexpr int kStepBlocks = kDepth / kBlock;
constexpr int kRunsWAt = kRunsAt + (kRunsX ? kTileM * kRun : 0);
constexpr int kRunsHalf = kRunsWAt - kRunsAt + (kRunsW ? kTileN * kRun : 0);
constexpr int kLdsBytes = kRunsAt + 2 * kRunsHalf;
static_assert(kHalfX >= 1 && kHalfW >= 1 && kLdsBytes <= 160 * 1024);

// Half a tile has so many features: each wave's lower half of w. Both halves of the waves' rows of
// w in LDS are then filled with half as many features, one after the other.
constexpr bool kHalves = kTileM * kTileN == 256 * 256;
#if MX_ONE_GROUP
using Dealer = DealOne<kTileN, kSwath, kHalves>;
#else
using Dealer = Deal<kTileN, kSwath, kHalves>;
#endif

// The row of w, of 32, at a row of LDS. Fragments are pairs of which lanes hold eight features side
// by side: the first of a pair has features 0 to 3 of each eight, the second has 4 to 7.
constexpr int kPairRows = 2 * kSide;
static_assert(kRowsW % kPairRows == 0);
MX_DEVICE constexpr int paired_row(int at) {
    return at / kPairRows * kPairRows + at % kSide / 4 * 8 + at % kPairRows / kSide * 4 + at % 4;
}

MX_DEVICE unsigned char* lds() {
    MX_LDS u32x4 all[kLdsBytes / 16];
    return reinterpret_cast<unsigned char*>(all);
}

// Copies step after step of tile after tile to LDS.
class Copier {
  public:
    MX_MEMBER Copier(unsigned K, int wave, int lane) : K(K), wave(wave) {
        const int row = lane / kRowPieces, place = lane % kRowPieces;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int x = first_x(wave) + row + odd * kCopyRows;
            const int w = first_w(wave) + row + odd * kCopyRows;
            k_x[odd] = (place ^ x / 2 % 8) * kPiece;
            k_w[odd] = (place ^ w / 2 % 8) * kPiece;
            x_at[odd] = (x - x / kRoomX * (kRoomX - kWaveRowsX)) * K + k_x[odd];
            w_at[odd] = paired_row(w) * K + k_w[odd];
        }
        x_place = place_of_x(first_x(wave));
        w_place = place_of_w(first_w(wave));
        block = lane % kScalePieces * kScaleBytes;
        scale_at = lane / kScalePieces * (K / kBlock) + block;
        const int of_share = lane / kBlockPieces, piece_at = lane % kBlockPieces * kPiece;
        blocks_x_at = (wave * (kBlocksX / kWaves) + of_share) * block_row() + piece_at;
        blocks_w_at = (wave * (kBlocksW / kWaves) + of_share) * block_row() + piece_at;
        run_x_at = (wave * kScaleRowsX + lane) * (K / kBlock);
        run_w_at = paired_row(wave * kRowsW + lane) * (K / kBlock) & ~3u;
    }

    // Turns to this tile; if there is none, zeros are copied.
    template <class Arguments>
    MX_MEMBER void start(Arguments known, Tile tile, bool is_any) {
        // Worked out here, not kept in registers since the tile is known.
        asm volatile("" : "+s"(tile.first), "+s"(tile.rows), "+s"(tile.group), "+s"(tile.feature));
        const ArgumentsPointer args = known();
        const unsigned blocks = K / kBlock, N = args->N;
        const unsigned left = N - tile.feature;
        Offset w_row = static_cast<Offset>(kWgrad ? 0 : tile.group) * N + tile.feature;
        unsigned w_rows = left < kTileN ? left : kTileN;
        if (kHalves && tile.is_half) {
            // The wave's rows are those of lower halves, then as many that are not there.
            const unsigned back = wave / (kWaves / kWavesN) * kHalfRowsW;
            w_row -= back;
            w_rows = back + min(left, back + kHalfRowsW);
        }
        w_rows = is_any ? w_rows : 0;
        const Offset x_row = tile.first;
        const unsigned x_rows = is_any ? tile.rows : 0;
        if constexpr (kDepths) {
            asm volatile("" : "+s"(tile.begin), "+s"(tile.end));
            const auto from = [&](const unsigned char* all, Offset row, unsigned rows,
                                  unsigned pitch, unsigned before) {
                return resource(all + row * pitch + before, rows ? rows * pitch - before : 0);
            };
            end = tile.end;
            k = 0;
            x = from(args->xq, x_row, x_rows, K, tile.begin);
            w = from(args->wq, w_row, w_rows, K, tile.begin);
            const unsigned first_block = tile.begin / kBlock;
            if constexpr (kRunsX) { // from a dword, as below, and tiles begin with a step
                skew = x_row * blocks % 4;
                const unsigned size = skew + x_rows * blocks + 3 & ~3;
                x_scales = resource(args->xs + (x_row * blocks - skew) + first_block,
                                    is_any ? size - first_block : 0);
            } else {
                x_scales = from(args->xs, x_row, x_rows, blocks, first_block);
            }
            w_scales = from(args->ws, w_row, w_rows, blocks, first_block);
            return;
        }
        runs_at = runs_at % kRun ? kRunsHalf - runs_at / kRun * kRun : runs_at;
        k = 0;
        x = resource(args->xq + x_row * K, x_rows * K);
        w = resource(args->wq + w_row * K, w_rows * K);
        if constexpr (kShuffledX) {
            // Groups of one size each begin with a block.
            const Offset more = args->layout > 0 ? -args->rows_each % kSide : 0;
            const Offset row = x_row + more * tile.group;
            skew = row % kSide;
            x_scales = resource(args->xs + row / kSide * block_row(),
                                is_any ? (skew + tile.rows + kSide - 1) / kSide * block_row() : 0);
        } else if constexpr (kRunsX) {
            // From a dword to a dword: the arguments are whole ones.
            const Offset first = x_row * blocks;
            skew = first % 4;
            x_scales =
                resource(args->xs + (first - skew), is_any ? skew + x_rows * blocks + 3 & ~3 : 0);
        } else {
            x_scales = resource(args->xs + x_row * blocks, x_rows * blocks);
        }
        if constexpr (kShuffledW)
            w_scales =
                resource(args->ws + w_row / kSide * block_row(), w_rows / kSide * block_row());
        else
            w_scales = resource(args->ws + w_row * blocks, w_rows * blocks);
    }

    // From here on zeros are copied.
    MX_MEMBER void stop() {
        k = 0;
        x[kSizeWord] = w[kSizeWord] = x_scales[kSizeWord] = w_scales[kSizeWord] = 0;
    }

    // To be called before a step's copies.
    MX_MEMBER void aim() {
        const unsigned last = depth();
        if constexpr (kWgrad) {
            const unsigned left = last - k;
            kept = kept << 8 | (left < kDepth ? left : 0);
        }
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const bool x_in = kWholeSteps || k + k_x[odd] < last;
            const bool w_in = kWholeSteps || k + k_w[odd] < last;
            x_now[odd] = x_in ? x_at[odd] + k : kNowhere;
            w_now[odd] = w_in ? w_at[odd] + k : kNowhere;
        }
        const bool in = kWgrad ? k < last : k / kBlock + block < last / kBlock;
        scale_now = in ? scale_at + k / kBlock : kNowhere;
        const bool is_any = kWholeSteps || k < K;
        const unsigned step_at = k / kDepth * kScaleBlock;
        blocks_x_now = is_any ? blocks_x_at + step_at : kNowhere;
        blocks_w_now = is_any ? blocks_w_at + step_at : kNowhere;
    }

    // One of the step's copies of the lower halves, into a stage.
    template <int I>
    MX_MEMBER void copy_low(unsigned stage) const {
        if constexpr (I < kHalfCopiesX)
            copy_x<I, 0>(stage);
        else
            copy_w<I - kHalfCopiesX, 0>(stage);
    }
    // One of those that follow: scales and what is not halved, then the upper halves.
    template <int I>
    MX_MEMBER void copy_upper(unsigned stage) const {
        constexpr int scales_x = I - kWholeX, scales_w = scales_x - kScaleCopiesX;
        constexpr int runs = I - kMiddleCopies, high_w = runs - kRunCopies;
        if constexpr (I < kWholeX)
            copy_x<I, 0>(stage);
        else if constexpr (scales_x < kScaleCopiesX && kShuffledX)
            copy_blocks<kBlocksX>(x_scales, blocks_x_now, stage, kScalesAtX);
        else if constexpr (scales_x < kScaleCopiesX)
            copy_scales(x_scales, scales_x, stage, kScalesAtX);
        else if constexpr (scales_w < kScaleCopiesW && !kShuffledW)
            copy_scales(w_scales, scales_w, stage, kScalesAtW);
        else if constexpr (scales_w < kScaleCopiesW)
            copy_blocks<kBlocksW>(w_scales, blocks_w_now, stage, kScalesAtW);
        else if constexpr (runs < kRunsX)
            copy_runs<kScaleRowsX>(x_scales, kRunSteps == 4 ? run_x_at : run_x_at + skew & ~3u,
                                   kRunsAt);
        else if constexpr (runs < kRunCopies)
            copy_runs<kRowsW>(w_scales, run_w_at, kRunsWAt);
        else if constexpr (high_w < kHalfCopiesW)
            copy_w<high_w, kHalfRowsW>(stage);
        else
            copy_x<high_w - kHalfCopiesW, kHalfRowsX>(stage);
    }

    // Clears what this wave has copied of the lower halves and scales in the step before the one
    // that was aimed at last, from the end of its group on. That step lies in `stage`; of younger
    // copies there are so many.
    template <int Younger>
    MX_MEMBER void clear_low_beyond_end(unsigned stage) const {
        const unsigned count = kept >> 8 & 0xff;
        if (count == 0)
            return;
        asm volatile("s_waitcnt vmcnt(%0)" ::"i"(Younger) : "memory");
        clear_half(stage, count, kSplitsX ? kHalfCopiesX : kCopiesX, 0, 0);
        const unsigned blocks = (count + kBlock - 1) / kBlock;
        const unsigned of_group = blocks < 4 ? (1u << 8 * blocks) - 1 : ~0u;
        unsigned char* scales = lds() + stage + thread_in_group() * 4;
        clear_words<kScaleCopiesX>(scales + kScalesAtX, of_group);
        clear_words<kScaleCopiesW>(scales + kScalesAtW, of_group);
    }
    // The same of the upper halves in the step before that one.
    template <int Younger>
    MX_MEMBER void clear_high_beyond_end(unsigned stage) const {
        const unsigned count = kept >> 16 & 0xff;
        if (count == 0)
            return;
        asm volatile("s_waitcnt vmcnt(%0)" ::"i"(Younger) : "memory");
        clear_half(stage, count, kHalfCopiesX, place_of_x(kHalfRowsX), kHighW);
    }

    // After a step's copies.
    MX_MEMBER void advance() {
        constexpr unsigned last = (kRunSteps - 1) * kStepBlocks;
        behind = runs_at;
        runs_at = runs_at % kRun == last ? kRunsHalf + last - runs_at : runs_at + kStepBlocks;
        k += kDepth;
    }
    // True once all steps of the tile are copied, of which there are two at least.
    MX_MEMBER bool is_done() const {
        constexpr bool has_two = kShared && kWholeSteps;
        return k >= (has_two ? depth() : max(depth(), 2 * kDepth));
    }
    // True if the step that comes after the present one's products is a tile's first.
    MX_MEMBER bool has_begun() const { return k == kDepth; }
    // How many k the tile has.
    MX_MEMBER unsigned depth() const { return kDepths ? end : K; }

    unsigned skew;   // the tile's first row in a block of shuffled scales, or scale in a dword
    unsigned behind; // where runs have the scales of the step before this one

  private:
    // From a row of a lower half to that of the upper one.
    static constexpr int kHighW = place_of_w(kHalfRowsW) - place_of_w(0);

    // Copy I of a half of x, or of all of it, whose rows begin so far from those of the lower half.
    template <int I, int Further>
    MX_MEMBER void copy_x(unsigned stage) const {
        unsigned further = (Further + I / 2 * 2 * kCopyRows) * K;
        constexpr int rows = Further > 0 ? kUpperX * kSide : kHalfRowsX; // of the half
        if constexpr (rows < kHalfRowsX)
            further = wave % kWavesN * kShareX + I * kCopyRows < rows ? further : kNowhere / 2;
        copy_16_bytes(x, x_now[I % 2], further, stage + x_place,
                      place_of_x(Further) + I * kCopyRows * kDepth);
    }
    template <int I, int Further>
    MX_MEMBER void copy_w(unsigned stage) const {
        copy_16_bytes(w, w_now[I % 2], paired_row(Further + I / 2 * 2 * kCopyRows) * K,
                      stage + w_place, (Further ? kHighW : 0) + I * kCopyRows * kDepth);
    }
    MX_MEMBER void clear_half(unsigned stage, unsigned count, int copies_x, int to_x,
                              int to_w) const {
        unsigned char* own = lds() + stage + thread_in_group() % kLanes * kPiece;
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            clear_pieces(own + x_place + to_x, copies_x, odd, count - k_x[odd]);
            clear_pieces(own + w_place + to_w, kHalfCopiesW, odd, count - k_w[odd]);
        }
    }
    // Of every second copy's piece, of whose bytes the first `left` count, if it is cut.
    MX_MEMBER static void clear_pieces(unsigned char* at, int copies, int odd, unsigned left) {
        if (left - 1 >= kPiece - 1)
            return;
        u32x4 kept;
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
            kept[i] = left >= 4 * i + 4 ? ~0u : left > 4 * i ? (1u << 8 * (left - 4 * i)) - 1 : 0;
        for (int i = odd; i < copies; i += 2)
            *reinterpret_cast<u32x4*>(at + i * kCopyRows * kDepth) &= kept;
    }
    template <int Copies>
    MX_MEMBER static void clear_words(unsigned char* at, unsigned of_group) {
        for (int i = 0; i < Copies; ++i)
            *reinterpret_cast<unsigned*>(at + i * kWaves * kLanes * 4) &= of_group;
    }
    // Copy i of row-major scales.
    MX_MEMBER void copy_scales(Resource from, int i, unsigned stage, int at) const {
        constexpr int rows = kWaves * kScaleCopyRows;
        copy_piece<kScaleBytes>(from, scale_now, (i * rows + wave * kScaleCopyRows) * (K / kBlock),
                                stage + wave * kScaleCopyRows * kScaleRow,
                                at + i * rows * kScaleRow);
    }
    // The wave's share of so many blocks of shuffled ones.
    template <int Blocks>
    MX_MEMBER void copy_blocks(Resource from, unsigned offset, unsigned stage, int at) const {
        constexpr int share = Blocks / kWaves;
        copy_16_bytes_of<share * kBlockPieces>(from, offset, 0, stage + wave * share * kScaleBlock,
                                               at);
    }
    // The wave's rows of a run, where one begins with this step.
    template <int Rows>
    MX_MEMBER void copy_runs(Resource from, unsigned offset, int at) const {
        copy_16_bytes_at_zero<Rows>(runs_at % kRun, from, offset, k / kBlock,
                                    runs_at + wave * Rows * kRun, at);
    }
    // Bytes of the shuffled scales of 16 rows, K padded to whole steps.
    MX_MEMBER unsigned block_row() const { return (K + kDepth - 1) / kDepth * kScaleBlock; }

    unsigned K, wave, block, scale_at, blocks_x_at, blocks_w_at, k;
    unsigned run_x_at, run_w_at, runs_at = 0;
    unsigned k_x[2], k_w[2], x_at[2], w_at[2]; // of copies of even and odd number
    unsigned x_now[2], w_now[2], scale_now, blocks_x_now, blocks_w_now;
    unsigned end;      // where kDepths: how many k the tile has
    unsigned kept = 0; // where the group ends in this step, byte 0, and in the ones before it, or 0
    int x_place, w_place; // of the wave's first row in a stage
    Resource x, w, x_scales, w_scales;
};

// One half of the fragments of an operand, of a wave.
template <int Count>
struct Half {
    u32x8 rows[Count];
    unsigned scales[Count]; // byte 0

    // From here on these are words. Left alone, LLVM takes bytes to the next step, and clears the
    // rest of their registers there, just before a product takes them.
    MX_MEMBER void widen() {
#pragma unroll
        for (int i = 0; i < Count; ++i)
            asm volatile("" : "+v"(scales[i]));
    }
};

// Where a lane reads the fragments of an operand in a stage. Rows are those of a part, At is where
// they begin in it, ScalesAt where the operand's scales begin in the stage or, in runs, in LDS.
// IsShuffled and InRuns say how these lie, IsPaired whether rows are in the order of paired_row.
template <int Rows, int At, int ScalesAt, bool IsShuffled, bool InRuns, bool IsPaired>
class Place {
  public:
    static constexpr int kReads = 3; // of one fragment

    // first, first_scale: rows of LDS, of payload and of scales. blocks: scales of a row.
    MX_MEMBER Place(int first, int first_scale, int lane, unsigned blocks) {
        const int row = first + lane % kSide, g = lane / kSide;
        const unsigned begin = row / Rows * kPart + At + row % Rows * kDepth;
        low = begin + (g ^ row / 2 % 8) * kPiece;
        high = begin + ((g + 4) ^ row / 2 % 8) * kPiece;
        const int own = IsPaired ? paired_row(lane % kSide) : lane % kSide;
        row_in_block = own % kSide;
        block = ScalesAt + (first_scale + own) / kSide * kScaleBlock + g * kSide;
        run = ScalesAt + (first_scale + lane % kSide) * kRun;
        before = kRunSteps == 4 ? 0 : (first_scale + own) * blocks % 4;
        scale = IsShuffled ? block + row_in_block
                           : ScalesAt + (first_scale + own) * kScaleRow + g / kScaleBytes * 4 +
                                 g % kScaleBytes;
    }

    // From here on it is a tile's turn whose first row is row `skew` of a block of scales.
    MX_MEMBER void start(unsigned skew) {
        const unsigned row = row_in_block + skew;
        scale = block + row + row / kSide * (kScaleBlock - kSide);
    }

    // From here on it is the turn of a step whose scale for the lane is byte `at` of its row's in
    // runs. The tile's first row begins at byte `skew` of a dword.
    MX_MEMBER void turn_to(unsigned at, unsigned skew) {
        scale = run + at + (kRunSteps == 4 ? 0 : (before + skew) % 4);
    }

    // Read `which`, of 3 Count, of a half whose first fragment is this: scales first, since all are
    // looked at before the first product.
    template <int Which, int Count>
    MX_MEMBER void read_half(Half<Count>& to, int first, unsigned stage) const {
        const unsigned char* at = lds() + stage;
        if constexpr (Which < Count)
            to.scales[Which] = (InRuns ? lds() : at)[scale + scale_of_fragment(first + Which)];
        else
            read_rows<(Which - Count) % 2>(to.rows[(Which - Count) / 2],
                                           kSide * (first + (Which - Count) / 2), at);
    }

  private:
    template <bool IsHigh>
    MX_MEMBER void read_rows(u32x8& to, int row, const unsigned char* stage) const {
        const int further = row / Rows * kPart + row % Rows * kDepth;
        const u32x4 half = *reinterpret_cast<const u32x4*>(stage + (IsHigh ? high : low) + further);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            to[IsHigh * 4 + i] = half[i];
    }
    // From the scale of a lane's first fragment to that of another.
    MX_MEMBER static constexpr int scale_of_fragment(int i) {
        if constexpr (InRuns)
            return i * kSide * kRun;
        const int rows = IsPaired ? paired_row(i * kSide) : i * kSide;
        return IsShuffled ? rows / kSide * kScaleBlock + rows % kSide : rows * kScaleRow;
    }
    unsigned low, high, scale, run, before;
    unsigned row_in_block, block; // of shuffled scales
};
using PlaceX = Place<kRowsX, 0, kRunsX ? kRunsAt : kScalesAtX, kShuffledX, kRunsX, false>;
using PlaceW =
    Place<kRowsW, kRowsX * kDepth, kRunsW ? kRunsWAt : kScalesAtW, kShuffledW, kRunsW, true>;

// Sums of 16 x 16 products in accumulation registers that the source names: a[4 i .. 4 i + 3] is
// fragment i. LLVM cannot keep 128 or 256 sums of a lane where they are: with no register to spare
// it moves them about, by way of memory. So it is not told of them, but that all are in use.
//
// What it does not know of it cannot protect: settle() waits until the last product is in its
// registers (ISA manual, section 4.5: 8 passes, and a margin), and the first product of an operand
// waits for the two states that must lie between it and a vector instruction that writes the
// operand: LLVM moves what is loaded about. The simulator checks both.

#define MX_TEN(t)                                                                                  \
    "a" #t "0", "a" #t "1", "a" #t "2", "a" #t "3", "a" #t "4", "a" #t "5", "a" #t "6",            \
        "a" #t "7", "a" #t "8", "a" #t "9"
#define MX_ALL_SUMS                                                                                \
    MX_TEN(), MX_TEN(1), MX_TEN(2), MX_TEN(3), MX_TEN(4), MX_TEN(5), MX_TEN(6), MX_TEN(7),         \
        MX_TEN(8), MX_TEN(9), MX_TEN(10), MX_TEN(11), MX_TEN(12), MX_TEN(13), MX_TEN(14),          \
        MX_TEN(15), MX_TEN(16), MX_TEN(17), MX_TEN(18), MX_TEN(19), MX_TEN(20), MX_TEN(21),        \
        MX_TEN(22), MX_TEN(23), MX_TEN(24), "a250", "a251", "a252", "a253", "a254", "a255"

// Fragments by their numbers, which must be constants once loops are unrolled. At most 64.
template <int Count>
struct NamedSums {
    // No value of the compiler's lives in these registers across this.
    MX_MEMBER static void reserve() { asm volatile("" ::: "memory", MX_ALL_SUMS); }

#if MX_X_E5M2
#define MX_OF_B " blgp:1"
#else
#define MX_OF_B ""
#endif
#define MX_ADD(before, to)                                                                         \
    asm volatile(before "v_mfma_scale_f32_16x16x128_f8f6f4 a[%c4:%c5], %0, %1, " to ", %2, %3 "    \
                        "op_sel_hi:[0,0,0]" MX_OF_B                                                \
                 :                                                                                 \
                 : "v"(a), "v"(b), "v"(a_scales), "v"(b_scales), "i"(4 * i), "i"(4 * i + 3)        \
                 : "memory")
    // The first product begins the sum. Vector instructions may have written fresh operands.
    template <bool IsFirst, bool IsFresh>
    MX_MEMBER static void add(int i, u32x8 a, unsigned a_scales, u32x8 b, unsigned b_scales) {
        if constexpr (IsFirst && IsFresh)
            MX_ADD("s_nop 1\n\t", "0");
        else if constexpr (IsFirst)
            MX_ADD("", "0");
        else if constexpr (IsFresh)
            MX_ADD("s_nop 1\n\t", "a[%c4:%c5]");
        else
            MX_ADD("", "a[%c4:%c5]");
    }
#undef MX_ADD
#undef MX_OF_B
    MX_MEMBER static void settle() { asm volatile("s_nop 15\n\ts_nop 7" ::: "memory"); }
    MX_MEMBER static f32x4 read(int i) {
        return {read_one(4 * i), read_one(4 * i + 1), read_one(4 * i + 2), read_one(4 * i + 3)};
    }

  private:
    MX_MEMBER static float read_one(int i) {
        float part;
        asm volatile("v_accvgpr_read_b32 %0, a%c1" : "=v"(part) : "i"(i) : "memory");
        return part;
    }
};

// The same, in registers of the compiler's choice, for as many as it can hold.
template <int Count>
struct PlainSums {
    f32x4 of[Count];

    MX_MEMBER static void reserve() {}
    template <bool IsFirst, bool IsFresh>
    MX_MEMBER void add(int i, u32x8 a, unsigned a_scales, u32x8 b, unsigned b_scales) {
        constexpr int e4m3 = 0, of_x = MX_X_E5M2;
        of[i] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(
            a, b, IsFirst ? f32x4{} : of[i], e4m3, of_x, 0, a_scales, 0, b_scales);
        // LLVM would move the product, which touches no memory, away from the reads it is to hide.
        asm volatile("" : "+v"(of[i])::"memory");
    }
    MX_MEMBER static void settle() {}
    MX_MEMBER f32x4 read(int i) const { return of[i]; }
};

template <bool IsNamed, int Count>
struct SumsOf {
    using type = NamedSums<Count>;
};
template <int Count>
struct SumsOf<false, Count> {
    using type = PlainSums<Count>;
};

#undef MX_ALL_SUMS
#undef MX_TEN

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

// With two waves a SIMD, each has half of the registers, and plain sums fit.
using Sums = SumsOf<(kFragsX * kFragsW >= 32), kFragsX * kFragsW>::type; // fragment x * kFragsW + w

// A gradient of w has zeros where groups have no k. Each workgroup writes its share of each such
// group's, a little beside every step of its tiles, as memory takes longer for them than products
// would leave it at the end.
constexpr bool kZeros = kWgrad && !MX_ACCUMULATE;
class Zeros {
  public:
    template <class Arguments>
    MX_MEMBER Zeros(Arguments args, Shelf& shelf) {
        if constexpr (kZeros)
            look(args, shelf, 0);
    }
    unsigned any = 0; // whether something is left of the first groups

    MX_MEMBER void store_some(Shelf& shelf) {
        unsigned left = shelf.get<kZerosLeft>();
        const LaneMask groups = shelf.get_long<kZerosGroups>();
        if (left == 0 && groups != 0) {
            shelf.put_long<kZerosGroups>(groups & groups - 1);
            left = begin(shelf, __builtin_ctzll(groups));
        }
        any = groups != 0 || left > kAtOnce;
        const unsigned now = min(left, kAtOnce);
        const Offset at = shelf.get_long<kZerosAt>();
        const Buffer out(reinterpret_cast<unsigned char*>(at), now * kPiece);
#pragma unroll
        for (unsigned i = 0; i < kStores; ++i)
            out.store((i * kThreads + thread_in_group()) * kPiece, u32x4{});
        shelf.put_long<kZerosAt>(at + now * kPiece);
        shelf.put<kZerosLeft>(left - now);
    }
    // All that is left.
    MX_MEMBER void store_all(Shelf& shelf) {
        if constexpr (!kZeros)
            return;
        for (;;) {
            while (any)
                store_some(shelf);
            const unsigned next = shelf.get<kZerosChunk>() + kLanes;
            if (next >= arguments()->count)
                return;
            look(Anew(), shelf, next);
        }
    }

  private:
    // Shelved: the first of 64 groups, those of them whose zeros are not begun; of a share, in
    // pieces, where it goes on and what is left.
    static constexpr unsigned kStores = 2, kAtOnce = kStores * kThreads;

    template <class Arguments>
    MX_MEMBER void look(Arguments args, Shelf& shelf, unsigned first) {
        const unsigned group = first + thread_in_group() % kLanes;
        const bool is_there = group < args()->count;
        unsigned begin, count;
        depth_of(args(), group, is_there, begin, count);
        const LaneMask groups = __builtin_amdgcn_ballot_w64(is_there && count == 0);
        any = groups != 0;
        shelf.put<kZerosChunk>(first);
        shelf.put_long<kZerosGroups>(groups);
    }
    // Turns to the workgroup's share of a group's zeros, of so many pieces.
    MX_MEMBER static unsigned begin(Shelf& shelf, unsigned in_chunk) {
        const ArgumentsPointer args = arguments();
        const Offset all = args->M * args->N * sizeof(Out) / kPiece;
        const unsigned share = (all + args->workgroups - 1) / args->workgroups;
        const Offset before = static_cast<Offset>(group_x()) * share;
        const Offset first = (shelf.get<kZerosChunk>() + in_chunk) * all + before;
        shelf.put_long<kZerosAt>(reinterpret_cast<Offset>(args->y) + first * kPiece);
        const Offset left = before < all ? all - before : 0;
        return left < share ? left : share;
    }
};

// A wave's work in the steps of its tiles.
class Stream {
  public:
    Sums sums;
    Zeros zeros;

    template <class Arguments>
    MX_MEMBER Stream(Arguments args, Shelf& shelf, const Copier& copier, unsigned blocks, int wave,
                     int lane)
        : zeros(args, shelf), blocks(blocks), block(lane / kSide), copier(copier),
          place_x(wave / kWavesN * kRoomX, wave / kWavesN * kWaveRowsX, lane, blocks),
          place_w(wave % kWavesN * kFeatures, wave % kWavesN * kFeatures, lane, blocks) {}

    // Copies the first two steps of the first tile, and reads the first operands.
    template <class Arguments>
    MX_MEMBER void begin(Arguments args, const Tile& first) {
        copier.start(args, first, true);
        for (int step = 0; step < 2; ++step) {
            copier.aim();
            each<kHalfCopies>([&](auto i) { copier.copy_low<i.value>(step * kStage); });
            each<kUpperCopies>([&](auto i) { copier.copy_upper<i.value>(step * kStage); });
            copier.advance();
        }
        if constexpr (kShuffledX)
            place_x.start(skew = copier.skew);
        if constexpr (kRunCopies > 0) {
            copier.behind = 0; // two steps are copied by now
            turn_to_step(true);
            copier.behind = kStepBlocks;
        }
        if constexpr (kWgrad)
            copier.clear_low_beyond_end<kHalfCopies + kOfStep>(0);
        copies_arrived<kHalfCopies + kOfStep>();
        each<kReadsX>([&](auto i) { place_x.read_half<i.value>(x_low, 0, stage); });
        each<kReadsW>([&](auto i) { place_w.read_half<i.value>(w_first, 0, stage); });
        x_low.widen();
        w_first.widen();
    }
    // The products of a tile, or of half of one, of so many steps.
    template <bool IsHalf>
    MX_MEMBER void multiply(unsigned steps, Shelf& shelf) {
        step<true, IsHalf>(w_first, w_second, shelf);
        for (--steps; steps >= 2; steps -= 2) {
            step<false, IsHalf>(w_second, w_first, shelf);
            step<false, IsHalf>(w_first, w_second, shelf);
        }
        if (steps > 0)
            step<false, IsHalf>(w_second, w_first, shelf);
        else
            w_first = w_second;
        settle_nans<IsHalf ? kHalfW : kFragsW>();
        sums.settle();
    }

  private:
    // Rows that met a NaN scale get NaN, and the next tile's notes begin.
    template <int Features>
    MX_MEMBER void settle_nans() {
        if (most_x.any_nan() || most_w.any_nan())
#pragma unroll
            for (int x = 0; x < kFragsX; ++x)
#pragma unroll
                for (int w = 0; w < Features; ++w)
                    sums.template add<false, true>(x * kFragsW + w, most_w.payload(w), kUnitScale,
                                                   most_x.payload(x), kUnitScale);
        most_x = {};
        most_w = {};
    }

    static constexpr int kReadsX = PlaceX::kReads * kHalfX, kReadsW = PlaceW::kReads * kHalfW;
    static constexpr int kUpperReadsX = PlaceX::kReads * kUpperX;
    // Copies that are waited for: a run's count for none, as most steps have none.
    static constexpr int kOfStep = 2 * kHalfCopies + kMiddleCopies;
    // Of quarters 1 and 3; the others have the rest.
    static constexpr int kFirstLow = kHalfCopies / 2, kFirstUpper = (kUpperCopies + 1) / 2;

    // A step of so many; the next tile is shelved, and without one zeros are copied. The first
    // begins the sums. Half a tile has no upper half of w: quarter 4 follows quarter 1, and its
    // products hide what quarters 2 and 3 do besides.
    template <bool IsFirst, bool IsHalf>
    MX_MEMBER void step(Half<kHalfW>& low, Half<kHalfW>& high, Shelf& shelf) {
        const unsigned other = kStage - stage;
        if (copier.is_done()) {
            if constexpr (kShared)
                copier.stop();
            else
                copier.start(Anew(), shelf.tile<kNext>(), !shelf.get<kIsLast>());
        }
        copier.aim();
        if (kZeros && zeros.any)
            zeros.store_some(shelf);
        note(most_x, 0, x_low);
        note(most_w, 0, low);
        const auto upper_is_there = [&] {
            if constexpr (kWgrad)
                copier.clear_high_beyond_end<kOfStep>(stage);
            copies_arrived<kOfStep>();
        };
        const auto next_is_there = [&] {
            if constexpr (kWgrad)
                copier.clear_low_beyond_end<2 * kHalfCopies>(other);
            copies_arrived<2 * kHalfCopies>();
        };
        const auto read_x_high = [&](auto j) { place_x.read_half<j.value>(x_high, kHalfX, stage); };
        const auto read_next_x = [&](auto j) { place_x.read_half<j.value>(x_low, 0, other); };
        const auto read_next_w = [&](auto j) { place_w.read_half<j.value>(high, 0, other); };
        if constexpr (IsHalf) {
            quarter<IsFirst, true, true, 1 + kUpperReadsX + kHalfCopies>(
                x_low, 0, low, 0, [&](auto i) {
                    if constexpr (i.value == 0)
                        upper_is_there();
                    else
                        mixed<i.value - 1, kUpperReadsX, kHalfCopies>(
                            read_x_high, [&](auto j) { copier.copy_low<j.value>(stage); });
                });
            note(most_x, 1, x_high);
            turn_to_next();
            quarter<IsFirst, true, false, 1 + kReadsX + kReadsW + kUpperCopies>(
                x_high, 1, low, 0, [&](auto i) {
                    if constexpr (i.value == 0) {
                        next_is_there();
                    } else {
                        mixed<i.value - 1, kReadsX + kReadsW, kUpperCopies>(
                            [&](auto j) {
                                if constexpr (j.value < kReadsX)
                                    read_next_x(j);
                                else
                                    read_next_w(Constant<j.value - kReadsX>{});
                            },
                            [&](auto j) { copier.copy_upper<j.value>(stage); });
                    }
                });
        } else {
            quarter<IsFirst, true, true, 1 + kReadsW + kFirstLow>(x_low, 0, low, 0, [&](auto i) {
                if constexpr (i.value == 0)
                    upper_is_there();
                else
                    mixed<i.value - 1, kReadsW, kFirstLow>(
                        [&](auto j) { place_w.read_half<j.value>(high, kHalfW, stage); },
                        [&](auto j) { copier.copy_low<j.value>(stage); });
            });
            note(most_w, 1, high);
            quarter<IsFirst, false, true, kUpperReadsX + kHalfCopies - kFirstLow>(
                x_low, 0, high, 1, [&](auto i) {
                    mixed<i.value, kUpperReadsX, kHalfCopies - kFirstLow>(
                        read_x_high, [&](auto j) { copier.copy_low<kFirstLow + j.value>(stage); });
                });
            note(most_x, 1, x_high);
            turn_to_next();
            quarter<IsFirst, true, false, 1 + kReadsX + kFirstUpper>(
                x_high, 1, high, 1, [&](auto i) {
                    if constexpr (i.value == 0)
                        next_is_there();
                    else
                        mixed<i.value - 1, kReadsX, kFirstUpper>(
                            read_next_x, [&](auto j) { copier.copy_upper<j.value>(stage); });
                });
            quarter<IsFirst, false, false, kReadsW + kUpperCopies - kFirstUpper>(
                x_high, 1, low, 0, [&](auto i) {
                    mixed<i.value, kReadsW, kUpperCopies - kFirstUpper>(read_next_w, [&](auto j) {
                        copier.copy_upper<kFirstUpper + j.value>(stage);
                    });
                });
        }
        x_low.widen();
        high.widen();
        copier.advance();
        stage = other;
    }

    // Scales are read from here on for the next step.
    MX_MEMBER void turn_to_next() {
        if constexpr (kShuffledX) { // a branch would let LLVM take bytes to its other side
            skew = copier.has_begun() ? copier.skew : skew;
            place_x.start(skew);
        }
        if constexpr (kRunCopies > 0)
            turn_to_step(copier.has_begun());
    }

    // Scales of runs are read from here on for the next step, maybe a tile's first.
    MX_MEMBER void turn_to_step(bool is_first) {
        const int of_tile = kShared ? copier.depth() / kBlock : blocks;
        last_block = is_first ? of_tile - 1 : last_block - kStepBlocks;
        // Lanes beyond the last scale take that one.
        const int of_step = kWholeSteps ? block : __builtin_elementwise_min(block, last_block);
        const unsigned at = copier.behind + of_step;
        if constexpr (kRunsX) {
            if constexpr (kRunSteps < 4)
                skew = is_first ? copier.skew : skew;
            place_x.turn_to(at, skew);
        }
        if constexpr (kRunsW)
            place_w.turn_to(at, 0);
    }

    // Number I of so many reads and copies, which take turns.
    template <int I, int Reads, int Copies, class Read, class Copy>
    MX_MEMBER static void mixed(Read read, Copy copy) {
        constexpr int before = I * Copies / (Reads + Copies);
        if constexpr ((I + 1) * Copies / (Reads + Copies) > before)
            copy(Constant<before>{});
        else
            read(Constant<I - before>{});
    }

    // A quarter of a step's products, of halves that come from loads now if they are fresh.
    // work(i), for each i below Work, is spread over those after the first few.
    template <bool IsFirst, bool IsFreshX, bool IsFreshW, int Work, int CountX, class Do>
    MX_MEMBER void quarter(const Half<CountX>& x, int x_half, const Half<kHalfW>& w, int w_half,
                           Do work) {
        constexpr int products = CountX * kHalfW, barrier_at = products / 8;
        constexpr int slots = products - barrier_at;
        sums.reserve();
        each<products>([&](auto i) {
            constexpr int fx = i.value / kHalfW, fw = i.value % kHalfW;
            constexpr bool is_fresh = (IsFreshX && fw == 0) || (IsFreshW && fx == 0);
            sums.template add<IsFirst, is_fresh>(
                (x_half * kHalfX + fx) * kFragsW + w_half * kHalfW + fw, w.rows[fw], w.scales[fw],
                x.rows[fx], x.scales[fx]);
            if constexpr (i.value >= barrier_at) {
                constexpr int first = (i.value - barrier_at) * Work / slots;
                constexpr int end = (i.value - barrier_at + 1) * Work / slots;
                each<end - first>([&](auto j) { work(Constant<first + j.value>{}); });
            }
            finish_before_next();
        });
    }

    template <int Most, int Count>
    MX_MEMBER static void note(Largest<Most>& most, int half, const Half<Count>& taken) {
#pragma unroll
        for (int i = 0; i < Count; ++i)
            most.take(half, i, taken.scales[i]);
    }

    unsigned blocks; // of a row
    int block;       // of a step that the lane has the scales of
    Copier copier;
    PlaceX place_x;
    PlaceW place_w;
    Half<kHalfX> x_low;
    Half<kUpperX> x_high;
    Half<kHalfW> w_first, w_second;
    Largest<kHalfX> most_x;
    Largest<kHalfW> most_w;
    unsigned stage = 0, skew = 0;
    int last_block = 0; // of a row, from the next step's first on
};

// The bias of the features that a lane holds: four of each fragment.
template <int Kind, int Frags>
struct Bias {
    f32x4 of[Frags];

    MX_MEMBER Bias(const Tile& tile, unsigned N, unsigned feature) {
        constexpr unsigned size = sizeof(DType<Kind>);
        const Offset first = static_cast<Offset>(tile.group) * N + tile.feature;
        const Buffer values(static_cast<const unsigned char*>(arguments()->bias) + first * size,
                            (N - tile.feature) * size);
#pragma unroll
        for (int w = 0; w < Frags; ++w) {
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
template <int Frags>
struct Bias<kNone, Frags> {
    MX_MEMBER Bias(const Tile&, unsigned, unsigned) {}
    MX_MEMBER static f32x4 added_to(f32x4 sum, int) { return sum; }
};

// What y holds, four features of a row, which are added to the sums.
template <class T, bool IsAny>
struct Old {
    Buffer y;
    unsigned row_bytes, feature, left;

    MX_MEMBER f32x4 added_to(f32x4 sum, unsigned row, int w) const {
        if constexpr (!IsAny)
            return sum;
        const unsigned n = feature + paired_row(w * kSide);
        const unsigned at = n < left ? row * row_bytes + n * sizeof(T) : kNowhere;
        if constexpr (sizeof(T) == 4) {
            return sum + __builtin_bit_cast(f32x4, y.load(at));
        } else {
            using Four = T __attribute__((ext_vector_type(4)));
            return sum + __builtin_convertvector(__builtin_bit_cast(Four, y.load_two(at)), f32x4);
        }
    }
};

// Where LDS has piece p of row r of results on their way: eight lanes that write adjacent rows, and
// those that read a row, are in different banks.
template <unsigned PassRow>
MX_DEVICE unsigned place_of(unsigned r, unsigned p) {
    constexpr unsigned banks = 128; // bytes
    constexpr unsigned together = PassRow < banks ? banks / PassRow : 1;
    return r * PassRow + (p ^ r / together) % (PassRow / kPiece) * kPiece;
}

// Rounds a wave's sums and stores them, 16 bytes a lane: rows come to lie in lines of memory by way
// of LDS, 16 rows at a time.
template <bool IsHalf, class All>
MX_DEVICE void store_tile(const All& sums, const Tile& tile, unsigned wave, unsigned lane) {
    constexpr int features = IsHalf ? kFeatures / 2 : kFeatures; // of a wave
    constexpr int in_pass = pass_features(features), frags = in_pass / kSide;
    constexpr unsigned pass_row = in_pass * sizeof(Out);
    constexpr unsigned row_pieces = pass_row / kPiece, rows = kLanes / row_pieces; // of a store
    constexpr int count = kPiece / sizeof(Out), piece_frags = count / 4;           // of a piece
    using Values = Out __attribute__((ext_vector_type(count)));
    // Values that follow from these are worked out for each tile, not kept in registers.
    asm volatile("" : "+v"(lane), "+s"(wave));
    const unsigned first_feature = wave % kWavesN * features;
    const unsigned N = arguments()->N;
    const unsigned written = lane % kSide, eight = lane / kSide, read = lane / row_pieces;
    const Bias<MX_BIAS, features / kSide> bias(tile, N, first_feature + eight * 8);
    unsigned char* own = lds() + kPassesAt + wave * kPass;
    const unsigned left = N - tile.feature, row_bytes = N * sizeof(Out);
    Out* y = static_cast<Out*>(arguments()->y);
    Offset first_row = (kWgrad ? arguments()->M * tile.group : 0) + tile.first;
    if constexpr (kUnpad) {
        unsigned of_x, of_y, rows;
        rows_of(arguments(), tile.group, true, of_x, rows, of_y);
        first_row = __builtin_amdgcn_readfirstlane(tile.first - of_x + of_y);
    }
    const Buffer out(reinterpret_cast<unsigned char*>(y + first_row * N + tile.feature),
                     tile.rows * row_bytes - tile.feature * sizeof(Out));
    const Old<Out, MX_ACCUMULATE> old{out, row_bytes, first_feature + eight * 8, left};
    const unsigned first_written = wave / kWavesN * kWaveRowsX + written;
    const unsigned piece = lane % row_pieces;
    const unsigned m = wave / kWavesN * kWaveRowsX + read;
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
    for (int pass = 0; pass < features / in_pass; ++pass) {
#pragma unroll
        for (int x = 0; x < kFragsX; ++x) {
#pragma unroll
            for (int i = 0; i < frags; i += piece_frags) {
                const int w = pass * frags + i;
                f32x4 sum;
                Values values;
#pragma unroll
                for (int j = 0; j < count; ++j) {
                    if (j % 4 == 0) {
                        sum = bias.added_to(sums.read(x * kFragsW + w + j / 4), w + j / 4);
                        sum = old.added_to(sum, first_written + x * kSide, w + j / 4);
                    }
                    values[j] = static_cast<Out>(sum[j % 4]);
                }
                const unsigned p = (eight * 8 + paired_row(i * kSide)) / count;
                *reinterpret_cast<Values*>(own + place_of<pass_row>(written, p)) = values;
            }
            finish_before_next();
            if (pass > 0 || x > 0)
                store();
            if (x == 0) {
                const unsigned n = first_feature + pass * in_pass + piece * count;
                at = n < left ? m * row_bytes + n * sizeof(Out) : kNowhere;
            }
            wave_in_order();
#pragma unroll
            for (int i = 0; i < stores; ++i)
                arrived[i] = *reinterpret_cast<const u32x4*>(
                    own + place_of<pass_row>(i * rows + read, piece));
            wave_in_order();
        }
    }
    store();
}

// Which of the workgroups it is in the order of tiles: they go to the dies in turn, and those of
// one die get tiles that follow each other.
template <class Arguments>
MX_DEVICE unsigned place_of_group(Arguments args) {
    const unsigned workgroups = args()->workgroups, group = group_x();
    return workgroups % kXcds ? group : group % kXcds * (workgroups / kXcds) + group / kXcds;
}

#if MX_SHARED
// A wave's sums and those that the other workgroup left it.
struct Gathered {
    const Sums& own;
    u32x4 others[kFragsX * kFragsW];

    MX_MEMBER f32x4 read(int i) const { return own.read(i) + __builtin_bit_cast(f32x4, others[i]); }
};

// Where two workgroups that share a tile meet, each wave with the other's of its number. Of two,
// the first to begin leaves its sums and the last adds them to its own: it waits only for one that
// runs already. Either order gives the same bits.
class Meeting {
  public:
    MX_MEMBER Meeting(ArgumentsPointer args, unsigned tile, int wave, int lane)
        : counts(args->counts + (tile * kWaves + wave) * kCounts, kCounts),
          sums(args->sums + static_cast<Offset>(tile * kWaves + wave) * kBytes, kBytes), lane(lane),
          before(counts.add_for_all(lane == 0 ? kBegun : kNowhere, 1)) {}

    // Whether the wave is to store all sums; else it has left its own.
    MX_MEMBER bool gather(Gathered& all) const {
        unsigned left = counts.load_for_all(kLeft);
        if (__builtin_amdgcn_readfirstlane(before) == 0) {
#pragma unroll
            for (int i = 0; i < kCount; ++i)
                sums.store_for_all(at(i), __builtin_bit_cast(u32x4, all.own.read(i)));
            asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
            counts.store_for_all(lane == 0 ? kLeft : kNowhere, 1);
            return false;
        }
        while (__builtin_amdgcn_readfirstlane(left) == 0)
            left = counts.load_for_all(kLeft);
        asm volatile("" ::: "memory"); // no load of sums before this
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            all.others[i] = sums.load_16_for_all(at(i));
        counts.clear_for_all(lane == 0 ? kBegun : kNowhere);
        return true;
    }

  private:
    static constexpr int kCount = kFragsX * kFragsW;
    static constexpr unsigned kBytes = kCount * kLanes * kPiece;
    // Of waves that have begun, and that have left sums: zero when a launch begins, and ends.
    static constexpr unsigned kBegun = 0, kLeft = 4, kCounts = 8;

    MX_MEMBER unsigned at(int i) const { return (i * kLanes + lane) * kPiece; }

    Buffer counts, sums;
    unsigned lane, before; // how many had begun before this one, known once it is used
};

MX_KERNEL(kThreads)
aiter_mx_linear_persistent_split(const unsigned char*, const unsigned char*, const unsigned char*,
                                 const unsigned char*, const void*, Out*, const void*, const void*,
                                 unsigned char*, unsigned char*, Offset, Offset, Offset, Offset,
                                 int, int, int, unsigned, unsigned, unsigned) {
    const AtOnce args;
    const unsigned K = args()->K;
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();
    const unsigned t = place_of_group(args), tile = t / 2, is_second = t % 2;
    const Meeting meeting(args(), tile, wave, lane);
    const unsigned steps = (K + kDepth - 1) / kDepth; // at least two of each workgroup
    const unsigned first = is_second ? steps / 2 : 0, last = is_second ? steps : steps / 2;
    Shelf shelf;
    Dealer deal(args, shelf, lane);
    Tile now = {};
    deal.find(args, shelf, tile, now);
    now.begin = first * kDepth;
    now.end = min(last * kDepth, K) - now.begin;
    Stream stream(args, shelf, Copier(K, wave, lane), K / kBlock, wave, lane);
    stream.begin(args, now);
    shelf.put_next(now);
    shelf.turn();
    stream.multiply<false>(last - first, shelf);
    Gathered sums{stream.sums, {}};
    if (meeting.gather(sums))
        store_tile<false>(sums, shelf.tile<kNow>(), wave, lane);
}
#else
// The present tile, or half of one, of so many steps.
template <bool IsHalf>
MX_DEVICE void compute(Stream& stream, unsigned steps, Shelf& shelf, unsigned wave, unsigned lane) {
    stream.multiply<IsHalf>(steps, shelf);
    store_tile<IsHalf>(stream.sums, shelf.tile<kNow>(), wave, lane);
}

// The arguments are those of GroupedArguments, which says how they are read.
MX_KERNEL(kThreads)
aiter_mx_grouped_gemm_persistent(const unsigned char*, const unsigned char*, const unsigned char*,
                                 const unsigned char*, const void*, Out*, const void*, const void*,
                                 Offset, Offset, Offset, Offset, int, int, int, unsigned, unsigned,
                                 unsigned) {
    const AtOnce args;
    const unsigned K = args()->K;
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();
    unsigned t = place_of_group(args);
    Shelf shelf;
    Dealer deal(args, shelf, lane);
    Stream stream(args, shelf, Copier(K, wave, lane), K / kBlock, wave, lane);
    Tile now;
    if (!deal.find(args, shelf, t, now)) {
        stream.zeros.store_all(shelf);
        return;
    }
    stream.begin(args, now);
    shelf.put_next(now);
    shelf.turn();
    shelf.put<kTurn>(t);
    for (;;) {
        const unsigned turn = shelf.get<kTurn>() + arguments()->workgroups;
        Tile next = {};
        shelf.put<kTurn>(turn);
        shelf.put<kIsLast>(!deal.find(Anew(), shelf, turn, next));
        shelf.put_next(next);
        const unsigned k = kWgrad ? shelf.tile<kNow>().end : K;
        const unsigned steps =
            max((k + kDepth - 1) / kDepth, 2); // no copies more than a tile ahead
        if (kHalves && shelf.get<kNow + 4>())
            compute<kHalves>(stream, steps, shelf, wave, lane);
        else
            compute<false>(stream, steps, shelf, wave, lane);
        if (shelf.get<kIsLast>())
            break;
        shelf.turn();
    }
    stream.zeros.store_all(shelf);
}
#endif
