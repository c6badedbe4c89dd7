"""How to compute one operation: one plain torch version of each, faster ones beside it."""
