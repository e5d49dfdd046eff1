// Returns the instruction set that runs here. It compiles in a tenth of a second, before kernels are compiled for that instruction set alone.

#include "isa.h"

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
