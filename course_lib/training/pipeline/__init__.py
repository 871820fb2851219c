"""Pipeline parallelism by torch.distributed.pipelining and by hand."""
