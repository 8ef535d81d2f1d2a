// Routing of a mixture of experts: lists routed rows expert by expert, in blocks.
//
//   topk_ids [M, top_k]   expert of each slot of a token; anything outside 0 .. E-1 is left out
//   expert_map [E]        number of an expert here, -1 where it is not; or a mask of those here
//   sorted_ids            for each expert in turn its ids in rising order of t, then padding up to
//                         a multiple of block_m
//   expert_ids            of each block: the expert's number here, or -1
//   post_padded           ids in use, padding included; aiter's second number is the tokens routed
//
// t = token * slots + slot, where slots past top_k belong to shared experts, which every token has.
// vLLM's ids are t, padding is M * slots; aiter's are slot << 24 | token, padding slots << 24 | M.
//
// One workgroup does it, or of many ids several: a first launch counts the ids that each has of
// each expert, a second one places them. Each wave counts its part of the ids, the counts are
// summed over workgroups, waves and experts in a fixed order, and each wave then places its part.
// Nothing is added atomically, so the lists are the same on every run.
//
//   ids     |<---- wave 0 ---->|<---- wave 1 ---->|...     chunks of a wave's lanes
//   place = first of the expert + its ids in waves before + in chunks before + in lanes before
//
// Of a masked layer topk_ids is how many rows count of each expert [E], its first ones: M / E rows
// of each follow each other, and row t is routed row t.
//
// With kQuantizes the other workgroups of the first launch meanwhile quantise the tokens'
// activations, as aiter_mx.quantize does: two launches of which neither needs the other's result
// are one.

#include "common/quantize.h"
#include "common/scan.h"
#include "common/target.h"

using namespace mx;

constexpr int kWaves = MX_WAVES;     // of the workgroup
constexpr int kExperts = MX_EXPERTS; // room for experts: a power of two, at least kLanes
constexpr bool kPacked = MX_PACKED;  // aiter's ids
constexpr bool kMasked = MX_MASKED;  // rows are with their experts already
constexpr bool kMany = MX_MANY;      // more ids than waves hold, or several workgroups that sort
constexpr bool kQuantizes = MX_X != kNone;
using X = DType<kQuantizes ? MX_X : kF32>; // of the activations
#if MX_WIDE_IDS
using Id = long long;
#else
using Id = int;
#endif

constexpr int kThreads = kWaves * kLanes;
constexpr int kHeld = MX_HELD; // chunks of a wave whose experts stay in registers
// Chunks after these that are looked up at a time; with more gfx950 would spill.
constexpr int kAtOnce = kLanes == 64 ? 4 : 8;
constexpr int kPieces = MX_PIECES;              // of activations that a thread quantises at once
constexpr int kScanned = kExperts / kLanes;     // experts of a lane in the scan
enum Map { kAll = 0, kNumbers = 1, kMask = 2 }; // what expert_map holds

struct Routing {
    const Id* topk_ids;
    int tokens, top_k, experts, shared;

    MX_MEMBER int slots() const { return top_k + shared; }

    // The expert of routed row t, counted over all ranks and then the shared ones, or -1.
    MX_MEMBER int expert(int t) const {
        if (t >= tokens * slots())
            return -1;
        long at = t;
        if (shared > 0) {
            const int token = static_cast<unsigned>(t) / static_cast<unsigned>(slots());
            const int slot = t - token * slots();
            if (slot >= top_k)
                return experts + slot - top_k;
            at = static_cast<long>(token) * top_k + slot;
        }
        const Id id = topk_ids[at];
        return id >= 0 && id < experts ? static_cast<int>(id) : -1;
    }
};

// Lanes whose expert is the same as this lane's.
MX_DEVICE LaneMask same_expert(int expert) {
    LaneMask same = lanes_where(expert >= 0);
#pragma unroll
    for (int bit = 1; bit < kExperts; bit *= 2) {
        const LaneMask set = lanes_where(expert & bit);
        same &= expert & bit ? set : ~set;
    }
    return same;
}

// Eight elements of one block, which 4 lanes hold together.
struct alignas(16) Piece {
    X values[8];
};
struct alignas(8) Payload {
    unsigned words[2];
};

[[maybe_unused]] MX_DEVICE float to_f32(float x) { return x; }

// Rows of a masked layer, M / experts of each expert one behind the other.
struct Masked {
    const Id* counts;
    int rows; // of an expert

    MX_MEMBER int count(int expert) const {
        const Id given = counts[expert];
        return given < 0 ? 0 : given < rows ? static_cast<int>(given) : rows;
    }
};

MX_DEVICE Piece load_piece(const X* x, long i, bool is_inside) {
    return is_inside ? reinterpret_cast<const Piece*>(x)[i] : Piece{};
}

// Quantises piece i of all, if it is inside.
MX_DEVICE void quantize(const Piece& piece, unsigned char* xq, unsigned char* xs, long i,
                        bool is_inside) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
        v[j] = to_f32(piece.values[j]);
    const BlockScale scale = block_scale<E4M3, kRoundUp>(max_of_lanes<4>(amax_bits(v)));
    if (!is_inside)
        return;
    reinterpret_cast<Payload*>(xq)[i] = {{to_e4m3x4<kRoundUp>(v[0], v[1], v[2], v[3], scale),
                                          to_e4m3x4<kRoundUp>(v[4], v[5], v[6], v[7], scale)}};
    if (i % 4 == 0)
        xs[i / 4] = scale.byte;
}

// Quantises the rows that count of a masked layer, whose room is many times theirs. The waves take
// all lanes' pieces of a row in turn, and each finds out by itself whose rows these are.
[[maybe_unused]] MX_DEVICE void quantize_counted(const X* x, unsigned char* xq, unsigned char* xs,
                                                 long width, const Masked& masked, int experts,
                                                 int group, int groups) {
    const int lane = thread_in_group() % kLanes;
    int own[kScanned], sum = 0; // rows that count, of the lane's experts
#pragma unroll
    for (int i = 0; i < kScanned; ++i) {
        const int e = lane * kScanned + i;
        own[i] = e < experts ? masked.count(e) : 0;
        sum += own[i];
    }
    const int so_far = sum_so_far(sum, lane);
    const int pieces = static_cast<int>(width / 8);
    const int units = (pieces + kLanes - 1) / kLanes; // of a row
    const long all = static_cast<long>(of_lane(kLanes - 1, so_far)) * units;
    const long waves = static_cast<long>(groups) * kWaves;
    for (long unit = group * kWaves + wave_in_group(); unit < all; unit += waves) {
        int row = static_cast<int>(unit / units);
        const int piece = static_cast<int>(unit - static_cast<long>(row) * units) * kLanes + lane;
        const int owner = lanes_of(lanes_where(so_far <= row));
        row -= of_lane(owner, so_far) - of_lane(owner, sum);
        int expert = owner * kScanned;
#pragma unroll
        for (int i = 0; i < kScanned - 1; ++i) {
            const int rows = of_lane(owner, own[i]);
            const bool is_past = expert == owner * kScanned + i && row >= rows;
            row -= is_past ? rows : 0;
            expert += is_past;
        }
        const long first = (static_cast<long>(expert) * masked.rows + row) * pieces;
        const bool is_inside = piece < pieces;
        quantize(load_piece(x, first + piece, is_inside), xq, xs, first + piece, is_inside);
    }
}

// What a launch does of the sorting.
enum Step { kCounts = 0, kPlaces = 1, kWhole = 2 };

// Threads that have an expert in common take workgroups in turns.
constexpr int kTurns = kThreads / kExperts > 1 ? kThreads / kExperts : 1;

MX_KERNEL(kThreads)
aiter_mx_moe_align(const Id* topk_ids, const float* topk_weights, const int* expert_map,
                   const int* num_tokens, const X* x, int* sorted_ids, float* sorted_weights,
                   int* expert_ids, int* post_padded, unsigned char* xq, unsigned char* xs,
                   int* counts_of_groups, long sorters, long step, long elements, int M, int top_k,
                   int experts, int shared, int first_shared, int map_kind, int drop_absent,
                   int block_m, int max_ids, int max_blocks,
                   int groups) { // that quantise, behind those that sort
    const bool counts_alone = kMany && step == kCounts;
    const bool places_alone = kMany && step == kPlaces;
    if (!places_alone) { // what it begins with is older than the launch ahead
        wait_for_grid_ahead();
        launch_dependents();
    }
    int tokens = M;
    if (num_tokens)
        tokens = *num_tokens < 0 ? 0 : *num_tokens < M ? *num_tokens : M;
    const Masked masked{topk_ids, M / experts};
    const int all_sorters = kMany ? static_cast<int>(sorters) : 1;
    if (kQuantizes && static_cast<int>(group_x()) >= all_sorters) {
        const long width = elements / M;
        const int group = static_cast<int>(group_x()) - all_sorters;
        if constexpr (kMasked) {
            quantize_counted(x, xq, xs, width, masked, experts, group, groups);
        } else {
            const long first = static_cast<long>(group) * kPieces * kThreads + thread_in_group();
            const long end = width * tokens / 8;
            Piece pieces[kPieces];
#pragma unroll
            for (int j = 0; j < kPieces; ++j)
                pieces[j] = load_piece(x, first + j * kThreads, first + j * kThreads < end);
#pragma unroll
            for (int j = 0; j < kPieces; ++j) {
                const long i = first + j * kThreads;
                quantize(pieces[j], xq, xs, i, i < end);
            }
        }
        return;
    }
    const int sorter = kMany ? static_cast<int>(group_x()) : 0;
    const int lane = thread_in_group() % kLanes;
    const int wave = wave_in_group();
    MX_LDS int counts[kWaves][kExperts]; // then ids of the expert in waves and chunks before
    MX_LDS int totals[kExperts], firsts[kExperts], numbers[kExperts]; // firsts: blocks

    const Routing routing{topk_ids, tokens, top_k, experts, shared};
    const int routed = kMasked ? 0 : tokens * routing.slots(); // that have to be sorted
    const int threads = all_sorters * kThreads;
    const int chunks = (routed + threads - 1) / threads; // of each wave
    const int first_t = (sorter * kWaves + wave) * chunks * kLanes + lane;
    int held[kHeld];
#pragma unroll
    for (int c = 0; c < kHeld; ++c)
        held[c] = c < chunks ? routing.expert(first_t + c * kLanes) : -1;
    const auto mapped = [&](int e) { // what expert_map says, or the expert's own number
        if (e >= experts)
            return first_shared + e - experts;
        return map_kind == kAll ? e : expert_map[e];
    };
    const int own_mapped = mapped(thread_in_group()); // under way early

    const auto put = [&](int place, int id, float weight) {
        if (place < max_ids) {
            sorted_ids[place] = id;
            if (kPacked)
                sorted_weights[place] = weight;
        }
    };
    if (!places_alone) {
        // All is padding until ids are placed, which the barrier keeps after this.
        const int padding = kPacked ? routing.slots() << 24 | M : M * routing.slots();
        for (int p = sorter * kThreads + thread_in_group(); p < max_ids; p += threads)
            put(p, padding, 0.0f);
        for (int b = sorter * kThreads + thread_in_group(); b < max_blocks; b += threads)
            expert_ids[b] = -1;
    }
    for (int i = thread_in_group(); i < kWaves * kExperts; i += kThreads)
        counts[i / kExperts][i % kExperts] = 0;
    group_memory_barrier();

    LaneMask held_same[kHeld];
    const auto count_chunk = [&](int expert, LaneMask same) {
        if (expert >= 0 && lanes_before(same, lane) == 0)
            counts[wave][expert] += lanes_of(same);
        wave_in_order();
    };
#pragma unroll
    for (int c = 0; c < kHeld; ++c)
        if (c < chunks) {
            held_same[c] = same_expert(held[c]);
            count_chunk(held[c], held_same[c]);
        }
    // Calls with the first routed row and the expert of each chunk that is not held. Few ids do
    // without its instructions, as a layer of few tokens waits for all that it fetches.
    const auto each_later = [&](const auto& take) {
        for (int first = kHeld; kMany && first < chunks; first += kAtOnce) {
            int found[kAtOnce];
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                found[i] = first + i < chunks ? routing.expert(first_t + (first + i) * kLanes) : -1;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
                if (first + i < chunks)
                    take(first_t + (first + i) * kLanes, found[i]);
        }
    };
    each_later([&](int, int expert) { count_chunk(expert, same_expert(expert)); });
    group_barrier();

    // Ids of each expert in the workgroups before, and in all.
    [[maybe_unused]] MX_LDS int before[kTurns][kExperts], in_all[kTurns][kExperts];
    if (places_alone) {
        wait_for_grid_ahead();
        launch_dependents();
        for (int i = thread_in_group(); i < kTurns * kExperts; i += kThreads) {
            const int turn = i / kExperts, e = i % kExperts;
            int sum_before = 0, sum = 0;
            for (int group = turn; group < all_sorters; group += kTurns) {
                const int count = counts_of_groups[group * kExperts + e];
                sum_before += group < sorter ? count : 0;
                sum += count;
            }
            before[turn][e] = sum_before;
            in_all[turn][e] = sum;
        }
        group_barrier();
    }

    for (int e = thread_in_group(); e < kExperts; e += kThreads) {
        int total = 0;
        if (places_alone)
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn)
                total += before[turn][e];
#pragma unroll
        for (int w = 0; w < kWaves; ++w) {
            const int count = counts[w][e];
            counts[w][e] = total;
            total += count;
        }
        if (counts_alone) {
            counts_of_groups[sorter * kExperts + e] = total;
            continue;
        }
        if (places_alone) {
            total = 0;
#pragma unroll
            for (int turn = 0; turn < kTurns; ++turn)
                total += in_all[turn][e];
        }
        if (kMasked && e < experts)
            total = masked.count(e);
        const int number = e == thread_in_group() ? own_mapped : mapped(e);
        const bool is_absent = e < experts && (map_kind == kMask ? number == 0 : number < 0);
        totals[e] = is_absent && drop_absent ? 0 : total;
        firsts[e] = (totals[e] + block_m - 1) / block_m;
        numbers[e] = map_kind == kMask && e < experts ? number != 0 : number;
    }
    if (counts_alone)
        return;
    group_barrier();

    if (wave == 0) { // from blocks of each expert to the first block of each
        int blocks = 0;
#pragma unroll
        for (int i = 0; i < kScanned; ++i)
            blocks += firsts[lane * kScanned + i];
        int first = sum_so_far(blocks, lane) - blocks;
#pragma unroll
        for (int i = 0; i < kScanned; ++i) {
            const int e = lane * kScanned + i, own = firsts[e];
            firsts[e] = first;
            first += own;
        }
        if (lane == kLanes - 1 && sorter == 0) {
            post_padded[0] = first * block_m;
            if (kPacked)
                post_padded[1] = tokens;
        }
    } else if (wave == 1 && map_kind == kMask) {
        int present = 0;
#pragma unroll
        for (int i = 0; i < kScanned; ++i)
            present += lane * kScanned + i < experts ? numbers[lane * kScanned + i] : 0;
        int number = sum_so_far(present, lane) - present;
#pragma unroll
        for (int i = 0; i < kScanned; ++i) {
            const int e = lane * kScanned + i;
            if (e < experts) {
                const int is_present = numbers[e];
                numbers[e] = is_present ? number : -1;
                number += is_present;
            }
        }
    }
    group_barrier();

    for (int e = thread_in_group(); e < experts + shared; e += kThreads) {
        const int blocks = (totals[e] + block_m - 1) / block_m;
        for (int b = sorter; b < blocks; b += all_sorters)
            if (firsts[e] + b < max_blocks)
                expert_ids[firsts[e] + b] = numbers[e];
    }
    if constexpr (kMasked)
        for (int e = wave; e < experts; e += kWaves)
            for (int i = lane; i < totals[e]; i += kLanes)
                put(firsts[e] * block_m + i, e * masked.rows + i, 0.0f);
    const auto place_chunk = [&](int t, int expert, LaneMask same) {
        const int before = lanes_before(same, lane);
        const bool is_listed = expert >= 0 && totals[expert] > 0;
        int placed = 0;
        if (is_listed)
            placed = counts[wave][expert];
        wave_in_order();
        if (is_listed && before == 0)
            counts[wave][expert] = placed + lanes_of(same);
        if (is_listed) {
            const int place = firsts[expert] * block_m + placed + before;
            if constexpr (kPacked) {
                const int token = static_cast<unsigned>(t) / static_cast<unsigned>(routing.slots());
                const int slot = t - token * routing.slots();
                const long at = static_cast<long>(token) * top_k + slot;
                put(place, slot << 24 | token, slot < top_k ? topk_weights[at] : 1.0f);
            } else {
                put(place, t, 0.0f);
            }
        }
        wave_in_order();
    };
#pragma unroll
    for (int c = 0; c < kHeld; ++c)
        if (c < chunks)
            place_chunk(first_t + c * kLanes, held[c], held_same[c]);
    each_later([&](int t, int expert) { place_chunk(t, expert, same_expert(expert)); });
}
