"""C++ kernels for the CPU, shipped as source and, in a wheel for a platform, compiled."""
