// What kernels for Hopper run on where there is no GPU: every thread of a block is a fiber of one
// CPU thread, and a scheduler picks at random, by a seed, which goes on at each synchronising
// instruction. Copies and wgmmas happen at random times between their start and the wait for them,
// so that what comes too early or too late changes results; what hardware leaves undefined fails.
//
// Fibers switch at those instructions alone, so that most fences have nothing to do: memory order
// and races between plain accesses are not emulated. Fences between the generic and the async proxy
// are: who wrote what by PTX, and whether a fence came behind it. Sums of wgmma are in fp32.
#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <setjmp.h>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <ucontext.h>
#include <unordered_map>
#include <vector>

#include "runtime.h" // whose macros the headers above must not see
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

using u64 = unsigned long long;

asm(R"(
.text
.globl switch_fiber
switch_fiber:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
extern "C" void switch_fiber(void** save, void* to);

namespace emulated {
namespace {

constexpr unsigned kSharedBytes = 256 << 10, kFirst = 1024, kMostShared = 228 << 10;
constexpr unsigned kPoison = 0x7fb5a5a5;                   // a signalling NaN
constexpr int kRegisters = 64 << 10, kLeastRegisters = 24; // of an SM, of a thread
constexpr size_t kStack = 128 << 10, kPage = 4096;
constexpr size_t kGuard = 16 << 20; // around tensors: what an index that is wrong by rows goes to
constexpr u64 kMagic = 0xba881e50ba881e5aull;

u64 random_state;
u64 random_bits() {
    random_state += 0x9e3779b97f4a7c15ull;
    u64 z = random_state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
unsigned below(unsigned n) { return (unsigned)((random_bits() >> 32) * n >> 32); }
bool chance(unsigned of256) { return of256 && (random_bits() >> 32 & 255) < of256; }

struct Block;
struct Thread;
struct Warp;
struct Warpgroup;

// Copies that a thread waits for together: parts that have not yet read shared memory, and parts
// that have not yet written.
struct CopyGroup {
    int unread = 0, unwritten = 0;
    unsigned number = 0; // of stores by TMA, see waited_at
    std::vector<Thread*> waiters;
};

// What a thread found where others may write.
struct Seen {
    const void* place;
    u64 words[2];
};

// A thread's accumulators of wgmmas that are under way: their values are here, and NaN where the
// kernel has them, until they have been waited for.
struct Sums {
    int n;
    u64 last_wgmma;
    float* places[128];
    float values[128];
};

// The last write to a word of shared memory by the generic proxy, and how many proxy fences had
// come before it: of the thread that wrote, or of all where a copy did, for which any thread may
// wait.
enum Writer { kNobody, kThread, kCopy };
struct Write {
    int at; // the instruction, from the kernel's first
    unsigned by : 2, thread : 10, fences : 20;
};
// The last write to a piece of memory, or store to it by TMA.
struct GlobalWrite {
    const void* at;
    u64 time;
    unsigned thread, group; // the group of stores, or 0
};

enum State { kRunnable, kBlocked, kDone };

struct Thread : ThreadIndices {
    Block* block;
    Warp* warp;
    int index, lane;
    State state;
    int place; // among the runnable
    void* stack_pointer;
    char* stack;
    char waits_for[160];
    unsigned result; // of a collective
    std::vector<Sums*> all_sums;
    u64 issued;
    bool fenced;
    std::vector<std::shared_ptr<CopyGroup>> copies_closed, bulk_closed;
    std::shared_ptr<CopyGroup> copies_open, bulk_open;
    unsigned number;        // of all that have started
    unsigned shared_fences; // proxy fences so far
    Seen seen[4];           // last, by loads of a polling loop
    unsigned seen_count;
    const void* polls; // where it is to find another value
};

// What a lane has come to a collective of its warp with.
struct Slot {
    bool active;
    Kind kind;
    unsigned mask, key, value, arg;
};

struct Warp {
    Thread* lanes[32] = {};
    unsigned exist = 0, done = 0;
    Slot slots[32] = {};
    int priority = 0;
    std::vector<u64> groups; // wgmmas up to the end of each committed group
};

// One that is issued, and runs at a random time once all 128 threads have come to it.
struct Wgmma {
    int site, n, type, adds, arrived = 0, negates, transposes;
    bool a_in_registers;
    u64 a, b;
    Sums* sums[128] = {};
    unsigned regs[128][4];
    std::vector<unsigned> unfenced; // places of operands, 16 bytes each
};

struct Warpgroup {
    std::deque<std::unique_ptr<Wgmma>> wgmmas;
    u64 base = 0, executed = 0;
    std::vector<Thread*> waiters;
};

struct NamedBarrier {
    int threads = 0, arrived = 0, kind = 0;
    int any = 0, all = 1, count = 0;
    u64 phase = 0;
    std::vector<Thread*> waiters;
};

struct Mbarrier {
    u64 phase = 0;
    int count, pending;
    long tx = 0;
    std::vector<Thread*> waiters;
};

struct Launch {
    void* function;
    void (*call)(void*, void**);
    void** args;
    Dim3 grid, block;
    unsigned dynamic_bytes;
    std::unordered_map<const void*, unsigned> statics;
    unsigned next_static;
};

struct Block {
    Dim3 id;
    u64 number;
    char* memory;  // shared
    Write* writes; // to each of its words
    unsigned shared_fences = 0;
    std::vector<Thread*> threads;
    std::vector<std::unique_ptr<Warp>> warps;
    std::vector<std::unique_ptr<Warpgroup>> groups;
    std::map<int, int> registers; // of a thread of each warpgroup that asked for so many
    int running = 0, priority = 0;
    int copies = 0; // under way, that read or write its shared memory
    std::map<int, NamedBarrier> named_barriers;
    std::map<unsigned, Mbarrier> mbarriers;
};

// A copy that is under way, or part of one.
struct Event {
    Block* block; // none for one that goes on where the block has ended
    std::function<void()> run;
};

// What a schedule is like, drawn once a launch, so that extremes of all sorts occur.
struct Options {
    unsigned copy_chance, wgmma_chance, yield_chance; // of 256, at each switch
    bool prioritised;                                 // warps, at random
    bool poison_copies;                               // their places, when they start
    bool wgmmas_last;                                 // after all else that can go on
    bool whole_boxes;                                 // come at once, not in parts
    unsigned start_chance; // of 65536, at each switch, that a block that may start does
};

Launch launch_;
Options options;
void* main_stack_pointer;
std::vector<Thread*> runnable;
std::vector<Event> copies;
std::vector<std::pair<Block*, Warpgroup*>> wgmmas_ready;
std::vector<std::unique_ptr<Block>> blocks;
std::vector<u64> order; // of all blocks of the grid
size_t next_block;      // in this order
int most_resident;
std::vector<Thread*> pollers; // those that found again what they had found
int rounds_in_vain;           // of them, since something else happened
constexpr int kMostRounds = 1000;
// Writes to memory since the launch began, for each page and each 16 bytes of it.
constexpr unsigned kPiece = 16;
std::unordered_map<u64, std::unique_ptr<GlobalWrite[]>> global_writes;
// Times, which proxy fences over memory count: of each thread's last of these, and of the wait for
// each group of stores by TMA, or 0.
u64 proxy_time;
std::vector<u64> fenced_at, waited_at;
std::vector<char*> free_stacks;
std::vector<std::pair<char*, Write*>> free_memories;
std::string error;
std::string doubt; // what is wrong if the result depends on it
bool in_launch = false, on_main = true;
jmp_buf launch_point; // where the thread that launches goes on
u64 switches, most_switches;
bool until_wait = false; // runs threads up to griddepcontrol.wait alone
int waiting_for_grid;

Thread* self() { return static_cast<Thread*>(current); }

// Where a thread is, as libraries and places in them, which build.py turns into lines.
std::string frames_of(void* pc, void** bp, Thread* t) {
    std::string text;
    char buffer[300];
    const auto put = [&](void* at) {
        Dl_info info;
        if (dladdr(at, &info) && info.dli_fname) {
            snprintf(buffer, sizeof buffer, " <%s+0x%lx>", info.dli_fname,
                     (long)((char*)at - (char*)info.dli_fbase));
            text += buffer;
        }
    };
    if (pc)
        put(pc);
    for (int i = 0; i < 12; ++i) { // frames
        if ((char*)bp < t->stack || (char*)bp > t->stack + kStack - 16 || (uintptr_t)bp % 8)
            break;
        if (!bp[1])
            break;
        put((char*)bp[1] - 1);
        bp = (void**)bp[0];
    }
    return text;
}

std::string name_of(const Thread* t) {
    char b[80];
    snprintf(b, sizeof b, "block %llu thread %d (warp %d lane %d)", t->block->number, t->index,
             t->index / 32, t->lane);
    return b;
}

// Where a thread is that does not run.
std::string where_is(Thread* t) {
    void** const frame = (void**)t->stack_pointer; // r15 r14 r13 r12 rbx rbp, return address
    return frames_of((char*)frame[6] - 1, (void**)frame[5], t);
}

bool gave_up_early;
// Ends the launch from wherever it is.
[[noreturn]] void give_up(const std::string& said) {
    error = said;
    gave_up_early = true;
    current = nullptr;
    if (on_main)
        longjmp(launch_point, 1);
    void* dummy;
    on_main = true;
    switch_fiber(&dummy, main_stack_pointer);
    abort();
}

void make_runnable(Thread* t) {
    if (t->state != kBlocked)
        return;
    t->state = kRunnable;
    t->place = (int)runnable.size();
    runnable.push_back(t);
}
void drop(Thread* t) {
    Thread* last = runnable.back();
    runnable[t->place] = last;
    last->place = t->place;
    runnable.pop_back();
}
void wake(std::vector<Thread*>& waiters) {
    for (Thread* t : waiters)
        make_runnable(t);
    waiters.clear();
}

void wake_poller(size_t i) {
    make_runnable(pollers[i]);
    pollers[i] = pollers.back();
    pollers.pop_back();
}
// Something has happened that a thread may have waited for.
void progress() { rounds_in_vain = 0; }

void run_copy() {
    progress();
    const unsigned i = below((unsigned)copies.size());
    Event e = std::move(copies[i]);
    copies[i] = std::move(copies.back());
    copies.pop_back();
    Thread* const own = self();
    current = nullptr;
    e.run();
    if (e.block)
        --e.block->copies;
    current = own;
}
void execute(Block* block, Warpgroup* g);
void meet_operands(Block* block, Wgmma& op);
void run_wgmma() {
    progress();
    const unsigned i = below((unsigned)wgmmas_ready.size());
    const auto [block, g] = wgmmas_ready[i];
    wgmmas_ready.erase(wgmmas_ready.begin() + i);
    execute(block, g);
}

[[noreturn]] void deadlock() {
    if (until_wait && waiting_for_grid)
        give_up("");
    std::string text = "DEADLOCK: no thread can go on\n";
    if (next_block < order.size())
        text += "  " + std::to_string(order.size() - next_block) +
                " blocks have not started, as no more may be resident\n";
    std::map<std::string, std::vector<Thread*>> alike;
    for (auto& b : blocks)
        for (Thread* t : b->threads)
            if (t->state == kBlocked) {
                char b[40];
                snprintf(b, sizeof b, "block %llu warp %d", t->block->number, t->index / 32);
                alike[std::string(b) + ": " + t->waits_for + " at" + where_is(t)].push_back(t);
            }
    for (auto& [what, those] : alike) {
        unsigned lanes = 0;
        for (Thread* t : those)
            lanes |= 1u << t->lane;
        char b[40];
        snprintf(b, sizeof b, "  lanes %08x of ", lanes);
        text += b + what + "\n";
    }
    for (auto& b : blocks) {
        for (auto& [a, m] : b->mbarriers) {
            char l[160];
            snprintf(l, sizeof l,
                     "  block %llu mbarrier 0x%x: phase %llu, arrivals left %d of %d, bytes %ld\n",
                     b->number, a, m.phase, m.pending, m.count, m.tx);
            text += l;
        }
        for (auto& [i, m] : b->named_barriers)
            if (m.arrived) {
                char l[160];
                snprintf(l, sizeof l, "  block %llu named barrier %d: %d of %d threads\n",
                         b->number, i, m.arrived, m.threads);
                text += l;
            }
    }
    give_up(text);
}

void start_block(u64 number);
bool may_start_block() { return next_block < order.size() && (int)blocks.size() < most_resident; }
void start_next_block() {
    progress();
    start_block(order[next_block++]);
}

// Picks what runs next, and switches to it.
void schedule() {
    for (;;) {
        if (may_start_block() && (random_bits() >> 32 & 65535) < options.start_chance) {
            start_next_block();
            continue;
        }
        if (!pollers.empty() && below(64) == 0) // for what plain stores have changed
            wake_poller(below((unsigned)pollers.size()));
        if (chance(options.copy_chance) && !copies.empty()) {
            run_copy();
            continue;
        }
        if (chance(options.wgmma_chance) && !wgmmas_ready.empty()) {
            run_wgmma();
            continue;
        }
        if (!runnable.empty())
            break;
        if (copies.empty() && wgmmas_ready.empty()) {
            if (may_start_block()) {
                start_next_block();
                continue;
            }
            if (!pollers.empty() && ++rounds_in_vain <= kMostRounds) {
                while (!pollers.empty())
                    wake_poller(pollers.size() - 1);
                continue;
            }
            int left = 0;
            for (auto& b : blocks)
                left += b->running;
            if (left)
                deadlock();
            break;
        }
        const bool mma =
            copies.empty() || (!wgmmas_ready.empty() && !options.wgmmas_last && below(2));
        mma ? run_wgmma() : run_copy();
    }
    if (++switches > most_switches) {
        std::string text = "no end after so many switches: a loop that waits in vain?\n";
        for (size_t i = 0; i < runnable.size() && i < 6; ++i)
            text += "  " + name_of(runnable[i]) + " at" + where_is(runnable[i]) + "\n";
        give_up(text);
    }
    // A loop that looks again and again, but does not wait, keeps nothing else from happening.
    if (switches % 4096 == 0) {
        if (!copies.empty())
            run_copy();
        if (!wgmmas_ready.empty())
            run_wgmma();
        if (switches % (1 << 20) == 0 && may_start_block())
            start_next_block();
    }
    Thread* const from = self();
    if (runnable.empty()) // all are done
        give_up("nothing is left to run");
    Thread* next = runnable[below((unsigned)runnable.size())];
    if (options.prioritised) {
        for (int i = 0; i < 6; ++i) {
            Thread* other = runnable[below((unsigned)runnable.size())];
            if (other->block->priority + other->warp->priority >
                next->block->priority + next->warp->priority)
                next = other;
        }
        if (below(4096) == 0)
            next->warp->priority = (int)below(1000);
    }
    if (next == from)
        return;
    current = next;
    on_main = false;
    switch_fiber(from ? &from->stack_pointer : &main_stack_pointer, next->stack_pointer);
}

void block_on(const char* format, ...) {
    Thread* t = self();
    va_list list;
    va_start(list, format);
    vsnprintf(t->waits_for, sizeof t->waits_for, format, list);
    va_end(list);
    drop(t);
    t->state = kBlocked;
    schedule();
}

const char* const kKindNames[] = {
    "__syncwarp",          "__any_sync",        "__all_sync",
    "__ballot_sync",       "__shfl_sync",       "__shfl_up_sync",
    "__shfl_down_sync",    "__shfl_xor_sync",   "__reduce_max_sync",
    "__reduce_min_sync",   "__reduce_add_sync", "__reduce_or_sync",
    "__reduce_and_sync",   "__match_any_sync",  "an aligned instruction",
    "ldmatrix or stmatrix"};

void finish_collective(Warp* w, unsigned mask, Kind kind, unsigned width) {
    unsigned all = 0, ballot = 0;
    bool first = true;
    for (int l = 0; l < 32; ++l) {
        if (!(mask >> l & 1))
            continue;
        const unsigned v = w->slots[l].value;
        ballot |= (v ? 1u : 0u) << l;
        const bool is_signed = w->slots[l].key;
        if (first)
            all = v;
        else
            switch (kind) {
            case kReduceMax:
                all = is_signed ? (unsigned)std::max((int)all, (int)v) : std::max(all, v);
                break;
            case kReduceMin:
                all = is_signed ? (unsigned)std::min((int)all, (int)v) : std::min(all, v);
                break;
            case kReduceAdd:
                all += v;
                break;
            case kReduceOr:
                all |= v;
                break;
            default:
                break;
            }
        first = false;
    }
    for (int l = 0; l < 32; ++l) {
        if (!(mask >> l & 1))
            continue;
        Slot& s = w->slots[l];
        unsigned r = 0;
        int source = l;
        const int segment = l & ~(int)(width - 1);
        switch (kind) {
        case kAny:
            r = ballot != 0;
            break;
        case kAll:
            r = ballot == mask;
            break;
        case kBallot:
            r = ballot;
            break;
        case kShfl:
            source = segment | (int)(s.arg & (width - 1));
            break;
        case kShflUp:
            source = l - (int)s.arg < segment ? l : l - (int)s.arg;
            break;
        case kShflXor:
            source = (l ^ (int)s.arg) >= segment + (int)width ? l : l ^ (int)s.arg;
            break;
        default:
            r = all;
        }
        if (kind >= kShfl && kind <= kShflXor)
            r = mask >> source & 1 ? w->slots[source].value : kPoison;
        w->lanes[l]->result = r;
    }
    for (int l = 0; l < 32; ++l)
        if (mask >> l & 1) {
            w->slots[l].active = false;
            make_runnable(w->lanes[l]);
        }
}

} // namespace

ThreadIndices* current;

void fail(const char* format, ...) {
    char b[700];
    va_list list;
    va_start(list, format);
    vsnprintf(b, sizeof b, format, list);
    va_end(list);
    std::string text = b;
    if (current) {
        text += "\n  in " + name_of(self()) + " at" +
                frames_of(nullptr, (void**)__builtin_frame_address(0), self());
    }
    give_up(text);
}

void maybe_yield() {
    if (current && chance(options.yield_chance))
        schedule();
}
// Blocks meet here: now and then one has to stand back, or may go ahead.
void contend() {
    if (options.prioritised && below(3) == 0) {
        self()->block->priority = (int)below(3) * 2000;
        schedule();
        return;
    }
    maybe_yield();
}
void nanosleep() { schedule(); }

// A thread that finds what it has found before looks again when another has written there, at
// random, or where nothing else can go on.
void polled(const void* place, unsigned bytes) {
    Thread* t = self();
    Seen now{place, {0, 0}};
    memcpy(now.words, place, bytes);
    bool again = false;
    for (const Seen& before : t->seen)
        again |= before.place == place && !memcmp(before.words, now.words, sizeof now.words);
    if (!again) {
        t->seen[t->seen_count++ % 4] = now;
        return;
    }
    t->polls = place;
    pollers.push_back(t);
    block_on("polls %p, where it finds 0x%llx", place, now.words[0]);
}
void written(const void* place) {
    progress();
    for (size_t i = pollers.size(); i-- > 0;)
        if (pollers[i]->polls == place)
            wake_poller(i);
}

unsigned collective(Kind kind, unsigned mask, unsigned key, unsigned value, unsigned arg,
                    unsigned width) {
    Thread* t = self();
    Warp* w = t->warp;
    mask &= w->exist;
    if (!(mask >> t->lane & 1))
        fail("%s with mask %08x, without the lane itself", kKindNames[kind], mask);
    if (mask & w->done)
        fail("%s with mask %08x, of which lanes %08x have ended", kKindNames[kind], mask,
             mask & w->done);
    unsigned here = 1u << t->lane;
    for (int l = 0; l < 32; ++l) {
        const Slot& s = w->slots[l];
        if (l == t->lane || !s.active || !(s.mask >> t->lane & 1 || mask >> l & 1))
            continue;
        if (s.mask != mask || s.kind != kind || s.key != key) {
            Thread* other = w->lanes[l];
            fail("%s (mask %08x, key %u) meets %s (mask %08x, key %u) of lane %d at%s",
                 kKindNames[kind], mask, key, kKindNames[s.kind], s.mask, s.key, l,
                 where_is(other).substr(0, 500).c_str());
        }
        here |= 1u << l;
    }
    w->slots[t->lane] = {true, kind, mask, key, value, arg};
    if (here == mask) {
        finish_collective(w, mask, kind, width);
        maybe_yield();
        return t->result;
    }
    block_on("%s of mask %08x", kKindNames[kind], mask);
    return t->result;
}

void aligned(int site) { collective(kAligned, ~0u, (unsigned)site, 0); }

// Shared memory.

void* shared_at(const void* id, unsigned size, unsigned align) {
    auto [found, fresh] = launch_.statics.try_emplace(id, 0u);
    if (fresh) {
        found->second = (launch_.next_static + align - 1) / align * align;
        launch_.next_static = found->second + size;
        if (launch_.next_static > kMostShared)
            fail("shared memory takes %u bytes", launch_.next_static);
    }
    return self()->block->memory + found->second;
}
unsigned char* dynamic_shared(unsigned align) {
    if (align > 1024)
        fail("dynamic shared memory aligned to %u", align);
    return (unsigned char*)self()->block->memory + kFirst;
}
unsigned to_shared(const void* p) {
    const long at = (const char*)p - self()->block->memory;
    if (at < 0 || at >= kSharedBytes)
        fail("%p is no address of this block's shared memory", p);
    return (unsigned)at;
}
static unsigned char* shared_of(Block* block, unsigned address, unsigned size, const char* what) {
    if (address < kFirst || address + size > launch_.next_static)
        fail("%s at 0x%x of shared memory, which is from 0x%x to 0x%x", what, address, kFirst,
             launch_.next_static);
    return (unsigned char*)block->memory + address;
}
unsigned char* shared_place(unsigned address, unsigned size, const char* what) {
    if (address % size)
        fail("%s of %u bytes at 0x%x of shared memory", what, size, address);
    return shared_of(self()->block, address, size, what);
}
void* global_place(u64 address, unsigned size, const char* what) {
    if (address % size)
        fail("%s of %u bytes at %p", what, size, (void*)address);
    return (void*)address;
}

// Proxies.

static int kernel_place(const void* at) { return (int)((char*)at - (char*)launch_.function); }
static std::string lines_of(const void* at) {
    return " at" + frames_of((char*)at - 1, nullptr, self());
}
static unsigned fences_of(Block* b, const Write& write) {
    return write.by == kCopy ? b->shared_fences : b->threads[write.thread]->shared_fences;
}
static void wrote_shared_at(Thread* t, Writer by, const void* place, unsigned bytes,
                            const void* at) {
    const auto first = (unsigned)((char*)place - t->block->memory);
    Write write{kernel_place(at), by, (unsigned)t->index, 0};
    write.fences = fences_of(t->block, write);
    for (unsigned word = first / 4; word <= (first + bytes - 1) / 4; ++word)
        t->block->writes[word] = write;
}
void wrote_shared(const void* place, unsigned bytes) {
    wrote_shared_at(self(), kThread, place, bytes, __builtin_return_address(0));
}
// What of this was written, with no fence of the writer since; or nothing.
static std::string unfenced(Block* b, unsigned address, unsigned bytes) {
    for (unsigned word = address / 4; word < (address + bytes) / 4; ++word) {
        const Write& write = b->writes[word];
        if (write.by == kNobody)
            continue;
        Write now = write;
        now.fences = fences_of(b, write);
        if (now.fences != write.fences)
            continue;
        char said[120];
        snprintf(said, sizeof said,
                 "0x%x of shared memory, which thread %u has written without a proxy fence since,",
                 word * 4, write.thread);
        return said + lines_of((char*)launch_.function + write.at);
    }
    return "";
}
static void meet_shared(Block* b, unsigned address, unsigned bytes, const char* what) {
    const std::string found = unfenced(b, address, bytes);
    if (!found.empty())
        fail("%s meets %s", what, found.c_str());
}
// What a copy that starts now writes over.
static void copied_over(Block* b, unsigned address, unsigned bytes, const char* what) {
    meet_shared(b, address, bytes, what);
    memset(&b->writes[address / 4], 0, bytes / 4 * sizeof(Write));
}
static void wrote_global_at(u64 address, unsigned bytes, const GlobalWrite& write) {
    for (u64 piece = address / kPiece; piece <= (address + bytes - 1) / kPiece; ++piece) {
        auto& page = global_writes[piece * kPiece / kPage];
        if (!page)
            page.reset(new GlobalWrite[kPage / kPiece]());
        page[piece % (kPage / kPiece)] = write;
    }
}
void wrote_global(const void* place, unsigned bytes) {
    const GlobalWrite write{__builtin_return_address(0), proxy_time, self()->number, 0};
    wrote_global_at((u64)place, bytes, write);
}
// Whether a copy may load what was written in this launch.
static void meet_global(u64 address, u64 bytes, const char* what) {
    if (global_writes.empty() || !bytes)
        return;
    const GlobalWrite* page = nullptr;
    u64 at = 0;
    for (u64 piece = address / kPiece; piece <= (address + bytes - 1) / kPiece; ++piece) {
        if (at != piece * kPiece / kPage || !page) {
            at = piece * kPiece / kPage;
            const auto found = global_writes.find(at);
            if (found == global_writes.end()) {
                piece = (at + 1) * kPage / kPiece - 1;
                page = nullptr;
                continue;
            }
            page = found->second.get();
        }
        const GlobalWrite& write = page[piece % (kPage / kPiece)];
        if (!write.time)
            continue;
        const char* how = write.group ? "by TMA " : "";
        const u64 time = write.group ? waited_at[write.group] : write.time;
        if (!time)
            fail("%s loads %p, where a store by TMA has not been waited for,%s", what,
                 (void*)(piece * kPiece), lines_of(write.at).c_str());
        if (fenced_at[write.thread] <= time && fenced_at[self()->number] <= time)
            fail("%s loads %p, which was stored %sin this launch, and there is no proxy fence of "
                 "either thread since:%s",
                 what, (void*)(piece * kPiece), how, lines_of(write.at).c_str());
    }
}
void proxy_fence(bool shared, bool global) {
    Thread* t = self();
    t->shared_fences += shared, t->block->shared_fences += shared;
    if (global)
        fenced_at[t->number] = ++proxy_time;
    maybe_yield();
}

// Barriers of threads.

static bool arrive_at(int id, int threads, int kind, int x, bool waits, int* result) {
    Thread* t = self();
    Block* b = t->block;
    NamedBarrier& named_barrier = b->named_barriers[id];
    if (threads < 0)
        threads = (int)b->threads.size();
    if (threads % 32 && threads != (int)b->threads.size())
        fail("named barrier %d of %d threads", id, threads);
    if (named_barrier.arrived == 0) {
        named_barrier.threads = threads;
        named_barrier.kind = kind;
        named_barrier.any = 0, named_barrier.all = 1, named_barrier.count = 0;
    } else if (named_barrier.threads != threads || named_barrier.kind != kind)
        fail("barrier %d for %d threads (kind %d), where others came for %d (kind %d)", id, threads,
             kind, named_barrier.threads, named_barrier.kind);
    progress();
    ++named_barrier.arrived;
    named_barrier.any |= x != 0, named_barrier.all &= x != 0, named_barrier.count += x != 0;
    if (named_barrier.arrived < named_barrier.threads) {
        if (!waits)
            return false;
        named_barrier.waiters.push_back(t);
        block_on("barrier %d for %d threads", id, threads);
        *result = (int)t->result;
        return true;
    }
    const int r = kind == 1   ? named_barrier.any
                  : kind == 2 ? named_barrier.all
                  : kind == 3 ? named_barrier.count
                              : 0;
    named_barrier.arrived = 0;
    ++named_barrier.phase;
    for (Thread* o : named_barrier.waiters)
        o->result = (unsigned)r;
    wake(named_barrier.waiters);
    *result = r;
    maybe_yield();
    return true;
}
int syncthreads(int kind, int x) {
    collective(kAligned, ~0u, 1000000u + (unsigned)kind, 0);
    int r = 0;
    arrive_at(0, -1, kind, x, true, &r);
    return r;
}
bool named_barrier(int site, int id, int threads, int kind, int x, bool is_aligned, bool waits) {
    if (id < 0 || id > 15)
        fail("named barrier %d", id);
    if (is_aligned)
        aligned(site);
    int r = 0;
    arrive_at(id, threads, kind, x, waits, &r);
    if (!waits)
        maybe_yield();
    return r;
}

// mbarriers. Their memory holds a constant, so that what is written over them is found.

static Mbarrier& mbarrier_of(Block* block, unsigned a, const char* what) {
    auto found = block->mbarriers.find(a);
    if (found == block->mbarriers.end())
        fail("%s of an mbarrier at 0x%x, where none is", what, a);
    if (*(u64*)shared_of(block, a, 8, what) != kMagic)
        fail("the mbarrier at 0x%x was written over", a);
    return found->second;
}
static void settle(Mbarrier& m) {
    if (m.pending || m.tx)
        return;
    ++m.phase;
    m.pending = m.count;
    written(&m);
    wake(m.waiters);
}
void mbarrier_init(unsigned a, unsigned count) {
    u64* p = (u64*)shared_place(a, 8, "mbarrier.init");
    Block* b = self()->block;
    if (b->mbarriers.count(a) && *p == kMagic && !b->mbarriers[a].waiters.empty())
        fail("mbarrier.init of one that threads wait for");
    if (!count)
        fail("mbarrier.init for 0 arrivals");
    *p = kMagic;
    Mbarrier m;
    m.count = m.pending = (int)count;
    b->mbarriers[a] = m;
    maybe_yield();
}
void mbarrier_arrive(unsigned a, unsigned expect) {
    maybe_yield();
    progress();
    Mbarrier& m = mbarrier_of(self()->block, a, "arrival");
    m.tx += expect;
    if (--m.pending < 0)
        fail("more arrivals than %d at the mbarrier at 0x%x", m.count, a);
    settle(m);
    maybe_yield();
}
static void mbarrier_bytes(Block* b, unsigned a, unsigned bytes) {
    Mbarrier& m = mbarrier_of(b, a, "bytes");
    m.tx -= bytes;
    settle(m);
}
bool mbarrier_test(unsigned a, unsigned parity, bool may_wait) {
    Thread* t = self();
    if (parity > 1)
        fail("mbarrier parity %u", parity);
    if (chance(options.yield_chance))
        schedule();
    {
        Mbarrier& m = mbarrier_of(t->block, a, "wait");
        if ((m.phase & 1) != parity)
            return true;
        if (!may_wait) {
            schedule();
            if ((m.phase & 1) == parity)
                polled(&m, sizeof m.phase);
            return (m.phase & 1) != parity;
        }
        m.waiters.push_back(t);
        block_on("mbarrier 0x%x, parity %u, phase %llu", a, parity, m.phase);
    }
    return (mbarrier_of(t->block, a, "wait").phase & 1) != parity;
}

// Copies.

struct Map {
    u64 address, rows, row_bytes, box_rows, box_bytes, swizzled;
};
static Map map_of(const void* p) {
    u64 words[16];
    memcpy(words, p, sizeof words);
    if (words[15] != 0x3a973a97)
        fail("no tensor map at %p", p);
    return {words[0], words[1], words[2], words[3], words[4], words[5]};
}
static void under_way(Block* b, std::function<void()> run) {
    if (b)
        ++b->copies;
    copies.push_back({b, std::move(run)});
}
static unsigned swizzled(const Map& map, unsigned address) {
    if (!map.swizzled)
        return address;
    return map.box_bytes == 128 ? address ^ (address >> 7 & 7) << 4
                                : address ^ (address >> 7 & 3) << 4;
}
// A box's rows, some at a time.
template <class F>
static void in_parts(unsigned rows, F of) {
    const unsigned parts = options.whole_boxes ? 1 : 1 + below(4);
    for (unsigned i = 0; i < parts; ++i) {
        const unsigned first = rows * i / parts, end = rows * (i + 1) / parts;
        if (first < end)
            of(first, end);
    }
}
// What a box has of a tensor, a row at a time.
template <class F>
static void in_tensor(const Map& map, int column, int row, F of) {
    const long first = std::max(column, 0);
    const long end = std::min((long)(column + map.box_bytes), (long)map.row_bytes);
    const long last = std::min((long)(row + map.box_rows), (long)map.rows);
    for (long y = std::max(row, 0); first < end && y < last; ++y)
        of(map.address + y * map.row_bytes + first, (unsigned)(end - first));
}
void tma_load(unsigned to, const void* p, int column, int row, unsigned barrier, unsigned mask) {
    Thread* t = self();
    if (mask)
        fail("copies to a cluster are not emulated");
    const Map map = map_of(p);
    const unsigned row_bytes = (unsigned)map.box_bytes, rows = (unsigned)map.box_rows;
    if (to % (map.swizzled ? row_bytes * 8 : 128))
        fail("tma_load to 0x%x", to);
    mbarrier_of(t->block, barrier, "tma_load");
    unsigned char* const all = shared_of(t->block, to, row_bytes * rows, "tma_load");
    copied_over(t->block, to, row_bytes * rows, "tma_load");
    in_tensor(map, column, row,
              [](u64 address, unsigned bytes) { meet_global(address, bytes, "tma_load"); });
    if (options.poison_copies)
        memset(all, 0xff, row_bytes * rows);
    Block* const b = t->block;
    in_parts(rows, [&](unsigned first, unsigned end) {
        under_way(b, [=] {
            for (unsigned r = first; r < end; ++r)
                for (unsigned c = 0; c < row_bytes; c += 16) {
                    unsigned char* const place =
                        shared_of(b, swizzled(map, to + r * row_bytes + c), 16, "tma_load");
                    const long y = (long)row + r;
                    for (unsigned i = 0; i < 16; ++i) {
                        const long x = (long)column + c + i;
                        const bool in =
                            y >= 0 && y < (long)map.rows && x >= 0 && x < (long)map.row_bytes;
                        place[i] =
                            in ? ((const unsigned char*)map.address)[y * map.row_bytes + x] : 0;
                    }
                }
            mbarrier_bytes(b, barrier, (end - first) * row_bytes);
        });
    });
    maybe_yield();
}
static std::shared_ptr<CopyGroup>& open_group(std::shared_ptr<CopyGroup>& g) {
    if (!g)
        g = std::make_shared<CopyGroup>();
    return g;
}
static void is_over(CopyGroup& group, int CopyGroup::* parts) {
    if (--(group.*parts) == 0)
        wake(group.waiters);
}
// Reads shared memory at one time and writes memory at another, where the block may have ended.
void tma_store(const void* p, int column, int row, unsigned from) {
    Thread* t = self();
    const Map map = map_of(p);
    const unsigned row_bytes = (unsigned)map.box_bytes, rows = (unsigned)map.box_rows;
    if (from % (map.swizzled ? row_bytes * 8 : 128))
        fail("tma_store from 0x%x", from);
    shared_of(t->block, from, row_bytes * rows, "tma_store");
    meet_shared(t->block, from, row_bytes * rows, "tma_store");
    const std::shared_ptr<CopyGroup> group = open_group(t->bulk_open);
    if (!group->number) {
        group->number = (unsigned)waited_at.size();
        waited_at.push_back(0);
    }
    const GlobalWrite write{__builtin_return_address(0), proxy_time, t->number, group->number};
    in_tensor(map, column, row,
              [&](u64 address, unsigned bytes) { wrote_global_at(address, bytes, write); });
    Block* const b = t->block;
    in_parts(rows, [&](unsigned first, unsigned end) {
        ++group->unread, ++group->unwritten;
        under_way(b, [=] {
            std::vector<unsigned char> read((end - first) * row_bytes);
            for (unsigned r = first; r < end; ++r)
                for (unsigned c = 0; c < row_bytes; c += 16)
                    memcpy(&read[(r - first) * row_bytes + c],
                           shared_of(b, swizzled(map, from + r * row_bytes + c), 16, "tma_store"),
                           16);
            is_over(*group, &CopyGroup::unread);
            under_way(nullptr, [=] {
                for (unsigned r = first; r < end; ++r)
                    for (unsigned c = 0; c < row_bytes; ++c) {
                        const long y = (long)row + r, x = (long)column + c;
                        if (y >= 0 && y < (long)map.rows && x >= 0 && x < (long)map.row_bytes)
                            ((unsigned char*)map.address)[y * map.row_bytes + x] =
                                read[(r - first) * row_bytes + c];
                    }
                is_over(*group, &CopyGroup::unwritten);
            });
        });
    });
    maybe_yield();
}
void bulk_load(unsigned to, u64 from, unsigned bytes, unsigned barrier, unsigned mask) {
    Thread* t = self();
    if (mask)
        fail("copies to a cluster are not emulated");
    if (bytes % 16 || from % 16 || to % 16)
        fail("copy_bulk of %u bytes from %p to 0x%x", bytes, (void*)from, to);
    mbarrier_of(t->block, barrier, "copy_bulk");
    unsigned char* const place = shared_of(t->block, to, bytes, "copy_bulk");
    copied_over(t->block, to, bytes, "copy_bulk");
    meet_global(from, bytes, "copy_bulk");
    if (options.poison_copies)
        memset(place, 0xff, bytes);
    Block* const b = t->block;
    under_way(b, [=] {
        memcpy(place, (const void*)from, bytes);
        mbarrier_bytes(b, barrier, bytes);
    });
    maybe_yield();
}
// Waits for all groups but the last so many.
static void wait_groups(std::vector<std::shared_ptr<CopyGroup>>& closed, int pending,
                        bool only_read) {
    Thread* t = self();
    for (int i = 0; i + pending < (int)closed.size(); ++i)
        while (closed[i]->unread || (!only_read && closed[i]->unwritten)) {
            closed[i]->waiters.push_back(t);
            block_on("wait_group%s %d", only_read ? ".read" : "", pending);
        }
    if (only_read || (int)closed.size() <= pending)
        return;
    const auto end = closed.end() - pending;
    for (auto group = closed.begin(); group != end; ++group)
        if ((*group)->number)
            waited_at[(*group)->number] = proxy_time;
    closed.erase(closed.begin(), end);
}
void bulk_commit() {
    auto& o = open_group(self()->bulk_open);
    self()->bulk_closed.push_back(o);
    o = nullptr;
}
void bulk_wait(int pending, bool only_read) {
    wait_groups(self()->bulk_closed, pending, only_read);
}
void cp_async(unsigned to, u64 from, unsigned bytes, unsigned exist) {
    Thread* t = self();
    unsigned char* const place = shared_place(to, bytes, "cp.async");
    if (exist)
        global_place(from, bytes, "cp.async");
    if (options.poison_copies)
        memset(place, 0xff, bytes);
    auto group = open_group(t->copies_open);
    ++group->unwritten;
    const void* const at = __builtin_return_address(0);
    under_way(t->block, [=] {
        memset(place, 0, bytes);
        memcpy(place, (const void*)from, exist);
        wrote_shared_at(t, kCopy, place, bytes, at);
        is_over(*group, &CopyGroup::unwritten);
    });
}
void cp_async_commit() {
    auto& o = open_group(self()->copies_open);
    self()->copies_closed.push_back(o);
    o = nullptr;
}
void cp_async_wait(int pending) { wait_groups(self()->copies_closed, pending, false); }
void mbarrier_arrive_copied(unsigned a) {
    Thread* t = self();
    auto groups = t->copies_closed;
    groups.push_back(open_group(t->copies_open));
    Block* const b = t->block;
    // Runs once those have come: else it is put back.
    auto again = std::make_shared<std::function<void()>>();
    *again = [=] {
        for (auto& g : groups)
            if (g->unwritten) {
                under_way(b, *again);
                return;
            }
        Mbarrier& m = mbarrier_of(b, a, "arrival");
        if (--m.pending < 0)
            fail("more arrivals than %d at the mbarrier at 0x%x", m.count, a);
        settle(m);
    };
    under_way(b, *again);
}
void st_async(unsigned to, const void* words, unsigned bytes, unsigned barrier) {
    Thread* t = self();
    Block* const b = t->block;
    unsigned char* const place = shared_place(to, bytes, "st.async");
    copied_over(b, to, bytes, "st.async");
    std::vector<char> held((const char*)words, (const char*)words + bytes);
    under_way(b, [=] {
        memcpy(place, held.data(), bytes);
        mbarrier_bytes(b, barrier, bytes);
    });
}
unsigned map_cluster(unsigned address, unsigned rank) {
    if (rank)
        fail("clusters are not emulated");
    return address;
}
int cluster_rank() { return 0; }
void cluster_arrive() {}
void cluster_wait() { maybe_yield(); }

// wgmma.

static Warpgroup* group_of(Thread* t) {
    Block* b = t->block;
    const size_t g = t->index / 128;
    if ((g + 1) * 128 > b->threads.size())
        fail("wgmma of fewer than four warps");
    return b->groups[g].get();
}
void wgmma_fence(int site) {
    aligned(site);
    self()->fenced = true;
}
void wgmma_commit(int site) {
    aligned(site);
    Thread* t = self();
    Warp* w = t->warp;
    if (t->lane == __builtin_ctz(w->exist)) // for the warp
        w->groups.push_back(t->issued);
    aligned(site);
}
void wgmma(int site, int n, int type, float* const* d, int count, bool a_in_registers,
           const unsigned* ra, u64 a, u64 b, int adds, int negates, int transposes) {
    aligned(site);
    Thread* t = self();
    Warpgroup* g = group_of(t);
    if (!t->fenced)
        fail("wgmma without a wgmma_fence since the last wait");
    const u64 index = t->issued++;
    while (g->base + g->wgmmas.size() <= index)
        g->wgmmas.push_back(std::make_unique<Wgmma>());
    Wgmma& op = *g->wgmmas[index - g->base];
    if (!op.arrived)
        op.site = site, op.n = n, op.type = type, op.adds = adds, op.negates = negates,
        op.transposes = transposes, op.a_in_registers = a_in_registers, op.a = a, op.b = b;
    else if (op.site != site || op.n != n || op.type != type || op.adds != adds ||
             op.negates != negates || op.transposes != transposes || op.a != a || op.b != b)
        fail("threads of a warpgroup have different wgmmas as number %llu: n %d and %d, A %llx and "
             "%llx, B %llx and %llx, adds %d and %d",
             index, op.n, n, op.a, a, op.b, b, op.adds, adds);
    const int lane = t->index % 128;
    Sums* sums = nullptr;
    for (Sums* each : t->all_sums) {
        if (each->places[0] == d[0])
            sums = each;
        else
            for (int i = 0; i < each->n; i += 8)
                if (each->places[i] == d[0] || d[i % count] == each->places[0])
                    fail("sums of a wgmma overlap others that are under way");
    }
    if (sums) {
        if (sums->n != count)
            fail("sums of %d values are under way as %d", count, sums->n);
        for (int i = 0; i < count; ++i)
            if (sums->places[i] != d[i] || bits_of(*d[i]) != kPoison)
                fail("value %d of wgmma's sums was written while these were under way", i);
    } else {
        sums = new Sums;
        sums->n = count;
        for (int i = 0; i < count; ++i) {
            sums->places[i] = d[i];
            sums->values[i] = *d[i];
            memcpy(d[i], &kPoison, 4);
        }
        t->all_sums.push_back(sums);
    }
    sums->last_wgmma = index;
    op.sums[lane] = sums;
    if (a_in_registers)
        memcpy(op.regs[lane], ra, 16);
    if (++op.arrived == 128) {
        meet_operands(t->block, op);
        if (g->executed == index)
            wgmmas_ready.push_back({t->block, g});
    }
    maybe_yield();
}
void wgmma_wait(int site, int pending) {
    aligned(site);
    Thread* t = self();
    Warp* w = t->warp;
    const long at = (long)w->groups.size() - 1 - pending;
    if (at < 0)
        return;
    const u64 bound = w->groups[(size_t)at];
    Warpgroup* g = group_of(t);
    while (g->executed < bound) {
        g->waiters.push_back(t);
        block_on("wgmma_wait<%d>: %llu of %llu have run", pending, g->executed, bound);
    }
    for (size_t i = 0; i < t->all_sums.size();) {
        Sums* sums = t->all_sums[i];
        if (sums->last_wgmma >= bound) {
            ++i;
            continue;
        }
        for (int v = 0; v < sums->n; ++v) {
            if (bits_of(*sums->places[v]) != kPoison)
                fail("value %d of wgmma's sums was written while these were under way", v);
            *sums->places[v] = sums->values[v];
        }
        delete sums;
        t->all_sums[i] = t->all_sums.back();
        t->all_sums.pop_back();
    }
    t->fenced = false;
    aligned(site);
}

namespace {
// Byte `column` of row r of an operand.
unsigned place_of(u64 desc, int r, int column) {
    const unsigned start = (desc & 0x3fff) << 4, lead = (desc >> 16 & 0x3fff) << 4,
                   stride = (desc >> 32 & 0x3fff) << 4, swizzle = desc >> 62;
    unsigned address;
    if (swizzle == 0)
        address = start + (unsigned)(r / 8) * stride + (unsigned)(r % 8) * 16 +
                  (unsigned)(column / 16) * lead + (unsigned)column % 16;
    else {
        const unsigned row = swizzle == 1 ? 128 : swizzle == 2 ? 64 : 32;
        address = start + (unsigned)(r / 8) * stride + (unsigned)(r % 8) * row + (unsigned)column;
        address ^= (address >> 7 & (swizzle == 1 ? 7 : swizzle == 2 ? 3 : 1)) << 4;
    }
    return address;
}
// An operand may have rows whose products nobody uses, and which lie where anything may: what is
// not fenced counts as NaN.
void meet_operands(Block* block, Wgmma& op) {
    const auto meet = [&](u64 desc, int rows) {
        for (int r = 0; r < rows; ++r)
            for (int half = 0; half < 2; ++half) {
                const unsigned at = place_of(desc, r, half * 16);
                shared_of(block, at, 16, "wgmma");
                const std::string found = unfenced(block, at, 16);
                if (found.empty())
                    continue;
                op.unfenced.push_back(at);
                if (doubt.empty())
                    doubt = "a wgmma in " + name_of(self()) + " meets " + found;
            }
    };
    meet(op.b, op.n);
    if (!op.a_in_registers)
        meet(op.a, 64);
}
void load_operand(Block* block, const Wgmma& op, u64 desc, int rows,
                  std::vector<float>& to) { // [rows][k]
    const int type = op.type, k = type == 0 ? 32 : 16;
    to.resize((size_t)rows * k);
    for (int r = 0; r < rows; ++r)
        for (int half = 0; half < 2; ++half) {
            const unsigned at = place_of(desc, r, half * 16);
            const unsigned char* p = shared_of(block, at, 16, "wgmma");
            float* out = &to[(size_t)r * k + half * (k / 2)];
            if (!op.unfenced.empty() &&
                std::find(op.unfenced.begin(), op.unfenced.end(), at) != op.unfenced.end())
                std::fill(out, out + k / 2, NAN);
            else if (type == 0)
                for (int i = 0; i < 16; ++i)
                    out[i] = kE4m3[p[i]];
            else
                for (int i = 0; i < 8; ++i) {
                    const uint16_t h = (uint16_t)(p[2 * i] | p[2 * i + 1] << 8);
                    out[i] = type == 1 ? float_of_bf16(h) : float_of_half(h);
                }
        }
}
void execute(Block* block, Warpgroup* g) {
    Thread* const own = self();
    current = block->threads[0]; // for what fails
    Wgmma& op = *g->wgmmas[0];
    const int k = op.type == 0 ? 32 : 16, n = op.n;
    static std::vector<float> a, b, bt, d;
    if (op.transposes || op.negates)
        fail("wgmma with transposed or negated operands");
    load_operand(block, op, op.b, n, b);
    if (op.a_in_registers) {
        a.assign((size_t)64 * k, 0);
        for (int t = 0; t < 128; ++t)
            for (int w = 0; w < 4; ++w)
                for (int h = 0; h < 2; ++h) {
                    const int row = t / 32 * 16 + t % 32 / 4 + w % 2 * 8,
                              col = t % 4 * 2 + w / 2 * 8 + h;
                    const uint16_t bits = (uint16_t)(op.regs[t][w] >> 16 * h);
                    a[(size_t)row * k + col] =
                        op.type == 1 ? float_of_bf16(bits) : float_of_half(bits);
                }
        if (op.type == 0)
            fail("wgmma over fp8 with A in registers");
    } else
        load_operand(block, op, op.a, 64, a);
    bt.resize((size_t)k * n);
    for (int j = 0; j < n; ++j)
        for (int i = 0; i < k; ++i)
            bt[(size_t)i * n + j] = b[(size_t)j * k + i];
    d.assign((size_t)64 * n, 0);
    for (int r = 0; r < 64; ++r) {
        float* const sum = &d[(size_t)r * n];
        for (int i = 0; i < k; ++i) {
            const float x = a[(size_t)r * k + i];
            const float* const y = &bt[(size_t)i * n];
            for (int j = 0; j < n; ++j)
                sum[j] += x * y[j];
        }
    }
    for (int t = 0; t < 128; ++t) {
        Sums* sums = op.sums[t];
        for (int v = 0; v < sums->n; ++v) {
            const int row = t / 32 * 16 + t % 32 / 4 + v / 2 % 2 * 8,
                      col = v / 4 * 8 + t % 4 * 2 + v % 2;
            sums->values[v] = (op.adds ? sums->values[v] : 0) + d[(size_t)row * n + col];
        }
    }
    current = own;
    g->wgmmas.pop_front();
    ++g->base;
    ++g->executed;
    wake(g->waiters);
    if (!g->wgmmas.empty() && g->wgmmas[0]->arrived == 128)
        wgmmas_ready.push_back({block, g});
}
} // namespace

void setmaxnreg(int site, int registers) {
    if (registers % 8 || registers < kLeastRegisters || registers > 256)
        fail("setmaxnreg of %d", registers);
    Block* const b = self()->block;
    b->registers[self()->index / 128] = registers;
    const int threads = (int)b->threads.size(), groups = (threads + 127) / 128;
    // At most, as a launch may have fewer; others keep the least that there is.
    const int launched = kRegisters / threads / 8 * 8 * groups;
    int wanted = kLeastRegisters * (groups - (int)b->registers.size());
    for (const auto& [group, own] : b->registers)
        wanted += own;
    if (wanted > launched)
        fail("setmaxnreg: %d registers are wanted by a thread of each warpgroup together, and a "
             "launch has %d: it never ends",
             wanted, launched);
    aligned(site);
}
void grid_wait() {
    if (until_wait) {
        ++waiting_for_grid;
        block_on("griddepcontrol.wait");
    }
    maybe_yield();
}
// Of so many matrices of eight rows, of which each lane has one.
static void addresses_of_rows(unsigned (&at)[32], int count, unsigned own) {
    for (int row = 0; row < 8 * count; ++row)
        at[row] = emulated_shuffle(kShfl, ~0u, own, row, 32);
}
void load_matrices(int site, unsigned* v, int count, unsigned address, bool transposed) {
    aligned(site);
    Thread* t = self();
    unsigned at[32];
    addresses_of_rows(at, count, address);
    for (int i = 0; i < count; ++i) {
        const int g = t->lane / 4, q = t->lane % 4;
        if (!transposed)
            memcpy(&v[i], shared_place(at[8 * i + g], 16, "ldmatrix") + 4 * q, 4);
        else {
            uint16_t low, high;
            memcpy(&low, shared_place(at[8 * i + 2 * q], 16, "ldmatrix") + 2 * g, 2);
            memcpy(&high, shared_place(at[8 * i + 2 * q + 1], 16, "ldmatrix") + 2 * g, 2);
            v[i] = pair(low, high);
        }
    }
    aligned(site);
}
void store_matrices(int site, const unsigned* v, int count, unsigned address, bool transposed) {
    const void* const caller = __builtin_return_address(0);
    aligned(site);
    Thread* t = self();
    unsigned at[32];
    addresses_of_rows(at, count, address);
    const auto put = [&](unsigned row, int byte, const void* value, unsigned bytes) {
        unsigned char* const place = shared_place(at[row], 16, "stmatrix") + byte;
        memcpy(place, value, bytes);
        wrote_shared_at(t, kThread, place, bytes, caller);
    };
    for (int i = 0; i < count; ++i) {
        const int g = t->lane / 4, q = t->lane % 4;
        if (!transposed)
            put(8 * i + g, 4 * q, &v[i], 4);
        else {
            const uint16_t low = lower(v[i]), high = upper(v[i]);
            put(8 * i + 2 * q, 2 * g, &low, 2);
            put(8 * i + 2 * q + 1, 2 * g, &high, 2);
        }
    }
    aligned(site);
}

unsigned move_matrix(int site, unsigned v) {
    aligned(site);
    const int row = self()->lane / 4, column = self()->lane % 4 * 2;
    uint16_t values[2]; // of the row, those of two rows of its column
    for (int i = 0; i < 2; ++i) {
        const int lane = (column + i) * 4 + row / 2;
        const unsigned word = emulated_shuffle(kShfl, ~0u, v, lane, 32);
        values[i] = row % 2 ? upper(word) : lower(word);
    }
    return pair(values[0], values[1]);
}

// Conversions.

namespace {
float decode(unsigned byte, int mantissa, int bias, bool is_e4m3) {
    const unsigned m = byte & ((1u << mantissa) - 1), e = (byte & 127) >> mantissa;
    float x;
    if (is_e4m3 ? (byte & 127) == 127 : e == 31)
        x = m == 0 && !is_e4m3 ? INFINITY : NAN;
    else
        x = e ? ldexpf(1.0f + (float)m / (float)(1 << mantissa), (int)e - bias)
              : ldexpf((float)m, 1 - bias - mantissa);
    return byte & 128 ? -x : x;
}
struct Table {
    float of[256];
    Table(int mantissa, int bias, bool e4m3) {
        for (unsigned i = 0; i < 256; ++i)
            of[i] = decode(i, mantissa, bias, e4m3);
    }
};
uint8_t encode(float x, int mantissa, int bias, float most) {
    if (x != x)
        return 0x7f;
    const unsigned sign = bits_of(x) >> 31 << 7;
    double a = std::fabs((double)x);
    if (a == 0)
        return (uint8_t)sign;
    if (a > most)
        a = most;
    int e = std::max(std::ilogb(a), 1 - bias);
    double units = std::nearbyint(std::ldexp(a, mantissa - e));
    if (units == 2 << mantissa)
        ++e, units /= 2;
    unsigned code = units < (1 << mantissa) ? (unsigned)units
                                            : (unsigned)(e + bias) << mantissa |
                                                  ((unsigned)units & ((1u << mantissa) - 1));
    return (uint8_t)(sign | code);
}
} // namespace

float kE4m3[256], kE5m2[256];
namespace {
struct FillTables {
    FillTables() {
        memcpy(kE4m3, Table(3, 7, true).of, sizeof kE4m3);
        memcpy(kE5m2, Table(2, 15, false).of, sizeof kE5m2);
    }
} fill_tables;
} // namespace
uint8_t e4m3_of(float x) { return encode(x, 3, 7, 448); }
uint8_t e5m2_of(float x) { return encode(x, 2, 15, 57344); }

// Launches.

namespace {
char* new_stack() {
    if (!free_stacks.empty()) {
        char* s = free_stacks.back();
        free_stacks.pop_back();
        return s;
    }
    char* s = (char*)mmap(nullptr, kStack + kPage, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (s == MAP_FAILED || mprotect(s, kPage, PROT_NONE))
        give_up("no room for the stacks of so many threads: fewer blocks may be resident");
    return s + kPage;
}

void fiber_main() {
    Thread* t = self();
    launch_.call(launch_.function, launch_.args);
    if (!t->all_sums.empty())
        fail("ended with wgmmas under way");
    Warp* w = t->warp;
    for (int l = 0; l < 32; ++l)
        if (w->slots[l].active && w->slots[l].mask >> t->lane & 1)
            fail("ended, while lane %d waits for it: %s", l, w->lanes[l]->waits_for);
    w->done |= 1u << t->lane;
    t->state = kDone;
    drop(t);
    progress();
    Block* b = t->block;
    if (--b->running == 0) {
        if (until_wait)
            fail("no thread of the block waits for the grid ahead");
        if (b->copies)
            fail("the block ends with %d copies under way", b->copies);
        current = nullptr;
        void* dummy;
        on_main = true;
        switch_fiber(&dummy, main_stack_pointer);
    }
    schedule();
    abort();
}

void start_block(u64 number) {
    auto b = std::make_unique<Block>();
    const Dim3 g = launch_.grid;
    b->number = number;
    b->id = {(unsigned)(number % g.x), (unsigned)(number / g.x % g.y),
             (unsigned)(number / g.x / g.y)};
    if (free_memories.empty()) {
        char* m = (char*)mmap(nullptr, kSharedBytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        free_memories.push_back({m, (Write*)calloc(kSharedBytes / 4, sizeof(Write))});
    }
    std::tie(b->memory, b->writes) = free_memories.back();
    free_memories.pop_back();
    memset(b->memory, 0xff, kSharedBytes);
    const int count = (int)(launch_.block.x * launch_.block.y * launch_.block.z);
    for (int i = 0; i < count; ++i) {
        if (i % 32 == 0) {
            b->warps.push_back(std::make_unique<Warp>());
            b->warps.back()->priority = (int)below(1000);
        }
        if (i % 128 == 0)
            b->groups.push_back(std::make_unique<Warpgroup>());
        Thread* t = new Thread();
        t->thread_index = {i % launch_.block.x, i / launch_.block.x % launch_.block.y,
                           i / launch_.block.x / launch_.block.y};
        t->block_index = b->id;
        t->block_size = launch_.block;
        t->grid_size = launch_.grid;
        t->block = b.get();
        t->warp = b->warps.back().get();
        t->index = i;
        t->number = (unsigned)fenced_at.size();
        fenced_at.push_back(0);
        t->lane = i % 32;
        t->warp->lanes[t->lane] = t;
        t->warp->exist |= 1u << t->lane;
        t->state = kBlocked;
        t->stack = new_stack();
        void** top = (void**)(t->stack + kStack);
        *--top = nullptr; // a return address
        *--top = (void*)fiber_main;
        for (int r = 0; r < 6; ++r)
            *--top = nullptr;
        t->stack_pointer = top;
        b->threads.push_back(t);
        make_runnable(t);
    }
    b->running = count;
    blocks.push_back(std::move(b));
}

void end_block(size_t i, bool reuse) {
    Block* b = blocks[i].get();
    for (Thread* t : b->threads) {
        if (reuse)
            free_stacks.push_back(t->stack);
        else
            munmap(t->stack - kPage, kStack + kPage);
        for (Sums* a : t->all_sums)
            delete a;
        delete t;
    }
    memset(b->writes, 0, (launch_.next_static + 3) / 4 * sizeof(Write));
    free_memories.push_back({b->memory, b->writes});
    blocks.erase(blocks.begin() + (long)i);
}

// All blocks of a grid, and then what their stores have left to write.
void run_blocks() {
    while (error.empty() && !gave_up_early && (!blocks.empty() || next_block < order.size())) {
        if (blocks.empty())
            start_next_block();
        schedule();
        on_main = true;
        for (size_t i = 0; i < blocks.size();)
            if (blocks[i]->running == 0)
                end_block(i, true);
            else
                ++i;
    }
    while (error.empty() && !copies.empty())
        run_copy();
}

void on_signal(int number, siginfo_t* info, void* context) {
    auto* const c = (ucontext_t*)context;
    if (!in_launch) { // of another thread of the process
        signal(number, SIG_DFL);
        return;
    }
    Thread* t = self();
    char* const at = (char*)info->si_addr;
    const char* what =
        number == SIGILL
            ? "an index outside of an array, or an address that is not aligned (-fsanitize)"
        : t && at >= t->stack - kPage && at < t->stack
            ? "stack overflow"
            : "memory outside of all tensors, or not to be written";
    char b[300];
    snprintf(b, sizeof b, "%s: %s, address %p\n  in %s", strsignal(number), what, (void*)at,
             t ? (name_of(t) + " at").c_str() : "a copy");
    if (!t)
        give_up(b);
    give_up(b + frames_of((void*)c->uc_mcontext.gregs[REG_RIP],
                          (void**)c->uc_mcontext.gregs[REG_RBP], t));
}
} // namespace

} // namespace emulated

using namespace emulated;

extern "C" {

// Memory that ends at, or begins behind, pages that no one may touch.
void* emulated_allocate(size_t bytes, size_t align, int at_end, void** base, size_t* mapped) {
    const size_t room = (bytes + kPage - 1) / kPage * kPage + (bytes == 0) * kPage;
    *mapped = room + 2 * kGuard;
    char* m = (char*)mmap(nullptr, *mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                          -1, 0);
    if (m == MAP_FAILED)
        return nullptr;
    mprotect(m + kGuard, room, PROT_READ | PROT_WRITE);
    *base = m;
    return m + kGuard + (at_end ? (room - bytes) / align * align : 0);
}
void emulated_free(void* base, size_t mapped) { munmap(base, mapped); }
// rights: PROT_NONE, PROT_READ, or both of PROT_READ and PROT_WRITE.
int emulated_protect(void* base, size_t mapped, int rights) {
    return mprotect((char*)base + kGuard, mapped - 2 * kGuard, rights);
}

// Runs a grid; returns whether something is wrong, and says what in `message`. Otherwise this is
// empty, or says what is wrong if the result is.
int emulated_launch(const Kernel* kernel, const unsigned* grid, const unsigned* block,
                    unsigned dynamic_bytes, void** args, u64 seed, int resident, u64 most,
                    int only_until_wait, char* message, size_t room) {
    static char alternate[1 << 18];
    stack_t own_stack{}, former_stack;
    own_stack.ss_size = sizeof alternate;
    own_stack.ss_sp = alternate;
    sigaltstack(&own_stack, &former_stack);
    constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    struct sigaction action{}, former[4];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i)
        sigaction(kSignals[i], &action, &former[i]);
    launch_ = {kernel->function,
               kernel->call,
               args,
               {grid[0], grid[1], grid[2]},
               {block[0], block[1], block[2]},
               dynamic_bytes,
               {},
               (kFirst + dynamic_bytes + 15) / 16 * 16};
    random_state = seed * 0x9e3779b97f4a7c15ull + 12345;
    const unsigned odds[] = {0, 4, 64, 200, 256};
    options.copy_chance = odds[below(5)];
    options.wgmma_chance = below(2) ? 0 : odds[below(4)];
    options.yield_chance = odds[below(4)] / 2;
    options.prioritised = below(3) > 0;
    options.poison_copies = below(2);
    options.wgmmas_last = below(2);
    options.whole_boxes = below(2);
    const unsigned start_odds[] = {65536, 65536, 256, 4, 0};
    options.start_chance = start_odds[below(5)];
    runnable.clear();
    copies.clear();
    wgmmas_ready.clear();
    error.clear();
    doubt.clear();
    switches = 0;
    most_switches = most;
    until_wait = only_until_wait;
    waiting_for_grid = 0;
    current = nullptr;
    pollers.clear();
    rounds_in_vain = 0;
    global_writes.clear();
    proxy_time = 1;
    fenced_at.clear();
    waited_at.assign(1, 0);
    order.resize((u64)grid[0] * grid[1] * grid[2]);
    next_block = 0;
    most_resident = until_wait ? 1 : resident;
    for (size_t i = 0; i < order.size(); ++i)
        order[i] = i;
    for (size_t i = order.size(); i > 1; --i)
        std::swap(order[i - 1], order[below((unsigned)i)]);
    if (dynamic_bytes + kFirst > kMostShared)
        error = "too much shared memory";
    if (until_wait)
        order.resize(1);
    in_launch = true;
    gave_up_early = false;
    if (!setjmp(launch_point))
        run_blocks();
    in_launch = false;
    on_main = true;
    current = nullptr;
    while (!blocks.empty())
        end_block(0, !gave_up_early);
    runnable.clear();
    copies.clear();
    wgmmas_ready.clear();
    for (int i = 0; i < 4; ++i)
        sigaction(kSignals[i], &former[i], nullptr);
    sigaltstack(&former_stack, nullptr);
    snprintf(message, room, "%s", (error.empty() ? doubt : error).c_str());
    return error.empty() ? 0 : 1;
}

// How the last launch was scheduled.
void emulated_schedule(char* to, size_t room) {
    snprintf(to, room,
             "copies %u/256, wgmmas %u/256, yields %u/256, starts %u/65536%s%s%s%s; %llu switches",
             options.copy_chance, options.wgmma_chance, options.yield_chance, options.start_chance,
             options.prioritised ? ", warps by priority" : "",
             options.poison_copies ? ", copies' places poisoned" : "",
             options.wgmmas_last ? ", wgmmas last" : "", options.whole_boxes ? ", whole boxes" : "",
             switches);
}
}
