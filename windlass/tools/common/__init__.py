"""What the programs that measure share: workloads, the engine driver, records and reports."""
