"""Plans for a model: which formats fit into memory, with their expected speed and quality."""

from windlass.tools.plan.select import Plan, select_quantization

__all__ = ["Plan", "select_quantization"]
