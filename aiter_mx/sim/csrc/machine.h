// What translated code and the machine know of each other: the machine is compiled once, and linked
// to each kernel's code.
#pragma once
#include "core.h"

// The kernel's: how many vector registers it has, and its waves.
extern const u32 sim_registers;
void start_wave(Wave* w);
u32 run_wave(Wave* w);

// Faults; these do not return.
__attribute__((cold, noreturn)) void bad_jump(Wave* w, u32 instruction, u64 target);
__attribute__((cold, noreturn)) void trap(Wave* w, u32 instruction);
__attribute__((cold)) void too_soon(Wave* w, u32 instruction, u32 rule);
__attribute__((cold)) void unset_scc(Wave* w, u32 instruction);

// Where a launch is traced
void note(Trace* trace, u32 kind, u32 number, u32 count, const u32* details);
#define ENTER(block)                                                                               \
    do {                                                                                           \
        blocks[block]++;                                                                           \
        if (UNLIKELY(w->trace != NULL))                                                            \
            note(w->trace, TRACE_BLOCK, block, 0, NULL);                                           \
    } while (0)

// EXEC, lanes
typedef enum {
    QUAD_PERM,
    ROW_SHL,
    ROW_SHR,
    ROW_ROR,
    WAVE_SHL,
    WAVE_ROL,
    WAVE_SHR,
    WAVE_ROR,
    ROW_MIRROR,
    ROW_HALF_MIRROR,
    ROW_BCAST15,
    ROW_BCAST31,
    ROW_NEWBCAST
} DppControl;
// SDWA and op_sel pieces of a register.
typedef enum { BYTE_0, BYTE_1, BYTE_2, BYTE_3, WORD_0, WORD_1, DWORD } Piece;
void expand_mask(u64 bits, u32* out);
void set_exec(Wave* w, u64 bits);
u64 dpp(Wave* w, u32* out, const u32* in, u32* mask, DppControl control, int argument, u32 row_mask,
        u32 bank_mask, int bound_zero, u64* read);
void select_piece(u32* out, const u32* in, Piece piece, int sign_extend);
void insert_piece(u32* d, const u32* in, const u32* lanes, Piece piece, int rest);
void fill(u32* out, u32 x);
u32 read_first_lane(const Wave* w, const u32* in);
void swap_rows(Wave* w, u32* d, u32* s, u32 width);
void pick_rows(Wave* w, u32 instruction, u32 to, u32 from, u32 count, u32 limit);
void swap_lanes(Wave* w, u32* a, u32* b);
void bpermute(Wave* w, u32* d, const u32* index, const u32* in, u32 offset);
void permute(Wave* w, u32* d, const u32* index, const u32* in, u32 offset);
void swizzle(Wave* w, u32* d, const u32* in, u32 pattern);
void transpose_read(Wave* w, u32* d, u32 bits);
void set_lane_ids(Wave* w, u32 axes);

// Strict mode
void late_write(Wave* w, u32 instruction, u64 lanes, int count, ...);
u64 unset_lanes(Wave* w, u32 instruction, u64 lanes, int count, ...);
void need1(Wave* w, u32 instruction, u32 a);
void need2(Wave* w, u32 instruction, u32 a, u32 b);
void need3(Wave* w, u32 instruction, u32 a, u32 b, u32 c);
void need_lanes(Wave* w, u32 instruction, u64 lanes, int count, ...);
void need_many(Wave* w, u32 instruction, int count, ...);
void become(Wave* w, u32 d, u64 unset);
void flow1(Wave* w, u32 instruction, u32 d, u32 a);
void flow2(Wave* w, u32 instruction, u32 d, u32 a, u32 b);
void flow3(Wave* w, u32 instruction, u32 d, u32 a, u32 b, u32 c);
void flow_many(Wave* w, u32 instruction, u32 d, int count, ...);
void flow_scalars(Wave* w, u32 instruction, u64 low, u64 high, u64 to_low, u64 to_high);
void scalar_from_lane(Wave* w, u32 instruction, u32 to, u32 row, u64 lane);
void lane_from_scalar(Wave* w, u32 instruction, u32 row, u64 lane, u32 from);
__attribute__((cold)) void bad_scalar_read(Wave* w, u32 instruction, u64 low, u64 high);
void wait_vm(Wave* w, u32 left);
void wait_lgkm(Wave* w, u32 left);
void issue_vm(Wave* w, u32 instruction, u32 reg, u32 count, u32 size);
void issue_scalar(Wave* w, u32 instruction, u32 reg, u32 count);
void issue_lds(Wave* w, u32 instruction, u32 reg, u32 count);

// Memory
typedef enum { U8, I8, U8_LO, U8_HI, I8_LO, I8_HI, U16, I16, U16_LO, U16_HI, DWORDS } Element;
void address_v(u64* out, const u32* base, i32 offset);
void address_s(u64* out, u64 base, const u32* index, i32 offset);
void global_load(Wave* w, u32 instruction, const u64* address, u32* d, Element element, u32 size);
void global_store(Wave* w, u32 instruction, const u64* address, const u32* d, Element element,
                  u32 size);
// A buffer instruction's descriptor and offsets; `index` and `offsets` are NULL where it has none.
typedef struct {
    const u32 *resource, *index, *offsets;
    i32 fixed;
    u32 soffset;
} BufferAddress;
void buffer_access(Wave* w, u32 instruction, const BufferAddress* at, u32* d, Element element,
                   u32 size, int is_write);
void synchronise(Wave* w);
void write_back(Wave* w, u32 instruction);
void invalidate(Wave* w, int whole_l2);
void invalidate_scalars(Wave* w);
void scratch_access(Wave* w, u32 instruction, const u32* offsets, i64 base, u32* d, Element element,
                    u32 size, int is_write);
void lds_load(Wave* w, u32 instruction, const u32* base, u32 offset, u32* d, Element element,
              u32 size);
void lds_store(Wave* w, u32 instruction, const u32* base, u32 offset, const u32* d, Element element,
               u32 size);
void flat_access(Wave* w, u32 instruction, const u64* address, u32* d, Element element, u32 size,
                 int is_write);
void copy_to_lds(Wave* w, u32 instruction, const u64* address, u32 base, Element element, u32 size);
void buffer_to_lds(Wave* w, u32 instruction, const BufferAddress* at, Element element, u32 size);
void scalar_load(Wave* w, u32 instruction, u64 address, u32 d, u32 dwords);
typedef enum { SCALAR_STORE, SCALAR_ADD, SCALAR_DEC, SCALAR_INC } ScalarWrite;
void scalar_write(Wave* w, u32 instruction, u64 address, u32 s, u32 dwords, ScalarWrite kind);
void scalar_buffer_load(Wave* w, u32 instruction, const u32* resource, u32 offset, u32 d,
                        u32 dwords);
typedef enum {
    A_SWAP,
    A_CMPSWAP,
    A_ADD,
    A_SUB,
    A_SMIN,
    A_UMIN,
    A_SMAX,
    A_UMAX,
    A_AND,
    A_OR,
    A_XOR,
    A_INC,
    A_DEC,
    A_ADD_F32,
    A_PK_ADD_F16,
    A_PK_ADD_BF16,
    A_ADD_F64,
    A_MIN_F32,
    A_MAX_F32,
    A_MIN_F64,
    A_MAX_F64
} Atomic;
void global_atomic(Wave* w, u32 instruction, const u64* address, u32* d, const u32* data, Atomic op,
                   u32 size);
void buffer_atomic(Wave* w, u32 instruction, const BufferAddress* at, u32* d, const u32* data,
                   Atomic op, u32 size);
void lds_atomic(Wave* w, u32 instruction, const u32* base, u32 offset, u32* d, const u32* data,
                Atomic op, u32 size);

// Matrix instructions
typedef enum {
    OF_F32,
    OF_F16,
    OF_BF16,
    OF_E4M3,
    OF_E5M2,
    OF_E2M3,
    OF_E3M2,
    OF_E2M1,
    OF_I8
} Operand;
void mfma(Wave* w, u32* d, const u32* a, Operand ka, const u32* b, Operand kb, const u32* c,
          u32 c_bits, u32 M, u32 K, u32 blocks);
void mfma_scaled_16(u32* d, const u32* a, Operand ka, const u32* b, Operand kb, const u32* c,
                    u32 c_bits, const u32* scale_a, u32 sa, const u32* scale_b, u32 sb);
void mfma_scaled_32(u32* d, const u32* a, Operand ka, const u32* b, Operand kb, const u32* c,
                    u32 c_bits, const u32* scale_a, u32 sa, const u32* scale_b, u32 sb);

void set_float_mode(u32 mode);
