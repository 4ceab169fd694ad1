#include "kernels_impl.h"

namespace hetero {

const KernelSet kKernelsV4 = {&Adam, &SumBlock, &Move};

}  // namespace hetero
