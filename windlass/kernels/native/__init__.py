"""Products in C++ for the CPU: shipped as source, compiled for the machine when first used."""
