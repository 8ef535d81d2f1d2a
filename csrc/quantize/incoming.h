// Pieces of 16 bytes that a lane has asked for and will take later: what is under way while a
// workgroup works on something else. On Hopper they wait in shared memory, each lane's where no
// other lane looks, so that no barrier is needed; on CDNA4, which has the registers, there.
#pragma once

#include "common/slice.h"

namespace mx {

template <int Count, int Threads>
class Incoming {
  public:
#if defined(__AMDGCN__)
    static constexpr int kSharedBytes = 0;

    // Asks for piece i: of a slice at an offset, zeros beyond it.
    MX_MEMBER void ask(int i, const Slice<true>& from, unsigned offset) {
        pieces[i] = from.load_once(offset);
    }
    MX_MEMBER void ask_there(int i, const unsigned char* from) {
        pieces[i] = *reinterpret_cast<const u32x4*>(from);
    }
    MX_MEMBER void asked() {}
    // All pieces, after which the next ones may be asked for.
    MX_MEMBER void take(u32x4 (&taken)[Count]) {
#pragma unroll
        for (int i = 0; i < Count; ++i)
            taken[i] = pieces[i];
    }

  private:
    u32x4 pieces[Count];
#else
    static constexpr int kSharedBytes = Count * Threads * 16; // of dynamic shared memory

    MX_MEMBER void ask(int i, const Slice<true>& from, unsigned offset) {
        const unsigned size = offset < kBeyond ? 16 : 0; // of what is read, the rest is zeros
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(place(i)),
                     "l"(from.address(size ? offset : 0)), "r"(size)
                     : "memory");
    }
    // The same of 16 bytes that are there.
    MX_MEMBER void ask_there(int i, const unsigned char* from) {
        asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(place(i)), "l"(from)
                     : "memory");
    }
    MX_MEMBER void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
    MX_MEMBER void take(u32x4 (&taken)[Count]) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < Count; ++i)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(taken[i].words[0]), "=r"(taken[i].words[1]),
                           "=r"(taken[i].words[2]), "=r"(taken[i].words[3])
                         : "r"(place(i))
                         : "memory");
    }

  private:
    static MX_MEMBER unsigned place(int i) {
        extern __shared__ uint4 incoming[];
        return static_cast<unsigned>(
            __cvta_generic_to_shared(incoming + i * Threads + thread_in_group()));
    }
#endif
};

} // namespace mx
