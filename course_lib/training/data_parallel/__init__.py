"""Data parallelism: DDP, Accelerate, Lightning, and scaling over slow links."""
