#pragma once

#include "common/target.h"

namespace mx {

// Which rows of x each group has: aiter_mx/kernels/grouped_gemm/problem.py says what the host
// passes. Whatever the bounds, no row outside 0 .. rows - 1 is named.

struct RowRange {
    long begin, end;
};

struct RowGroups {
    const void *starts, *ends;
    long rows, count;
    int layout, index_bytes;

    // Rows from one group's first to the next one's, where they lie so.
    MX_MEMBER long room() const {
        constexpr int masked = 1;
        return layout == masked ? rows / count : 0;
    }
    MX_MEMBER RowRange range(long group) const {
        constexpr int masked = 1;
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

  private:
    MX_MEMBER static long cut(long bound, long most) { return min(max(bound, 0l), most); }
    MX_MEMBER long at(const void* bounds, long group) const {
        return index_bytes == 4 ? static_cast<const int*>(bounds)[group]
                                : static_cast<const long*>(bounds)[group];
    }
};

} // namespace mx
