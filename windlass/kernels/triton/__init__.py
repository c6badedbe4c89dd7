"""The same operations in Triton, for CUDA. Each is compared with its plain version in the tests."""
