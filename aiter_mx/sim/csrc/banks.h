// Bank conflicts of LDS: how often the banks are gone over beyond what an access of its width
// takes. The lanes are served in phases; in one, a bank gives one dword to all lanes that ask for
// it. How many banks and which lanes make a phase was found by others on MI350: docs/simulator.md.
#pragma once
#include "trace.h"

NOINLINE u32 bank_conflicts(const u32* at, u64 exec, u32 size, int is_write) {
    static const u8 in_order[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    static const u8 of_b96[8] = {0, 5, 1, 4, 2, 7, 3, 6}, of_b128[8] = {0, 3, 5, 6, 1, 2, 4, 7};
    const u8* quads = is_write || size < 12 ? in_order : size == 12 ? of_b96 : of_b128;
    u32 dwords = size < 4 ? 1 : size / 4, banks = is_write || size == 12 ? 32 : 64;
    u32 lanes = banks / (dwords == 3 ? 4 : dwords), extra = 0;
    for (u32 first = 0; first < 64; first += lanes) {
        u32 words[64][64], count[64] = {0}, most = 1;
        for (u32 i = first; i < first + lanes; i++) {
            u32 lane = (i & 32) + 4u * quads[i / 4 % 8] + i % 4;
            if (!(exec >> lane & 1))
                continue;
            for (u32 word = at[lane] / 4, end = word + dwords; word < end; word++) {
                u32 bank = word % banks, known = 0;
                while (known < count[bank] && words[bank][known] != word)
                    known++;
                if (known == count[bank])
                    words[bank][count[bank]++] = word;
                most = count[bank] > most ? count[bank] : most;
            }
        }
        extra += most - 1;
    }
    return extra;
}

// An atomic is served as a write of its width is, but of the lanes that want one dword each has its
// own turn.
NOINLINE u32 atomic_conflicts(const u32* at, u64 exec, u32 size) {
    u32 lanes = size == 8 ? 16 : 32, extra = 0;
    for (u32 first = 0; first < 64; first += lanes) {
        u32 turns[32] = {0}, most = 1;
        for (u32 lane = first; lane < first + lanes; lane++)
            for (u32 word = 0; exec >> lane & 1 && word < size / 4; word++) {
                u32 bank = (at[lane] / 4 + word) % 32;
                turns[bank]++;
                most = turns[bank] > most ? turns[bank] : most;
            }
        extra += most - 1;
    }
    return extra;
}
