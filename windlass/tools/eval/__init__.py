"""How good a model is: perplexity, distance to a reference, tasks."""
