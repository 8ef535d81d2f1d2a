"""Constants drawn around the calibrated ones: what a choice must survive to be made."""

from __future__ import annotations

import random
from functools import cache

from aiter_mx.sim.timing.constants import Constants, shipped, with_values

DRAWS = 32
_SEED = 950
_FACTORS = {  # of the calibrated value, either way; and of every latency
    "memory_tb_s": 0.1,
    "mall_tb_s": 0.2,
    "address_cycles": 0.2,
    "line_bytes_a_cycle": 0.2,
    "data_bytes_a_cycle": 0.2,
    "deal_us": 0.3,
}
_LATENCY_FACTOR = 0.3
_MATRIX_CLOCK_GHZ = (1.9, 2.4)


@cache
def drawn() -> tuple[Constants, ...]:
    """The same constants in every process: rates and latencies up to so much off, any clock."""
    draw = random.Random(_SEED)
    known = vars(shipped())
    latencies = [name for name in known if name.endswith("_latency_us")]
    factors = dict.fromkeys(latencies, _LATENCY_FACTOR) | _FACTORS
    found = []
    for _ in range(DRAWS):
        values = {
            name: known[name] * (1 + draw.uniform(-most, most)) for name, most in factors.items()
        }
        values["matrix_clock_ghz"] = draw.uniform(*_MATRIX_CLOCK_GHZ)
        found.append(with_values(values))
    return tuple(found)
