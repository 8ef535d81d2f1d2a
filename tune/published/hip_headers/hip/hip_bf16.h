#pragma once

#include <hip/hip_runtime.h>

using __hip_bfloat16 = __bf16;
