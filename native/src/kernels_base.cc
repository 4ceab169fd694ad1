#include "kernels_impl.h"

namespace hetero {

const KernelSet kKernelsBase = {&Adam, &SumBlock, &Move};

}  // namespace hetero
