// All of the machine in one file, compiled with STRICT 1 or 0.
#include "formats.h"
#include "run.h"
