"""Training: one loop for scratch, fine-tuning and distillation, exact to the bit across restarts."""
