"""Atomic writes and safe reads of files. No torch, no file formats."""
