// What each warp of a workgroup of wgmma_f16_sm90.cu does.
#pragma once

#include "boxes_x_sm90.h"

namespace mx {

// Adder is the kernel's own; Scaler, one warp for each warpgroup that adds, makes factors of w's
// scales.
template <class Adder, class Scaler, class Places>
MX_DEVICE void take_roles(const MoeArgs& a, Places& shared, const TensorMap& weights_map) {
    // The same in all lanes, and known to be.
    const int lane = threadIdx.x % kLanes, warp = __shfl_sync(~0u, threadIdx.x / kLanes, 0);
    set_up_barriers(shared);
    if (warp < kAddWarps) {
        increase_registers<kAddingRegisters>();
        Adder(a, shared, warp / kGroupWarps, warp % kGroupWarps, lane).run();
    } else {
        decrease_registers<kBringingRegisters>();
        const int role = warp - kAddWarps;
        if (role < kGroupWarps)
            Bringer{a, shared, role * kLanes + lane}.run();
        else if (role < kGroupWarps + kGroups)
            Scaler{a, shared, role - kGroupWarps, lane}.run();
        else if (role == 2 * kGroupWarps - 1)
            open_entries(a, shared, lane);
        else if (role >= 2 * kGroupWarps && role < 2 * kGroupWarps + kFetchWarps)
            fetch_x(a, shared, role - 2 * kGroupWarps, lane);
        else if (role == 2 * kGroupWarps + kFetchWarps)
            copy_weights(a, shared, weights_map, lane);
    }
}

} // namespace mx
