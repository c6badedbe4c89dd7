"""Shared by the tools: workloads, the engine driver, records and reports."""
