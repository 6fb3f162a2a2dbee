// The cards that this library holds code for, as CMake names them. speq/kernels/architectures.py
// reads them out of the file: loading the library would bind its kernels, whatever the card.

extern "C" __attribute__((visibility("default"))) const char speq_cuda_architectures[] =
    "speq_cuda_architectures:" SPEQ_CUDA_ARCHITECTURES;
