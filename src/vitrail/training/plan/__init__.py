"""What a run will cost, and what follows from that: batch, memory, threads, epochs for a budget."""
