"""How a wave starts: which registers the hardware fills before the first instruction."""

from __future__ import annotations

from aiter_mx.code_object import KernelInfo
from aiter_mx.sim.faults import UnknownInstruction

# Properties bit, SGPRs, value: user registers in the order of LLVM's AMDGPU usage guide.
_USER = (
    (0, 4, None),  # private segment buffer
    (1, 2, "w->group->launch->dispatch_packet"),
    (2, 2, "0"),  # queue pointer: there is no queue, and reading one is a memory fault
    (3, 2, "w->group->launch->kernarg"),
    (4, 2, "0"),  # dispatch id
    (5, 2, "0"),  # flat scratch
    (6, 1, "w->group->launch->scratch_bytes"),
)
_FLAT_SCRATCH = 102


def start_wave(kernel: KernelInfo, strict: bool) -> str:
    """The C function ``start_wave``.

    Raises:
        UnknownInstruction: the kernel asks for a register set-up that is not simulated.
    """
    descriptor = kernel.descriptor
    lines, at = [], 0
    for bit, count, value in _USER:
        if descriptor.properties >> bit & 1:
            if value is None:
                raise UnknownInstruction(
                    f"kernel {kernel.name} wants its private-segment buffer in registers, "
                    "which the simulator does not set up"
                )
            if count == 2:
                lines.append(f"set_s64(w, {at}, {value});")
            else:
                lines.append(f"w->s[{at}] = (u32)({value});")
            at += count
    if descriptor.preload_dwords:
        source = f"(const u8 *)w->group->launch->kernarg + {4 * descriptor.preload_offset}"
        lines.append(f"memcpy(w->s + {at}, {source}, {4 * descriptor.preload_dwords});")
        at += descriptor.preload_dwords
    at = max(at, descriptor.rsrc2 >> 1 & 31)
    for axis in range(3):
        if descriptor.rsrc2 >> (7 + axis) & 1:
            lines.append(f"w->s[{at}] = w->group->id[{axis}];")
            at += 1
    if descriptor.rsrc2 >> 10 & 1:
        raise UnknownInstruction(f"kernel {kernel.name} wants work-group information registers")
    ids = descriptor.rsrc2 >> 11 & 3
    lines.append(f"set_lane_ids(w, {ids + 1});")
    float_mode = descriptor.rsrc1 >> 12 & 0xFF
    lines.append(f"w->mode = {float_mode:#x};")
    if strict:
        flat = 3 << (_FLAT_SCRATCH - 64)
        low, high = (1 << at) - 1 & (1 << 64) - 1, flat
        lines.append(f"w->sset[0] = {low:#x}ull; w->sset[1] = {high:#x}ull; w->set[0] = w->exec;")
    lines.append(f"set_s64(w, {_FLAT_SCRATCH}, 0);")
    body = "\n  ".join(lines)
    return f"void start_wave(Wave *w) {{\n  {body}\n}}"
