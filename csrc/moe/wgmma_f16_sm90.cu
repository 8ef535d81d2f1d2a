// Grouped GEMM over routed tokens on Hopper, for some tens of tokens an expert.
// aiter_mx/kernels/moe_gemm/problem.py defines what it computes and its arguments.
//
// A workgroup takes kRows rows of an expert's w and up to kCols rows of x, those of a block of ids,
// and goes along K. Both become fp16 with their scales applied, relative to the largest of the row,
// so that sums over all of K stay in the matrix unit and take both rows' largest scales at its end:
//
//   w  -> a ring in shared memory for each warpgroup that adds, by boxes of 128 k -> registers
//      -> fp16, wgmma's A
//   x  -> shared memory, kAhead chunks ahead -> fp16, by a warpgroup of its own -> shared memory:
//      wgmma's B. Where there is room for all of K it stays there from tile to tile.
//
// A row whose scales are too far apart for fp16, zero blocks aside, is computed again in fp32.

#if MX_TILES == 1
#include "wgmma_f16_one_tile_sm90.h"
#else
#include "wgmma_f16_two_tiles_sm90.h"
#endif
#include "common/target.h"

using namespace mx;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    aiter_mx_moe_gemm_wgmma_f16(MX_MOE_PARAMETERS, const __grid_constant__ TensorMap weights_map) {
    extern __shared__ __align__(1024) unsigned char dynamic[];
    take_roles<Adder, Factors>(MX_MOE_ARGS, *reinterpret_cast<Places*>(dynamic), weights_map);
}
