#pragma once

#include <hip/hip_runtime.h>

using half = _Float16;
using __half = _Float16;
