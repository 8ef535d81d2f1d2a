// Blocks of one expert that wgmma_f16_sm90.cu takes together.
#pragma once

#include "common/target.h"

namespace mx {

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

} // namespace mx
