#pragma once
#include <cuda_runtime.h> // the HIP kernel language is CUDA's; only gfx950 needs HIP's own header
