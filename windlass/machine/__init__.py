"""What the operating system grants this process: CPUs by core and NUMA node, cgroup limits. No torch."""
