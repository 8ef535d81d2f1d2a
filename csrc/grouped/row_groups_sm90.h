#pragma once

#include "common/target.h"

#ifndef MX_UNPAD
#define MX_UNPAD 0
#endif

namespace mx {

// Whether groups have other rows of y: those from ends[g] to ends[g + 1].
constexpr bool kUnpad = MX_UNPAD;

// Which rows of x each group has: aiter_mx/kernels/grouped_gemm/problem.py says what the host
// passes. Whatever the bounds, no row outside 0 .. rows - 1 is named.

struct RowRange {
    long begin, end;
};

struct RowGroups {
    const void *starts, *ends;
    long rows, count; // of x, and of groups
    int layout, index_bytes;

    // Where a group may have several ranges: how many there are, then the group of each.
    MX_MEMBER const int* runs() const {
        return layout < 0 ? static_cast<const int*>(ends) - layout : nullptr;
    }
    MX_MEMBER int ranges() const {
        const int* of = runs();
        return of ? cut(*of, -static_cast<long>(layout)) : count;
    }
    MX_MEMBER int group_of(int range) const {
        const int* of = runs();
        return of ? of[1 + range] : range;
    }

    // Rows from one group's first to the next one's, where they lie so.
    MX_MEMBER long room() const {
        constexpr int masked = 1;
        return layout == masked ? rows / count : 0;
    }
    // The rows of a group, or of one of several ranges.
    MX_MEMBER RowRange range(long group) const {
        constexpr int masked = 1;
        if constexpr (kUnpad) {
            const RowRange of_y = range_of_y(group);
            const long begin = cut(at(starts, group), rows);
            return {begin, begin + of_y.end - of_y.begin};
        }
        if (layout == masked) {
            const long room = rows / count;
            const long begin = group * room;
            return {begin, begin + cut(at(ends, group), room)};
        }
        const long end = ends ? cut(at(ends, group), rows) : rows;
        const long begin = starts          ? cut(at(starts, group), rows)
                           : group && ends ? cut(at(ends, group - 1), rows)
                                           : 0;
        return {begin, max(begin, end)};
    }

    // Its rows of y.
    MX_MEMBER RowRange range_of_y(long group) const {
        constexpr int unpadded = 2; // and the rows of y
        if constexpr (!kUnpad)
            return range(group);
        const long begin = cut(at(ends, group), layout - unpadded);
        const long end = cut(at(ends, group + 1), layout - unpadded);
        const long left = rows - cut(at(starts, group), rows); // of x
        return {begin, begin + min(max(end - begin, 0l), left)};
    }

  private:
    MX_MEMBER static long cut(long bound, long most) { return min(max(bound, 0l), most); }
    MX_MEMBER long at(const void* bounds, long group) const {
        return index_bytes == 4 ? static_cast<const int*>(bounds)[group]
                                : static_cast<const long*>(bounds)[group];
    }
};

} // namespace mx
