"""C++ kernels for the CPU, shipped as source and compiled for the machine at first use."""
