"""Data parallelism: DDP, Accelerate, and scaling over slow links."""
