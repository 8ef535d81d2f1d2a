// What CUDA C++ has and C++ has not, ahead of what translate.py makes of a kernel's source. A
// thread is a fiber of runtime.cpp, and functions here that stand for PTX instructions switch to
// others.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

namespace emulated {
struct Dim3 {
    unsigned x, y, z;
};
struct ThreadIndices {
    Dim3 thread_index, block_index, block_size, grid_size;
};
extern ThreadIndices* current; // the thread that runs
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

enum Kind {
    kSyncWarp,
    kAny,
    kAll,
    kBallot,
    kShfl,
    kShflUp,
    kShflXor,
    kReduceMax,
    kReduceMin,
    kReduceAdd,
    kReduceOr,
    kAligned,
};
// All lanes of the mask arrive; `value` is handed around. key has to be alike.
unsigned collective(Kind kind, unsigned mask, unsigned key, unsigned value, unsigned arg = 0,
                    unsigned width = 32);
void aligned(int site); // all lanes of the warp are here
void maybe_yield();
void contend();
void* shared_at(const void* id, unsigned size, unsigned align);
unsigned char* dynamic_shared(unsigned align);
unsigned to_shared(const void* p);
unsigned char* shared_place(unsigned address, unsigned size, const char* what); // checked
void* global_place(unsigned long long address, unsigned size, const char* what);

int syncthreads(int kind, int x); // 0: none, 1: or, 2: and, 3: count
bool named_barrier(int site, int id, int threads, int kind, int x, bool aligned, bool waits);

void mbarrier_init(unsigned a, unsigned count);
void mbarrier_arrive(unsigned a, unsigned expect);
bool mbarrier_test(unsigned a, unsigned parity, bool may_wait);
void mbarrier_arrive_copied(unsigned a);

void tma_load(unsigned to, const void* map, int column, int row, unsigned barrier, unsigned mask);
void tma_store(const void* map, int column, int row, unsigned from);
void bulk_load(unsigned to, unsigned long long from, unsigned bytes, unsigned barrier,
               unsigned mask);
void bulk_commit();
void bulk_wait(int pending, bool only_read);
void cp_async(unsigned to, unsigned long long from, unsigned bytes, unsigned exist);
void cp_async_commit();
void cp_async_wait(int pending);
void st_async(unsigned to, const void* words, unsigned bytes, unsigned barrier);
unsigned map_cluster(unsigned address, unsigned rank);
int cluster_rank();
void cluster_arrive();
void cluster_wait();

void wgmma_fence(int site);
void wgmma_commit(int site);
void wgmma_wait(int site, int pending);
// a: descriptor, or null and registers. type: 0 e4m3, 1 bf16, 2 fp16.
void wgmma(int site, int n, int type, float* const* d, int count, bool a_in_registers,
           const unsigned* a, unsigned long long a_desc, unsigned long long b_desc, int adds,
           int negates, int transposes);
void setmaxnreg(int site, int registers);
void load_matrices(int site, unsigned* v, int count, unsigned address, bool transposed);
void store_matrices(int site, const unsigned* v, int count, unsigned address, bool transposed);
unsigned move_matrix(int site, unsigned v); // transposed
void grid_wait();
void nanosleep();
void polled(const void* place, unsigned bytes); // a load found there what it found
void written(const void* place);                // which others may poll

// By the generic proxy, whose writes copies and wgmma see behind a fence alone.
void wrote_shared(const void* place, unsigned bytes);
void wrote_global(const void* place, unsigned bytes);
void proxy_fence(bool shared, bool global);

// Bits of registers.
template <class R, class V>
inline R as(V v) {
    if constexpr (std::is_pointer_v<V>)
        return (R)(uintptr_t)v;
    else if constexpr (std::is_floating_point_v<R> || !std::is_floating_point_v<V>)
        return (R)v;
    else {
        static_assert(sizeof(R) == sizeof(V));
        R r;
        memcpy(&r, &v, sizeof r);
        return r;
    }
}
template <class V, class R>
inline void put(V& to, R r) {
    if constexpr (std::is_pointer_v<V>)
        to = (V)(uintptr_t)r;
    else if constexpr (std::is_floating_point_v<V> && !std::is_floating_point_v<R>) {
        static_assert(sizeof(V) == sizeof(R));
        memcpy(&to, &r, sizeof r);
    } else
        to = (V)r;
}
inline unsigned bits_of(float x) {
    unsigned u;
    memcpy(&u, &x, 4);
    return u;
}
inline float float_of_bits(unsigned u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
inline float float_of_half(uint16_t h) {
    _Float16 f;
    memcpy(&f, &h, 2);
    return (float)f;
}
inline uint16_t half_of(float x) {
    if (x != x)
        return 0x7fff;
    _Float16 f = (_Float16)x;
    uint16_t h;
    memcpy(&h, &f, 2);
    return h;
}
inline float float_of_bf16(uint16_t b) { return float_of_bits((unsigned)b << 16); }
inline uint16_t bf16_of(float x) {
    if (x != x)
        return 0x7fff;
    unsigned u = bits_of(x);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
extern float kE4m3[256], kE5m2[256];
uint8_t e4m3_of(float x); // to nearest even, saturating; NaN is 0x7f
uint8_t e5m2_of(float x);
inline unsigned pair(unsigned low, unsigned high) { return (low & 0xffff) | high << 16; }
inline uint16_t lower(unsigned w) { return (uint16_t)w; }
inline uint16_t upper(unsigned w) { return (uint16_t)(w >> 16); }

inline unsigned cvt_f16x2_e4m3x2(uint16_t a) {
    return pair(half_of(kE4m3[a & 255]), half_of(kE4m3[a >> 8]));
}
inline uint16_t cvt_e4m3x2_f16x2(unsigned a) {
    return e4m3_of(float_of_half(lower(a))) | e4m3_of(float_of_half(upper(a))) << 8;
}
inline uint16_t cvt_e4m3x2_f32(float high, float low) { return e4m3_of(low) | e4m3_of(high) << 8; }
inline uint16_t cvt_e5m2x2_f32(float high, float low) { return e5m2_of(low) | e5m2_of(high) << 8; }
inline unsigned cvt_bf16x2_f32(float high, float low) { return pair(bf16_of(low), bf16_of(high)); }
inline unsigned cvt_f16x2_f32(float high, float low) { return pair(half_of(low), half_of(high)); }
template <class F>
inline unsigned halves(unsigned a, unsigned b, F f) {
    return pair(f(lower(a), lower(b)), f(upper(a), upper(b)));
}
inline unsigned mul_f16x2(unsigned a, unsigned b) {
    return halves(
        a, b, [](uint16_t x, uint16_t y) { return half_of(float_of_half(x) * float_of_half(y)); });
}
inline unsigned mul_bf16x2(unsigned a, unsigned b) {
    return halves(
        a, b, [](uint16_t x, uint16_t y) { return bf16_of(float_of_bf16(x) * float_of_bf16(y)); });
}
inline uint16_t half_of_double(double x) { return half_of((float)x); }
inline unsigned fma_f16x2(unsigned a, unsigned b, unsigned c) {
    return pair(half_of_double((double)float_of_half(lower(a)) * float_of_half(lower(b)) +
                               float_of_half(lower(c))),
                half_of_double((double)float_of_half(upper(a)) * float_of_half(upper(b)) +
                               float_of_half(upper(c))));
}
inline unsigned fma_bf16x2(unsigned a, unsigned b, unsigned c) {
    return pair(bf16_of((float)((double)float_of_bf16(lower(a)) * float_of_bf16(lower(b)) +
                                float_of_bf16(lower(c)))),
                bf16_of((float)((double)float_of_bf16(upper(a)) * float_of_bf16(upper(b)) +
                                float_of_bf16(upper(c)))));
}
inline unsigned max_u16x2(unsigned a, unsigned b) {
    return halves(a, b, [](uint16_t x, uint16_t y) { return x > y ? x : y; });
}
inline unsigned min_u16x2(unsigned a, unsigned b) {
    return halves(a, b, [](uint16_t x, uint16_t y) { return x < y ? x : y; });
}
template <unsigned Infinity>
inline unsigned max_nan_xorsign_abs(unsigned a, unsigned b) {
    return halves(a, b, [](uint16_t x, uint16_t y) -> unsigned {
        const unsigned sign = (x ^ y) & 0x8000, p = x & 0x7fff, q = y & 0x7fff;
        if (p > Infinity || q > Infinity)
            return 0x7fff;
        return sign | (p > q ? p : q);
    });
}
inline unsigned prmt(unsigned a, unsigned b, unsigned s) {
    const unsigned long long ab = (unsigned long long)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned n = s >> 4 * i & 15;
        unsigned byte = (unsigned)(ab >> 8 * (n & 7)) & 255;
        if (n & 8)
            byte = byte & 128 ? 255 : 0;
        r |= byte << 8 * i;
    }
    return r;
}
inline unsigned lop3(unsigned a, unsigned b, unsigned c, unsigned table) {
    unsigned r = 0;
    for (int i = 0; i < 8; ++i)
        if (table >> i & 1)
            r |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    return r;
}
template <int Bytes, class R>
inline R ld(const void* p) {
    R r{};
    memcpy(&r, p, Bytes < (int)sizeof(R) ? Bytes : sizeof(R));
    return r;
}
template <int Bytes, class V>
inline void st(void* p, V v) {
    memcpy(p, &v, Bytes);
}

// An entry point, which a translated source has as emulated_<name>.
struct Kernel {
    void* function;
    void (*call)(void*, void**);
    int count; // of parameters
    const unsigned* sizes;
};
template <class... P>
struct Thunk {
    template <size_t... I>
    static void call(void (*f)(P...), void** args, std::index_sequence<I...>) {
        f(*(std::remove_cv_t<P>*)args[I]...);
    }
    static void run(void* f, void** args) {
        call((void (*)(P...))f, args, std::index_sequence_for<P...>{});
    }
};
template <class... P>
inline Kernel kernel_of(void (*f)(P...)) {
    static const unsigned sizes[] = {sizeof(P)..., 0};
    return {(void*)f, &Thunk<P...>::run, sizeof...(P), sizes};
}
template <class S>
inline S& shared() {
    static char id;
    return *(S*)shared_at(&id, sizeof(S), alignof(S));
}
} // namespace emulated

#define __device__
#define __host__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) alignas(n)
#define threadIdx (emulated::current->thread_index)
#define blockIdx (emulated::current->block_index)
#define blockDim (emulated::current->block_size)
#define gridDim (emulated::current->grid_size)
#define warpSize 32

#define EMULATED_VECTOR(T, name)                                                                   \
    struct alignas(2 * sizeof(T)) name##2 { T x, y; };                                             \
    struct name##3 { T x, y, z; };                                                                 \
    struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; };             \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTOR(float, float)
EMULATED_VECTOR(int, int)
EMULATED_VECTOR(unsigned, uint)
EMULATED_VECTOR(unsigned short, ushort)
EMULATED_VECTOR(unsigned char, uchar)
EMULATED_VECTOR(long long, longlong)
EMULATED_VECTOR(unsigned long long, ulonglong)
EMULATED_VECTOR(double, double)

#define EMULATED_MINMAX(A, B, R)                                                                   \
    inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }                                   \
    inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
EMULATED_MINMAX(int, int, int)
EMULATED_MINMAX(unsigned, unsigned, unsigned)
EMULATED_MINMAX(int, unsigned, unsigned)
EMULATED_MINMAX(unsigned, int, unsigned)
EMULATED_MINMAX(long, long, long)
EMULATED_MINMAX(unsigned long, unsigned long, unsigned long)
EMULATED_MINMAX(long, unsigned long, unsigned long)
EMULATED_MINMAX(unsigned long, long, unsigned long)
EMULATED_MINMAX(long long, long long, long long)
EMULATED_MINMAX(unsigned long long, unsigned long long, unsigned long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float __uint_as_float(unsigned u) { return emulated::float_of_bits(u); }
inline unsigned __float_as_uint(float x) { return emulated::bits_of(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    return emulated::prmt(a, b, s & 0x7777);
}
inline unsigned __funnelshift_r(unsigned lower, unsigned upper, unsigned s) {
    return (unsigned)(((unsigned long long)upper << 32 | lower) >> (s & 31));
}
inline unsigned __funnelshift_l(unsigned lower, unsigned upper, unsigned s) {
    return (unsigned)(((unsigned long long)upper << 32 | lower) << (s & 31) >> 32);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
    return (unsigned)((unsigned long long)a * b >> 32);
}
template <int Bits, class F>
inline unsigned emulated_simd(unsigned a, unsigned b, F f) {
    unsigned r = 0;
    for (int i = 0; i < 32; i += Bits) {
        const unsigned m = (1u << Bits) - 1;
        r |= (unsigned)(f((int)(a >> i & m), (int)(b >> i & m)) & (int)m) << i;
    }
    return r;
}
#define EMULATED_SIMD(name, bits, e)                                                               \
    inline unsigned name(unsigned a, unsigned b) {                                                 \
        return emulated_simd<bits>(a, b, [](int x, int y) { return e; });                          \
    }
EMULATED_SIMD(__vmaxu4, 8, x > y ? x : y)
EMULATED_SIMD(__vminu4, 8, x < y ? x : y)
EMULATED_SIMD(__vmaxu2, 16, x > y ? x : y)
EMULATED_SIMD(__vminu2, 16, x < y ? x : y)
EMULATED_SIMD(__vabsdiffu4, 8, x > y ? x - y : y - x)
EMULATED_SIMD(__vcmpeq4, 8, x == y ? 255 : 0)
EMULATED_SIMD(__vcmpne4, 8, x != y ? 255 : 0)
EMULATED_SIMD(__vcmpgtu4, 8, x > y ? 255 : 0)
EMULATED_SIMD(__vcmpgeu4, 8, x >= y ? 255 : 0)
EMULATED_SIMD(__vcmpltu4, 8, x < y ? 255 : 0)
EMULATED_SIMD(__vadd4, 8, x + y)
EMULATED_SIMD(__vsub4, 8, x - y)
EMULATED_SIMD(__vsubus4, 8, x > y ? x - y : 0)
template <class X>
inline X __ldg(const X* p) {
    return *(const X*)emulated::global_place((unsigned long long)(uintptr_t)p, sizeof(X), "__ldg");
}
inline unsigned long long __cvta_generic_to_shared(const void* p) { return emulated::to_shared(p); }

inline void __syncwarp(unsigned mask = ~0u) {
    emulated::collective(emulated::kSyncWarp, mask, 0, 0);
}
inline int __any_sync(unsigned mask, int x) {
    return emulated::collective(emulated::kAny, mask, 0, x != 0);
}
inline int __all_sync(unsigned mask, int x) {
    return emulated::collective(emulated::kAll, mask, 0, x != 0);
}
inline unsigned __ballot_sync(unsigned mask, int x) {
    return emulated::collective(emulated::kBallot, mask, 0, x != 0);
}
template <class X>
inline X emulated_shuffle(emulated::Kind kind, unsigned mask, X x, unsigned arg, int width) {
    static_assert(sizeof(X) == 4 || sizeof(X) == 8);
    unsigned words[2];
    memcpy(words, &x, sizeof x);
    for (unsigned i = 0; i < sizeof x / 4; ++i)
        words[i] = emulated::collective(kind, mask, width, words[i], arg, width);
    memcpy(&x, words, sizeof x);
    return x;
}
template <class X>
inline X __shfl_sync(unsigned m, X x, int from, int width = 32) {
    return emulated_shuffle(emulated::kShfl, m, x, from, width);
}
template <class X>
inline X __shfl_up_sync(unsigned m, X x, unsigned d, int width = 32) {
    return emulated_shuffle(emulated::kShflUp, m, x, d, width);
}
template <class X>
inline X __shfl_xor_sync(unsigned m, X x, int d, int width = 32) {
    return emulated_shuffle(emulated::kShflXor, m, x, d, width);
}
template <class X>
inline X __reduce_max_sync(unsigned m, X x) {
    return (X)emulated::collective(emulated::kReduceMax, m, std::is_signed_v<X>, x);
}
template <class X>
inline X __reduce_min_sync(unsigned m, X x) {
    return (X)emulated::collective(emulated::kReduceMin, m, std::is_signed_v<X>, x);
}
template <class X>
inline X __reduce_add_sync(unsigned m, X x) {
    return (X)emulated::collective(emulated::kReduceAdd, m, 0, x);
}
inline unsigned __reduce_or_sync(unsigned m, unsigned x) {
    return emulated::collective(emulated::kReduceOr, m, 0, x);
}
inline void __syncthreads() { emulated::syncthreads(0, 0); }
inline int __syncthreads_or(int x) { return emulated::syncthreads(1, x); }
inline int __syncthreads_count(int x) { return emulated::syncthreads(3, x); }
inline void __nanosleep(unsigned) { emulated::nanosleep(); }
[[noreturn]] inline void __trap() { emulated::fail("__trap"); }
#define EMULATED_ATOMIC(name, e)                                                                   \
    template <class X, class Y>                                                                    \
    inline X name(X* p, Y y_) {                                                                    \
        emulated::contend();                                                                       \
        const X x = *p, y = (X)y_;                                                                 \
        *p = (e);                                                                                  \
        emulated::written(p);                                                                      \
        emulated::contend();                                                                       \
        return x;                                                                                  \
    }
EMULATED_ATOMIC(atomicAdd, x + y)
EMULATED_ATOMIC(atomicOr, x | y)
