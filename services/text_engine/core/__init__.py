"""Pure Python, no torch: sequences, blocks, prefix hashes and the scheduler, testable in milliseconds."""
