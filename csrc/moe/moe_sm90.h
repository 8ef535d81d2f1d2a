// What the Hopper kernels of moe_gemm share: their arguments, and the walk over blocks of ids and
// tiles of w. aiter_mx/kernels/moe_gemm/problem.py defines the terms.
#pragma once

#include "common/target.h"
#include "moe.h"
#include "sm90/memory.h"
#include "sm90/tma.h"

namespace mx {

// Blocks of one expert are joined where a kernel takes more rows than a block has.

// Numbers pieces of `most` ids, more than a block has, or fewer at its end, of all that
// neighbouring blocks have for one expert: its weights are taken fewer times than there are blocks.
// One warp, of which a lane has the expert of a block; those of 32 blocks more are at hand to see
// where an expert's end.
struct JoinedBlocks {
    static constexpr unsigned kNone = ~0u;

    const int* experts; // of blocks
    unsigned room;      // for blocks
    int block_m, most;
    int lane;
    unsigned window = 0;   // the first block of the open ones
    unsigned numbered = 0; // pieces ahead of it
    int expert, next;      // of the lane's block; of that 32 blocks on
    int before = 0;        // blocks of its expert ahead of the window's first one
    int last = 0;          // the expert of the block ahead of the window
    int first, count;      // ids of the lane's block ahead of the piece that begins in it; its own
    unsigned begins = 0;   // blocks in which a piece begins
    bool is_open = false;  // the window

    MX_MEMBER JoinedBlocks(const int* experts, unsigned room, int block_m, int most, int lane)
        : experts(experts), room(room), block_m(block_m), most(most), lane(lane) {
        if (joins())
            ask(); // before it is known how many blocks are in use
    }
    MX_MEMBER bool joins() const { return block_m < most; }
    MX_MEMBER int expert_of(unsigned block) const { return block < room ? experts[block] : -1; }
    MX_MEMBER void ask() {
        expert = expert_of(lane);
        next = expert_of(kLanes + lane);
    }
    // Finds the pieces that begin in the window.
    MX_MEMBER void open(unsigned blocks) {
        const unsigned at = window + lane;
        const int ahead = __shfl_up_sync(~0u, expert, 1), next_ahead = __shfl_up_sync(~0u, next, 1);
        const int end = __shfl_sync(~0u, expert, kLanes - 1);
        const bool goes_on = at > 0 && at < blocks && expert == (lane == 0 ? last : ahead);
        const bool next_goes_on = at + kLanes < blocks && next == (lane == 0 ? end : next_ahead);
        const unsigned same = __ballot_sync(~0u, goes_on);
        const unsigned long both =
            static_cast<unsigned long>(__ballot_sync(~0u, next_goes_on)) << kLanes | same;
        const unsigned begun = ~same & ((2u << lane) - 1);
        const int in_run = begun != 0 ? lane - (kLanes - 1) + __clz(begun) : lane + before;
        const int left = __ffsll(static_cast<long>(~(both >> lane >> 1))); // blocks of the expert
        before = __shfl_sync(~0u, in_run, kLanes - 1) + 1;
        last = end;
        const unsigned ids_ahead = static_cast<unsigned>(in_run) * block_m;
        first = (ids_ahead + most - 1) / most * most - ids_ahead;
        count = min(most, left * block_m - first);
        begins = __ballot_sync(~0u, at < blocks && first < block_m);
        is_open = true;
    }
    // Finds a piece whose number is not less than that of the one before: returns the block in
    // which it begins, or kNone, the ids of that which are ahead of it and its own.
    MX_MEMBER unsigned find(unsigned number, unsigned blocks, int& its_first, int& its_count) {
        if (!is_open)
            open(blocks);
        while (number - numbered >= static_cast<unsigned>(__popc(begins))) {
            numbered += __popc(begins);
            begins = 0;
            if (window + kLanes >= blocks)
                return kNone;
            window += kLanes;
            expert = next;
            next = expert_of(window + kLanes + lane);
            open(blocks);
        }
        const int earlier = __popc(begins & ((1u << lane) - 1));
        const bool is_it = begins >> lane & 1 && earlier == static_cast<int>(number - numbered);
        const int at = __ffs(__ballot_sync(~0u, is_it)) - 1;
        its_first = __shfl_sync(~0u, first, at);
        its_count = __shfl_sync(~0u, count, at);
        return window + at;
    }
};

using Offset = unsigned long; // elements and bytes: tensors may exceed 4 GiB

constexpr int kBlock = 32;               // k of one scale
constexpr int kChunk = 128;              // k that are copied at a time
constexpr int kBlocks = kChunk / kBlock; // of a chunk

struct MoeArgs {
    const unsigned char *xq, *xs, *wq, *ws;
    const int *ids, *expert_ids, *padded;
    const float* weights;
    const void* bias;
    void* out;
    unsigned char* out_scales;
    long N, K;
    int num_experts, num_valid, a_div, packed_top_k, weights_by_place, max_blocks, block_m;
    int bias_kind;
    ActivationArgs activation;

    MX_MEMBER Offset blocks() const { return static_cast<Offset>(K) / kBlock; }
    // Of K, and of N, the host sees to it that 32 bits hold them.
    MX_MEMBER Offset row_of_k(unsigned row) const {
        return static_cast<Offset>(row) * static_cast<unsigned>(K);
    }
    MX_MEMBER Offset row_of_blocks(unsigned row) const {
        return static_cast<Offset>(row) * static_cast<unsigned>(K / kBlock);
    }
    MX_MEMBER int chunks() const { return (static_cast<int>(K) + kChunk - 1) / kChunk; }
};

// The parameters of a kernel, as the host packs them, and MoeArgs of these.
#define MX_MOE_PARAMETERS                                                                          \
    const unsigned char *xq, const unsigned char *xs, const unsigned char *wq,                     \
        const unsigned char *ws, const int *ids, const int *expert_ids, const int *padded,         \
        const float *weights, const void *bias, void *out, unsigned char *out_scales, long N,      \
        long K, int num_experts, int num_valid, int a_div, int packed_top_k, int weights_by_place, \
        int max_blocks, int block_m, int bias_kind, float alpha, float beta, float limit
#define MX_MOE_ARGS                                                                                \
    {                                                                                              \
        xq, xs, wq, ws, ids, expert_ids, padded, weights, bias, out, out_scales, N, K,             \
            num_experts, num_valid, a_div, packed_top_k, weights_by_place, max_blocks, block_m,    \
            bias_kind, {                                                                           \
            alpha, beta, limit                                                                     \
        }                                                                                          \
    }

MX_DEVICE void prefetch_l2(const void* p) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory");
}

// Rows of w in a tile of `Rows`. With an activation, each Group of them are half gate rows, then
// the up rows of the same features; the layout says where these are in w.
template <int Rows, int Group, bool Activated, bool Interleaved>
struct TileRows {
    // Features of the result that the tile has.
    static constexpr int kFeatures = Activated ? Rows / 2 : Rows;

    MX_MEMBER static long count(const MoeArgs& a) { return (a.N + Rows - 1) / Rows; }
    // The row of an expert's w; those past its last one are taken from that.
    MX_MEMBER static unsigned row(const MoeArgs& a, unsigned tile, unsigned r) {
        const unsigned rows = a.N;
        if constexpr (!Activated)
            return min(tile * Rows + r, rows - 1);
        constexpr unsigned half = Group / 2;
        const unsigned feature = min(tile * kFeatures + r / Group * half + r % half, rows / 2 - 1);
        const unsigned up = r % Group >= half;
        return Interleaved ? 2 * feature + up : feature + up * (rows / 2);
    }
};

// Goes over the items of a workgroup, each a tile of w and a piece of a block of ids, and gives out
// the piece's valid rows, Cols at a time. All lanes of each warp take part, and each warp of the
// workgroup goes the same way. The ids of the next item are on their way meanwhile. Where blocks
// have fewer ids than JoinedIds, a piece has so many of an expert's.
template <int Cols, int JoinedIds = 0>
struct MoeWalk {
    static constexpr int kPiece = Cols < 64 ? 64 : Cols; // ids of a block, looked up at a time
    static constexpr int kIds = kPiece / kLanes;         // of a lane
    static constexpr int kWords = (Cols + kLanes - 1) / kLanes; // of the mask of Cols ids
    static constexpr long kNowhere = 1l << 62;
    static_assert(kWords == 1 || kWords == kIds, "rows are those of a word, or of the whole piece");

    const MoeArgs& a;
    const unsigned tiles; // of an expert's w
    const int lane;
    unsigned step_pieces, step_tiles;        // from an item of the workgroup to its next one
    unsigned next_piece, next_tile;          // of the next item to open
    long next_begin;                         // place of its block's first id
    int next_in_block;                       // of its own first id
    const int *next_expert_at, *next_ids_at; // of its first id for this lane
    int next_ids;                            // of the block from that one
    int padded = 0;                          // ids in use, padding included
    unsigned end_piece = ~0u;                // where the workgroup's part of the pieces ends
    int next_expert = -1, ids[kIds];         // of the next item
    unsigned left[kIds] = {}; // valid ids of the open item that are not given out yet
    int t[kIds];              // the open item's routed rows, 32 after each other
    long place;               // of its first id
    unsigned tile;
    int expert;
    int first; // of the rows given out last
    unsigned valid[kWords];
    bool looks_ahead; // look_ahead() is due
    JoinedBlocks joined;

    // Unless begins, the lists may not be written yet: begin() is to follow.
    MX_MEMBER MoeWalk(const MoeArgs& a, unsigned tiles, int lane, bool begins = true)
        : a(a), tiles(tiles), lane(lane), step_pieces(gridDim.x / tiles),
          step_tiles(gridDim.x % tiles), next_piece(blockIdx.x / tiles),
          next_tile(blockIdx.x % tiles),
          joined(a.expert_ids, a.max_blocks, a.block_m, JoinedIds, lane) {
        if (!joins())
            aim();
        if (begins)
            begin();
    }
    MX_MEMBER void begin() {
        padded = *a.padded;
        if (joins())
            aim();
        look_up(); // of what may not be in use, rather than wait for padded first
    }
    MX_MEMBER bool joins() const { return JoinedIds > 0 && joined.joins(); }
    // Fetches into the L2 what begin() will read; it may be written meanwhile.
    MX_MEMBER void ask_for_lists() const {
        if (next_begin == kNowhere)
            return;
        constexpr int in_sector = 32 / sizeof(int); // which is what a prefetch brings
        const int* const of_ids = next_ids_at - lane + (lane - 2) * in_sector;
        if (lane < 2)
            prefetch_l2(lane == 0 ? a.padded : next_expert_at);
        else if ((lane - 2) * in_sector < min(a.block_m, kPiece))
            prefetch_l2(of_ids);
    }
    MX_MEMBER unsigned pieces_of_block() const { return (a.block_m + kPiece - 1) / kPiece; }
    // Splits the number of a piece into that of its block and its first id's within the block.
    MX_MEMBER unsigned block_of(unsigned piece, int& first_id) const {
        first_id = 0;
        if (a.block_m <= kPiece)
            return piece;
        first_id = piece % pieces_of_block() * kPiece;
        return piece / pieces_of_block();
    }
    // Finds where the next item's lists are.
    MX_MEMBER void aim() {
        int count = a.block_m; // of ids from the block's first one on
        unsigned block;
        if (joins()) {
            const unsigned blocks = (static_cast<unsigned>(padded) + a.block_m - 1) / a.block_m;
            block = joined.find(next_piece, min(blocks, static_cast<unsigned>(a.max_blocks)),
                                next_in_block, count);
            count += next_in_block;
        } else {
            block = block_of(next_piece, next_in_block);
        }
        const bool exists = block < static_cast<unsigned>(a.max_blocks);
        next_begin = exists ? block * static_cast<long>(a.block_m) : kNowhere;
        next_expert_at = a.expert_ids + block;
        next_ids_at = a.ids + next_begin + next_in_block + lane;
        next_ids = exists ? count - next_in_block - lane : 0;
    }
    // Asks for the ids and the expert of the next item.
    MX_MEMBER void look_up() {
        if (next_begin == kNowhere)
            return;
        next_expert = *next_expert_at;
#pragma unroll
        for (int i = 0; i < kIds; ++i)
            ids[i] = i * kLanes < next_ids ? next_ids_at[i * kLanes] : -1;
    }
    MX_MEMBER void look_ahead() {
        aim();
        look_up();
    }
    MX_MEMBER unsigned any_left() const {
        unsigned any = 0;
#pragma unroll
        for (unsigned word : left)
            any |= word;
        return any;
    }
    // Gives out the next rows; false if there are none. absent() is called for items whose expert
    // is not here. Unless looks_up, the caller calls look_ahead() where it is due.
    template <class Absent>
    MX_MEMBER bool next(Absent absent, bool looks_up = true) {
        return next(absent, looks_up, [] {});
    }
    // opened() is called for each item, when it is known which is the next, and may change that.
    template <class Absent, class Opened>
    MX_MEMBER bool next(Absent absent, bool looks_up, Opened opened) {
        looks_ahead = false;
        while (!any_left()) {
            if (looks_ahead)
                look_ahead();
            if (next_begin >= padded || next_piece >= end_piece) // its block is not in use
                return false;
            place = next_begin + next_in_block;
            tile = next_tile;
            expert = next_expert;
#pragma unroll
            for (int i = 0; i < kIds; ++i) {
                t[i] = routed_row(ids[i], a.num_valid, a.packed_top_k);
                left[i] = __ballot_sync(~0u, t[i] >= 0);
            }
            next_piece += step_pieces;
            next_tile += step_tiles;
            if (next_tile >= tiles) {
                next_tile -= tiles;
                ++next_piece;
            }
            opened();
            looks_ahead = true;
            if (static_cast<unsigned>(expert) >= static_cast<unsigned>(a.num_experts)) {
                absent();
#pragma unroll
                for (unsigned& word : left)
                    word = 0;
            }
        }
        if (looks_ahead && looks_up)
            look_ahead();
        if constexpr (kWords > 1) {
            first = 0;
#pragma unroll
            for (int i = 0; i < kWords; ++i) {
                valid[i] = left[i];
                left[i] = 0;
            }
        } else {
            const bool upper = left[0] == 0;
            const unsigned in_word = upper ? left[1] : left[0];
            const int shift = (__ffs(in_word) - 1) / Cols * Cols;
            const unsigned mask = ~0u >> (kLanes - Cols) << shift;
            valid[0] = (in_word & mask) >> shift;
            (upper ? left[1] : left[0]) &= ~mask;
            first = upper * kLanes + shift;
        }
        return true;
    }
    // The routed row of one of the rows given out, or -1; each lane may ask for another one.
    MX_MEMBER int row(int i) const {
        if constexpr (kWords > 1) {
            int found = __shfl_sync(~0u, t[0], i % kLanes);
#pragma unroll
            for (int word = 1; word < kWords; ++word) {
                const int other = __shfl_sync(~0u, t[word], i % kLanes);
                found = i / kLanes == word ? other : found;
            }
            return found;
        } else {
            return __shfl_sync(~0u, first < kLanes ? t[0] : t[1], (first + i) % kLanes);
        }
    }
    // Rows given out, up to the last valid one.
    MX_MEMBER int rows() const {
        int last = 0;
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            if (valid[i])
                last = i * kLanes + kLanes - __clz(valid[i]);
        return last;
    }
    // Tiles of 8 rows up to that one.
    MX_MEMBER int col_tiles() const { return (rows() + 7) / 8; }
    // Where the routing's weight of one of the rows is.
    MX_MEMBER const float* weight(int i, int row) const {
        return a.weights + (a.weights_by_place ? place + first + i : row);
    }
};

// Zeros for the open item, whose expert is not here: `features` from its first one, of each row.
template <class Out, int Features, bool Activated, class Walk>
MX_DEVICE void store_zeros(const MoeArgs& a, const Walk& walk, int warp, int warps) {
    const long features = Activated ? a.N / 2 : a.N;
#pragma unroll
    for (int t : walk.t)
        for (int r = warp; r < kLanes; r += warps) {
            const long row = __shfl_sync(~0u, t, r);
            for (int i = walk.lane; i < Features; i += kLanes) {
                const long n = walk.tile * static_cast<long>(Features) + i;
                if (row < 0 || n >= features)
                    continue;
                if constexpr (Activated) {
                    static_cast<unsigned char*>(a.out)[row * features + n] = 0;
                    if (n % kBlock == 0)
                        a.out_scales[(row * features + n) / kBlock] = 0;
                } else {
                    store(static_cast<Out*>(a.out) + row * features + n, 0.0f);
                }
            }
        }
}

} // namespace mx
