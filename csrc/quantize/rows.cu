// Quantisation along rows, scales row-major. Rows are whole blocks, so a tensor is one sequence of
// them, whatever its shape:
//
//   x       [blocks, 32]   fp32, bf16 or fp16
//   payload [blocks, 32]   e4m3, or e2m1 two a byte
//   scales  [blocks]       e8m0
//
// With groups, the rows of each group of x are followed in the output by rows of zeros up to a
// multiple of kGroupRows; what lies after the last group is zeros too. A tile of kGroupRows rows is
// of one group, and so are its blocks one sequence in x.
//
// A wave takes kLanes blocks in one step, in kLoads loads of 16 bytes a lane; kLanesOfBlock lanes
// hold a block, so that each of them stores one scale and all of these make whole sectors. On CDNA4
// a lane's loads follow each other in twos, so that it stores as many bytes as it may at once.
//
//   load 0   |lane 0|lane 1|lane 2|lane 3|lane 4|...      (Hopper, 16-bit input: 4 lanes a block)
//            |         block 0           | block 1 ...
//   load 1   |      block kLanes / 4     | ...
//
//   loads    |0     |1     |0     |1     |0     |1        (CDNA4, 16-bit input: 2 lanes a block)
//            |   lane 0    |   lane 1    |   lane 2
//            |         block 0           | block 1 ...

#include "common/packed.h"
#include "groups.h"

using namespace mx;

using In = DType<MX_IN>;
using Format = FormatOfBits<MX_BITS>::type;
constexpr ScaleMode kMode = static_cast<ScaleMode>(MX_MODE);
constexpr int kWaves = MX_WAVES; // of a workgroup
constexpr bool kGrouped = MX_GROUPED;
constexpr unsigned long kMaxGridX = MX_MAX_GRID_X; // groups beyond it continue in the grid's y

constexpr int kBlock = 32;
constexpr int kResident = MX_RESIDENT; // workgroups of a compute unit
constexpr int kValues = kPieceValues<In>;
constexpr int kLoads = kBlock / kValues;
constexpr int kAdjacent = kBoundsCostNothing ? 2 : 1; // pieces of a lane that follow each other
constexpr int kLanesOfBlock = kLoads / kAdjacent;     // and blocks of a lane
constexpr int kBlocksAtOnce = kLanes / kLanesOfBlock;
constexpr int kThreads = kWaves * kLanes;
constexpr unsigned kBlockBytes = kBlock * sizeof(In), kPayloadBytes = kBlock * MX_BITS / 8;
using Offset = unsigned long;

MX_KERNEL_RESIDENT(kThreads, kResident)
aiter_mx_quantize_rows(const unsigned char* x, const void* offsets, unsigned char* payload,
                       unsigned char* scales, unsigned char*, unsigned char*, void* padded_offsets,
                       Offset blocks, Offset blocks_per_row, Offset span, Offset spans_per_tile,
                       Offset x_rows, int groups, int wide) {
    launch_dependents();
    const Offset id = group_y() * kMaxGridX + group_x();
    Offset first = id * span, end = first + span, from = first, available = blocks;
    if constexpr (kGrouped) {
        const unsigned tile = id / spans_per_tile;
        const Offset inside = id % spans_per_tile * span;
        const Offset tile_blocks = kGroupRows * blocks_per_row;
        const TileRows tile_rows =
            rows_of_tile({offsets, wide != 0, static_cast<unsigned>(groups), x_rows}, tile,
                         id == 0 ? padded_offsets : nullptr);
        first = tile * tile_blocks + inside;
        end = first + (inside + span < tile_blocks ? span : tile_blocks - inside);
        from = tile_rows.first * blocks_per_row + inside;
        available = (tile_rows.first + tile_rows.count) * blocks_per_row;
    }
    if (end > blocks)
        end = blocks;

    const int lane = thread_in_group() % kLanes;
    for (Offset step = wave_in_group() * kLanes; first + step < end; step += kThreads) {
        const Offset read = (from + step) * kBlockBytes;
        const Slice<> in(x + read, bytes_left(available * kBlockBytes, read, kLanes * kBlockBytes));
        const Offset block = first + step;
        const unsigned blocks_left = bytes_left(end, block, kLanes);
        const Slice<> out(payload + block * kPayloadBytes, blocks_left * kPayloadBytes);
        u32x4 pieces[kLanesOfBlock][kAdjacent];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
            const int of_block = i / kAdjacent, piece = i % kAdjacent;
            pieces[of_block][piece] =
                in.load_once(((of_block * kLanes + lane) * kAdjacent + piece) * 16);
        }
        unsigned own_scale = 0;
#pragma unroll
        for (int two = 0; two < kLanesOfBlock; two += 2) {
            unsigned amax[2];
            amax_of_blocks<In, kLanesOfBlock>(pieces[two], pieces[two + 1], amax[0], amax[1]);
#pragma unroll
            for (int i = two; i < two + 2; ++i) {
                const BlockScale scale = block_scale<Format, kMode>(amax[i - two]);
                own_scale = lane % kLanesOfBlock == i ? scale.byte : own_scale;
                const auto bytes = piece_to_payload<Format, kMode, In>(pieces[i][0], scale);
                if constexpr (kAdjacent == 1) {
                    out.store((i * kLanes + lane) * sizeof(bytes), bytes);
                } else {
                    const auto more = piece_to_payload<Format, kMode, In>(pieces[i][1], scale);
                    const auto both = joined(bytes, more);
                    out.store((i * kLanes + lane) * sizeof(both), both);
                }
                finish_before_next(); // side by side they would take too many registers
            }
        }
        Slice<>(scales + block, blocks_left)
            .store(lane % kLanesOfBlock * kBlocksAtOnce + lane / kLanesOfBlock,
                   static_cast<unsigned char>(own_scale));
    }
}
