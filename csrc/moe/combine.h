// The last step of an expert layer: a token's result is the weighted sum of its routed rows.
//
//   y [M * slots, N]      routed rows, t = token * slots + slot, fp32 or 16 bits
//   places [M * slots]    with MX_SORTED: which row of y is that of each t; -1 for none
//   topk_ids [M, top_k]   expert of each slot; slots past top_k are shared experts', of weight 1
//   expert_map [E]        number of an expert here, or -1; may be null
//   num_tokens [1]        tokens that count, the first ones; null for all
//   out [M, N]            sum over slots, in their order, of those whose expert is here
//
// Rows of the others are not read: nobody has written them.
#pragma once

#include "common/target.h"

namespace mx {

constexpr int kTopK = MX_TOP_K;
constexpr int kShared = MX_SHARED;
constexpr int kSlots = kTopK + kShared;
constexpr int kMaxThreads = MX_MAX_THREADS;  // of a workgroup
constexpr int kMaxGroupsY = MX_MAX_GROUPS_Y; // tokens beyond it follow in a loop
constexpr bool kSorted = MX_SORTED;          // y lies as the sorted ids do
using Y = DType<MX_Y>;
using Out = DType<MX_OUT>;
#if MX_WIDE_IDS
using Id = long long;
#else
using Id = int;
#endif

MX_DEVICE float to_f32(float x) { return x; }

} // namespace mx
