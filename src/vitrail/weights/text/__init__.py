"""Text towers: tokenizers, prompts, classes by words."""
