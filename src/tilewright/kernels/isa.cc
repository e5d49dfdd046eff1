// Says which instruction set runs here. It is compiled in a tenth of a second, before kernels are compiled for that set alone.

#include "isa.h"

extern "C" const char* TilewrightIsa() { return native::isa_names[native::isa()]; }
