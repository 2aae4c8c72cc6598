"""Training: from scratch, fine-tuning and distillation, with exact resume."""
