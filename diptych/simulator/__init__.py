"""A cluster in one process: the real scheduler, block pool and balancer under a simulated clock, with a cost model."""
