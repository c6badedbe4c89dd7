"""Chat templates, request building, incremental detokenisation and output grammars. No torch."""
