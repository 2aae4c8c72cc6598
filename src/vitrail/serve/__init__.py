"""A model as a small web service: one process, one event loop, one model thread, threads that decode."""
