"""Augmentation in training: the same for an image whatever the workers, processes and restarts."""
