#include "kernels_impl.h"

namespace hetero {

const KernelSet kKernelsV3 = {&Adam, &SumBlock, &Move};

}  // namespace hetero
