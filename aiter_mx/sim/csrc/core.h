// The machine that translated code runs on: waves, workgroups, faults.
#pragma once
#include <setjmp.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

// What translated code calls; machine.h has the prototypes.
#define API __attribute__((noinline))
#define NOINLINE static __attribute__((noinline, unused))
#define COLD static __attribute__((noinline, cold, noreturn, unused))
#define INLINE static inline __attribute__((always_inline, unused))
#ifdef __OPTIMIZE__
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#else
#define UNLIKELY(x) (x) // of a kernel's body it would make five instructions of LLVM's more
#endif
#define ALIGNED __attribute__((aligned(64)))

// Registers are whole rows of 64 lanes: two of them are the same row or do not overlap at all.
#if defined(__clang__)
#define LANES _Pragma("clang loop vectorize(assume_safety)") for (int l = 0; l < 64; l++)
#else
#define LANES _Pragma("GCC ivdep") for (int l = 0; l < 64; l++)
#endif
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 4")
#endif
#define EACH_ACTIVE(w) for (u64 left_ = (w)->exec; left_; left_ &= left_ - 1)
#define ACTIVE_LANE __builtin_ctzll(left_)

enum { VCC = 106, M0 = 124, EXEC = 126, SGPRS = 128 };
enum { RUNNING, YIELDED, AT_BARRIER, ENDED };
enum { RANDOM, ROUND_ROBIN, RUN_TO_BARRIER };

enum {
    FAULT_NONE,
    FAULT_OUTSIDE,         // address in no region
    FAULT_ACCESS,          // a region that must not be read, or not be written
    FAULT_LDS_OUTSIDE,     // beyond the workgroup's LDS
    FAULT_SCRATCH_OUTSIDE, // beyond the lane's scratch
    FAULT_REGISTER_UNSET,  // register never written
    FAULT_REGISTER_EARLY,  // register read before the wait that makes it valid
    FAULT_REGISTER_LATE,   // register overwritten while a load into it is under way
    FAULT_LDS_UNSET,       // LDS byte never written
    FAULT_LDS_EARLY,       // LDS byte read before the wait that ends the copy into it
    FAULT_LDS_RACE,        // two waves, no barrier between
    FAULT_JUMP,            // indirect jump to somewhere that is not known code
    FAULT_STUCK,           // too many steps
    FAULT_MEMORY,          // the simulator has no memory
    FAULT_TRAP,            // s_trap
    FAULT_HAZARD,          // fewer wait states than software owes
    FAULT_INDEX,           // register picked by M0 that the kernel does not have
    FAULT_DESCRIPTOR,      // buffer descriptor of a kind that is not simulated
    FAULT_LDS_OVER_READS,  // copy over what others read, issued before a barrier but not waited for
    FAULT_SCC_UNSET,       // SCC read that nothing has written
    FAULT_SCRATCH_UNSET,   // scratch byte never written
    FAULT_MISALIGNED,      // atomic whose address is no multiple of its size
    FAULT_LANES_DIFFER,    // lanes of one store write different values to one byte
    FAULT_GLOBAL_RACE,     // global byte that another wave or workgroup wrote, unordered
    FAULT_DEADLOCK,        // all workgroups wait for each other
    FAULT_STALE            // a cache may hide what another wave wrote
};

typedef struct {
    u32 kind, instruction, lane, wave, group[3], is_write, size, reg;
    u32 other_wave, other_is_write, is_scalar, count; // count: times that it was found
    u64 address, other_group;
} Fault;

typedef struct {
    u64 begin, end;
    u32 readable, writable;
} Region;

typedef struct {
    u64 bytes_read, bytes_written, scalar_bytes_read;
    u64 lds_bytes_read, lds_bytes_written, lds_conflicts, scratch_bytes, waits, in_flight_bytes;
    u64 address_cycles, latencies;
} Counters;

// One launch, shared by the threads that run it. aiter_mx/sim/program.py mirrors this layout.
typedef struct {
    u64 next_group;
    u32 stop, schedule;
    u32 grid[3], block[3];
    u64 seed, max_steps;
    u64 kernarg, dispatch_packet, image_base;
    const Region* regions;
    u32 region_count, lds_bytes, scratch_bytes, entry_pc, count_conflicts, delay, finite_scales;
    u32 sum_order, perturbing;
    u32 collect;  // go on after a finding of one of the checks
    u64 checks;   // those that are on, by fault or wait-state rule
    u64** shadow; // a word for each dword of a region: who wrote it last; NULL where none is kept
    u64* group_bytes; // read by each workgroup of each region, or NULL
    // Where the first vector load of 16 bytes a lane is: 1 + its instruction, then how often each
    // block had been entered by then; or NULL.
    u64* first_load;
    // Where workgroups run side by side: a word for each dword, what was written to it; how many of
    // them the GPU holds at once, else 0.
    u64** history;
    struct Coherence* coherence;
    u32 blocks, resident;
    u64 end_group;       // the first workgroup that does not run
    struct Trace* trace; // where what waves do is written down, by one thread; NULL where it is not
} Launch;

// What waves do, as words: a kind in the highest 4 bits, a number below, details behind it.
typedef struct Trace {
    u32* words;
    u64 count, room;
    u64* lines; // a table of those that the workgroup has touched, by region
    u64 line_count, line_room;
} Trace;
enum {
    TRACE_BLOCK, // the wave enters this basic block
    TRACE_WAVE,  // this wave goes on
    TRACE_GROUP, // this workgroup begins
    // Instruction; then region << 16 | address cycles, first line, lines that the workgroup has not
    // touched before, bytes.
    TRACE_MEMORY,
    TRACE_LDS // instruction; then bank conflicts
};
enum { COUNTS_NEW_LINES = 1 << 30 }; // in an access' first word; older traces count all of its own
enum { FINDINGS = 256 };
typedef struct {
    u32 count;
    Fault found[FINDINGS];
} Findings;

// A vector-memory or LDS operation whose counter has not been waited for.
typedef struct {
    u32 instruction, bytes, depth; // depth: of the wave when it was issued
    u16 reg, reg_count;
    u8 is_scalar, touches_lds, is_write, is_copy, size, is_waiting;
    u8 writes_back;        // it is a buffer_wbl2
    u32 writes;            // of its wave, up to and with this one's, or 0
    u64 lanes, unset[4];   // unset: lanes of each register that scratch gives no value
    struct Snapshot* flag; // what whoever wrote what it reads knew
    u32 address[64];
} Pending;

enum { VM_MAX = 63, LGKM_MAX = 15, QUEUE = 64 };
typedef struct {
    u32 first, count;
    Pending entry[QUEUE];
} Queue;

struct Group;
typedef struct Wave {
    u32 mask[64] ALIGNED; // EXEC as one word a lane, all ones or zero
    u32 tmp[4][256] ALIGNED;
    u64 exec;
    u32 s[SGPRS];
    u32 scc, pc, id, state, skips; // skips: VSKIP is on
    u32 depth;                     // memory latencies that it has waited for, one after the other
    i64 budget, wait_cost;
    u32 mode; // MODE register: bits 4-5 f32 denormals, 23 FP16_OVFL
    u32* v;
    u64* set; // lanes of each register that hold a value
    u8* due;  // loads under way into each register
    u64 sset[2];
    u8 *scratch, *scratch_state;
    struct Group* group;
    struct Delayed* delayed; // what each entry of vm has still to do
    // Of coherence.h; number: in the launch.
    u32 *views, number, writes, learned, is_coherent;
    struct Snapshot* snapshot;
    struct Doubt* doubts;
    Queue vm, lgkm;
    Trace* trace;
} Wave;

typedef struct Group {
    const Launch* launch;
    Counters* counters;
    u8** seen; // two bitmaps a region, bytes read and bytes written, or NULL
    u64* block_counts;
    Fault* fault;
    Findings* findings;
    jmp_buf on_fault;
    u32 id[3], wave_count, epoch, synchronises; // synchronises: has used atomics or invalidated
    u64 global_epoch;
    u8* lds;
    u16 *writer, *reader;
    u64 index, random, steps;
    const Region* last_region;
    Wave** waves;
    u32 turn;
    // Of coherence.h: since it last paused, whether it read memory, and what it had not read.
    u32 looks, moves, looker, look, looked[256];
    u64 pause_at;
    void* memory;
} Group;

#define ROW(n) (w->v + 64 * (n))

INLINE float f32(u32 x) {
    float f;
    memcpy(&f, &x, 4);
    return f;
}
INLINE u32 bits32(float f) {
    u32 x;
    memcpy(&x, &f, 4);
    return x;
}
INLINE double f64(u64 x) {
    double d;
    memcpy(&d, &x, 8);
    return d;
}
INLINE u64 bits64(double d) {
    u64 x;
    memcpy(&x, &d, 8);
    return x;
}

INLINE u64 next_random(u64* state) {
    u64 z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}

// The lanes whose word has its highest bit set.
INLINE u64 pack_mask(const u32* in) {
    u64 bits = 0;
#if defined(__AVX__)
    typedef float Floats __attribute__((vector_size(32))); // an intrinsics header would be slow
    for (int i = 0; i < 8; i++) {
        Floats x;
        memcpy(&x, in + 8 * i, sizeof x);
        bits |= (u64)(u32)__builtin_ia32_movmskps256(x) << (8 * i);
    }
#else
    for (int l = 0; l < 64; l++)
        bits |= (u64)(in[l] >> 31) << l;
#endif
    return bits;
}

// Two registers as one; they need not be aligned.
typedef u64 Pair __attribute__((aligned(4), may_alias));
#define s64(w, n) (*(Pair*)((w)->s + (n)))
#define set_s64(w, n, x) (s64(w, n) = (x))

// Of bits
INLINE u32 reverse_bits(u32 x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
}
INLINE u64 extract(u64 x, u32 offset, u32 width) {
    return width == 0 ? 0 : width >= 64 ? x >> offset : x >> offset & ((1ull << width) - 1);
}
INLINE i64 extract_signed(u64 x, u32 offset, u32 width, u32 bits) {
    if (!width)
        return 0;
    if (offset + width > bits)
        width = bits - offset;
    return (i64)(x >> offset << (64 - width)) >> (64 - width);
}
INLINE i32 leading_signs(i32 x) { return x == 0 || x == -1 ? -1 : __builtin_clrsb(x) + 1; }
