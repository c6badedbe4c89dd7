"""Which formats of a model fit into a memory, how fast and how good they can be expected to be."""

from windlass.tools.plan.select import Plan, select_quantization

__all__ = ["Plan", "select_quantization"]
