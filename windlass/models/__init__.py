"""Networks, checkpoint readers, tokenizers, the loader."""
