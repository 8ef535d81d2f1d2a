// What the launches of `rescaled` hand each other: operands as ../linear/rescaled_sm90.h has them,
// of x in blocks of 128 rows and a ring of tiles of w; and in place of counters and sums
//
//   lists      see GroupLists
//   claimed    [2]      blocks of w, and tiles of results, that CTAs have taken; cleared
//   ready, used  [tiles of w] each: of a tile of w the steps that are in the ring, and the products
//                       that have read it; cleared
//
// A tile of results is of a block of x and a tile of w. Rows of a block that its group has not are
// zeros. Numbers of tiles of w pass over groups without rows, and tile t has place t % room of the
// ring.
#pragma once

#include "groups_sm90.h"

namespace mx {

struct GroupWorkspace : GroupSizes {
    unsigned char* memory;
    int most_blocks; // of x
    int room;        // tiles of w in the ring

    // The same, so that compilers work out anew what follows from it, for which registers have no
    // room meanwhile.
    MX_MEMBER GroupWorkspace anew() const {
        GroupWorkspace same = *this;
        asm volatile("" : "+r"(same.most_blocks), "+r"(same.room));
        return same;
    }
    MX_MEMBER RescaledOperands operands() const {
        return {memory, static_cast<long>(most_blocks) * kTileRows,
                static_cast<long>(room) * kTileRows, K};
    }
    MX_MEMBER GroupLists lists() const {
        return {reinterpret_cast<int*>(operands().ended()), groups, most_blocks};
    }
    MX_MEMBER int* busy() const { return lists().busy(); }
    MX_MEMBER unsigned* claimed() const { return lists().behind(); }
    MX_MEMBER unsigned* ready() const { return claimed() + 2; }
    MX_MEMBER unsigned* used() const { return ready() + groups * across(); }
    // Words from claimed() on that are cleared.
    MX_MEMBER int counters() const { return 2 + 2 * groups * across(); }
    // Blocks of x of a group, and which of all blocks is its first.
    MX_MEMBER int first_of_x(int group) const {
        return GroupLists::before(lists().block_ends(), group);
    }
    MX_MEMBER int count_of_x(int group) const {
        return GroupLists::count(lists().block_ends(), group);
    }
};

#define MX_SIZES int most_blocks, int room, int panel
#define MX_WORKSPACE {{M, N, K, static_cast<int>(G)}, workspace, most_blocks, room}

} // namespace mx
