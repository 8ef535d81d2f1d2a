// The targets differ in these, which have the same names for both: lanes of a wave, loads, e4m3
// conversion, cross-lane sums, output conversion. Sources need no HIP or CUDA header of their own,
// which keeps a build well under a second.
#pragma once

#if defined(__AMDGCN__)
#include "gfx950/target.h"
#else
#include "sm90/target.h"
#endif

namespace mx {

// Codes of the dtypes that the host names, aiter_mx/kernels/spec.py.
enum DTypeCode { kNone = 0, kF32 = 1, kBF16 = 2, kFP16 = 3 };

template <int Code>
struct DTypeOf;
template <>
struct DTypeOf<kF32> {
    using type = float;
};
template <>
struct DTypeOf<kBF16> {
    using type = bf16;
};
template <>
struct DTypeOf<kFP16> {
    using type = fp16;
};
template <int Code>
using DType = typename DTypeOf<Code>::type;

} // namespace mx
